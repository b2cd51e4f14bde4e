"""Runs of tests: in this process, or in processes of their own."""

import json
import os
import pathlib
import signal

import pytest

from maxbench.run import log_writer, loop
from tests.conftest import resolve

EXACT = {"precision.grads": "fp32", "train.data": "LICENSE"}
MESH = dict(dp=2, fsdp=2, tp=2, gbs=8)


@pytest.fixture
def train(tmp_path, capsys):
    """Trains in this process; returns the exit code and the printed text."""

    def run_here(
        folder=tmp_path, workload="llama31_8b", overrides=None, **flags
    ) -> tuple[int, str]:
        settings = EXACT | (overrides or {})
        flags = {"dtype": "fp32", "output_dir": str(folder), **flags}
        run = resolve(workload, "tiny", settings, **flags)
        code = loop.train(run)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run_here


def folder_of(root: pathlib.Path) -> pathlib.Path:
    """Folder of the newest run below a path."""
    return max(root.rglob("result.json"), key=lambda p: p.stat().st_mtime_ns).parent


def result_of(root: pathlib.Path) -> dict:
    """result.json of the newest run below a path."""
    return json.loads((folder_of(root) / "result.json").read_text())


def losses(folder: pathlib.Path) -> dict[int, float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


@pytest.fixture
def signal_at_step(monkeypatch):
    """Sends this process a signal once a step is recorded; restores the handlers afterwards."""
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    record_step = log_writer.Log.step

    def install(number: signal.Signals, step: int) -> None:
        def record(log, i, *rest):
            record_step(log, i, *rest)
            if i == step:
                os.kill(os.getpid(), number)

        monkeypatch.setattr(log_writer.Log, "step", record)

    yield install
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def reference_run(tmp_path_factory) -> pathlib.Path:
    """Folder of a run of six steps on eight devices, with checkpoints of steps 4 and 6."""
    out, every = tmp_path_factory.mktemp("reference"), EXACT | {"output.checkpoint_every": 4}
    run = resolve("llama31_8b", "tiny", every, dtype="fp32", output_dir=str(out), steps=6, **MESH)
    assert loop.train(run) == 0
    return folder_of(out)
