"""Predictions, profiles and NCCL calls of runs, which a report adds to what their logs say."""

import dataclasses
import functools
import itertools
import pathlib
import shlex
from collections.abc import Iterator, Sequence

from maxbench.config import command_line, options
from maxbench.config.errors import UserError
from maxbench.config.run import Run
from maxbench.hardware.gpus import GpuTypes
from maxbench.reporting import compare
from maxbench.run_logs import log_files, nccl
from maxbench.run_logs.record import RunRecord, dig

# Files of a run's folder that maxbench.traces reads without another program.
PROFILES = ("xplane/plugins/profile/*/*.xplane.pb", "nsys_profile/*.sqlite")
CAUSES = 3  # of a slow run that a line names


def add_predictions(rows: Sequence[compare.RunSummary], gpu_types: GpuTypes, every: bool) -> None:
    """Adds NCCL calls to trace runs, and predictions to trace runs, or to every run."""
    for summary in rows:
        r, traced = summary.record, summary.record.profiled == "nccltrace"
        if r.result.get("config") and (traced or (every and summary.step)):
            summary.planned, summary.unplanned = predict(r, gpu_types)
        if traced:
            patterns = ("srun-train-*.log", "node-*.log")
            found = (path for pattern in patterns for path in r.path.glob(pattern))
            logs = sorted(found) if r.path.is_dir() else [r.path]
            calls, damaged = nccl.calls(_lines(logs, summary.notes))
            planned, steps = (summary.planned or {}).get("communication", []), max(1, len(r.step_s))
            summary.trace = {"steps": steps, "damaged_lines": damaged, "calls": calls}
            summary.trace["step_compared_with_plan"] = nccl.compare_with_plan(calls, planned, steps)


def add_profiles(rows: Sequence[compare.RunSummary], gpu_types: GpuTypes, every: bool) -> None:
    """Adds the profiles of runs' folders, and the causes that they show to runs below published.

    A run under a profiler has no verdict: its profile is of all runs of its name.

    Args:
      every: adds all profiles, else those of runs below published.
    """
    slow = [x for x in rows if x.verdict in ("WARN", "FAIL")]
    keys = {x.repeat_key for x in slow}
    for summary in rows:
        if every or summary.repeat_key in keys:
            _add_profile(summary, gpu_types)
    for summary in slow:
        profiles = (x.profile for x in rows if x.repeat_key == summary.repeat_key)
        if (profile := next(filter(None, profiles), None)) and (found := profile.causes()):
            summary.notes.append(f"profile: {'; '.join(found[:CAUSES])}")


def _add_profile(summary: compare.RunSummary, gpu_types: GpuTypes) -> None:
    r = summary.record
    if not (r.path.is_dir() and r.profiled):
        return
    if not any(path for pattern in PROFILES for path in r.path.glob(pattern)):
        if any(r.path.glob("nsys_profile/*.nsys-rep")):
            summary.notes.append(f"`maxbench trace {r.path}` reads its profile, with nsys")
        return
    from maxbench.traces import report  # late: numpy

    gpu_type = "" if summary.on_cpu else r.gpu_type
    try:
        asked = options.TraceOptions(paths=[str(r.path)], gpu_type=gpu_type)
        summary.profile = report.trace(asked, gpu_types)
    except UserError as e:
        summary.notes.append(f"its profile is not read: {e}")


def _lines(logs: Sequence[pathlib.Path], notes: list[str]) -> Iterator[str]:
    """Lines of logs about NCCL calls; adds a note for each log that cannot be read."""
    for path in logs:
        try:
            # A trace of many GPUs is gigabytes: it is never whole in memory.
            for line in (x for block in log_files.blocks(path) for x in block.splitlines()):
                if b": opCount" in line:
                    yield line.decode(errors="replace")
        except OSError as e:
            note = f"{path.name} cannot be read: {e.strerror}"
            notes += [note] if note not in notes else []


def predict(r: RunRecord, gpu_types: GpuTypes) -> tuple[dict | None, str]:
    """planner.figures() of the step that ran, from the compile cache, with labelled `parts` and its
    explain.Explanation as `explained`; or None, and why.

    Nothing is compiled: that takes seconds, and needs a compiler that may not be installed.
    """
    try:
        run = r.to_run(gpu_types)
    except UserError as e:
        return None, str(e)
    from maxbench.cost_model import compile_cache

    file = compile_cache.program_file(run)
    if file.is_file() and (figures := _planned(run, file, file.stat().st_mtime_ns)):
        return figures, ""
    return None, f"not planned yet: {_plan_command(dig(r.result, 'command', []))}"


@functools.cache  # repeats of a run are many
def _planned(run: Run, file: pathlib.Path, changed_ns: int) -> dict | None:
    """As `planned`, by the run's program, the file of the compile cache and when it was written."""
    from maxbench.cost_model import compile_cache

    # Late: numpy takes a tenth of a second.
    from maxbench.planning import explain, plan_text, planner

    if compile_cache.load(run) is None:
        return None
    plan = planner.plan(run)
    figures = plan.figures() | {"explained": explain.explain(plan)}
    parts_s = figures["parts_s"]
    labelled = {text: parts_s.get(name, 0.0) for name, text in plan_text.PARTS.items()}
    return figures | {"parts": {text: s for text, s in labelled.items() if s > 0}}


def _plan_command(command: list) -> str:
    """The `maxbench plan` command for the program of a run, from the run's command."""
    words = (word for word in command if isinstance(word, str))
    flags = itertools.dropwhile(lambda word: not word.startswith("-"), words)
    try:
        given = command_line.read(options.Train, ["maxbench", *flags]).changed()
    except UserError:  # of another version
        return "maxbench plan"
    kept = {
        f.name: given[f.name] for f in dataclasses.fields(options.RunOptions) if f.name in given
    }
    planned = lambda path: not path.startswith(("profile.", "output.", "runtime."))
    kept["settings"] = {k: v for k, v in given.get("settings", {}).items() if planned(k)} or None
    return shlex.join(["maxbench", "plan", *command_line.words_of(options.RunOptions(**kept))])
