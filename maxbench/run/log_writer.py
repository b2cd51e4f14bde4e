"""What a run says: step timing, log lines, metrics.jsonl, result.json."""

import contextlib
import dataclasses
import json
import os
import pathlib
import tempfile
import threading
import time

from maxbench.config.run import Run
from maxbench.metrics import flops, step_stats
from maxbench.run import terminal

SCHEMA = 1  # of result.json
RESERVED_BYTES = (
    1 << 18
)  # bytes kept on disk for the end of result.json, in case it is full by then
USED = ("peak_bytes_in_use", "bytes_in_use")


def memory_bytes(device) -> tuple[int, int]:
    """Peak memory of a device, and what is in use; where it keeps no count (CPU), this process's
    peak for both."""
    stats = device.memory_stats() or dict.fromkeys(USED, process_peak_bytes())
    return tuple(stats[name] for name in USED)


def process_peak_bytes() -> int:
    """Peak resident memory of this process (getrusage would count the one it came from)."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def since_start_s() -> float:
    """Seconds since this process started."""
    ticks = int(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    up = float(pathlib.Path("/proc/uptime").read_text().split()[0])
    return up - ticks / os.sysconf("SC_CLK_TCK")


class FolderDeleted(Exception):
    """The run's folder was deleted during the run."""


class Log:
    """The files of a run, written by process 0: log-<name>.out, metrics.jsonl, result.json.

    Lines go to the log as they come, so a run that is killed can still be read. All processes keep
    what result.json will say: should process 0 die, another writes it.
    """

    def __init__(
        self, run: Run, devices: step_stats.Devices, command: list[str], process: int,
        folder: pathlib.Path, about: dict,
    ):  # fmt: skip
        self.run, self.devices, self.process, self.writes = run, devices, process, process == 0
        self.folder, self.screen, self.writers, self.times = folder, None, None, {}
        self.result = {
            "schema": SCHEMA,
            "name": run.name,
            "status": "running",
            "command": command,
            "started": time.time(),
            "device": dataclasses.asdict(devices),
            "mocked": bool(run.runtime.mock_gpus),
            "parameters": flops.params(run.model),
            "config": run.asdict(),
            **about,
        }
        self.closing = threading.Lock()
        if not self.writes:
            return
        # Room on disk for the end of result.json; a file without a name goes with its process.
        self.reserved_disk = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self.reserved_disk.write(os.urandom(RESERVED_BYTES))
        self.file = (folder / f"log-{run.name}.out").open("a", buffering=1)
        self.jsonl = (folder / "metrics.jsonl").open("a", buffering=1)
        self.write_result()

    def line(self, text: str, show: bool = True) -> None:
        """A line of the log, shown on stdout too."""
        if not self.writes:
            return
        if show and self.screen:
            self.screen.line(text)
        elif show:
            print(text, flush=True)
        self.file.write(text + "\n")

    def step(self, i: int, step_s: float, out: dict[str, float], memory: tuple[int, int]) -> None:
        """Records a step: both log lines that existing tools read, one line of metrics.jsonl."""
        self.times[i], self.result["peak_bytes"] = step_s, memory[0]
        losses = self.result.setdefault("loss", {"first": (i, out["loss"])})
        losses["last"] = (i, out["loss"])
        if not self.writes:
            return
        run = self.run
        tokens = run.layout.gbs * run.train.seq
        tflops = step_stats.performance_figures(run, None, step_s)["tflops_per_gpu"]["full"]
        peak, allocated = memory
        maxtext = (
            f"completed step: {i}, seconds: {step_s:.3f}, TFLOP/s/device: {tflops:.3f}, "
            f"Tokens/s/device: {tokens / step_s / run.layout.gpus:.3f}, total_weights: {tokens}, "
            f"loss: {out['loss']:.3f}"
        )
        nemo = (
            f"Training epoch 0, iteration {i}/{run.train.steps - 1} | lr: {out['lr']:.4} | "
            f"global_batch_size: {run.layout.gbs} | global_step: {i} | "
            f"peak_memory_usage: {peak} | memory_allocated: {allocated} | "
            f"reduced_train_loss: {out['loss']:.4} | train_step_timing in s: {step_s:.4} | "
            f"TFLOPS_per_GPU: {tflops:.4} | consumed_samples: {(i + 1) * run.layout.gbs}"
        )
        self.line(maxtext, show=not self.screen)
        self.line(nemo, show=not self.screen)
        record = {"step": i, "step_s": step_s, **out, "peak_bytes": peak, "time": time.time()}
        self.jsonl.write(json.dumps(record) + "\n")
        about = record | self.rates(step_s, memory)
        if self.screen:
            self.screen.step(about, run.train.steps)
        if self.writers:
            self.writers.put(about)

    def rates(self, step_s: float, memory: tuple[int, int]) -> dict[str, float]:
        """What a step means on these devices, by name: of a CPU tokens/s alone."""
        gpu_type, about = (
            self.devices.gpu_type,
            step_stats.performance_figures(self.run, None, step_s),
        )
        made = {"tokens_per_s": about["tokens_per_s"]}
        if self.devices.platform == "cpu":
            return made
        made["tokens_per_s_per_gpu"] = about["tokens_per_s"] / self.devices.count
        made["gib"] = memory[0] / 2**30
        if gpu_type:
            made["tflops"] = about["tflops_per_gpu"]["full"]
            made["mfu"] = step_stats.performance_figures(self.run, gpu_type, step_s)["mfu"]["full"]
        return made

    def phase(self, name: str, done: int = 0, total: int | None = None) -> None:
        """What the run does from now on, for a terminal."""
        if self.screen:
            self.screen.phase(name, done, total)

    def close(self, status: str, reason: str = "") -> None:
        """Writes result.json and the closing table, once, however full the disk is."""
        if not self.writes or not self.closing.acquire(blocking=False):
            return
        self.reserved_disk.close()
        try:
            self.check_folder()
            parts = self.finish(status, reason)
        except BaseException:
            self.closing.release()  # to be closed with that as the reason
            raise
        if self.writers:
            self.writers.close()
        if self.screen:
            self.screen.stop()
            self.screen.summary(parts)
        for last in (
            lambda: self.line(terminal.summary(parts) + "\n", show=not self.screen),
            lambda: self.line(f"results: {self.folder}"),
            self.file.close,
            self.jsonl.close,
        ):
            with contextlib.suppress(OSError):
                last()

    def finish(self, status: str, reason: str) -> terminal.Parts:
        """Writes result.json as it stays; returns what the closing table says."""
        self.result |= {"status": status, "reason": reason, "ended": time.time()}
        try:
            self.result |= self.summary()
            return terminal.closing(self.result)
        finally:  # whatever is wrong with the figures
            self.write_result()

    def write_result_for_lost_peer(self, reason: str) -> None:
        """Writes how a run ended of which a process is lost, process 0 or another. Of several that
        do so at once the last one stays, which says the same."""
        if self.writes:
            self.close("failed", reason)
        elif json.loads((self.folder / "result.json").read_text())["status"] == "running":
            self.finish("failed", reason)

    def check_folder(self) -> None:
        """Raises FolderDeleted if the log file is no longer in the run's folder."""
        if self.writes and not self.file.closed and os.fstat(self.file.fileno()).st_nlink == 0:
            raise FolderDeleted(f"the run's folder was deleted during the run: {self.folder}")

    def summary(self) -> dict:
        """Figures over the window, by name, each with its convention."""
        steps, times = step_stats.measured_window(self.run.train.window, self.times)
        if not times:
            return {"steps_done": 0}
        step = step_stats.statistics_of(times)
        return {
            "steps_done": len(self.times),
            "window": [steps[0], steps[-1]],
            "step_s": step,
            **step_stats.performance_figures(self.run, self.devices.gpu_type, step["mean"]),
            "published": self.comparison(step["mean"]),
        }

    def comparison(self, step_s: float) -> dict:
        """The nearest published figure and our share of its tokens/s per GPU, if it can be held."""
        if self.devices.gpu_type is None:
            return {"verdict": f"not comparable: ran on {self.devices.kind}"}
        if self.run.runtime.mock_gpus:
            return {"verdict": "not comparable: the network was mocked"}
        beside = step_stats.compare_with_published(self.run, self.devices.gpu_type)
        text = beside.refusal or f"{beside.share(step_s):.1%} of the published tokens/s"
        return beside.about | {"verdict": text}

    def write_result(self) -> None:
        """result.json, replaced as a whole: a reader never sees half of it."""
        part = self.folder / f"result.json.part{self.process}"
        now = dict(self.result)  # other threads add to it
        part.write_text(json.dumps(now, indent=1, default=str) + "\n")
        os.replace(part, self.folder / "result.json")
