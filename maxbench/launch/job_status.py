"""State of submitted jobs: step, seconds per step, and why one waits or ended."""

import contextlib
import getpass
import os
import pathlib
import re
import statistics
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from maxbench.config.errors import UserError, escape_control
from maxbench.host import environment
from maxbench.launch import hosts, kubectl, node, submission
from maxbench.launch.submission import Submission
from maxbench.run_logs import deaths, log_files, run_folder
from maxbench.run_logs.record import RunRecord


class Row(NamedTuple):
    """One start of a job; '-' or '' if a field is unknown."""

    job: str
    state: str
    step: str  # last one in the log
    seconds: str  # median of the last steps
    run: str  # name of the folder
    why: str  # reason of waiting or of the end


HEADS = Row("job", "state", "step", "s/step", "run", "why")
LOGGED_STEP = re.compile(rb"completed step: (\d+), seconds: (\d+\.\d+)")
TAIL = 1 << 14  # bytes read from the end of a log


def folders(roots: Sequence[str | pathlib.Path]) -> list[pathlib.Path]:
    """Run folders of jobs below roots (default: STAGE_PATH/experiments), the newest first.

    Raises:
      UserError: a root is not a folder.
    """
    default = pathlib.Path(os.environ.get("STAGE_PATH", ""), "experiments")
    paths = [*map(pathlib.Path, roots)] or [default]
    for root in paths:
        if not root.is_dir():
            raise UserError(f"{str(root)!r} is not a folder; give the folder of the runs")
    return _newest_first({folder for root in paths for folder in _job_folders(root)})


def _newest_first(found: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    return sorted(found, key=lambda f: f.name.rpartition("_")[2], reverse=True)


def _job_folders(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Folders of jobs; their subfolders, such as checkpoints, are skipped: they may disappear."""
    for folder, subfolders, files in os.walk(root):
        if {"job_id", "job.json", submission.FILE} & {*files}:
            subfolders.clear()
            yield pathlib.Path(folder)


def table(run_folders: Sequence[pathlib.Path]) -> list[Row]:
    """A row for each run folder."""
    jobs = {folder: submission.of(folder) for folder in run_folders}
    known = states({*jobs.values()})
    latest: dict[Submission, pathlib.Path] = {}
    for folder, job in jobs.items():
        latest.setdefault(job, folder)  # a scheduler reports the last start of a job
    last = lambda f, job: known.get(job, ("", "")) if latest[job] is f else ("REQUEUED", "")
    return [row_of(folder, job.job, last(folder, job)) for folder, job in jobs.items()]


def row_of(folder: pathlib.Path, job: str, of_scheduler: tuple[str, str]) -> Row:
    """A start of a job, from (state, reason) of its scheduler and from the files in its folder."""
    run = run_folder.read_state(folder)
    step, seconds = progress(run)
    state, reason = ended(run)
    if of_scheduler[0] == "CANCELLED" and reason == "stopped by SIGTERM":  # by the deletion
        reason = ""
    elif of_scheduler[0] == "CANCELLED" and state in submission.ENDED:  # deleted after its end
        of_scheduler = ("", "")
    if reason == node.CLOSED:  # a consequence; the scheduler may know the cause
        reason = of_scheduler[1] or reason
    why = escape_control(reason or of_scheduler[1])
    return Row(job, of_scheduler[0] or state, step, seconds, folder.name, why)


def states(jobs: Collection[Submission]) -> dict[Submission, tuple[str, str]]:
    """(state, reason) of jobs from their schedulers."""
    found: dict[Submission, tuple[str, str]] = {}
    for scheduler, query in {
        "slurm": slurm_states,
        "kubernetes": kubectl.states,
        "hosts": hosts.states,
    }.items():
        if members := {job for job in jobs if job.scheduler == scheduler}:
            found |= query(members)
    return found


def slurm_states(jobs: Collection[Submission]) -> dict[Submission, tuple[str, str]]:
    """(state, reason) of jobs from squeue, or from sacct for those that ended."""
    listed = ",".join(sorted(job.job for job in jobs if job.job.isdecimal()))
    queries = [["sacct", "-n", "-P", "-X", "-o", "JobID,State,Reason", "-j", listed]]
    queries += [["squeue", "-h", "-u", getpass.getuser(), "-t", "all", "-o", "%i|%T|%r"]]
    found = {}
    for command in queries if listed else []:
        for number, state, why in (
            x.split("|", 2) for x in environment.run_lines(*command) if "|" in x
        ):
            found[number] = (state, "" if why == "None" else why)
    return {job: found[job.job] for job in jobs if job.job in found}


def refresh(run_folders: Sequence[pathlib.Path]) -> list[pathlib.Path]:
    """Brings the files of jobs that ran elsewhere into their folders; returns all run folders of
    the same names, the newest first."""
    jobs = {folder: submission.of(folder) for folder in run_folders}
    kubectl.refresh({f: job for f, job in jobs.items() if job.scheduler == "kubernetes"})
    hosts.refresh({f: job for f, job in jobs.items() if job.scheduler == "hosts"})
    remote = {f.parent for f, job in jobs.items() if job.scheduler != "slurm"}
    return _newest_first({*run_folders, *(f for parent in remote for f in _job_folders(parent))})


def progress(run: RunRecord) -> tuple[str, str]:
    """The last step, and the median time of the last steps in seconds."""
    if run.step_s:
        return str(run.last), f"{statistics.median(run.step_s.values()):.3f}"
    # From the output of the first node: of a run whose files are elsewhere.
    with contextlib.suppress(OSError):
        if steps := LOGGED_STEP.findall(log_files.tail(run.path / "node-0.log", TAIL)):
            return steps[-1][0].decode(), f"{statistics.median(float(s) for _, s in steps):.3f}"
    return "-", "-"


def ended(run: RunRecord) -> tuple[str, str]:
    """State of a job by the files of its run, as the report reads them, and why it ended so."""
    end = submission.read_json(run.path / "exit.json")
    if not (end or run.step_s or any((run.path / name).exists() for name in run_folder.MARKERS)):
        return "SUBMITTED", ""
    if end.get("code") == 0 or run.status == "done":
        return "COMPLETED", ""
    if end.get("state") in submission.ENDED or end.get("reason") == node.CLOSED:
        return str(end.get("state", "FAILED")), str(end.get("reason", ""))
    if run.status in ("running", "skipped"):
        return "STARTED", run.reason
    return deaths.of_reason(run.reason).state, run.reason
