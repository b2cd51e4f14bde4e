"""The run: compile, start or resume, train, measure.

Step time is completion to completion, each stamped as it comes while the next step is queued.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent import futures

import jax
import numpy as np
from jax import monitoring
from jax.experimental import multihost_utils

from maxbench.mesh import axes, places
from maxbench.run import checkpoint, hosts, metrics, profile, runtime
from maxbench.spec import cli
from maxbench.spec.errors import UserError
from maxbench.spec.run import Run
from maxbench.step import compiler
from maxbench.step.step import Step

# What Slurm says about the job, for result.json.
JOB = {"id": "SLURM_JOB_ID", "nodes": "SLURM_JOB_NODELIST", "restart": "SLURM_RESTART_COUNT"}


class Failed(Exception):
    """A run that must not go on; its message is the reason."""


def train(run: Run) -> int:
    """Trains; returns the exit code: 0 done or stopped by SIGTERM, 1 failed."""
    with cli.clear_errors("train"):
        runtime.connect(run)
        resume = checkpoint.locate(run.output.resume, run) if run.output.resume else None
        devices = axes.make_mesh(run.layout)
        check_processes(run, devices)
        step = Step(run, devices)
    stop, log = stop_requests(), start_log(run, devices)
    try:
        compiled = compile_step(step, log)
        with cli.clear_errors("train"):
            state = load(step, resume, log) if resume else step.init()
        stopped = steps(run, log, stop, compiled, state)
        if runtime.processes() > 1 or step.platform in ("gpu", "cuda"):
            log.result |= hosts.survey(metrics.window(run.train.window, log.times)[1])
    except Failed as e:
        log.close("failed", str(e))
        print(f"maxbench train: error: {e}", file=sys.stderr)
        return 1
    except BaseException as e:
        log.close("failed", f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}")
        raise
    log.close("stopped" if stopped else "done", stopped)
    return 0


def check_processes(run: Run, devices) -> None:
    """Every process must own a part of the mesh.

    Raises:
      UserError: some would have nothing to do.
    """
    owners = {d.process_index for d in devices.devices.flat}
    if len(owners) < (there := runtime.processes()):
        here = jax.local_device_count()
        raise UserError(
            f"{run.layout.describe()} leaves {there - len(owners)} of {there} processes with "
            f"{here} devices each without work; start {-(-run.layout.gpus // here)}, or use "
            f"{jax.device_count()} devices"
        )


def start_log(run: Run, devices) -> metrics.Log:
    first = devices.devices.flat[0]
    found = metrics.Devices(first.platform, first.device_kind, run.layout.gpus)
    about = {
        "versions": runtime.versions(),
        "git": runtime.git_revision(),
        "environment": runtime.environment(),
        "xla_options": compiler.xla_options(first.platform, run),
        "processes": runtime.processes(),
        "job": {k: os.environ[v] for k, v in JOB.items() if v in os.environ},
        "flops_conventions": list(metrics.flops.CONVENTIONS),
    }
    log = metrics.Log(run, found, sys.argv, jax.process_index() == 0, about)
    log.line(f"{run.name}: {run.layout.describe()}; {found.kind}, {run.precision.dtype}")
    if runtime.processes() > 1:  # process 0 made the folder; all write into it
        name = log.folder.name if log.folder else ""
        stamp = multihost_utils.broadcast_one_to_all(int(name.rpartition("_")[2] or 0))
        log.folder = metrics.run_folder(run, int(stamp))
    return log


def compile_step(step: Step, log: metrics.Log):
    """Compiles the step and says what memory it needs, before any weight exists."""
    events = []
    listen = lambda event, **_: events.append(event)
    monitoring.register_event_listener(listen)
    compiled, lower_s, compile_s = step.compile()
    monitoring.unregister_event_listener(listen)
    state_gib = places.size_gib(step.abstract)
    temporary_gib = compiled.memory_analysis().temp_size_in_bytes / 2**30
    train = step.run.train
    log.result |= {"lower_s": lower_s, "compile_s": compile_s, "state_gib": state_gib}
    log.result |= {"temporary_gib": temporary_gib, "attention": train.attention}
    how, quantized = step.run.precision, ""
    if step.run.format.quantized:
        log.result[how.dtype] = {"backend": how.backend, "scaling": how.scaling}
        quantized = f", {how.dtype} {how.backend} {how.scaling}"
    log.line(
        f"compiled in {lower_s + compile_s:.1f} s (lower {lower_s:.1f}); per device: state "
        f"{state_gib:.2f} GiB, temporaries {temporary_gib:.2f} GiB; "
        f"attention {train.attention}, remat {train.remat}{quantized}"
    )
    if "/jax/compilation_cache/compile_requests_use_cache" in events:
        found = "hit" if events[-1].endswith("cache_hits") else "miss"
        log.result["compilation_cache"] = found
        log.line(f"compilation cache {found}: {jax.config.jax_compilation_cache_dir}")
    return compiled


def load(step: Step, resume, log: metrics.Log):
    path, about = resume
    start = time.time()
    order = about["layer_order"]
    same = np.array_equal(order, step.order)
    state = checkpoint.restore(path, about, step.abstract if same else step.in_order(order))
    state = state if same else step.reorder(state, order)
    seconds, size = time.time() - start, sum(about["files"].values())
    log.line(
        f"Global Checkpoint Load : Rank : 0 : Start time : {start:.3f}s : "
        f"Time spent in load_checkpoint: {seconds:.3f}s : {rate(size, seconds)} : from {path}"
    )
    log.result["checkpoint_load"] = {"path": str(path), "seconds": seconds, "bytes": size}
    return state


def save(run: Run, log: metrics.Log, state) -> None:
    start = time.time()
    size, seconds = checkpoint.save(log.folder / "checkpoints", run, state)
    log.line(
        f"Global Checkpoint Save : Rank: 0 : Iteration: {int(state['step'])} : "
        f"Start time: {start:.3f}s : Save duration: {seconds:.3f}s : {rate(size, seconds)}"
    )
    log.result.setdefault("checkpoint_saves", []).append({"seconds": seconds, "bytes": size})


def rate(size: int, seconds: float) -> str:
    return f"{size / 1e9:.3f} GB : {size / 1e9 / seconds:.3f} GB/s"


def steps(run: Run, log: metrics.Log, stop: Callable[[int], str], compiled, state) -> str:
    """Trains to the last step, or to where a stop was asked for; returns why it stopped, or ''."""
    i, every, reason = int(state["step"]), run.output.checkpoint_every, ""
    window = profile.Window(run.profile, jax.process_index(), log.folder)
    queue = Queue(log)
    while i < run.train.steps and not reason:
        reason = stop(i)
        if window.edge(i):
            queue.drain()
        window.before(i)
        state, out = compiled(state)
        queue.add(i, out)
        i += 1
        if every and i % every == 0 and i < run.train.steps:
            queue.drain()
            save(run, log, state)
            queue.last_done = time.perf_counter()
    queue.drain()
    window.switch(on=False)
    if run.output.checkpoint or every:
        save(run, log, state)
    return reason and f"{reason} after step {i - 1}"


class Queue:
    """Steps that were started. A thread of its own waits for each in turn and stamps it when it is
    done: on a GPU, whose launch queue is short, the call that starts a step may return near that
    step's end."""

    def __init__(self, log: metrics.Log):
        self.log, self.device = log, jax.local_devices()[0]
        self.thread = futures.ThreadPoolExecutor(1)
        self.newest = self.thread.submit(lambda: None)
        self.last_done = time.perf_counter()

    def add(self, i: int, out: dict) -> None:
        """Takes what step i will have reported; returns when the step before it is recorded."""
        before = self.newest
        self.newest = self.thread.submit(self._record, before, i, out)
        before.result()

    def drain(self) -> None:
        """Waits until every step is recorded.

        Raises:
          Failed: a loss or gradient is not finite.
        """
        self.newest.result()

    def _record(self, before: futures.Future, i: int, out: dict) -> None:
        before.result()  # after a step that failed, none is recorded
        jax.block_until_ready(out)
        now = time.perf_counter()
        step_s, self.last_done = now - self.last_done, now
        if not self.log.times:
            self.log.result["start_to_first_step_s"] = metrics.since_start_s()
        out = {k: float(v) for k, v in out.items()}
        self.log.step(i, step_s, out, metrics.memory_bytes(self.device))
        for name in ("loss", "grad_norm"):
            # A mocked network leaves what it should have brought unwritten.
            if not math.isfinite(out[name]) and not self.log.result.get("mocked"):
                raise Failed(f"{name} is {out[name]} at step {i}: nothing after it means anything")


def stop_requests() -> Callable[[int], str]:
    """SIGTERM: finish the step, save, exit. Several processes agree on the step.

    Returns what says why to stop with a given step as the last one, or ''.
    """
    if runtime.processes() > 1:
        reached = multihost_utils.reached_preemption_sync_point
        return lambda step: "SIGTERM" if reached(step) else ""
    asked = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(signal.Signals(number).name))
    return lambda _: asked[0] if asked else ""
