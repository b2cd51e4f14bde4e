"""Checkpoints: saved in the background, restored exactly on any mesh, refused if damaged."""

import json
import pathlib
import random
import re

import jax.numpy as jnp
import pytest
from absl import logging

from maxbench.run import checkpoint, restore
from tests.conftest import WORKLOADS, config, resolve
from tests.drills import kills
from tests.run.conftest import MESH, folder_of, losses, result_of


@pytest.mark.core
@pytest.mark.xdist_group("reference_run")
def test_resume_is_bitwise_exact(reference_run, train, tmp_path):
    saved = (
        r"Global Checkpoint Save : Rank: 0 : Iteration: 4 : Start time: \d+\.\d{3}s : "
        r"Save duration: \d+\.\d{3}s : \d+\.\d{3} GB : \d+\.\d{3} GB/s : "
        r"and \d+\.\d{3}s in the background"
    )
    assert re.search(saved, next(reference_run.glob("log-*.out")).read_text())
    expected, fourth = losses(reference_run), str(reference_run / "checkpoints/4")
    code, printed = train(steps=6, checkpoint=True, resume=fourth, **MESH)
    assert code == 0
    assert re.search(r"Time spent in load_checkpoint: \d+\.\d{3}s", printed)
    resumed = folder_of(tmp_path)
    assert losses(resumed) == {4: expected[4], 5: expected[5]}
    sixth = [kills.fingerprints(f / "checkpoints", 6) for f in (reference_run, resumed)]
    assert sixth[0] == sixth[1]


@pytest.mark.core
@pytest.mark.xdist_group("reference_run")
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(dict(cp=4, fsdp=2, mbs=2), id="cp"),
        # Virtual stages store the layers in another order. Compiles for 10 s.
        pytest.param(dict(pp=2, vp=2, tp=2, mbs=1), id="pp", marks=pytest.mark.exhaustive),
    ],
)
def test_resume_continues_on_another_mesh(reference_run, train, tmp_path, mesh):
    expected, fourth = losses(reference_run), str(reference_run / "checkpoints/4")
    code, printed = train(steps=6, resume=fourth, gbs=8, **mesh)
    assert code == 0, printed
    resumed = losses(folder_of(tmp_path))
    assert resumed == pytest.approx({4: expected[4], 5: expected[5]}, rel=1e-5)


@pytest.fixture(scope="module")
def second_step(tmp_path_factory) -> pathlib.Path:
    """The checkpoint of step 2 of a run of one device."""
    out = tmp_path_factory.mktemp("second_step")
    words = [*kills.FLAGS, "--steps", "2", "--checkpoint", "--output_dir", str(out)]
    process = kills.start_process(words, str(out / "printed"))
    process.join()
    assert process.exitcode == 0, (out / "printed").read_text()
    return folder_of(out) / "checkpoints/2"


def run_for(workload: str = "llama31_8b", overrides: dict | None = None, **flags):
    """The run that second_step is of, with changes."""
    sizes = {"model.embed": 32, "model.mlp": 64, "precision.grads": "fp32"}
    settings = sizes | (overrides or {})
    options = {"dtype": "fp32", "layers": 1, "seq": 16, "steps": 4} | flags
    return resolve(workload, "tiny", settings, **options)


REFUSED = {
    "done": (dict(steps=2), "nothing is left to train; use --steps 3 or more"),
    "model": (
        dict(workload="grok1_314b"),
        "of another model: name=llama31 (this run: grok1)",
    ),
    "weights": (
        dict(overrides={"precision.weights": "bf16"}),
        "its weights are fp32; use --config.precision.weights=fp32",
    ),
}


@pytest.mark.xdist_group("second_step")
@pytest.mark.parametrize("name", REFUSED)
def test_checkpoint_that_does_not_fit_is_refused(second_step, name):
    changes, message = REFUSED[name]
    with pytest.raises(ValueError, match="resume=") as error:
        restore.find_checkpoints(str(second_step), run_for(**changes))
    assert str(second_step) in str(error.value)
    assert message in str(error.value)


def test_missing_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint to start from: it does not exist"):
        restore.find_checkpoints(str(tmp_path / "nowhere"), run_for())


@pytest.fixture
def copy_of_second_step(second_step, tmp_path) -> pathlib.Path:
    """A copy of second_step that a test may damage."""
    copy = tmp_path / "checkpoints" / "2"
    for file in (p for p in second_step.rglob("*") if p.is_file()):
        target = copy / file.relative_to(second_step)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    return copy


def changed_info(text: str, damage: str) -> str:
    """run.json damaged in some way."""
    info = json.loads(text)
    match damage:
        case "cut":
            return text[: len(text) // 2]
        case "edited":
            info["run"]["model"]["heads"] += 1  # a flag of the user is not to blame
        case "without fingerprints":
            info["fingerprints"] = {}
            fields = {k: v for k, v in info.items() if k != "crc32"}
            return json.dumps(checkpoint.CheckpointInfo(**fields).to_json())
        case _:
            return damage
    return json.dumps(info)


@pytest.mark.xdist_group("second_step")
@pytest.mark.parametrize("damage", ["cut", "edited", "without fingerprints", "{}", "[]", ""])
def test_damaged_run_json_is_refused(copy_of_second_step, damage):
    path = copy_of_second_step / "about/run.json"
    path.write_text(changed_info(path.read_text(), damage))
    with pytest.raises(ValueError, match=r"run\.json is missing, damaged or foreign"):
        restore.find_checkpoints(str(copy_of_second_step), run_for())


@pytest.mark.xdist_group("second_step")
def test_damaged_arrays_are_refused_without_a_traceback(copy_of_second_step, tmp_path):
    files = (p for p in copy_of_second_step.rglob("*") if p.is_file())
    largest = max(files, key=lambda p: p.stat().st_size)
    data = largest.read_bytes()
    middle = len(data) // 2
    largest.write_bytes(data[:middle] + bytes(64) + data[middle + 64 :])
    # In another process: reads that orbax leaves unfinished would complain in a later test.
    out, output = tmp_path / "out", tmp_path / "printed"
    flags = [*kills.FLAGS, "--steps", "4", "--output_dir", str(out)]
    process = kills.start_process([*flags, "--resume", str(copy_of_second_step)], str(output))
    process.join()
    printed = output.read_text()
    assert process.exitcode == 2, printed
    reason = f"resume: every checkpoint is damaged: {copy_of_second_step}: damaged, "
    assert f"error: {reason}" in printed
    assert "Traceback" not in printed
    result = result_of(out)
    assert result["status"] == "failed"
    assert result["reason"].startswith(reason)


@pytest.mark.exhaustive
def test_resume_skips_damaged_checkpoints_and_reports_changed_settings(train, tmp_path):
    every_step = {"output.checkpoint_every": 1}
    assert train(tmp_path / "a", steps=4, overrides=every_step)[0] == 0
    folder = folder_of(tmp_path / "a")
    assert sorted(p.name for p in folder.glob("checkpoints/*")) == ["3", "4"]
    (folder / "checkpoints/4/about/run.json").write_text("{}")
    other = {"optim.b1": 0.8, "train.seed": 7}
    paths = f"{tmp_path},{folder}"
    code, printed = train(tmp_path / "b", steps=5, resume=paths, overrides=other, gbs=4)
    assert code == 0, printed
    assert f"resume: skipped {folder}/checkpoints/4: run.json is" in printed
    for text in ("layout.gbs=4 (saved: 2)", "optim.b1=0.8 (saved: 0.9)", "train.seed=7 (saved: 0)"):
        assert f"resume: changed since it was saved: {text}" in printed
    assert [*losses(folder_of(tmp_path / "b"))] == [3, 4]
    load = result_of(tmp_path / "b")["checkpoint_load"]
    assert load["path"] == str(folder / "checkpoints/3")
    assert (len(load["skipped"]), len(load["changed"])) == (1, 4)  # steps differ, too


@pytest.mark.exhaustive
def test_damaged_checkpoint_silences_orbax_alone(caplog):
    """Its errors are the reason of the skip; other packages log as before."""
    log_from_orbax = eval(
        compile("lambda log: log.warning('of orbax')", "/lib/orbax/reader.py", "eval")
    )
    state, error = restore.attempt(lambda _: 1 / 0, None)
    assert (state, error) == (None, "ZeroDivisionError: division by zero")
    log_from_orbax(logging)
    logging.warning("ours")
    assert [r.getMessage() for r in caplog.records] == ["ours"]


def test_saver_saves_each_step_once_and_keeps_the_newest(tmp_path):
    every = {"output.checkpoint_every": 1, "output.max_to_keep": 1, "output.keep_period": 3}
    run, saves = resolve("llama31_8b", "tiny", every), []
    with checkpoint.Saver(tmp_path, run, dict, saves.append) as saver:
        for step in (1, 2, 3, 4, 5, 5):
            saver.save({"step": jnp.int32(step), "params": jnp.ones(8)})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "5"]
    assert [save.step for save in saves] == [1, 2, 3, 4, 5]
    assert all(s.seconds > 0 and s.background_s > 0 and s.bytes > 99 for s in saves)


@pytest.mark.exhaustive
def test_damaged_files_are_never_restored(tmp_path):
    """Eight damages; tests/drills/kills.py makes more."""
    assert kills.restore_damaged(tmp_path, 8, random.Random(0))["skipped"] > 1


@pytest.mark.exhaustive
def test_killed_and_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(tmp_path):
    """Two kills; tests/drills/kills.py makes more."""
    trained, _ = kills.kill_and_resume(tmp_path / "killed", 2, random.Random(0))
    assert trained == kills.uninterrupted(tmp_path / "whole", max(trained.losses) + 1)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_preset_resumes_from_its_own_checkpoint(workload, tmp_path):
    """Without the arrays: what was written is compared with what the command line resolves."""
    for preset in ("tiny", "fp8,tiny", "nvfp4,tiny", *config(workload).known):
        gpu = "b200" if "nvfp4" in preset else "h100"
        if preset == "rehearse":
            continue
        settings = {"precision.bf16_layers": (1, 1)} if "fp" in preset else {}
        run = resolve(workload, preset, settings, gpu_type=gpu)
        info = checkpoint.CheckpointInfo(run.config.asdict(), run.asdict(), 1, {}, [], {"x": 1})
        written = checkpoint.CheckpointInfo.from_json(json.dumps(info.to_json()))
        restore._check_fits(restore.Checkpoint(tmp_path, written), run)
        assert restore.config_diff(written, run) == []


@pytest.mark.exhaustive
def test_a_run_with_some_layers_in_bf16_resumes(train, tmp_path):
    some = {"precision.bf16_layers": (1, 1)}
    flags = dict(dtype="fp8", layers=4, seq=64, mbs=2)
    assert train(tmp_path / "a", overrides=some, steps=1, checkpoint=True, **flags)[0] == 0
    folder = str(folder_of(tmp_path / "a"))
    code, text = train(tmp_path / "b", overrides=some, steps=2, resume=folder, **flags)
    assert code == 0, text
    assert result_of(tmp_path / "b")["steps_done"] == 1
