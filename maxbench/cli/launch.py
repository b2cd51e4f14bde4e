"""Checks the variables of launch.sh, makes the job scripts and submits them.

  launch/launch.sh                     submits: the run, and a job each for profile and trace
  launch/launch.sh --dry-run           prints the exact scripts and commands
  launch/launch.sh --wait              submits, waits for the end
  launch/launch.sh --file jobs.toml    the jobs of a file, largest first
  launch/launch.sh --suite FILE        and what each is to reach, for maxbench report --suite
  launch/launch.sh -- --layers 8       further flags of the trainer
  JOB_TOTAL_GPUS="8 16 32" DTYPE="bf16 fp8" REPEATS=3 launch/launch.sh    18 runs, largest first

launch/launch.sh is `maxbench launch` in the environment that setup.sh has made.

Variables (other names that are understood in brackets; the last ones are NVIDIA's, refused or
without effect here):
"""

import importlib.util
import os
import pathlib
import shlex
import sys
from collections.abc import Sequence

from maxbench.config import command_line, commands, recipes
from maxbench.config.errors import UserError, check_choice
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.launch import jobs, runai, slurm
from maxbench.launch.job_file import resolve_jobs
from maxbench.launch.variables import REFUSED, UNUSED, VARIABLES, JobConfig
from maxbench.preflight import checks

# CLUSTER_TYPE -> what submits. It has dry_run(runs), the text of what would be submitted for their
# Settings, and submit(runs, wait, suite), which returns an exit code; suite is a name or ''.
SCHEDULERS = {"slurm": slurm, "runai": runai}


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 submitted, 2 bad input, or sbatch's own."""
    words = list(argv[1:])
    cut = words.index("--") if "--" in words else len(words)
    words, extra = words[:cut], words[cut + 1 :]
    if {"--help", "-h"} & {*words}:
        print(help_text())
        return 0
    fv, inside = commands.define("launch"), words[:1] == ["--inside"]  # as launch.sh calls itself
    with command_line.clear_errors("launch"):
        try:
            command_line.no_words(command_line.flags_of(fv, [argv[0], *words[inside:]]))
        except UserError as e:
            raise UserError(f"{e}; flags of the trainer stand after --") from None
        if not (recipes.ROOT / "launch").is_dir():  # an installation has no scripts of jobs
            raise UserError("jobs run from a checkout: clone maxbench, and call launch/launch.sh")
        suite, file = fv["suite"].value, fv["file"].value
        if suite and file:
            raise UserError("give one of --file and --suite; a suite is a file of jobs")
        every = resolve_jobs(os.environ, extra, suite or file, suite=bool(suite))
        if suite and not all("" in jobs.job_kinds(s) for s in every):
            raise UserError("DISABLE_PERFRUN=true leaves out the runs that a suite is about")
        check_choice("CLUSTER_TYPE", cluster := every[0].values["CLUSTER_TYPE"].lower(), SCHEDULERS)
        scheduler = SCHEDULERS[cluster]
        for note in dict.fromkeys(note for s in every for note in s.notes):
            print(f"launch.sh: note: {note}", file=sys.stderr)
        if inside:
            print(_inside(every))
        elif fv["dry-run"].value:
            print(scheduler.dry_run(every))
        else:
            _check_xla_flags(every)
            return scheduler.submit(every, fv["wait"].value, pathlib.Path(suite).stem)
    return 0


def _check_xla_flags(every: Sequence[JobConfig]) -> None:
    """Raises UserError for XLA flags or compiler options that XLA does not know.

    A login node without jaxlib cannot check them; the job's preflight does.
    """
    if importlib.util.find_spec("jaxlib") and (wrong := checks.lint_runs(*(s.run for s in every))):
        raise UserError("; ".join(wrong))


def _inside(every: Sequence[JobConfig]) -> str:
    """The rest of a job that has begun, where sbatch has started launch.sh itself."""
    settings = every[0]
    has = int(os.environ.get("SLURM_JOB_NUM_NODES", settings.nodes))
    if len(every) > 1:
        raise UserError("this job is one run: give one size, DTYPE and JOB_TOTAL_GPUS")
    if has < settings.nodes:
        raise UserError(
            f"{settings.run.layout.describe()} needs {settings.nodes} nodes, and this job "
            f"has {has}: sbatch -N {settings.nodes} launch.sh"
        )
    if late := slurm.options_missing_in_job(settings):
        words = shlex.join(late)
        print(f"launch.sh: note: this job has begun without {words}", file=sys.stderr)
        print(f"  (unless you gave it): sbatch {words} launch.sh", file=sys.stderr)
    # One allocation, one job: the profile or trace if one is asked for.
    return slurm.script(settings, jobs.job_kinds(settings)[-1], 0)


def help_text() -> str:
    """The docstring and every variable."""
    lines = [__doc__.strip(), ""]
    known = {"models": recipes.models(), "sizes": recipes.sizes(), "presets": recipes.PRESETS}
    known["schedulers"] = SCHEDULERS
    listed = {name: " | ".join(words) for name, words in known.items()}
    for name, v in VARIABLES.items():
        choices = " | ".join(GPU_TYPES if v.kind == "gpu type" else v.choices)
        meaning = ": ".join(filter(None, (choices, v.meaning.format(**listed))))
        default = {"*": "(by workload)", "": ""}.get(v.default, f"({v.default})")
        also = f" [{', '.join(v.also)}]" if v.also else ""
        lines.append(f"  {name:<24} {meaning} {default}{also}")
    lines += [f"  {name:<24} no effect: {why}" for name, why in UNUSED.items()]
    lines += [f"  {name:<24} refused: {why}" for name, why in REFUSED.items()]
    return "\n".join(lines)
