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
from maxbench.run_logs.record import parse_json


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
TAIL = 1 << 14  # bytes read from the end of metrics.jsonl: about 30 steps


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
    step, seconds = progress(folder)
    state, reason = ended(folder)
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


def progress(folder: pathlib.Path) -> tuple[str, str]:
    """The last step, and the median time of the last steps in seconds."""
    with contextlib.suppress(OSError), open(folder / "metrics.jsonl", "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        lines = [parse_json(line) for line in file.read().splitlines()]
        steps = [x for x in lines if isinstance(x.get("step"), int)]
        seconds = [x["step_s"] for x in steps if isinstance(x.get("step_s"), float)]
        if steps:
            return str(steps[-1]["step"]), f"{statistics.median(seconds):.3f}" if seconds else "-"
    return _progress_in_log(folder / "node-0.log")


def _progress_in_log(log: pathlib.Path) -> tuple[str, str]:
    """As progress(), from the output of the first node: of a run whose files are elsewhere."""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        if steps := LOGGED_STEP.findall(file.read()):
            return steps[-1][0].decode(), f"{statistics.median(float(s) for _, s in steps):.3f}"
    return "-", "-"


def ended(folder: pathlib.Path) -> tuple[str, str]:
    """State from the files of a job, and the reason if it failed."""
    end, result = (
        submission.read_json(folder / "exit.json"),
        submission.read_json(folder / "result.json"),
    )
    if not end:
        return ("STARTED" if result or (folder / "job.json").exists() else "SUBMITTED"), ""
    if end.get("code") == 0:
        return "COMPLETED", ""
    if end.get("state") in submission.ENDED or end.get("reason") == node.CLOSED:
        return str(end.get("state", "FAILED")), str(end.get("reason", ""))
    why = result.get("reason") or end.get("reason") or f"exit code {end.get('code')}"
    return "FAILED", str(why)
