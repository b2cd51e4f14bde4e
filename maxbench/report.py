"""Reads runs back: tables, plots, verdicts against the published figures.

  maxbench report experiments
  maxbench report --format=html experiments > report.html
  maxbench report --cost 2.5 --format=csv experiments other/log-*.out
  maxbench report --diff RUN_A RUN_B

Reads our own folders, and logs of NeMo, Megatron-Bridge and MaxText runs. NCCL's calls of trace
jobs are set beside what plan predicts, and the page shows where plan thinks that a step goes, for
runs whose program is in plan's cache.
"""

import dataclasses
import functools
import itertools
import os
import shlex
import sys
from collections.abc import Mapping, Sequence

from absl import flags

from maxbench import cli, compare, nccl, page, recipes, runlogs, tables
from maxbench.config import Output, Profile, Run, Runtime, Train, choose
from maxbench.hardware import GPUS

FORMATS = ("table", "csv", "json", "md", "html")
# Flags of the trainer that say nothing about the program that plan compiles.
NOT_PLANNED = ("steps", "profile", "output_dir", "resume", "coordinator", "processes", "process")


def define(fv: flags.FlagValues) -> None:
    """Defines the flags of the report."""
    string = lambda name, default, text: flags.DEFINE_string(name, default, text, flag_values=fv)
    number = lambda name, default, text: flags.DEFINE_float(name, default, text, flag_values=fv)
    string("format", "table", "table | csv | json | md | html")
    string("title", "maxbench report", "heading of the HTML page")
    string("output", "", "write to this file instead of the screen")
    string("window", "35,44", "first and last step that count")
    string("gpu_type", "", "of logs that do not name it: h100 | h200 | b200 | gb200 | gb300")
    number("cost", 0.0, "dollars per GPU hour")
    number("interval", 0.0, "minutes between checkpoints; 0 = the best (Young, Daly)")
    number("mtbf", 24.0, "hours between failures of the whole job")
    flags.DEFINE_bool("full-names", False, "paths instead of names", flag_values=fv)
    flags.DEFINE_bool("diff", False, "what moved between two runs", flag_values=fv)


def settings(fv: flags.FlagValues) -> compare.Settings:
    """The flags, checked.

    Raises:
      ValueError: a flag that cannot be, with what would work.
    """
    choose("format", fv["format"].value, FORMATS)
    if fv["gpu_type"].value:
        choose("gpu_type", fv["gpu_type"].value, GPUS)
    first, comma, last = fv["window"].value.partition(",")
    digits = first.strip().isdecimal() and last.strip().isdecimal()
    if not (comma and digits and int(first) <= int(last)):
        raise ValueError(f"window={fv['window'].value!r} must be two steps, as 35,44")
    for name in ("cost", "interval", "mtbf"):
        value = fv[name].value
        if not 0 <= value < 1e9 or (name == "mtbf" and value == 0):
            raise ValueError(f"{name}={value} must be a positive number")
    return compare.Settings(
        window=(int(first), int(last)),
        cost=fv["cost"].value,
        gpu_type=fv["gpu_type"].value,
        interval_s=fv["interval"].value * 60,
        mtbf_s=fv["mtbf"].value * 3600,
    )


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 no run succeeded, 2 bad input."""
    fv = flags.FlagValues()
    define(fv)
    if {"--help", "-h", "-help"} & set(argv):
        print(cli.help_text(__doc__.strip(), fv).rpartition("\n")[0])
        return 0
    with cli.clear_errors("report"):
        paths = fv(list(argv), known_only=False)[1:] or ["experiments"]
        chosen = settings(fv)
        rows = [compare.row(r, chosen) for r in runlogs.read(paths)]
        if not rows:
            raise ValueError(f"no run and no log at or below {', '.join(paths)}")
        look_inside(rows, every=fv["format"].value == "html")
        made = render(rows, chosen, fv, paths)
        if fv["output"].value:
            with open(fv["output"].value, "w", encoding="utf-8") as f:
                f.write(made + "\n")
    if not fv["output"].value:
        try:
            print(made, flush=True)
        except BrokenPipeError:  # `| head` has seen enough; Python would complain at exit too
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if any(one.ok for one in rows) else 1


def look_inside(rows: Sequence[compare.Row], every: bool) -> None:
    """Adds NCCL's calls to trace runs, and plan's prediction to them, or to every run."""
    for one in rows:
        r = one.record
        if r.profiled == "nccltrace":
            logs = sorted(r.path.glob("srun-train-*.log")) if r.path.is_dir() else [r.path]
            one.trace = nccl.read(logs)
        if r.result.get("config") and (one.trace or (every and one.step)):
            one.planned, one.unplanned = predict(r)


def predict(r: runlogs.Record) -> tuple[dict | None, str]:
    """plan.figures() of the very step that ran, from plan's cache; or None, and why there is none.

    Nothing is compiled: that takes seconds, and a compiler which may not be here.
    """
    try:
        run = _run(r.result["config"])
        if r.gpu_type != run.layout.gpu_type or r.mocked:
            ran = "with its network mocked" if r.mocked else f"on {r.device or r.gpu_type}"
            return None, f"the run was {ran}, a plan would be for {run.layout.gpu_type}"
        # The number of steps only bends the learning rate: a plan of the default is as good.
        for steps in (run.train.steps, Train.steps):
            train = dataclasses.replace(run.train, steps=steps)
            if found := _planned(dataclasses.replace(run, train=train)):
                return found, ""
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError):
        return None, "its configuration is of another version of maxbench"
    return None, f"not planned yet: {_plan_command(r.result.get('command'))}"


def _run(config: Mapping) -> Run:
    """The Run of a result.json, without what differs between starts of the same program."""
    parts = {name: dict(config[name]) for name in recipes.SECTIONS}
    parts["train"]["window"] = tuple(parts["train"]["window"])
    made = {name: recipes.SECTIONS[name](**fields) for name, fields in parts.items()}
    overlap = Runtime(tp_overlap=made["runtime"].tp_overlap)
    return Run(**made | {"output": Output(), "profile": Profile(), "runtime": overlap})


@functools.cache  # repeats of a run are many
def _planned(run: Run) -> dict | None:
    from maxbench import artifact, plan  # late: numpy takes a tenth of a second

    if artifact.load(run) is None:
        return None
    figures = plan.figures(plan.plan(run))
    parts = {text: figures["parts_s"].get(name, 0.0) for name, text in plan.PARTS.items()}
    return figures | {"parts": parts}


def _plan_command(command: object) -> str:
    """The `maxbench plan` command of the same program, from the command of a run."""
    words = [w for w in command if isinstance(w, str)] if isinstance(command, list) else []
    kept = ["maxbench", "plan"]
    rest = itertools.dropwhile(lambda word: not word.startswith("-"), words)
    for word in rest:
        name, is_set, _ = word.lstrip("-").partition("=")
        own = name.startswith(("config.profile.", "config.output.", "config.runtime."))
        if name in NOT_PLANNED or own:
            _ = is_set or next(rest, "")
        elif name != "checkpoint":
            kept.append(word)
    return shlex.join(kept)


def render(rows: list[compare.Row], s: compare.Settings, fv: flags.FlagValues, paths) -> str:
    """The report in the format that was asked for.

    Raises:
      ValueError: --diff without exactly two runs.
    """
    if fv["diff"].value:
        if len(rows) != 2:
            raise ValueError(f"--diff compares two runs, and {len(rows)} are at {', '.join(paths)}")
        order = sorted(rows, key=lambda x: 0 if str(x.record.path).startswith(paths[0]) else 1)
        return tables.difference(*order)
    full = [str(x.record.path) for x in rows]
    names = full if fv["full-names"].value else compare.short_names(rows)
    makers = {
        "table": lambda: tables.text(rows, s, names),
        "csv": lambda: tables.to_csv(rows, full),
        "json": lambda: tables.to_json(rows, s, full, paths),
        "md": lambda: tables.markdown(rows, s, names),
        "html": lambda: page.html(rows, s, names, fv["title"].value),
    }
    return makers[fv["format"].value]()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
