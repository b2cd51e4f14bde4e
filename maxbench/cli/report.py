"""Reports finished runs: tables, plots, comparison with published figures: `maxbench report`."""

import os
import pathlib
import sys
from collections.abc import Sequence

from maxbench.config import command_line, options
from maxbench.config.errors import UserError
from maxbench.launch import job_status
from maxbench.reporting import build_report
from maxbench.terminal import console


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 no run succeeded or a suite failed.

    Raises:
      UserError: invalid flags, or no run at the paths.
    """
    asked = command_line.read(options.Report, argv)
    _fetch([asked.suite] if asked.suite else asked.paths)
    report = build_report.read(asked, width=0 if asked.output else console.terminal_width())
    text = report.text(asked.format, asked.diff)
    if file := asked.output:
        try:
            pathlib.Path(file).write_text(text + "\n", encoding="utf-8")
        except OSError as e:
            raise UserError(f"output={file!r} cannot be written: {e.strerror}") from None
        print(f"written: {file}", file=sys.stderr)
    else:
        print(text)
    return 0 if report.ok else 1


def _fetch(words: Sequence[str]) -> None:
    """Brings the files of jobs on Kubernetes into the folders that are reported."""
    paths = [*map(pathlib.Path, words)]
    folders = {path for path in paths if os.path.isdir(path)}  # False for a name that is too long
    folders |= {path.parent for path in paths if path.name.startswith("suite_") and path.is_file()}
    if folders:
        job_status.refresh(job_status.folders([*folders]))
