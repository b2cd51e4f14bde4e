"""Lists submitted jobs: `maxbench jobs`."""

from collections.abc import Sequence

from maxbench.config import command_line, options
from maxbench.config.errors import UserError
from maxbench.launch import job_status
from maxbench.terminal import console


def main(argv: Sequence[str]) -> int:
    """Prints a line per job, newest first; returns the exit code.

    Raises:
      UserError: a place is no folder, or no place has a job.
    """
    places = command_line.read(options.Jobs, argv).words
    folders = job_status.refresh(job_status.folders(places))
    if not folders:
        below = ", ".join(places) or "STAGE_PATH/experiments"
        raise UserError(f"no job below {below}; `maxbench report` lists runs that no job started")
    heads, rows = job_status.HEADS, job_status.table(folders)
    width = console.terminal_width()
    print("\n".join(console.table(heads, rows, text=range(len(heads)), width=width)))
    return 0
