"""Ends submitted jobs: `maxbench cancel`."""

import subprocess
from collections.abc import Sequence

from maxbench.config import command_line, options
from maxbench.config.errors import UserError
from maxbench.launch import hosts, job_status, kubectl, submission
from maxbench.launch.submission import Submission


def main(argv: Sequence[str]) -> int:
    """Cancels one job; returns the exit code."""
    number, *places = command_line.read(options.Cancel, argv).words or [""]
    if not number:
        raise UserError("no job is given; `maxbench jobs` lists the jobs")
    found = (submission.of(folder) for folder in job_status.folders(places))
    job = next((job for job in found if job.job == number), None)
    if not job:
        raise UserError(f"JOB={number!r} has no run folder; `maxbench jobs` lists the jobs")
    if why := CANCEL[job.scheduler](job):
        raise UserError(f"job {number} cannot be cancelled: {why}")
    print(f"job {number} is cancelled")
    return 0


def _scancel(job: Submission) -> str:
    """Cancels a Slurm job; returns why that failed, or ''."""
    try:
        done = subprocess.run(["scancel", job.job], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as e:
        return str(e)
    return " ".join(done.stderr.split()) if done.returncode else ""


CANCEL = {"slurm": _scancel, "kubernetes": kubectl.cancel, "hosts": hosts.cancel}
