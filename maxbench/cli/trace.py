"""Reads profiles and prints where their measured steps go: `maxbench trace`."""

import json
import sys
from collections.abc import Sequence

from maxbench.config import command_line, options
from maxbench.config.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done.

    Raises:
      UserError: invalid flags, no profile that can be read, or a drawing that cannot be written.
    """
    asked = command_line.read(options.Trace, argv)
    if not asked.paths:
        raise UserError("which profile? a file, a folder of ranks, or the folder of a run")
    from maxbench.traces import report

    path = command_line.writable("drawing", asked.drawing, ".svg")
    found = report.trace(asked)
    if path:
        try:
            path.write_text(found.svg())
        except OSError as e:
            raise UserError(f"{path} cannot be written: {e.strerror}") from None
        print(f"drawing: {path}", file=sys.stderr)
    print(json.dumps(found.data(), indent=1) if asked.json else found)
    return 0
