"""The run: compile, start or resume, train, measure.

Step time is completion to completion, each stamped as it comes while the next step is queued.
"""

import contextlib
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from concurrent import futures

import jax
import numpy as np
from jax import monitoring
from jax.experimental import multihost_utils

from maxbench.config import environment, folders
from maxbench.config.errors import UserError
from maxbench.config.run import Run
from maxbench.distributed import peer_watch, runtime, stragglers
from maxbench.metrics import step_stats
from maxbench.run import checkpoint, log_writer, metric_writers, profile, terminal
from maxbench.sharding import mesh, rules
from maxbench.step import xla_options
from maxbench.step.train_step import Step

# What Slurm says about the job, for result.json.
JOB = {"id": "SLURM_JOB_ID", "nodes": "SLURM_JOB_NODELIST", "restart": "SLURM_RESTART_COUNT"}


EX_TEMPFAIL = 75  # sysexits.h: the same, later


class RunFailed(Exception):
    """A run that must not go on; its message is the reason."""


def train(run: Run, screen: terminal.Screen | None = None) -> int:
    """Trains; returns the exit code: 0 done, 1 failed, 2 bad input, 130 stopped by Ctrl-C, and
    AGAIN of a run that SIGTERM has stopped."""
    log = others = None
    try:
        others = runtime.init_distributed(run)
        stop = stop_requests(others)  # in place of jax's, which heeds it now and then
        found = checkpoint.find_checkpoints(run.output.resume, run) if run.output.resume else None
        devices = mesh.make_mesh(run.layout)
        check_processes(run, devices)
        step = Step(run, devices)
        log = start_log(run, devices, screen)
        if others:
            others.on_peer_loss(log.write_result_for_lost_peer)
        stopped = _train(step, found, stop, log)
        log.close("stopped" if stopped else "done", stopped)
    except BaseException as e:
        status, reason, code = verdict(e, run, log, others)
        if log:
            with contextlib.suppress(log_writer.FolderDeleted):  # which verdict() reports
                log.close(status, reason)
        if screen:
            screen.stop()
        if code:
            error = "error: " * (status == "failed")
            print(f"maxbench train: {error}{reason}", file=sys.stderr, flush=True)
        if others:  # jax would wait for all to end well
            if not code:
                traceback.print_exc()
            others.close(reason)
            sys.stdout.flush()
            os._exit(code or 1)
        if not code:
            raise
        return code
    if others:
        others.close()
    return EX_TEMPFAIL if stopped else 0


def _train(step: Step, found, stop: Callable[[int], str], log: log_writer.Log) -> str:
    """Compiles, starts or resumes, trains; returns why it stopped, or ''."""
    run = step.run
    compiled = compile_step(step, log)
    state = load(step, found, log) if found else step.init()
    with saver(run, log) as save:
        stopped = steps(run, log, stop, compiled, state, save)
    if runtime.process_count() > 1 or step.platform in ("gpu", "cuda"):
        measured_s = step_stats.measured_window(run.train.window, log.times)[1]
        hosts, slow = stragglers.compare_hosts(measured_s)
        log.result |= {"hosts": hosts, "slow_hosts": slow}
    return stopped


def verdict(e: BaseException, run: Run, log, others) -> tuple[str, str, int]:
    """How a run ends that raised: its status, the reason, and the exit code, 0 for a defect of the
    program, which keeps its traceback."""
    if isinstance(e, KeyboardInterrupt):
        done = log.times if log else ()
        when = f"at step {max(done)}" if done else "before the first step"
        return "stopped", f"stopped by you {when}", 130
    if log:
        try:
            log.check_folder()
        except log_writer.FolderDeleted as deleted:  # whatever failed because of it
            return "failed", str(deleted), 1
    if isinstance(e, UserError):
        return "failed", str(e), 2
    if isinstance(e, RunFailed):
        return "failed", str(e), 1
    if others and others.lost.wait(peer_watch.GRACE_S):  # what was raised is only what came of it
        return "failed", others.reason, 1
    for full in ("No space left on device", "Disk quota exceeded"):
        if full in str(e):  # tensorstore's is no OSError
            return "failed", f"{full}: output_dir={run.output.dir!r}", 1
    return "failed", f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}", 0


def check_processes(run: Run, devices) -> None:
    """Every process must own a part of the mesh.

    Raises:
      UserError: some would have nothing to do.
    """
    owners = {d.process_index for d in devices.devices.flat}
    if len(owners) < (there := runtime.process_count()):
        here = jax.local_device_count()
        raise UserError(
            f"{run.layout.describe()} leaves {there - len(owners)} of {there} processes with "
            f"{here} devices each without work; start {-(-run.layout.gpus // here)}, or use "
            f"{jax.device_count()} devices"
        )


def start_log(run: Run, devices, screen: terminal.Screen | None = None) -> log_writer.Log:
    first = devices.devices.flat[0]
    gpu_type = run.gpu_types.type_of(first.device_kind) or None
    found = step_stats.Devices(first.platform, first.device_kind, run.layout.gpus, gpu_type)
    about = {
        "versions": environment.versions(),
        "git": environment.git_revision(),
        "environment": environment.variables(),
        "xla_options": xla_options.xla_options(first.platform, run),
        "processes": runtime.process_count(),
        "job": {k: os.environ[v] for k, v in JOB.items() if v in os.environ},
        "flops_conventions": list(log_writer.flops.CONVENTIONS),
    }
    process = jax.process_index()
    stamp = folders.make_folder(run) if process == 0 else 0
    if (
        runtime.process_count() > 1
    ):  # before anything stands there: another process may have to end it
        stamp = int(multihost_utils.broadcast_one_to_all(stamp))
    log = log_writer.Log(run, found, sys.argv, process, folders.run_folder(run, stamp), about)
    log.screen = screen
    if log.writes:
        log.writers = metric_writers.MetricWriters(run, log.folder, log.line)
    log.line(f"{run.name}: {run.layout.describe()}; {found.kind}, {run.precision.dtype}")
    return log


def compile_step(step: Step, log: log_writer.Log):
    """Compiles the step and says what memory it needs, before any weight exists."""
    log.phase("compile")
    events = []
    listen = lambda event, **_: events.append(event)
    monitoring.register_event_listener(listen)
    compiled, lower_s, compile_s = step.compile()
    monitoring.unregister_event_listener(listen)
    state_gib = rules.size_gib(step.abstract)
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
        f"attention {train.attention}, remat {train.remat_summary}{quantized}"
    )
    if "/jax/compilation_cache/compile_requests_use_cache" in events:
        found = "hit" if events[-1].endswith("cache_hits") else "miss"
        log.result["compilation_cache"] = found
        log.line(f"compilation cache {found}: {jax.config.jax_compilation_cache_dir}")
    return compiled


def load(step: Step, found, log: log_writer.Log):
    """The state of the newest checkpoint that is whole; says which are not, and what is changed."""
    start, (checkpoints, skipped) = time.time(), found

    def abstract(order):
        return step.abstract if np.array_equal(order, step.order) else step.in_order(order)

    try:
        saved, state = checkpoint.restore(checkpoints, skipped, checkpoint.read_onto(abstract))
    finally:
        for why in skipped:
            log.line(f"resume: passed over {why}")
    order = saved.about["layer_order"]
    state = state if np.array_equal(order, step.order) else step.reorder(state, order)
    seconds, changed = time.time() - start, checkpoint.config_diff(saved.about, step.run)
    size = checkpoint.size(saved.path)
    log.line(
        f"Global Checkpoint Load : Rank : 0 : Start time : {start:.3f}s : "
        f"Time spent in load_checkpoint: {seconds:.3f}s : {rate(size, seconds)} : from {saved.path}"
    )
    for one in changed:
        log.line(f"resume: changed since it was saved: {one}")
    about = {"path": str(saved.path), "seconds": seconds, "bytes": size}
    log.result["checkpoint_load"] = about | {"skipped": skipped, "changed": changed}
    return state


def saver(run: Run, log: log_writer.Log):
    """What saves this run's states, each with a line in the log; None where none was asked for."""
    if not (run.output.checkpoint or run.output.checkpoint_every):
        return contextlib.nullcontext()

    def tell(took: dict) -> None:
        waited, background, size = took["seconds"], took["background_s"], took["bytes"]
        log.line(
            f"Global Checkpoint Save : Rank: 0 : Iteration: {took['step']} : Start time: "
            f"{took['start']:.3f}s : Save duration: {waited:.3f}s : "
            f"{rate(size, waited + background)} : and {background:.3f}s in the background"
        )
        log.result.setdefault("checkpoint_saves", []).append(took)

    return checkpoint.Saver(log.folder / "checkpoints", run, tell)


def rate(size: int, seconds: float) -> str:
    return f"{size / 1e9:.3f} GB : {size / 1e9 / seconds:.3f} GB/s"


def steps(
    run: Run, log: log_writer.Log, stop: Callable[[int], str], compiled, state, saver=None
) -> str:
    """Trains to the last step, or to where a stop was asked for; returns why it stopped, or ''."""
    i, every, reason = int(state["step"]), run.output.checkpoint_every, ""
    window = profile.Window(run.profile, jax.process_index(), log.folder)
    queue = StepTimer(log)
    log.phase("steps", i, run.train.steps)
    while i < run.train.steps and not reason:
        reason = stop(i)
        if window.changes_at(i):
            queue.drain()
        window.before_step(i)
        state, out = compiled(state)
        queue.add(i, out)
        i += 1
        if saver and every and i % every == 0 and i < run.train.steps:
            queue.drain()
            saver.save(state)
            queue.last_done = time.perf_counter()
        elif saver:
            saver.check()
    queue.drain()
    window.close()
    if saver:
        log.phase("save")
        saver.save(state)
    saved = f"saved as step {i}" if saver else "nothing saved, no checkpoint was asked for"
    return f"{reason} after step {i - 1}: {saved}" if reason and i < run.train.steps else ""


class StepTimer:
    """Steps that were started. A thread of its own waits for each in turn and stamps it when it is
    done: on a GPU, whose launch queue is short, the call that starts a step may return near that
    step's end."""

    def __init__(self, log: log_writer.Log):
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
            self.log.result["start_to_first_step_s"] = log_writer.since_start_s()
        out = {k: float(v) for k, v in out.items()}
        self.log.step(i, step_s, out, log_writer.memory_bytes(self.device))
        for name in ("loss", "grad_norm"):
            # A mocked network leaves what it should have brought unwritten.
            if not math.isfinite(out[name]) and not self.log.result.get("mocked"):
                raise RunFailed(
                    f"{name} is {out[name]} at step {i}: nothing after it means anything"
                )


def stop_requests(others: peer_watch.PeerWatch | None) -> Callable[[int], str]:
    """SIGTERM: finish the step, save if checkpoints were asked for, exit. Several processes agree
    on the step, whichever of them it was sent to.

    Returns what says why to stop with a given step as the last one, or ''.
    """
    asked = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(signal.Signals(number).name))
    if others:
        return lambda step: "SIGTERM" * others.is_last_step(step, bool(asked))
    return lambda _: asked[0] if asked else ""
