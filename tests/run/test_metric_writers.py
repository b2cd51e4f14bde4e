"""Metrics for TensorBoard, Weights & Biases and Prometheus; a writer that fails stops no run."""

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


def write(folder, **settings) -> list[str]:
    """Writes the metrics of three steps to a folder; returns the lines of the log."""
    run = resolve("llama31_8b", "", {f"output.{k}": v for k, v in settings.items()}, gpus=8)
    lines: list[str] = []
    writers = metric_writers.MetricWriters(run, folder, lines.append)
    for i in range(3):
        writers.put(FIGURES | {"step": i, "loss": 11.5 - i})
    writers.close()
    writers.thread.join(300)  # close() waits too short for a busy machine
    assert not writers.thread.is_alive()
    return lines


def events(tmp_path) -> list[event_pb2.Event]:
    """Events of the event file: length, checksum of it, bytes, checksum of them."""
    (file,) = tmp_path.glob("events.out.tfevents.*")
    data, parsed = file.read_bytes(), []
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        parsed.append(event_pb2.Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    return parsed


def test_tensorboard_has_every_step(tmp_path):
    assert write(tmp_path) == []
    first, *steps = events(tmp_path)
    assert first.file_version == "brain.Event:2"
    assert [e.step for e in steps] == [0, 1, 2]
    for i, event in enumerate(steps):
        values = {v.tag: v.simple_value for v in event.summary.value}
        assert values["train/loss"] == pytest.approx(11.5 - i)
        assert values["train/peak_bytes"] == 60 << 30
        assert {*values} == {f"train/{n}" for n in FIGURES if n != "time"}
        assert time.time() - event.wall_time < 600


def test_an_evaluation_is_written_beside_the_step_that_it_follows(tmp_path):
    run = resolve("llama31_8b", gpus=8)
    writers = metric_writers.MetricWriters(run, tmp_path, print)
    writers.put(FIGURES | {"step": 3})
    writers.put({"step": 3, "eval_loss": 9.5})
    writers.close()
    writers.thread.join(300)
    last = events(tmp_path)[-1]
    assert (last.step, [(v.tag, v.simple_value) for v in last.summary.value]) == (
        3,
        [("train/eval_loss", 9.5)],
    )
    text = (tmp_path / "metrics.prom").read_text()
    for name, value in {"evaluation_loss": 9.5, "loss": 11.5, "step_seconds": 9.4}.items():
        assert re.search(rf"^maxbench_{name}\{{.*\}} {value}$", text, re.M)


def test_openmetrics_has_the_last_step_in_base_units(tmp_path):
    path = tmp_path / "node" / "mine.prom"
    path.parent.mkdir()
    assert write(tmp_path, openmetrics=str(path), tensorboard=False) == []
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


def test_docs_list_every_metric():
    page = pathlib.Path("docs/reference/metrics_and_files.md").read_text()
    for name, (metric, _) in metric_writers.METRICS.items():
        assert re.search(rf"^\| `?{name}`? \| `maxbench_{metric}` \|", page, re.M), name


def test_wandb_gets_the_run_and_its_steps(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda figures, step: calls.append((step, figures["loss"])),
        finish=lambda: calls.append("finish"),
    )
    fake = types.SimpleNamespace(init=lambda **options: calls.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert write(tmp_path, wandb=True) == []
    options, *rest = calls
    assert (options["project"], options["name"]) == ("maxbench", tmp_path.name)
    assert options["config"]["layout"]["gbs"] == 128
    assert rest == [(0, 11.5), (1, 10.5), (2, 9.5), "finish"]


def test_missing_wandb_is_refused_before_the_run_starts(monkeypatch):
    monkeypatch.setattr(runtime, "find_spec", lambda name: None)
    code, out, err = train_command("--config", "llama31_8b:tiny", "--wandb")
    assert (code, out) == (2, "")
    assert "wandb=True needs Weights & Biases, which is not installed: pip install wandb" in err


def disk_full(*_):
    raise OSError(28, "No space left on device")


def test_failing_writer_is_dropped_and_logged_once(tmp_path, monkeypatch):
    monkeypatch.setattr(metric_writers.TensorBoard, "write", disk_full)
    (line,) = write(tmp_path)
    assert line.startswith("TensorBoard gets no more metrics of this run: OSError: ")
    assert 'maxbench_step{run="' in (tmp_path / "metrics.prom").read_text()


def test_writer_to_a_missing_folder_is_dropped(tmp_path):
    missing = tmp_path / "missing" / "x.prom"
    (line,) = write(tmp_path, openmetrics=str(missing), tensorboard=False)
    assert line.startswith("OpenMetrics gets no more metrics of this run: FileNotFoundError: ")


def test_failing_log_does_not_stop_the_other_writers(tmp_path, monkeypatch):
    monkeypatch.setattr(metric_writers.TensorBoard, "__init__", disk_full)
    run = resolve("llama31_8b", gpus=8)
    writers = metric_writers.MetricWriters(run, tmp_path, disk_full)
    writers.put(FIGURES | {"step": 0})
    writers.close()
    writers.thread.join(300)
    assert 'maxbench_step{run="' in (tmp_path / "metrics.prom").read_text()


def test_hanging_writer_delays_neither_steps_nor_the_end(tmp_path, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(metric_writers, "CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(metric_writers.TensorBoard, "write", lambda *_: released.wait())
    writers = metric_writers.MetricWriters(resolve("llama31_8b", gpus=8), tmp_path, print)
    for i in range(1000):
        writers.put(FIGURES | {"step": i})
    writers.close()
    assert writers.thread.is_alive()
    released.set()
    writers.thread.join()
