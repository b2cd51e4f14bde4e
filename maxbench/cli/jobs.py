"""Lists submitted jobs: `maxbench jobs`."""

from collections.abc import Sequence

from maxbench.config import command_line, options
from maxbench.launch import job_status
from maxbench.terminal import console


def main(argv: Sequence[str]) -> int:
    """Prints a line per job, newest first; returns the exit code."""
    places = command_line.read(options.Jobs, argv).words
    folders = job_status.refresh(job_status.folders(places))
    heads, rows = job_status.HEADS, job_status.table(folders)
    width = console.terminal_width()
    print("\n".join(console.table(heads, rows, text=range(len(heads)), width=width)))
    return 0
