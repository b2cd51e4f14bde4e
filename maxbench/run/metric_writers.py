"""Metrics where people look: TensorBoard's event files, Weights & Biases, a file for Prometheus.

Process 0 hands over what a step has said, and goes on: a thread of its own writes. What fails is
left out from then on, and the log says so once; no run waits for it or ends by it.
"""

import contextlib
import json
import os
import pathlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from maxbench.config.run import Run

PATIENCE = 10.0  # seconds that the end of a run waits for what is still to be written
PERIOD = 1.0  # seconds between two versions of a file, at least
NAMES = {  # what a step says -> its name for Prometheus, in base units, and what that is
    "step": ("step", "The last step that is done"),
    "step_s": ("step_seconds", "Time of a step"),
    "loss": ("loss", "Training loss"),
    "grad_norm": ("gradient_norm", "Global norm of the gradient"),
    "lr": ("learning_rate", "Learning rate"),
    "peak_bytes": ("peak_memory_bytes", "Peak memory of the first GPU; of the process on a CPU"),
    "tokens_per_s": ("tokens_per_second", "Tokens per second over all devices"),
    "tflops": ("tflops_per_gpu", "TFLOP/s per GPU, every score of attention counted"),
    "mfu": ("mfu_ratio", "Model FLOPs utilization, every score of attention counted"),
}


class StepMetrics(NamedTuple):
    """What a step has said, and when."""

    when: float  # seconds since 1970
    figures: Mapping[str, float]  # by names in NAMES

    @property
    def step(self) -> int:
        return int(self.figures["step"])


class MetricWriters:
    """All that a run's metrics go to beside its own files."""

    def __init__(self, run: Run, folder: pathlib.Path, say: Callable[[str], None]):
        self.say, self.queue = say, queue.SimpleQueue()
        made = {TensorBoard: run.output.tensorboard, WandB: run.output.wandb, OpenMetrics: True}
        kinds = [kind for kind, wanted in made.items() if wanted]
        self.thread = threading.Thread(target=self._work, args=(kinds, run, folder), daemon=True)
        self.thread.start()

    def put(self, figures: Mapping[str, float]) -> None:
        """Hands over a step's figures; returns at once."""
        known = {name: figures[name] for name in NAMES if name in figures}
        self.queue.put(StepMetrics(time.time(), known))

    def close(self) -> None:
        """Waits until all is written, but no longer than PATIENCE."""
        self.queue.put(None)
        self.thread.join(PATIENCE)

    def _work(self, kinds: list[type], run: Run, folder: pathlib.Path) -> None:
        sinks = {}
        for kind in kinds:
            self._attempt(sinks, kind, lambda kind=kind: sinks.update({kind: kind(run, folder)}))
        while said := self.queue.get():
            for kind, sink in [*sinks.items()]:
                self._attempt(sinks, kind, lambda sink=sink, said=said: sink.write(said))
        for kind, sink in [*sinks.items()]:
            self._attempt(sinks, kind, sink.close)

    def _attempt(self, sinks: dict[type, Any], kind: type, do: Callable[[], None]) -> None:
        """Does what may fail; a sink that has failed is none any more."""
        try:
            do()
        except Exception as e:  # of files, networks, other programs: the run goes on
            with contextlib.suppress(Exception):
                sinks.pop(kind).close()
            why = f"{type(e).__name__}: {e}".splitlines()[0][:200]
            with contextlib.suppress(
                OSError, ValueError
            ):  # the log's disk is full, or it is closed
                self.say(f"{kind.__name__} has no more metrics of this run: {why}")


class TensorBoard:
    """An event file in the run's folder: `tensorboard --logdir experiments`."""

    def __init__(self, run: Run, folder: pathlib.Path):
        # Late, in this thread: it takes 0.15 s, while the step is compiled. The writer below the
        # public one, whose queue between processes a thread has no use for.
        from tensorboardX import event_file_writer
        from tensorboardX.proto import event_pb2, summary_pb2

        self.event, self.summary = event_pb2.Event, summary_pb2.Summary
        self.file = event_file_writer.EventsWriter(str(folder / "events"))
        self.flushed = 0.0

    def write(self, said: StepMetrics) -> None:
        values = [
            self.summary.Value(tag=f"train/{name}", simple_value=value)
            for name, value in said.figures.items()
            if name != "step"
        ]
        summary = self.summary(value=values)
        self.file.write_event(self.event(wall_time=said.when, step=said.step, summary=summary))
        if said.when - self.flushed > PERIOD:
            self.file.flush()
            self.flushed = said.when

    def close(self) -> None:
        self.file.close()


class WandB:
    """A run of the project `maxbench` at Weights & Biases, by its own settings (WANDB_*)."""

    def __init__(self, run: Run, folder: pathlib.Path):
        import wandb  # late: the user's own

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "maxbench"),
            name=folder.name,
            dir=str(folder),
            config=run.asdict(),
        )

    def write(self, said: StepMetrics) -> None:
        self.run.log({k: v for k, v in said.figures.items() if k != "step"}, step=said.step)

    def close(self) -> None:
        self.run.finish()


class OpenMetrics:
    """The last step as text, metrics.prom, for Prometheus' node exporter (textfile collector)."""

    def __init__(self, run: Run, folder: pathlib.Path):
        self.path = pathlib.Path(run.output.openmetrics or folder / "metrics.prom")
        m, a = run.model, run.layout
        labels = {"run": run.name, "model": m.name, "size": m.size, "gpus": a.gpus}
        labels["dtype"] = run.precision.dtype
        self.labels = ",".join(f"{k}={json.dumps(str(v))}" for k, v in labels.items())
        self.last, self.written = StepMetrics(0.0, {}), 0.0

    def write(self, said: StepMetrics) -> None:
        self.last = said
        if said.when - self.written >= PERIOD:
            self._replace(running=1)
            self.written = said.when

    def close(self) -> None:
        self._replace(running=0)

    def _replace(self, running: int) -> None:
        """Replaced as a whole: a reader never sees half of it."""
        part = self.path.with_name(f"{self.path.name}.part")  # the exporter reads *.prom alone
        part.write_text(self._text(running))
        os.replace(part, self.path)

    def _text(self, running: int) -> str:
        rows = {"running": (running, "1 while the run goes on")}
        for name, value in self.last.figures.items():
            metric, about = NAMES[name]
            rows[metric] = (value, about)
        lines = []
        for metric, (value, about) in rows.items():
            lines += [f"# HELP maxbench_{metric} {about}.", f"# TYPE maxbench_{metric} gauge"]
            lines += [f"maxbench_{metric}{{{self.labels}}} {value:.12g}"]
        return "\n".join([*lines, "# EOF", ""])
