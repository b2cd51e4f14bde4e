"""The training run: compile, initialize or resume, train, measure."""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent import futures
from typing import Any, NamedTuple

import jax
from jax import monitoring
from jax.experimental import multihost_utils

from maxbench.config import exit_codes, ineffective
from maxbench.config.errors import UserError
from maxbench.config.run import Run
from maxbench.distributed import runtime, stragglers
from maxbench.metrics import step_stats
from maxbench.model import layer_stack
from maxbench.run import (
    checkpoint,
    endings,
    evaluation,
    metric_writers,
    mllog,
    profile,
    replicas,
    restore,
    terminal,
)
from maxbench.run.log_writer import FolderDeleted, Log
from maxbench.run.result import CheckpointLoad, CheckpointSave, RunResult
from maxbench.run.step_timer import StepTimer
from maxbench.run_logs import folders
from maxbench.sharding import mesh, rules
from maxbench.step import data, token_files
from maxbench.step.train_step import Step, on_device
from maxbench.terminal.console import size


def train(
    run: Run,
    screen: terminal.Screen | None = None,
    report: Callable[..., None] | None = None,
) -> int:
    """Trains a model.

    Args:
      report: called with folder=, when the run has one, and with error=, if it fails.

    Returns:
      The exit code, of config/exit_codes.py.
    """
    log = peers = None
    try:
        peers = runtime.init_distributed(run)
        stop_reason = endings.stop_requests(peers)
        files = open_files(run)
        devices = mesh.make_mesh(run.layout)
        run = on_device(run, devices.devices.flat[0])
        path = run.output.resume
        candidates = restore.find_checkpoints(path, run) if path else None
        check_processes(run, devices)
        step = Step(run, devices)
        log = start_log(run, devices, screen)
        if report:
            report(folder=str(log.folder.absolute()))
        if peers:
            log.progress = peers.progress
            peers.on_peer_loss(log.write_result_for_lost_peer, log.report_hang)
        stopped = _train(step, files, candidates, stop_reason, log)
        reached = f"target loss {run.train.target_loss} reached"
        done = ("done", reached if log.result.target_reached else "")
        log.close(*(("stopped", stopped) if stopped else done))
    except BaseException as e:
        ending = _close(endings.explain(e, run, log, peers), log, screen)
        if report:
            report(error=ending.reason)
        if ending.code:
            prefix = "error: " if ending.status == "failed" else ""
            print(f"maxbench train: {prefix}{ending.reason}", file=sys.stderr, flush=True)
        if remedy := ending.remedy and f"maxbench train: to do: {ending.remedy}":
            if ending.code:
                print(remedy, file=sys.stderr, flush=True)
            else:
                e.add_note(remedy)  # stands below the traceback
        if peers:  # at exit jax would wait for the other processes
            if not ending.code:
                traceback.print_exc()
            peers.close(ending.reason)
            sys.stdout.flush()
            os._exit(ending.code or exit_codes.FAILED)
        if not ending.code:
            raise
        return ending.code
    if peers:
        peers.close()
    return exit_codes.RESTART if stopped else exit_codes.DONE


def _close(
    ending: endings.Ending, log: Log | None, screen: terminal.Screen | None
) -> endings.Ending:
    """Writes the result of a run that raised; returns the ending, with an error of the writing."""
    if log:
        try:
            with contextlib.suppress(FolderDeleted):  # is the reason already
                log.close(ending.status, ending.reason)
        except OSError as e:
            if not ending.code:
                reason = f"{ending.reason}; result.json cannot be written: {e.strerror}"
                ending = ending._replace(reason=reason)
    if screen:
        screen.stop()
    return ending


class Files(NamedTuple):
    """The sequences of the run's files."""

    training: token_files.Windows | None  # of train.data
    held_out: tuple[token_files.Windows, int] | None  # as token_files.held_out()


def open_files(run: Run) -> Files:
    """Opens the run's files, of which all processes must see the same.

    Raises:
      UserError: a file is missing or invalid; processes see different ones.
    """
    training = token_files.of_run(run) if run.train.reads_files else None
    held_out = token_files.held_out(run) if run.train.eval_data else None
    if run.output.mllog and not (held_out and run.train.target_loss):
        raise UserError(
            f"output.mllog={run.output.mllog!r}: MLPerf's log is of a run to a target loss; give "
            "--eval_data and --target_loss, or output.mllog=''"
        )
    prints = [files.fingerprint() for files in (training, held_out and held_out[0]) if files]
    seen = stragglers.allgather_json({"files": prints}) if prints else []
    if others := [i for i, one in enumerate(seen) if one != seen[0]]:
        raise UserError(
            f"data={run.train.data!r} or eval_data={run.train.eval_data!r} is another on processes "
            f"{', '.join(map(str, others))} than on process 0; give paths that are the same files "
            "on all nodes"
        )
    return Files(training, held_out)


def _train(
    step: Step,
    files: Files,
    candidates: restore.Candidates | None,
    stop_reason: Callable[[int], str],
    log: Log,
) -> str:
    """Compiles, initializes or resumes, trains; returns why the run stopped early, or ''."""
    run = step.run
    synthetic = data.Synthetic(run, step.mesh)
    with futures.ThreadPoolExecutor(1) as thread:
        # XLA compiles these while Python traces the step.
        init = None if candidates else thread.submit(step.compile_init)
        if not files.training:
            thread.submit(synthetic.compile)
        compiled = compile_step(step, log)
    batches: data.Batches = synthetic
    if files.training:
        batches = data.FromFiles(run, step.mesh, files.training)
        log.line(f"data: {files.training.describe()}")
    evaluate = evaluation.Evaluator(step, *files.held_out, log) if files.held_out else None
    if candidates:
        state = load_checkpoint(step, candidates, batches, log)
    else:
        assert init
        state = init.result()()
    with make_saver(run, batches, log) as saver:
        check = replicas.check_of(step)
        stopped = run_steps(run, log, stop_reason, compiled, state, batches, saver, evaluate, check)
    if runtime.process_count() > 1 or step.platform in ("gpu", "cuda"):
        log.progress.phase = "compare"
        _, measured_s = step_stats.measured_window(run.train.window, log.times)
        log.result.hosts, log.result.slow_hosts = stragglers.compare_hosts(measured_s)
    return stopped


def check_processes(run: Run, devices: jax.sharding.Mesh) -> None:
    """Checks that every process has devices in the mesh.

    Raises:
      UserError: some have none.
    """
    owners = {d.process_index for d in devices.devices.flat}
    if len(owners) < (count := runtime.process_count()):
        local = jax.local_device_count()
        raise UserError(
            f"{run.layout.describe()} leaves {count - len(owners)} of {count} processes with "
            f"{local} devices each without work; start {-(-run.layout.gpus // local)}, or use "
            f"{jax.device_count()} devices"
        )


def start_log(run: Run, devices: jax.sharding.Mesh, screen: terminal.Screen | None = None) -> Log:
    """Creates the run's folder, the same for all processes, and its log."""
    first = devices.devices.flat[0]
    gpu_type = run.hardware.type_of(first.device_kind) or None
    kind = step_stats.Devices(first.platform, first.device_kind, run.layout.gpus, gpu_type)
    process, process_count = jax.process_index(), runtime.process_count()
    stamp = folders.make_folder(run) if process == 0 else 0
    if process_count > 1:  # every process needs the folder: it may have to write the result
        stamp = int(multihost_utils.broadcast_one_to_all(stamp))
    result = RunResult.of_run(run, kind, sys.argv, process_count)
    log = Log(run, kind, process, folders.run_folder(run, stamp), result, screen)
    if log.writes:
        log.writers = metric_writers.MetricWriters(run, log.folder, log.line)
    if run.output.mllog and log.writes:
        platform = f"{run.layout.gpus} x {kind.kind}"
        log.mllog = mllog.MlLog(run, platform, lambda text: log.line(text, show=False))
    log.line(f"{run.name}: {run.layout.describe()}; {kind.kind}, {run.precision.dtype}")
    for text in ineffective.of_a_file(run):
        log.line(text)
    return log


def compile_step(step: Step, log: Log) -> jax.stages.Compiled:
    """Compiles the step, and logs the memory that it needs, before any weight is allocated."""
    log.phase("compile")
    events: list[str] = []
    thread = threading.get_ident()  # another one compiles other programs

    def listen(event: str, **_: Any) -> None:
        if threading.get_ident() == thread:
            events.append(event)

    monitoring.register_event_listener(listen)
    compiled, lower_s, compile_s = step.compile()
    monitoring.unregister_event_listener(listen)
    result, train, precision = log.result, step.run.train, step.run.precision
    result.lower_s, result.compile_s = lower_s, compile_s
    result.state_gib = rules.size_gib(step.abstract)
    memory = compiled.memory_analysis()
    assert memory is not None  # XLA's compilers have it
    result.temporary_gib = memory.temp_size_in_bytes / 2**30
    result.attention = train.attention
    quantization = ""
    if step.run.format.quantized:
        about = {"backend": precision.backend, "scaling": precision.scaling}
        result.quantization = {precision.dtype: about}
        quantization = f", {precision.dtype} {precision.backend} {precision.scaling}"
    log.line(
        f"compiled in {lower_s + compile_s:.1f} s (lower {lower_s:.1f}); per device: state "
        f"{size(result.state_gib * 2**30)}, temporaries "
        f"{size(memory.temp_size_in_bytes)}; "
        f"attention {train.attention}, remat {step.run.remat_summary}{quantization}"
    )
    if "/jax/compilation_cache/compile_requests_use_cache" in events:
        result.compilation_cache = "hit" if events[-1].endswith("cache_hits") else "miss"
        folder = jax.config.values["jax_compilation_cache_dir"]
        log.line(f"compilation cache {result.compilation_cache}: {folder}")
    return compiled


def load_checkpoint(
    step: Step, candidates: restore.Candidates, batches: data.Batches, log: Log
) -> Any:
    """Restores the newest undamaged checkpoint onto the step's mesh, and the iterator of batches;
    returns the state.

    Logs the checkpoints that were skipped, and the settings that differ from the saved run's.
    """
    start = time.time()
    table = lambda stacks: layer_stack.stacks_from_json(step.run.model, stacks)
    same = lambda stacks: stacks == layer_stack.stacks_to_json(step.stacks)
    abstract = lambda stacks: step.abstract if same(stacks) else step.with_stacks(table(stacks))
    try:
        saved, state = restore.restore(candidates, restore.read_onto(abstract))
    finally:
        for reason in candidates.skipped:
            log.line(f"resume: skipped {reason}")
    stacks = saved.info.stacks
    state = state if same(stacks) else step.restack(state, table(stacks))
    begins_anew = batches.restore(saved.info.data)
    load = CheckpointLoad(
        path=str(saved.path),
        seconds=time.time() - start,
        bytes=checkpoint.size(saved.path),
        skipped=candidates.skipped,
        changed=restore.config_diff(saved.info, step.run),
    )
    log.line(
        f"Global Checkpoint Load : Rank : 0 : Start time : {start:.3f}s : "
        f"Time spent in load_checkpoint: {load.seconds:.3f}s : {_rate(load.bytes, load.seconds)} : "
        f"from {load.path}"
    )
    for difference in load.changed:
        log.line(f"resume: changed since it was saved: {difference}")
    if begins_anew:
        log.line(f"resume: begins with the first sequence of its data: {begins_anew}")
    log.result.checkpoint_load = load
    return state


def make_saver(run: Run, batches: data.Batches, log: Log) -> Any:
    """Context manager of the run's checkpoint.Saver, which logs each save; of None without any."""
    if not (run.output.checkpoint or run.output.checkpoint_every):
        return contextlib.nullcontext()

    def on_saved(save: CheckpointSave) -> None:
        total_s = save.seconds + save.background_s
        log.line(
            f"Global Checkpoint Save : Rank: 0 : Iteration: {save.step} : Start time: "
            f"{save.start:.3f}s : Save duration: {save.seconds:.3f}s : "
            f"{_rate(save.bytes, total_s)} : and {save.background_s:.3f}s in the background"
        )
        log.result.checkpoint_saves.append(save)

    return checkpoint.Saver(log.folder / "checkpoints", run, batches.state, on_saved)


def _rate(size: int, seconds: float) -> str:
    return f"{size / 1e9:.3f} GB : {size / 1e9 / seconds:.3f} GB/s"


def run_steps(
    run: Run,
    log: Log,
    stop_reason: Callable[[int], str],
    compiled: jax.stages.Compiled,
    state: Any,
    batches: data.Batches,
    saver: checkpoint.Saver | None = None,
    evaluate: evaluation.Evaluator | None = None,
    check: replicas.Check | None = None,
) -> str:
    """Trains until the last step, or until the target loss is reached or a stop is requested.

    Args:
      stop_reason: why a step is the last one, or ''; see endings.stop_requests().
      compiled: the step: state, batch -> state, metrics.

    Returns:
      Why training stopped before the last step, or ''.
    """
    i, every, reason, reached = int(state["step"]), run.output.checkpoint_every, "", False
    eval_every = run.train.eval_every or run.train.steps
    progress = log.progress
    window = profile.Window(
        run.profile, jax.process_index(), log.folder, lambda: compiled.as_text() or ""
    )
    timer = StepTimer(log)

    def between_steps(phase: str, work: Callable[..., Any], *args: Any) -> Any:
        timer.drain()
        with progress.during(phase):
            result = work(*args)
        timer.restart()
        return result

    if evaluate:
        evaluate.began = time.perf_counter()
        if log.mllog:
            log.mllog.begin(i, evaluate.count * run.layout.gbs)
    log.phase("steps", i, run.train.steps)
    try:
        while i < run.train.steps and not reason and not reached:
            reason = stop_reason(i)
            if window.changes_at(i):
                timer.drain()
            with progress.during("profile"):
                window.before_step(i)
            progress.began = i
            asked = time.perf_counter()
            batch = next(batches)
            waited = (asked, time.perf_counter()) if run.train.reads_files else None
            state, metrics = compiled(state, batch)
            progress.dispatched = i
            timer.add(i, metrics, waited)
            i += 1
            if evaluate and (i % eval_every == 0 or i == run.train.steps):
                reached = between_steps("evaluate", evaluate, state, i)
            if check and i % check.every == 0:
                between_steps("replicas", check, state["params"], i)
            if saver and every and i % every == 0 and i < run.train.steps:
                between_steps("save", saver.save, state)
            elif saver:
                saver.check()
        timer.drain()
        if log.mllog:
            log.mllog.end(i, reached)
    except KeyboardInterrupt:
        timer.stop()  # the reason names the last step of the log
        raise
    with progress.during("profile"):
        window.close()
    if saver:
        log.phase("save")
        saver.save(state)
    if not reason or i == run.train.steps or reached:
        return ""
    saved = f"saved as step {i}" if saver else "nothing saved, no checkpoint was requested"
    return f"{reason} after step {i - 1}: {saved}"
