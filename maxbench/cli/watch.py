"""Follows one job until it ends: `maxbench watch`."""

import re
import time
from collections.abc import Sequence

from maxbench.config import command_line, options
from maxbench.config.errors import UserError
from maxbench.launch import watch

JOB = re.compile(r"\d+|[a-z][a-z0-9-]*")  # Slurm's number, or a name
PAUSE_S = 5  # between two queries: Slurm's controller serves many users


def main(argv: Sequence[str]) -> int:
    """Prints a line per change; returns the exit code: 0 completed, 1 ended otherwise."""
    job, *places = command_line.read(options.Watch, argv).words or [""]
    if not JOB.fullmatch(job):
        raise UserError(f"JOB={job!r} must be a job, as `maxbench jobs` lists them")
    state = ""
    for folder, row in watch.changes(job, places, lambda: time.sleep(PAUSE_S)):
        clock, state = time.strftime("%H:%M:%S"), row.state
        if folder:
            print(f"{clock}  {folder}")
        step = f"step {row.step}, {row.seconds} s/step" if row.step != "-" else ""
        print("  ".join(filter(None, [clock, row.state, step, row.why])), flush=True)
    return 0 if state == "COMPLETED" else 1
