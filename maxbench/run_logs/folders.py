"""Names of run folders: experiments/<name>/<name>_<timestamp>."""

import pathlib
import time

from maxbench.config.run import Run


def run_folder(run: Run, stamp: int) -> pathlib.Path:
    """The folder of a run that has that timestamp: experiments/<name>/<name>_<timestamp>."""
    return pathlib.Path(run.output.dir) / "experiments" / run.name / f"{run.name}_{stamp}"


def make_folder(run: Run) -> int:
    """Creates the folder of a run and returns its timestamp."""
    if stamp := run.output.stamp:
        # The launcher created this folder and wrote the job's files to it. If an earlier start of
        # the job left a result there, this start gets a folder of its own.
        folder = run_folder(run, stamp)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "result.json").exists():
            return stamp
    return new_folder(pathlib.Path(run.output.dir), run.name)[1]


def new_folder(out: pathlib.Path, name: str, step: int = 1) -> tuple[pathlib.Path, int]:
    """Creates experiments/<name>/<name>_<timestamp> in `out`; returns the folder and its timestamp.

    The timestamp is the time in seconds, rounded down to a multiple of `step`, or the first later
    multiple without a folder.
    """
    stamp = int(time.time()) // step * step
    while True:
        folder = out / "experiments" / name / f"{name}_{stamp}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            stamp += step
        else:
            return folder, stamp
    raise AssertionError("unreachable")
