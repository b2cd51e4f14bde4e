"""State of submitted jobs: step, seconds per step, and why one waits or ended."""

import contextlib
import getpass
import os
import pathlib
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from maxbench.config import environment
from maxbench.config.errors import UserError, escape_control
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
    found = {folder for root in paths for folder in _job_folders(root)}
    return sorted(found, key=lambda f: f.name.rpartition("_")[2], reverse=True)


def _job_folders(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Folders of jobs; their subfolders, such as checkpoints, are skipped: they may disappear."""
    for folder, subfolders, files in os.walk(root):
        if {"job_id", "job.json"} & {*files}:
            subfolders.clear()
            yield pathlib.Path(folder)


def table(run_folders: Sequence[pathlib.Path]) -> list[Row]:
    """A row for each run folder."""
    numbers = {folder: job_number(folder) for folder in run_folders}
    known = states({*numbers.values()})
    latest: dict[str, pathlib.Path] = {}
    for folder, job in numbers.items():
        latest.setdefault(job, folder)  # Slurm reports the last start of a job
    of_slurm = lambda f, job: known.get(job, ("", "")) if latest[job] is f else ("REQUEUED", "")
    return [row_of(folder, job, of_slurm(folder, job)) for folder, job in numbers.items()]


def row_of(folder: pathlib.Path, job: str, of_slurm: tuple[str, str]) -> Row:
    """A start of a job, from (state, reason) of Slurm and from the files in its folder."""
    step, seconds = progress(folder)
    state, reason = ended(folder)
    why = escape_control(reason or of_slurm[1])
    return Row(job, of_slurm[0] or state, step, seconds, folder.name, why)


def job_number(folder: pathlib.Path) -> str:
    """Number of the job that a run folder belongs to."""
    if found := _json(folder / "job.json").get("job"):
        return str(found)
    with contextlib.suppress(OSError):
        return (folder / "job_id").read_text().strip()
    return ""


def states(jobs: set[str]) -> dict[str, tuple[str, str]]:
    """(state, reason) of jobs from squeue, or from sacct for those that ended."""
    listed = ",".join(sorted(j for j in jobs if j.isdecimal()))
    queries = [["sacct", "-n", "-P", "-X", "-o", "JobID,State,Reason", "-j", listed]]
    queries += [["squeue", "-h", "-u", getpass.getuser(), "-t", "all", "-o", "%i|%T|%r"]]
    found = {}
    for command in queries if listed else []:
        for job, state, why in (
            x.split("|", 2) for x in environment.run_lines(*command) if "|" in x
        ):
            found[job] = (state, "" if why == "None" else why)
    return found


def progress(folder: pathlib.Path) -> tuple[str, str]:
    """The last step, and the median time of the last steps in seconds."""
    with contextlib.suppress(OSError), open(folder / "metrics.jsonl", "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        lines = [parse_json(line) for line in file.read().splitlines()]
        steps = [x for x in lines if isinstance(x.get("step"), int)]
        seconds = [x["step_s"] for x in steps if isinstance(x.get("step_s"), float)]
        if steps:
            return str(steps[-1]["step"]), f"{statistics.median(seconds):.3f}" if seconds else "-"
    return "-", "-"


def ended(folder: pathlib.Path) -> tuple[str, str]:
    """State from the files of a job, and the reason if it failed."""
    end, result = _json(folder / "exit.json"), _json(folder / "result.json")
    if not end:
        return ("STARTED" if result or (folder / "job.json").exists() else "SUBMITTED"), ""
    if end.get("code") == 0:
        return "COMPLETED", ""
    why = result.get("reason") or end.get("reason") or f"exit code {end.get('code')}"
    return "FAILED", str(why)


def _json(path: pathlib.Path) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        return parse_json(path.read_bytes())
    return {}
