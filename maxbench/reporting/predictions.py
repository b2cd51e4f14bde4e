"""What a report needs beside the logs: plan's predictions and NCCL's calls of the runs in it."""

import dataclasses
import functools
import itertools
import pathlib
import shlex
from collections.abc import Iterator, Sequence

from maxbench.config import command_line, recipes
from maxbench.config.errors import UserError
from maxbench.config.run import Run, Train
from maxbench.hardware.gpus import GpuTypes
from maxbench.reporting import compare
from maxbench.run_logs import nccl, readers
from maxbench.run_logs.record import RunRecord, dig

# Flags of the trainer that say nothing about the program that plan compiles.
NOT_PLANNED = {*recipes.FLAG_GROUPS["run"], *recipes.FLAG_GROUPS["devices and processes"]}


def look_inside(rows: Sequence[compare.RunSummary], gpu_types: GpuTypes, every: bool) -> None:
    """Adds NCCL's calls to trace runs, and plan's prediction to them, or to every run."""
    for one in rows:
        r, traced = one.record, one.record.profiled == "nccltrace"
        if r.result.get("config") and (traced or (every and one.step)):
            one.planned, one.unplanned = predict(r, gpu_types)
        if traced:
            logs = sorted(r.path.glob("srun-train-*.log")) if r.path.is_dir() else [r.path]
            calls, damaged = nccl.calls(_lines(logs, one.notes))
            planned, steps = (one.planned or {}).get("communication", []), max(1, len(r.step_s))
            one.trace = {"steps": steps, "damaged_lines": damaged, "calls": calls}
            one.trace["step_beside_plan"] = nccl.compare_with_plan(calls, planned, steps)


def _lines(logs: Sequence[pathlib.Path], notes: list[str]) -> Iterator[str]:
    """Lines of logs about NCCL's calls; what cannot be read is added to the notes."""
    for path in logs:
        try:
            # A trace of many GPUs is gigabytes: never whole in memory.
            for line in (x for block in readers.blocks(path) for x in block.splitlines()):
                if b": opCount" in line:
                    yield line.decode(errors="replace")
        except OSError as e:
            note = f"{path.name} cannot be read: {e.strerror}"
            notes += [note] if note not in notes else []


def predict(r: RunRecord, gpu_types: GpuTypes) -> tuple[dict | None, str]:
    """plan.figures() of the very step that ran, from plan's cache; or None, and why there is none.

    Nothing is compiled: that takes seconds, and a compiler which may not be here.
    """
    try:
        run = r.to_run(gpu_types)
    except UserError as e:
        return None, str(e)
    # The number of steps only bends the learning rate: a plan of the default is as good.
    for steps in (run.train.steps, Train.steps):
        train = dataclasses.replace(run.train, steps=steps)
        if found := _planned(dataclasses.replace(run, train=train)):
            return found, ""
    return None, f"not planned yet: {_plan_command(dig(r.result, 'command', []))}"


@functools.cache  # repeats of a run are many
def _planned(run: Run) -> dict | None:
    from maxbench.cost_model import compile_cache
    from maxbench.planning import planner  # late: numpy takes a tenth of a second

    if compile_cache.load(run) is None:
        return None
    figures = planner.figures(planner.plan(run))
    seconds = ((text, figures["parts_s"].get(name, 0.0)) for name, text in planner.PARTS.items())
    return figures | {"parts": {text: s for text, s in seconds if s > 0}}


def _plan_command(command: list) -> str:
    """The `maxbench plan` command of the same program, from the command of a run."""
    words = (word for word in command if isinstance(word, str))
    kept = ["maxbench", "plan"]
    rest = itertools.dropwhile(lambda word: not word.startswith("-"), words)
    for word in rest:
        name, is_set, _ = word.lstrip("-").partition("=")
        own = name.startswith(("config.profile.", "config.output.", "config.runtime."))
        if own or name.removeprefix("no") in NOT_PLANNED or name in NOT_PLANNED:
            _ = is_set or command_line.is_bool(name) or next(rest, "")
        else:
            kept.append(word)
    return shlex.join(kept)
