"""MLPerf's lines in the log of a run to a target loss."""

import json
import re

import pytest

from maxbench.config.options import ReportOptions
from maxbench.reporting.build_report import read
from tests.run.conftest import folder_of, result_of

# Keys that mlcommons/logging 7bbf792, mlperf_logging/compliance_checker/training_6.1.0, requires
# exactly once before run_start: common.yaml, closed_common.yaml, closed_llama31_8b.yaml and
# closed_gpt_oss_20b.yaml.
REQUIRED = """
submission_org submission_platform submission_division submission_benchmark cache_clear init_start
init_stop global_batch_size gradient_accumulation_steps max_sequence_length opt_name
opt_base_learning_rate opt_end_learning_rate opt_learning_rate_warmup_steps
opt_learning_rate_decay_steps opt_learning_rate_decay_schedule opt_adamw_beta_1 opt_adamw_beta_2
opt_adamw_epsilon opt_adamw_weight_decay opt_gradient_clip_norm eval_samples max_steps
"""
EVALUATION = ["block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop"]
SETTINGS = {
    "train.eval_data": "CONTRIBUTING.md",
    "train.eval_every": 2,
    "train.eval_steps": 2,
    "output.mllog": "llama31_8b",
}


def events(folder):
    log = next(folder_of(folder).glob("log-*.out")).read_text()
    return [json.loads(line) for line in re.findall(r"^:::MLLOG (.*)", log, re.MULTILINE)]


@pytest.mark.parametrize(("target", "status"), [(6.2, "success"), (0.1, "aborted")])
def test_the_lines_are_those_that_the_compliance_checker_requires(train, tmp_path, target, status):
    code, printed = train(steps=4, mbs=8, overrides=SETTINGS | {"train.target_loss": target})
    assert code == 0, printed
    found, result = events(tmp_path), result_of(tmp_path)
    keys = [event["key"] for event in found]
    start, stop = keys.index("run_start"), keys.index("run_stop")
    before = keys[:start]
    assert {key: before.count(key) for key in REQUIRED.split()} == dict.fromkeys(
        REQUIRED.split(), 1
    )
    assert before.index("init_start") < before.index("init_stop") == start - 1
    evaluations = result["evaluations"]
    assert keys[start + 1 : stop] == EVALUATION * len(evaluations)
    assert keys[stop + 1 :] == ["train_samples"]
    assert found[stop]["metadata"]["status"] == status
    losses = [event for event in found if event["key"] == "eval_accuracy"]
    assert [event["value"] for event in losses] == [e["loss"] for e in evaluations]
    samples = [event["metadata"]["samples_count"] for event in losses]
    assert samples == [8 * (e["step"] + 1) for e in evaluations]
    assert found[-1]["value"] == samples[-1]
    value = {event["key"]: event["value"] for event in found}
    assert (value["global_batch_size"], value["eval_samples"], value["max_steps"]) == (8, 16, 4)
    warmup = value["opt_learning_rate_warmup_steps"]
    assert value["opt_learning_rate_decay_steps"] == 4 - warmup
    assert [event["time_ms"] for event in found] == sorted(event["time_ms"] for event in found)
    log = next(folder_of(tmp_path).glob("log-*.out"))
    (alone,) = read(ReportOptions(str(log))).rows
    assert alone.record.eval_loss == pytest.approx(
        {e["step"]: e["loss"] for e in evaluations}, abs=1e-4
    )
    assert (alone.record.gbs, alone.record.seq, alone.record.damaged) == (8, 64, 0)


def test_lines_without_a_target_are_refused(train, tmp_path):
    code, printed = train(steps=4, mbs=8, overrides=SETTINGS)
    assert (code, [*tmp_path.iterdir()]) == (2, [])
    assert "output.mllog='llama31_8b': MLPerf's log is of a run to a target loss" in printed
