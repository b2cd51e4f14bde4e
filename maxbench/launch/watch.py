"""Follows one job until it ends: a row whenever its state, step or reason changes."""

import pathlib
from collections.abc import Callable, Iterator, Sequence

from maxbench.config.errors import UserError
from maxbench.launch import job_status

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL",
         "DEADLINE", "OUT_OF_MEMORY", "REVOKED")  # fmt: skip


def changes(
    job: str, roots: Sequence[str | pathlib.Path], pause: Callable[[], None]
) -> Iterator[tuple[pathlib.Path | None, job_status.Row]]:
    """Rows of a job whenever they change, until it ends, with its folder if that is new.

    Raises:
      UserError: a root is not a folder, or neither Slurm nor a run folder knows the job.
    """
    folder, last = None, None
    while last is None or last.state.partition(" ")[0] not in ENDED:
        if last:
            pause()
        # A requeue creates a folder with the same parent: the other roots need no second search.
        found = job_status.folders([folder.parent] if folder else roots)
        newest = next((f for f in found if job_status.job_number(f) == job), folder)
        row = _row(job, newest, last)
        if row != last:
            yield (newest if newest != folder else None), row
        folder, last = newest, row


def _row(job: str, folder: pathlib.Path | None, last: job_status.Row | None) -> job_status.Row:
    """The row of a job; the last one if Slurm does not answer and its folder shows no end."""
    of_slurm = job_status.states({job}).get(job)
    if not (of_slurm or folder or last):
        raise UserError(f"job {job} is not known to Slurm, and has no run folder")
    if not of_slurm and last and not (folder and job_status.ended(folder)[0] in ENDED):
        of_slurm = (last.state, last.why)
    if folder:
        return job_status.row_of(folder, job, of_slurm or ("", ""))
    state, why = of_slurm or ("", "")
    return job_status.Row(job, state, "-", "-", "-", why)
