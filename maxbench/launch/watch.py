"""Follows one job until it ends: a row whenever its state, step or reason changes."""

import pathlib
from collections.abc import Callable, Iterator, Sequence

from maxbench.config.errors import UserError
from maxbench.launch import job_status, submission
from maxbench.launch.submission import Submission
from maxbench.run_logs import run_folder


def changes(
    job: str, roots: Sequence[str | pathlib.Path], pause: Callable[[], None]
) -> Iterator[tuple[pathlib.Path | None, job_status.Row]]:
    """Rows of a job whenever they change, until it ends, with its folder if that is new.

    Raises:
      UserError: a root is not a folder, or neither Slurm nor a run folder knows the job.
    """
    folder, last = None, None
    submitted = Submission(job)
    while last is None or last.state.partition(" ")[0] not in submission.ENDED:
        if last:
            pause()
        # A requeue creates a folder with the same parent: the other roots need no second search.
        found = job_status.folders([folder.parent] if folder else roots)
        own = [f for f in found if submission.of(f).job == job]
        newest = own[0] if own else folder
        submitted = submission.of(newest) if newest else submitted
        # The state before the files: those of a job that has ended are complete.
        known = job_status.states({submitted}).get(submitted)
        own = [f for f in job_status.refresh(own) if submission.of(f).job == job]
        newest = own[0] if own else newest
        row = _row(job, known, newest, last)
        if row != last:
            yield (newest if newest != folder else None), row
        folder, last = newest, row


def _row(
    job: str,
    known: tuple[str, str] | None,
    folder: pathlib.Path | None,
    last: job_status.Row | None,
) -> job_status.Row:
    """The row of a job; the last one if its scheduler does not answer and it has not ended.

    Args:
      known: (state, reason) from its scheduler, None if that does not know the job.
    """
    if not (known or folder or last):
        raise UserError(f"job {job} is not known to Slurm, and has no run folder")
    has_ended = folder and job_status.ended(run_folder.read_state(folder))[0] in submission.ENDED
    if last and not (known and known[0]) and not has_ended:
        known = (last.state, last.why)
    if folder:
        return job_status.row_of(folder, job, known or ("", ""))
    state, why = known or ("", "")
    return job_status.Row(job, state, "-", "-", "-", why)
