"""Runs of several processes: the same losses as of one, and a lost process is named."""

import json
import pathlib
import random
import signal

import pytest

from tests.drills import freezes, kills
from tests.run.conftest import EXACT, MESH, folder_of, losses

FLAGS = ["--config", "configs/llama31_8b.py:tiny", "--dtype", "fp32"]
FLAGS += [*(f"--config.{k}={v}" for k, v in EXACT.items()), "--steps", "6"]
FLAGS += [f"--{k}={v}" for k, v in MESH.items()]


def train_pair(tmp_path, by: str, *flags: str) -> None:
    """Trains on two processes with four devices each, which find each other by flags or by jax's
    environment variables."""
    address, started, output = kills.free_address(), [], tmp_path / f"{by}.txt"
    for i in range(2):
        more, env = ["--coordinator", address, "--processes", "2", "--process", str(i)], {}
        if by == "environment":
            more, env = [], {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
            env["JAX_PROCESS_ID"] = str(i)
        words = [*FLAGS, *flags, *more]
        started.append(kills.start_process(words, str(output), devices=4, **env))
    for process in started:
        process.join()
        assert process.exitcode == 0, output.read_text()


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> pathlib.Path:
    """Folder of a run of two processes, with a checkpoint of step 5."""
    out = tmp_path_factory.mktemp("pair")
    train_pair(out, "flags", "--config.output.checkpoint_every=5", "--output_dir", str(out))
    return folder_of(out)


@pytest.mark.xdist_group("reference_run")
def test_two_processes_train_as_one(reference_run, pair):
    assert losses(pair) == pytest.approx(losses(reference_run), rel=1e-5)
    assert len(list(pair.parent.rglob("result.json"))) == 1


@pytest.mark.exhaustive
@pytest.mark.xdist_group("reference_run")
def test_one_and_two_processes_resume_from_the_checkpoint_of_two(
    reference_run, pair, train, tmp_path
):
    fifth = str(pair / "checkpoints/5")
    train_pair(tmp_path, "environment", "--resume", fifth, "--output_dir", str(tmp_path / "two"))
    assert losses(folder_of(tmp_path / "two")) == {5: losses(pair)[5]}
    code, printed = train(tmp_path / "one", steps=6, resume=fifth, **MESH)
    assert code == 0, printed
    one = losses(reference_run)
    assert losses(folder_of(tmp_path / "one")) == pytest.approx({5: one[5]}, rel=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("lost", [0, 1])
def test_killed_process_is_named_and_ends_the_run(tmp_path, lost):
    run = kills.RunProcesses(tmp_path, kills.ENDLESS, processes=2)
    run.wait_until(lambda: run.folder() and losses(run.folder()))
    run.processes[lost].kill()
    codes = run.exit_codes()
    assert codes[lost] == -signal.SIGKILL
    assert codes[1 - lost] not in (0, -signal.SIGKILL)
    result = json.loads((run.folder() / "result.json").read_text())
    reason = f"process {lost} of 2 on n{lost} died, see {run.output_path}"
    assert (result["status"], result["reason"]) == ("failed", reason)
    assert result["steps_done"] > 0
    assert f"error: {reason}" in run.printed()
    assert "Traceback" not in run.printed()


# The second kind begins as the first.
@pytest.mark.exhaustive
@pytest.mark.parametrize(("process", "kind"), [*enumerate([*freezes.KINDS][1:])])
def test_frozen_or_stuck_process_is_named_and_ends_the_run(tmp_path, process, kind):
    run = freezes.Run(tmp_path, 2, 30)  # s; on a busy host a start answers late
    try:
        run.stop_shortly(process % 2, 3)
        run.end(process % 2, kind, random.Random(0))
    finally:
        run.close()
