"""How submitted jobs are: state, step, seconds per step, and why one waits or has ended."""

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
    """One start of a job; '-' and '' stand for what nobody tells."""

    job: str
    state: str
    step: str  # the last that was logged
    seconds: str  # of the last steps, median
    run: str  # name of its folder
    why: str  # it waits, or has ended


HEADS = Row("job", "state", "step", "s/step", "run", "why")
TAIL = 1 << 14  # bytes of metrics.jsonl that are read: some 30 steps


def folders(places: Sequence[str | pathlib.Path]) -> list[pathlib.Path]:
    """Folders of runs below places, or below the usual one; the newest first.

    Raises:
      UserError: a place is not there.
    """
    below = [*map(pathlib.Path, places)]
    below = below or [pathlib.Path(os.environ.get("STAGE_PATH", ""), "experiments")]
    for place in below:
        if not place.is_dir():
            raise UserError(f"there is no folder {str(place)!r}; give that of the runs")
    found = {folder for place in below for folder in _of_jobs(place)}
    return sorted(found, key=lambda f: f.name.rpartition("_")[2], reverse=True)


def _of_jobs(place: pathlib.Path) -> Iterator[pathlib.Path]:
    """Folders that a job has made; what is below one, as checkpoints, comes and goes."""
    for folder, below, files in os.walk(place):
        if {"job_id", "job.json"} & {*files}:
            below.clear()
            yield pathlib.Path(folder)


def table(found: Sequence[pathlib.Path]) -> list[Row]:
    """The jobs of folders."""
    numbers = {folder: number(folder) for folder in found}
    known = states({*numbers.values()})
    latest: dict[str, pathlib.Path] = {}
    for folder, job in numbers.items():
        latest.setdefault(job, folder)  # Slurm's word is about the last start of a job
    word = lambda f, job: known.get(job, ("", "")) if latest[job] is f else ("REQUEUED", "")
    return [look(folder, job, word(folder, job)) for folder, job in numbers.items()]


def look(folder: pathlib.Path, job: str, word: tuple[str, str]) -> Row:
    """A start of a job, by Slurm's word on it (state, why) and by what is in its folder."""
    step, seconds = progress(folder)
    left, reason = ended(folder)
    return Row(job, word[0] or left, step, seconds, folder.name, escape_control(reason or word[1]))


def number(folder: pathlib.Path) -> str:
    """The job that a folder is of."""
    if found := _json(folder / "job.json").get("job"):
        return str(found)
    with contextlib.suppress(OSError):
        return (folder / "job_id").read_text().strip()
    return ""


def states(jobs: set[str]) -> dict[str, tuple[str, str]]:
    """(state, why) of jobs by squeue, or by sacct where they have ended."""
    listed = ",".join(sorted(j for j in jobs if j.isdecimal()))
    ask = [["sacct", "-n", "-P", "-X", "-o", "JobID,State,Reason", "-j", listed]]
    ask += [["squeue", "-h", "-u", getpass.getuser(), "-t", "all", "-o", "%i|%T|%r"]]
    found = {}
    for command in ask if listed else []:
        for job, state, why in (
            x.split("|", 2) for x in environment.run_lines(*command) if "|" in x
        ):
            found[job] = (state, "" if why == "None" else why)
    return found


def progress(folder: pathlib.Path) -> tuple[str, str]:
    """The last step, and the median seconds of the last steps."""
    with contextlib.suppress(OSError), open(folder / "metrics.jsonl", "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        lines = [parse_json(line) for line in file.read().splitlines()]
        steps = [x for x in lines if isinstance(x.get("step"), int)]
        seconds = [x["step_s"] for x in steps if isinstance(x.get("step_s"), float)]
        if steps:
            return str(steps[-1]["step"]), f"{statistics.median(seconds):.3f}" if seconds else "-"
    return "-", "-"


def ended(folder: pathlib.Path) -> tuple[str, str]:
    """What the job itself left: its state, and the reason of one that failed."""
    left, result = _json(folder / "exit.json"), _json(folder / "result.json")
    if not left:
        return ("STARTED" if result or (folder / "job.json").exists() else "SUBMITTED"), ""
    if left.get("code") == 0:
        return "COMPLETED", ""
    why = result.get("reason") or left.get("reason") or f"exit code {left.get('code')}"
    return "FAILED", str(why)


def _json(path: pathlib.Path) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        return parse_json(path.read_bytes())
    return {}
