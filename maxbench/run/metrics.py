"""What a run says: step timing, log lines, metrics.jsonl, result.json."""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping

from maxbench.hardware import published
from maxbench.hardware.gpus import GPUS, named
from maxbench.run import terminal
from maxbench.spec import flops
from maxbench.spec.run import Run

SCHEMA = 1  # of result.json
ROOM = 1 << 18  # bytes kept on disk for the end of result.json, in case it is full by then
USED = ("peak_bytes_in_use", "bytes_in_use")


@dataclasses.dataclass
class Devices:
    """What the run found: kind as the driver names it, and which of gpus.GPUS that is."""

    platform: str
    kind: str
    count: int

    @property
    def gpu_type(self) -> str | None:
        """A name of gpus.GPUS, or None for what has no peak to be held against."""
        return named(self.kind) or None


def figures(run: Run, gpu_type: str | None, step_s: float) -> dict:
    """flops.figures() of a run on GPUs of a type of gpus.GPUS, or on devices without a peak."""
    a, peak = run.layout, GPUS[gpu_type].peak_tflops(run.format.peak) if gpu_type else 0
    return flops.figures(run.model, run.train.seq, a.gbs, a.gpus, step_s, peak)


def window(chosen: tuple[int, int], times: Mapping[int, float]) -> tuple[list[int], list[float]]:
    """Steps that count and their times: the chosen ones, or the last half of a shorter run."""
    first, last = chosen
    steps = sorted(times)
    if not steps or steps[-1] < last or steps[0] > first:
        first, last = (steps[len(steps) // 2], steps[-1]) if steps else (0, -1)
    kept = [i for i in steps if first <= i <= last]
    return kept, [times[i] for i in kept]


def statistics_of(values: list[float]) -> dict[str, float]:
    """Mean, standard deviation (of the population), median, p10, p90; in the unit of the values."""
    ordered = sorted(values)
    at = lambda q: ordered[round(q * (len(ordered) - 1))]
    return {
        "mean": statistics.fmean(values),
        "std": statistics.pstdev(values),
        "median": statistics.median(values),
        "p10": at(0.1),
        "p90": at(0.9),
    }


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


def run_folder(run: Run, stamp: int) -> pathlib.Path:
    """experiments/<name>/<name>_<timestamp>"""
    return pathlib.Path(run.output.dir) / "experiments" / run.name / f"{run.name}_{stamp}"


def make_folder(run: Run) -> int:
    """Makes the run's folder; returns its timestamp."""
    if stamp := run.output.stamp:
        # The launcher has made the folder, and put the job's own files there.
        folder = run_folder(run, stamp)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "result.json").exists():
            return stamp
    return new_folder(pathlib.Path(run.output.dir), run.name)[1]


def new_folder(out: pathlib.Path, name: str) -> tuple[pathlib.Path, int]:
    """Makes experiments/<name>/<name>_<timestamp> below out; returns it and its timestamp."""
    for stamp in itertools.count(int(time.time())):
        folder = out / "experiments" / name / f"{name}_{stamp}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder, stamp


def beside_published(run: Run, gpu_type: str) -> published.Comparison:
    """The run on GPUs of a type of gpus.GPUS, beside the published row of the same work."""
    model, layout = run.model, run.layout
    return published.compare(
        model.name, model.size, run.precision.dtype, gpu_type,
        gpus=layout.gpus, gbs=layout.gbs, seq=run.train.seq, layers=model.layers,
    )  # fmt: skip


class Log:
    """The files of a run, written by process 0: log-<name>.out, metrics.jsonl, result.json.

    Lines go to the log as they come, so a run that is killed can still be read. All processes keep
    what result.json will say: should process 0 die, another writes it.
    """

    def __init__(
        self, run: Run, devices: Devices, command: list[str], process: int,
        folder: pathlib.Path, about: dict,
    ):  # fmt: skip
        self.run, self.devices, self.process, self.writes = run, devices, process, process == 0
        self.folder, self.screen, self.sinks, self.times = folder, None, None, {}
        self.result = {
            "schema": SCHEMA,
            "name": run.name,
            "status": "running",
            "command": command,
            "started": time.time(),
            "device": dataclasses.asdict(devices) | {"gpu_type": devices.gpu_type},
            "mocked": bool(run.runtime.mock_gpus),
            "parameters": flops.params(run.model),
            "config": run.asdict(),
            **about,
        }
        self.closing = threading.Lock()
        if not self.writes:
            return
        # Room on disk for the end of result.json; a file without a name goes with its process.
        self.room = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self.room.write(os.urandom(ROOM))
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
        tflops = figures(run, None, step_s)["tflops_per_gpu"]["full"]
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
        if self.sinks:
            self.sinks.put(about)

    def rates(self, step_s: float, memory: tuple[int, int]) -> dict[str, float]:
        """What a step means on these devices, by name: of a CPU tokens/s alone."""
        gpu_type, about = self.devices.gpu_type, figures(self.run, None, step_s)
        made = {"tokens_per_s": about["tokens_per_s"]}
        if self.devices.platform == "cpu":
            return made
        made["tokens_per_s_per_gpu"] = about["tokens_per_s"] / self.devices.count
        made["gib"] = memory[0] / 2**30
        if gpu_type:
            made["tflops"] = about["tflops_per_gpu"]["full"]
            made["mfu"] = figures(self.run, gpu_type, step_s)["mfu"]["full"]
        return made

    def phase(self, name: str, done: int = 0, total: int | None = None) -> None:
        """What the run does from now on, for a terminal."""
        if self.screen:
            self.screen.phase(name, done, total)

    def close(self, status: str, reason: str = "") -> None:
        """Writes result.json and the closing table, once, however full the disk is."""
        if not self.writes or not self.closing.acquire(blocking=False):
            return
        self.room.close()
        try:
            parts = self.finish(status, reason)
        except BaseException:
            self.closing.release()  # to be closed with that as the reason
            raise
        if self.sinks:
            self.sinks.close()
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

    def rescue(self, reason: str) -> None:
        """Writes how a run ended of which a process is lost, process 0 or another. Of several that
        do so at once the last one stays, which says the same."""
        if self.writes:
            self.close("failed", reason)
        elif json.loads((self.folder / "result.json").read_text())["status"] == "running":
            self.finish("failed", reason)

    def summary(self) -> dict:
        """Figures over the window, by name, each with its convention."""
        steps, times = window(self.run.train.window, self.times)
        if not times:
            return {"steps_done": 0}
        step = statistics_of(times)
        return {
            "steps_done": len(self.times),
            "window": [steps[0], steps[-1]],
            "step_s": step,
            **figures(self.run, self.devices.gpu_type, step["mean"]),
            "published": self.comparison(step["mean"]),
        }

    def comparison(self, step_s: float) -> dict:
        """The nearest published figure and our share of its tokens/s per GPU, if it can be held."""
        if self.devices.gpu_type is None:
            return {"verdict": f"not comparable: ran on {self.devices.kind}"}
        if self.run.runtime.mock_gpus:
            return {"verdict": "not comparable: the network was mocked"}
        beside = beside_published(self.run, self.devices.gpu_type)
        text = beside.refusal or f"{beside.share(step_s):.1%} of the published tokens/s"
        return beside.about | {"verdict": text}

    def write_result(self) -> None:
        """result.json, replaced as a whole: a reader never sees half of it."""
        part = self.folder / f"result.json.part{self.process}"
        now = dict(self.result)  # other threads add to it
        part.write_text(json.dumps(now, indent=1, default=str) + "\n")
        os.replace(part, self.folder / "result.json")
