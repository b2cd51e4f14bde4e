"""Folders of runs: experiments/<name>/<name>_<timestamp>."""

import contextlib
import itertools
import pathlib
import time

from maxbench.config.run import Run


def run_folder(run: Run, stamp: int) -> pathlib.Path:
    """experiments/<name>/<name>_<timestamp>"""
    return pathlib.Path(run.output.dir) / "experiments" / run.name / f"{run.name}_{stamp}"


def make_folder(run: Run) -> int:
    """Makes the run's folder; returns its timestamp."""
    if stamp := run.output.stamp:
        # The launcher has made the folder, and put the job's own files there.
        folder = run_folder(run, stamp)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "result.json").exists():
            return stamp
    return new_folder(pathlib.Path(run.output.dir), run.name)[1]


def new_folder(out: pathlib.Path, name: str) -> tuple[pathlib.Path, int]:
    """Makes experiments/<name>/<name>_<timestamp> below out; returns it and its timestamp."""
    for stamp in itertools.count(int(time.time())):
        folder = out / "experiments" / name / f"{name}_{stamp}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder, stamp
