"""Metrics of each step for other tools: TensorBoard, Weights & Biases, Prometheus.

Process 0 queues the metrics and continues; a thread writes them. A writer that fails is dropped,
and the log says so once: no run waits for a writer, or ends because of one.
"""

import contextlib
import json
import os
import pathlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from maxbench.config.run import Run

CLOSE_TIMEOUT_S = 10.0  # wait of a run's end for metrics that are still queued
MIN_INTERVAL_S = 1.0  # between two writes of a file
METRICS = {  # metric -> its name for Prometheus, in base units, and its description
    "step": ("step", "The last completed step"),
    "step_s": ("step_seconds", "Time of a step"),
    "loss": ("loss", "Training loss"),
    "eval_loss": ("evaluation_loss", "Loss of held-out sequences"),
    "grad_norm": ("gradient_norm", "Global norm of the gradient"),
    "lr": ("learning_rate", "Learning rate"),
    "mtp_loss": ("mtp_loss", "Loss of multi-token prediction"),
    "lost_rows": ("lost_rows", "Rows of experts that exceeded model.dispatch_factor"),
    "data_wait_s": (
        "data_wait_seconds",
        "Time that the devices waited for the batch",
    ),
    "peak_bytes": ("peak_memory_bytes", "Peak memory of the first GPU; of the process on a CPU"),
    "tokens_per_s": ("tokens_per_second", "Tokens per second over all devices"),
    "tflops": ("tflops_per_gpu", "TFLOP/s per GPU, every score of attention counted"),
    "mfu": ("mfu_ratio", "Model FLOPs utilization, every score of attention counted"),
}


class StepMetrics(NamedTuple):
    """Metrics of one step."""

    time: float  # seconds since 1970
    values: Mapping[str, float]  # by keys of METRICS

    @property
    def step(self) -> int:
        return int(self.values["step"])


class Writer(Protocol):
    """A destination of metrics, used by one thread. Any exception drops it."""

    def __init__(self, run: Run, folder: pathlib.Path): ...
    def write(self, metrics: StepMetrics) -> None: ...
    def close(self) -> None: ...


class MetricWriters:
    """Writes a run's metrics to all destinations that the run chooses, in a thread.

    Args:
      folder: the run's folder.
      log: writes a line to the log.
    """

    def __init__(self, run: Run, folder: pathlib.Path, log: Callable[[str], None]):
        self.log = log
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        chosen = {TensorBoard: run.output.tensorboard, WandB: run.output.wandb, OpenMetrics: True}
        kinds = [kind for kind, is_chosen in chosen.items() if is_chosen]
        self.thread = threading.Thread(target=self._write_all, args=(kinds, run, folder))
        self.thread.daemon = True
        self.thread.start()

    def put(self, metrics: Mapping[str, float]) -> None:
        """Queues metrics of a step, without those that METRICS does not list."""
        known = {name: metrics[name] for name in METRICS if name in metrics}
        self.queue.put(StepMetrics(time.time(), known))

    def close(self) -> None:
        """Waits until all metrics are written, at most CLOSE_TIMEOUT_S."""
        self.queue.put(None)
        self.thread.join(CLOSE_TIMEOUT_S)

    def _write_all(self, kinds: list[type[Writer]], run: Run, folder: pathlib.Path) -> None:
        writers: dict[type[Writer], Writer] = {}
        for kind in kinds:
            with self._dropping(writers, kind):
                writers[kind] = kind(run, folder)
        while metrics := self.queue.get():
            for kind, writer in [*writers.items()]:
                with self._dropping(writers, kind):
                    writer.write(metrics)
        for kind, writer in [*writers.items()]:
            with self._dropping(writers, kind):
                writer.close()

    @contextlib.contextmanager
    def _dropping(self, writers: dict[type[Writer], Writer], kind: type[Writer]):
        """Drops a writer whose code in the `with` block raises, and logs the error."""
        try:
            yield
        except Exception as e:  # of files, networks, other packages
            with contextlib.suppress(Exception):
                writers.pop(kind).close()
            error = f"{type(e).__name__}: {e}".splitlines()[0][:200]
            # The log's disk may be full, or the log closed.
            with contextlib.suppress(OSError, ValueError):
                self.log(f"{kind.__name__} gets no more metrics of this run: {error}")


class TensorBoard:
    """An event file in the run's folder: `tensorboard --logdir experiments`."""

    def __init__(self, run: Run, folder: pathlib.Path):
        # Imported in this thread: it takes 0.15 s, while the main thread compiles the step. The
        # public SummaryWriter would add a thread and a queue of its own.
        from tensorboardX import event_file_writer
        from tensorboardX.proto import event_pb2, summary_pb2

        self.event, self.summary = event_pb2.Event, summary_pb2.Summary
        self.file = event_file_writer.EventsWriter(str(folder / "events"))
        self.flushed = 0.0

    def write(self, metrics: StepMetrics) -> None:
        values = [
            self.summary.Value(tag=f"train/{name}", simple_value=value)
            for name, value in metrics.values.items()
            if name != "step"
        ]
        summary = self.summary(value=values)
        event = self.event(wall_time=metrics.time, step=metrics.step, summary=summary)
        self.file.write_event(event)
        if metrics.time - self.flushed > MIN_INTERVAL_S:
            self.file.flush()
            self.flushed = metrics.time

    def close(self) -> None:
        self.file.close()


class WandB:
    """A run of the project `maxbench` in Weights & Biases, configured by its variables, WANDB_*."""

    def __init__(self, run: Run, folder: pathlib.Path):
        import wandb  # an optional dependency

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "maxbench"),
            name=folder.name,
            dir=str(folder),
            config=run.config.asdict(),
        )

    def write(self, metrics: StepMetrics) -> None:
        values = {name: value for name, value in metrics.values.items() if name != "step"}
        self.run.log(values, step=metrics.step)

    def close(self) -> None:
        self.run.finish()


class OpenMetrics:
    """The last step and evaluation as text, for the textfile collector of Prometheus' node
    exporter."""

    def __init__(self, run: Run, folder: pathlib.Path):
        self.path = pathlib.Path(run.output.openmetrics or folder / "metrics.prom")
        labels = {
            "run": run.name,
            "model": run.model.name,
            "size": run.model.size,
            "gpus": run.layout.gpus,
            "dtype": run.precision.dtype,
        }
        self.labels = ",".join(f"{k}={json.dumps(str(v))}" for k, v in labels.items())
        self.last, self.written = StepMetrics(0.0, {}), 0.0

    def write(self, metrics: StepMetrics) -> None:
        self.last = StepMetrics(metrics.time, {**self.last.values, **metrics.values})
        if metrics.time - self.written >= MIN_INTERVAL_S:
            self._replace(running=1)
            self.written = metrics.time

    def close(self) -> None:
        self._replace(running=0)

    def _replace(self, running: int) -> None:
        """Replaces the file as a whole, so that a reader never sees half of it."""
        part = self.path.with_name(f"{self.path.name}.part")  # the exporter reads *.prom alone
        part.write_text(self._text(running))
        os.replace(part, self.path)

    def _text(self, running: int) -> str:
        rows: list[tuple[str, float, str]] = [
            ("running", running, "1 while the run is in progress")
        ]
        rows += [(METRICS[k][0], value, METRICS[k][1]) for k, value in self.last.values.items()]
        lines = []
        for name, value, description in rows:
            lines += [f"# HELP maxbench_{name} {description}.", f"# TYPE maxbench_{name} gauge"]
            lines += [f"maxbench_{name}{{{self.labels}}} {value:.12g}"]
        return "\n".join([*lines, "# EOF", ""])
