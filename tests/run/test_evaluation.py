"""Evaluations on held-out files: the same at each, in no step time, and an end at a target loss."""

import re
import time

import pytest

from maxbench.config.options import ReportOptions
from maxbench.reporting import details, tables
from maxbench.reporting.build_report import read
from maxbench.run import evaluation
from tests.conftest import train_command
from tests.drills import kills
from tests.run.conftest import folder_of, losses, result_of

HELD_OUT = {"train.eval_data": "CONTRIBUTING.md", "train.eval_every": 2}


def test_a_run_ends_at_its_target_loss(train, tmp_path):
    settings = HELD_OUT | {"train.target_loss": 5.0, "output.checkpoint": True}
    code, printed = train(steps=50, mbs=8, overrides=settings)
    assert code == 0, printed
    result = result_of(tmp_path)
    e, last = result["target_reached"], result["evaluations"][-1]
    assert (result["status"], result["reason"], e) == ("done", "target loss 5.0 reached", last)
    assert [x["step"] for x in result["evaluations"]] == [*range(1, e["step"] + 1, 2)]
    assert e["loss"] <= 5 < min([x["loss"] for x in result["evaluations"][:-1]], default=9)
    steps = e["step"] + 1
    assert (result["steps_done"], e["tokens"]) == (steps, steps * 8 * 64)
    assert {*losses(folder_of(tmp_path))} == {*range(steps)}
    assert (folder_of(tmp_path) / f"checkpoints/{steps}").exists()
    assert re.search(rf"evaluation after step {e['step']}: loss {e['loss']:.4f}, ", printed)
    reached = f"reached after {steps} steps, {e['tokens']:,} tokens, {e['elapsed_s']:.1f} s"
    assert re.search(rf"  target 5 +{reached}\n", printed)


@pytest.mark.exhaustive
def test_evaluations_are_equal_on_every_mesh_and_in_no_step_time(train, tmp_path, monkeypatch):
    evaluate = evaluation.Evaluator.__call__
    slowly = lambda self, *args: (time.sleep(3), evaluate(self, *args))[1]
    monkeypatch.setattr(evaluation.Evaluator, "__call__", slowly)
    same = HELD_OUT | {"optim.lr": 0.0, "optim.lr_min": 0.0, "train.target_loss": 1.0}
    found = []
    for name, mesh in {"a": dict(mbs=8), "b": dict(fsdp=2, tp=2, gbs=8, mbs=2)}.items():
        code, printed = train(tmp_path / name, steps=5, overrides=same, **mesh)
        assert code == 0, printed
        result = result_of(tmp_path / name)
        assert [e["step"] for e in result["evaluations"]] == [1, 3, 4]
        assert len({e["loss"] for e in result["evaluations"]}) == 1
        assert result["step_s"]["p90"] < 3
        monkeypatch.undo()
        assert re.search(r"  target 1 +not reached\n", printed)
        found.append(result["evaluations"][0]["loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_the_report_has_evaluations_and_the_way_to_the_target(train, tmp_path):
    train(steps=4, overrides=HELD_OUT | {"train.target_loss": 6.2}, mbs=8)
    (row,) = read(ReportOptions(str(tmp_path))).rows
    e = result_of(tmp_path)["target_reached"]
    figures = tables.record(row)
    assert figures["eval_loss_last"] == e["loss"]
    assert figures["steps_to_target"] == e["step"] + 1
    assert (figures["tokens_to_target"], figures["seconds_to_target"]) == (
        e["tokens"],
        e["elapsed_s"],
    )
    assert any(
        text.startswith("target loss 6.2 reached after ") for text in details.timeline(row.record)
    )
    log = next(folder_of(tmp_path).glob("log-*.out"))
    (alone,) = read(ReportOptions(str(log))).rows
    assert (alone.record.status, alone.record.reason) == ("done", "ended at its target loss")
    assert alone.record.eval_loss == pytest.approx(row.record.eval_loss, abs=1e-4)
    read_alone = tables.record(alone)
    for name in ("steps_to_target", "tokens_to_target"):
        assert read_alone[name] == figures[name]
    assert read_alone["seconds_to_target"] == pytest.approx(figures["seconds_to_target"], abs=0.06)
    assert "target loss 6.2 reached after " in "\n".join(details.timeline(alone.record))


REFUSED = {
    "eval_data='LICENSE' has 177 sequences, and 23 batches of gbs=8 are 184; give longer": {
        "train.eval_data": "LICENSE",
        "train.eval_steps": 23,
    },
    "eval_data='uniform' does not exist": {"train.eval_data": "uniform"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_invalid_evaluations_are_refused(train, tmp_path, reason):
    code, printed = train(steps=4, overrides=REFUSED[reason], mbs=8)
    assert (code, [*tmp_path.iterdir()]) == (2, [])
    assert reason in printed


def test_settings_of_evaluations_have_no_effect_without_held_out_data():
    code, _, err = train_command("--config", "llama31_8b:tiny", "--target_loss=3", "--dry_run")
    assert code == 2
    assert (
        "train.target_loss=3.0 has no effect: there is no evaluation; use --eval_data PATH" in err
    )


@pytest.mark.exhaustive
def test_two_processes_evaluate_as_one(tmp_path):
    held_out = ["--eval_data", "CONTRIBUTING.md", "--eval_steps", "2", "--gbs", "4"]
    found = []
    for processes in (1, 2):
        out = tmp_path / str(processes)
        run = kills.RunProcesses(out, 3, *kills.DATA, *held_out, processes=processes)
        assert {*run.exit_codes()} == {0}, run.printed()
        found.append([e["loss"] for e in result_of(out)["evaluations"]])
    assert len(found[0]) == 1
    assert found[0] == pytest.approx(found[1], rel=1e-5)
