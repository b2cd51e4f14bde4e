"""Follows one job until it has ended: a line whenever its state, step or reason has changed."""

import pathlib
from collections.abc import Callable, Iterator, Sequence

from maxbench.config.errors import UserError
from maxbench.launch import job_status

PAUSE_S = 5  # Slurm's controller answers many
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL")
ENDED += ("DEADLINE", "OUT_OF_MEMORY", "REVOKED")


def changes(
    job: str, places: Sequence[str | pathlib.Path], pause: Callable[[], None]
) -> Iterator[tuple[pathlib.Path | None, job_status.Row]]:
    """What has changed of a job until it has ended, and its folder where that has.

    Raises:
      UserError: a place is not there, or neither Slurm nor a folder in one knows the job.
    """
    folder, last = None, None
    while last is None or last.state.partition(" ")[0] not in ENDED:
        if last:
            pause()
        # A requeue makes a new folder beside the last one: no need to look at all others again.
        found = job_status.folders([folder.parent] if folder else places)
        here = next((f for f in found if job_status.number(f) == job), folder)
        row = _look(job, here, last)
        if row != last:
            yield (here if here != folder else None), row
        folder, last = here, row


def _look(job: str, folder: pathlib.Path | None, last: job_status.Row | None) -> job_status.Row:
    """How a job is now; as it was where Slurm does not answer and its folder does not tell more."""
    word = job_status.states({job}).get(job)
    if not (word or folder or last):
        raise UserError(f"job {job} is not known to Slurm, and no folder of a run is of it")
    if not word and last and not (folder and job_status.ended(folder)[0] in ENDED):
        word = (last.state, last.why)
    if folder:
        return job_status.look(folder, job, word or ("", ""))
    return job_status.Row(job, word[0], "-", "-", "-", word[1])
