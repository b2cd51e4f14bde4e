"""The files of a run: log-<name>.out, metrics.jsonl, result.json; and its lines on stdout."""

import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import threading
import time

from maxbench.config.run import Run
from maxbench.distributed.hang_detector import Hang
from maxbench.distributed.progress import Progress
from maxbench.metrics import step_stats
from maxbench.run import terminal
from maxbench.run.metric_writers import MetricWriters
from maxbench.run.mllog import MlLog
from maxbench.run.process_stats import MemoryUse
from maxbench.run.result import Evaluation, RunResult

RESERVED_BYTES = 1 << 18  # of disk, for the end of result.json on a disk that is full by then


class FolderDeleted(Exception):
    """The run's folder was deleted during the run; the message is the reason."""


def _print(text: str) -> None:
    """Prints a line. A run whose reader closes the pipe (`maxbench train | head`) goes on, with its
    log and result.json; later lines go to the null device."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


class Log:
    """Writes the log, metrics and result of a run. Only process 0 writes.

    Lines are flushed at once, so the log of a killed run is complete. All processes keep the
    result: if process 0 dies, another one writes it.

    Args:
      process: number of this process.
      folder: the run's folder, which exists.
      screen: terminal to show the run on; without one, lines are printed to stdout.

    Attributes:
      times: seconds of each recorded step.
      losses: of each.
      data_waits: seconds of each that the devices waited for its batch from files.
      writers: TensorBoard and others, or None.
      mllog: lines of MLPerf Training, or None.
      progress: of this process, which the peer watch reads.
    """

    def __init__(
        self,
        run: Run,
        devices: step_stats.Devices,
        process: int,
        folder: pathlib.Path,
        result: RunResult,
        screen: terminal.Screen | None = None,
    ):
        self.run, self.devices, self.folder, self.result = run, devices, folder, result
        self.process, self.writes, self.screen = process, process == 0, screen
        self.times: dict[int, float] = {}
        self.data_waits: dict[int, float] = {}
        self.losses: dict[int, float] = {}
        self.writers: MetricWriters | None = None
        self.mllog: MlLog | None = None
        self.progress = Progress()
        self.closing = threading.Lock()  # the main thread and the peer watch may both close
        if not self.writes:
            return
        # A file without a name: the kernel frees it with this process, however that ends.
        self.reserved_disk = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self.reserved_disk.write(os.urandom(RESERVED_BYTES))
        self.file = (folder / f"log-{run.name}.out").open("a", buffering=1)
        self.jsonl = (folder / "metrics.jsonl").open("a", buffering=1)
        self.write_result()

    def line(self, text: str, show: bool = True) -> None:
        """Writes a line to the log, and shows it."""
        if not self.writes:
            return
        if show and self.screen:
            self.screen.line(text)
        elif show:
            _print(text)
        self.file.write(text + "\n")

    def step(self, i: int, step_s: float, metrics: dict[str, float], memory: MemoryUse) -> None:
        """Records step i: two lines of the log, one of metrics.jsonl, and the metric writers.

        Args:
          metrics: loss, grad_norm, lr; data_wait_s, if batches are of files.
        """
        self.times[i], self.result.peak_bytes = step_s, memory.peak
        self.data_waits[i] = metrics.get("data_wait_s", 0.0)
        self.losses[i] = metrics["loss"]
        self.result.record_loss(i, metrics["loss"])
        self.progress.finish(i, step_s)
        if not self.writes:
            return
        for text in self._step_lines(i, step_s, metrics, memory):
            self.line(text, show=not self.screen)
        record = {"step": i, "step_s": step_s, **metrics}
        record |= {"peak_bytes": memory.peak, "time": time.time()}
        self.jsonl.write(json.dumps(record) + "\n")
        figures = record | self._rates(step_s, memory)
        if self.screen:
            self.screen.step(figures, self.run.train.steps)
        if self.writers:
            self.writers.put(figures)

    def _step_lines(
        self, i: int, step_s: float, metrics: dict[str, float], memory: MemoryUse
    ) -> tuple[str, str]:
        """The lines of a step as MaxText and NeMo print them, for tools that parse those."""
        run = self.run
        tokens = run.layout.gbs * run.train.seq
        tflops = step_stats.performance_figures(run, None, step_s)["tflops_per_gpu"]["full"]
        maxtext = (
            f"completed step: {i}, seconds: {step_s:.3f}, TFLOP/s/device: {tflops:.3f}, "
            f"Tokens/s/device: {tokens / step_s / run.layout.gpus:.3f}, total_weights: {tokens}, "
            f"loss: {metrics['loss']:.3f}"
        )
        nemo = (
            f"Training epoch 0, iteration {i}/{run.train.steps - 1} | lr: {metrics['lr']:.4} | "
            f"global_batch_size: {run.layout.gbs} | global_step: {i} | "
            f"peak_memory_usage: {memory.peak} | memory_allocated: {memory.allocated} | "
            f"reduced_train_loss: {metrics['loss']:.4} | train_step_timing in s: {step_s:.4} | "
            f"TFLOPS_per_GPU: {tflops:.4} | consumed_samples: {(i + 1) * run.layout.gbs}"
        )
        return maxtext, nemo

    def _rates(self, step_s: float, memory: MemoryUse) -> dict[str, float]:
        """Rates of a step; on a CPU tokens/s alone, without a known peak no MFU."""
        gpu_type = self.devices.gpu_type
        figures = step_stats.performance_figures(self.run, gpu_type, step_s)
        rates = {"tokens_per_s": figures["tokens_per_s"]}
        if self.devices.platform == "cpu":
            return rates
        rates["tokens_per_s_per_gpu"] = figures["tokens_per_s"] / self.devices.count
        rates["gib"] = memory.peak / 2**30
        if gpu_type:
            rates["tflops"] = figures["tflops_per_gpu"]["full"]
            rates["mfu"] = figures["mfu"]["full"]
        return rates

    def evaluation(self, evaluation: Evaluation, reached: bool) -> None:
        """Records an evaluation, which ends the run if the target is reached: a line of the log,
        result.json, and the metric writers."""
        e, result = evaluation, self.result
        result.evaluations.append(e)
        result.target_reached = e if reached else None
        if not self.writes:
            return
        self.line(
            f"evaluation after step {e.step}: loss {e.loss:.4f}, {e.tokens:,} tokens, "
            f"{e.elapsed_s:.1f} s since step 0 of this run; took {e.seconds:.3f} s"
        )
        if reached:  # as MaxText prints it
            self.line(f"Training stopped: Target loss {self.run.train.target_loss} achieved")
        self.write_result()
        if self.writers:
            self.writers.put({"step": e.step, "eval_loss": e.loss})

    def phase(self, name: str, done: int = 0, total: int | None = None) -> None:
        """Begins a phase: compile, steps, save. A terminal and the other processes see it."""
        self.progress.phase = name
        if self.screen:
            self.screen.phase(name, done, total)

    def close(self, status: str, reason: str = "") -> None:
        """Writes result.json and the summary; does nothing the second time.

        Raises:
          FolderDeleted: nothing can be written.
          OSError: result.json cannot be written; may be called again then, with that reason.
        """
        if not self.writes or not self.closing.acquire(blocking=False):
            return
        self.reserved_disk.close()
        try:
            self.check_folder()
            summary = self._finish(status, reason)
        except BaseException:
            self.closing.release()
            raise
        if self.writers:
            self.writers.close()
        if self.screen:
            self.screen.stop()
            self.screen.summary(summary)
            self.screen.losses(self.losses, {e.step: e.loss for e in self.result.evaluations})
        for write in (
            lambda: self.line(terminal.summary(summary) + "\n", show=not self.screen),
            lambda: self.line(f"results: {self.folder}"),
            self.file.close,
            self.jsonl.close,
        ):
            with contextlib.suppress(OSError):  # a full disk
                write()

    def check_folder(self) -> None:
        """Checks that the log file is still in the run's folder.

        Raises:
          FolderDeleted: it is not; a later checkpoint may have created the folder anew.
        """
        if self.writes and not self.file.closed and os.fstat(self.file.fileno()).st_nlink == 0:
            raise FolderDeleted(f"the run's folder was deleted during the run: {self.folder}")

    def _finish(self, status: str, reason: str) -> terminal.Parts:
        """Writes the final result.json, even if figures cannot be computed; returns the summary."""
        result = self.result
        result.status, result.reason, result.ended = status, reason, time.time()
        try:
            result.record_figures(self.run, self.devices, self.times, self.data_waits)
            return terminal.summary_parts(result.to_json())
        finally:
            self.write_result()

    def report_hang(self, hang: Hang | None, lines: list[str]) -> None:
        """Records a hang in the result, and writes lines about it to the log.

        A process other than 0 writes to the log if process 0 is frozen.
        """
        if hang:
            self.result.stalled = [dataclasses.asdict(process) for process in hang.processes]
        if self.writes:
            for text in lines:
                self.line(text)
            return
        for text in lines:
            _print(text)
        if hang and lines and self._is_running():
            with (self.folder / f"log-{self.run.name}.out").open("a") as file:
                file.write("".join(f"{text}\n" for text in lines))

    def _is_running(self) -> bool:
        """Whether no process has written the run's end yet."""
        return json.loads((self.folder / "result.json").read_text())["status"] == "running"

    def write_result_for_lost_peer(self, reason: str) -> None:
        """Writes the result of a run that lost a process, which may be process 0.

        Several processes may do so at once: all write the same reason, and the last one stays.
        """
        if self.writes:
            self.close("failed", reason)
        elif self._is_running():
            self._finish("failed", reason)

    def write_result(self) -> None:
        """Replaces result.json as a whole, so that a reader never sees half of it."""
        part = self.folder / f"result.json.part{self.process}"
        part.write_text(json.dumps(self.result.to_json(), indent=1, default=str) + "\n")
        os.replace(part, self.folder / "result.json")
