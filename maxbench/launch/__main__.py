"""Checks the variables of launch.sh, makes the job scripts and submits them.

  launch/launch.sh               submits: the run, and a job each for profile and trace
  launch/launch.sh --dry-run     prints the exact scripts and commands
  launch/launch.sh --wait        submits, waits for the end
  launch/launch.sh -- --layers 8 further flags of the trainer

Variables (other names that are understood in brackets):
"""

import os
import sys
from collections.abc import Sequence

from maxbench.launch import runai
from maxbench.launch.slurm import dry_run, kinds, runai_jobs, script, submit
from maxbench.launch.variables import VARIABLES, settle
from maxbench.spec import cli
from maxbench.spec.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 submitted, 2 bad input, or sbatch's own."""
    words = list(argv[1:])
    cut = words.index("--") if "--" in words else len(words)
    options, extra = words[:cut], words[cut + 1 :]
    if {"--help", "-h"} & set(options):
        print(help_text())
        return 0
    with cli.clear_errors("launch"):
        if unknown := [o for o in options if o not in ("--dry-run", "--wait", "--inside")]:
            raise UserError(
                f"unknown option {unknown[0]!r}; there are --dry-run, --wait, --help, and flags of "
                "the trainer after --"
            )
        settings = settle(os.environ, extra)
        for note in settings.notes:
            print(f"launch.sh: note: {note}", file=sys.stderr)
        if "--inside" in options:
            has = int(os.environ.get("SLURM_JOB_NUM_NODES", settings.nodes))
            if has < settings.nodes:
                raise UserError(
                    f"{settings.run.layout.describe()} needs {settings.nodes} nodes, and this job "
                    f"has {has}: sbatch -N {settings.nodes} launch.sh"
                )
            # One allocation, one job: the profile or trace if one is asked for.
            print(script(settings, kinds(settings)[-1], 0))
        elif "--dry-run" in options:
            print(dry_run(settings))
        elif settings.values["CLUSTER_TYPE"] == "runai":
            return runai.submit(settings, runai_jobs(settings))
        else:
            return submit(settings, wait="--wait" in options)
    return 0


def help_text() -> str:
    """The docstring and every variable."""
    lines = [__doc__.strip(), ""]
    for name, (default, meaning, others) in VARIABLES.items():
        known = f" [{', '.join(others)}]" if others else ""
        default = {"*": "(by workload)", "": ""}.get(default, f"({default})")
        lines.append(f"  {name:<24} {meaning} {default}{known}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
