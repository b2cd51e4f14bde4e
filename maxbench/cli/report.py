"""Reads runs back: tables, plots, verdicts against the published figures.

maxbench report experiments
"""

import os
import pathlib
import sys
from collections.abc import Sequence

from maxbench.config import command_line, commands
from maxbench.config.errors import UserError
from maxbench.reporting import build_report


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 no run succeeded or a suite did not, 2 bad input."""
    if commands.print_help_if_asked("report", argv):
        return 0
    fv = commands.define("report")
    with command_line.clear_errors("report"):
        found = build_report.report_from_flags(fv, argv)
        made = found.text(fv["format"].value, fv["diff"].value)
        if file := fv["output"].value:
            try:
                pathlib.Path(file).write_text(made + "\n", encoding="utf-8")
            except OSError as e:
                raise UserError(f"output={file!r} cannot be written: {e.strerror}") from None
    if not fv["output"].value:
        try:
            print(made, flush=True)
        except BrokenPipeError:  # `| head` has seen enough; Python would complain at exit too
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if found.ok else 1
