"""Metrics for TensorBoard, Weights & Biases and Prometheus: what they hold, and that none of them
stops a run."""

import pathlib
import re
import struct
import sys
import threading
import time
import types

import pytest
from tensorboardX.proto import event_pb2

from maxbench.distributed import runtime
from maxbench.run import metric_writers
from tests.conftest import resolve, train_command

FIGURES = {"step_s": 9.4, "loss": 11.5, "grad_norm": 1.5, "lr": 3e-7, "peak_bytes": 60 << 30}
FIGURES |= {"tokens_per_s": 111_550.0, "mfu": 0.41, "time": 1.0}


def of(tmp_path, steps=3, said=None, **settings) -> list[str]:
    """A run's metrics, written to a folder; what the log was told."""
    run = resolve("llama31_8b", "", {f"output.{k}": v for k, v in settings.items()}, gpus=8)
    said = [] if said is None else said
    made = metric_writers.MetricWriters(run, tmp_path, said.append)
    for i in range(steps):
        made.put(FIGURES | {"step": i, "loss": 11.5 - i})
    made.close()
    made.thread.join(300)  # a busy machine may take longer than the end of a run would wait
    assert not made.thread.is_alive()
    return said


def events(tmp_path) -> list[event_pb2.Event]:
    """What stands in the event file: records of length, its checksum, bytes, their checksum."""
    (file,) = tmp_path.glob("events.out.tfevents.*")
    rest, found = file.read_bytes(), []
    while rest:
        (size,) = struct.unpack("<Q", rest[:8])
        found.append(event_pb2.Event.FromString(rest[12 : 12 + size]))
        rest = rest[16 + size :]
    return found


def test_tensorboard_has_every_step(tmp_path):
    assert of(tmp_path) == []
    first, *steps = events(tmp_path)
    assert first.file_version == "brain.Event:2"
    assert [e.step for e in steps] == [0, 1, 2]
    for i, event in enumerate(steps):
        told = {v.tag: v.simple_value for v in event.summary.value}
        assert told["train/loss"] == pytest.approx(11.5 - i)
        assert told["train/peak_bytes"] == 60 << 30
        assert {*told} == {f"train/{n}" for n in FIGURES if n != "time"}
        assert time.time() - event.wall_time < 600


def test_openmetrics_has_the_last_step_in_base_units(tmp_path):
    path = tmp_path / "node" / "mine.prom"
    path.parent.mkdir()
    assert of(tmp_path, openmetrics=str(path), tensorboard=False) == []
    assert [p.name for p in path.parent.iterdir()] == ["mine.prom"]
    assert not list(tmp_path.glob("events*"))
    *lines, end = path.read_text().splitlines()
    assert end == "# EOF"
    values = {}
    for about, kind, sample in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        name, labels, value = re.fullmatch(r"(maxbench_\w+)\{(.*)\} (\S+)", sample).groups()
        assert about.startswith(f"# HELP {name} ")
        assert kind == f"# TYPE {name} gauge"
        assert 'model="llama31",size="8b",gpus="8",dtype="bf16"' in labels
        values[name.removeprefix("maxbench_")] = float(value)
    expected = {"running": 0, "step": 2, "step_seconds": 9.4, "loss": 9.5, "mfu_ratio": 0.41}
    assert values.items() >= expected.items()
    assert values["peak_memory_bytes"] == 60 << 30


def test_the_page_has_every_metric():
    page = pathlib.Path("docs/reference/metrics_and_files.md").read_text()
    for name, (metric, _) in metric_writers.NAMES.items():
        assert re.search(rf"^\| `?{name}`? \| `maxbench_{metric}` \|", page, re.M), name


def test_wandb_is_given_the_run_and_its_steps(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda figures, step: calls.append((step, figures["loss"])),
        finish=lambda: calls.append("finish"),
    )
    fake = types.SimpleNamespace(init=lambda **given: calls.append(given) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert of(tmp_path, wandb=True) == []
    given, *rest = calls
    assert (given["project"], given["name"]) == ("maxbench", tmp_path.name)
    assert given["config"]["layout"]["gbs"] == 128
    assert rest == [(0, 11.5), (1, 10.5), (2, 9.5), "finish"]


def test_wandb_that_is_not_installed_is_said_before_anything_starts(monkeypatch):
    monkeypatch.setattr(runtime, "find_spec", lambda name: None)
    code, out, err = train_command("--config", "llama31_8b:tiny", "--wandb")
    assert (code, out) == (2, "")
    assert "wandb=True needs Weights & Biases, which is not installed: pip install wandb" in err


def test_what_fails_is_left_out_and_said_once(tmp_path, monkeypatch):
    def no(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(metric_writers.TensorBoard, "write", no)
    said, *rest = of(tmp_path)
    assert not rest
    assert said.startswith("TensorBoard has no more metrics of this run: OSError: ")
    assert 'maxbench_step{run="' in (tmp_path / "metrics.prom").read_text()
    nowhere = tmp_path / "nowhere" / "x.prom"
    monkeypatch.undo()
    (said,) = of(tmp_path / "..", openmetrics=str(nowhere), tensorboard=False)
    assert said.startswith("OpenMetrics has no more metrics of this run: FileNotFoundError: ")


def test_a_log_that_cannot_take_the_complaint_ends_nothing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(metric_writers.TensorBoard, "__init__", lambda *_: full(0))
    run = resolve("llama31_8b", gpus=8)
    made = metric_writers.MetricWriters(run, tmp_path, full)
    made.put(FIGURES | {"step": 0})
    made.close()
    made.thread.join(300)
    assert 'maxbench_step{run="' in (tmp_path / "metrics.prom").read_text()


def test_what_hangs_holds_no_step_and_no_end(tmp_path, monkeypatch):
    held = threading.Event()
    monkeypatch.setattr(metric_writers, "PATIENCE", 0.05)
    monkeypatch.setattr(metric_writers.TensorBoard, "write", lambda *_: held.wait())
    made = metric_writers.MetricWriters(resolve("llama31_8b", gpus=8), tmp_path, print)
    for i in range(1000):
        made.put(FIGURES | {"step": i})
    made.close()  # returns
    assert made.thread.is_alive()
    held.set()
    made.thread.join()
