"""What a run says: step timing, log lines, metrics.jsonl, result.json, the closing table."""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import statistics
import sys
import threading
import time
from collections.abc import Mapping

from maxbench.hardware import published
from maxbench.hardware.gpus import GPUS, named
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

    Lines go to the log as they come, so a run that is killed can still be read.
    """

    def __init__(self, run: Run, devices: Devices, command: list[str], writes: bool, about: dict):
        self.run, self.devices, self.writes = run, devices, writes
        self.folder, self.live, self.times = None, None, {}
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
        if not writes:
            return
        self.folder = self._new_folder()
        self.room = self.folder / ".room"
        try:
            self.room.write_bytes(os.urandom(ROOM))
        except OSError:
            self.room.unlink()
            raise
        self.file = (self.folder / f"log-{run.name}.out").open("a", buffering=1)
        self.jsonl = (self.folder / "metrics.jsonl").open("a", buffering=1)
        if sys.stdout.isatty():
            self.live = live_line(run.train.steps)
        self.write_result()

    def _new_folder(self) -> pathlib.Path:
        if stamp := self.run.output.stamp:
            # The launcher has made the folder, and put the job's own files there.
            folder = run_folder(self.run, stamp)
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / "result.json").exists():
                return folder
        return new_folder(pathlib.Path(self.run.output.dir), self.run.name)[0]

    def line(self, text: str, show: bool = True) -> None:
        """A line of the log, shown on stdout too."""
        if not self.writes:
            return
        if show and self.live:
            self.live.console.print(text, highlight=False, markup=False, soft_wrap=True)
        elif show:
            print(text, flush=True)
        self.file.write(text + "\n")

    def step(self, i: int, step_s: float, out: dict[str, float], memory: tuple[int, int]) -> None:
        """Records a step: both log lines that existing tools read, one line of metrics.jsonl."""
        self.times[i], self.result["peak_bytes"] = step_s, memory[0]
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
        self.line(maxtext, show=not self.live)
        self.line(nemo, show=not self.live)
        record = {"step": i, "step_s": step_s, **out, "peak_bytes": peak, "time": time.time()}
        self.jsonl.write(json.dumps(record) + "\n")
        if self.live:
            last = f"{step_s:.3f} s  {tflops:.1f} TFLOP/s  loss {out['loss']:.3f}"
            self.live.update(self.live.task_ids[0], completed=i + 1, last=last)

    def close(self, status: str, reason: str = "") -> None:
        """Writes result.json and the closing table, once, however full the disk is."""
        if not self.writes or not self.closing.acquire(blocking=False):
            return
        self.room.unlink(missing_ok=True)
        self.result |= {"status": status, "reason": reason, "ended": time.time()}
        self.result |= self.summary()
        self.write_result()
        if self.live:
            self.live.stop()
            self.live = None
        for last in (
            lambda: self.line(closing_table(self.result)),
            lambda: self.line(f"results: {self.folder}"),
            self.file.close,
            self.jsonl.close,
        ):
            with contextlib.suppress(OSError):
                last()

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
        if self.writes:
            part = self.folder / "result.json.part"
            part.write_text(json.dumps(self.result, indent=1, default=str) + "\n")
            os.replace(part, self.folder / "result.json")


def live_line(steps: int):
    """One live line on a terminal, started: a rich.progress.Progress with one task."""
    from rich import progress  # only a terminal needs it

    columns = ("[progress.description]{task.description}", progress.BarColumn())
    columns += (progress.MofNCompleteColumn(), progress.TimeRemainingColumn())
    live = progress.Progress(*columns, "{task.fields[last]}", transient=True)
    live.add_task("training", total=steps, last="compiling")
    live.start()
    return live


def closing_table(result: dict) -> str:
    """The end of a run on one screen: a label and a figure per line."""
    device = result["device"]
    rows = {
        "run": result["name"],
        "status": " ".join([result["status"], result["reason"].removeprefix("stopped ")]).strip(),
        "device": f"{device['count']} x {device['kind']}",
    }
    if "step_s" in result:
        s, (first, last), mfu = result["step_s"], result["window"], result["mfu"]
        shares = ", ".join(f"{v:.2%} ({c})" for c, v in mfu.items() if v is not None)
        rates = ", ".join(f"{v:.2f} ({c})" for c, v in result["tflops_per_gpu"].items())
        dtype = result["config"]["precision"]["dtype"]
        rows |= {
            f"step time (steps {first} to {last})": f"{s['mean']:.3f} s, std {s['std']:.3f}",
            "  median, p10, p90": f"{s['median']:.3f}, {s['p10']:.3f}, {s['p90']:.3f} s",
            "tokens/s": f"{result['tokens_per_s']:,.0f}",
            "TFLOP/s per GPU": rates,
            f"MFU against the {dtype} peak": shares or "no peak known for this device",
            "days to 1T tokens": f"{result['days_to_1t_tokens']:,.2f}",
        }
    if "peak_bytes" in result:
        label = "peak memory per GPU" if device["gpu_type"] else "peak memory, process"
        rows[label] = f"{result['peak_bytes'] / 2**30:.2f} GiB"
    if "start_to_first_step_s" in result:
        start, compiled = result["start_to_first_step_s"], result["compile_s"]
        rows["start to first step"] = f"{start:.1f} s (compile {compiled:.1f} s)"
    if names := ",".join(result.get("slow_hosts", ())):
        rows["slow hosts"] = f"{names}; leave them out: EXCLUDE_NODES={names}"
    if row := result.get("published"):
        known = f"{row['step_s']} s on {row['gpus']}, {row['source']}: " if "step_s" in row else ""
        rows["published"] = known + row["verdict"]
    wide = max(map(len, rows))
    rule = "-" * (wide + 50)
    return "\n".join([rule, *(f"{label:<{wide}}  {text}" for label, text in rows.items()), rule])
