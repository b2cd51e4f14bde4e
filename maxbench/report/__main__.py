"""Reads runs back: tables, plots, verdicts against the published figures.

maxbench report experiments
"""

import os
import pathlib
import sys
from collections.abc import Sequence

from maxbench.report import reading
from maxbench.spec import cli, commands
from maxbench.spec.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 no run succeeded or a suite did not, 2 bad input."""
    if commands.helped("report", argv):
        return 0
    fv = commands.define("report")
    with cli.clear_errors("report"):
        found = reading.ask(fv, argv)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv))
