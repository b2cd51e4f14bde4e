"""Reads profiles and prints where their measured steps go: `maxbench trace`."""

import json
from collections.abc import Sequence

from maxbench.config import command_line, options
from maxbench.config.errors import UserError


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done.

    Raises:
      UserError: invalid flags, or no profile that can be read.
    """
    asked = command_line.read(options.Trace, argv)
    if not asked.paths:
        raise UserError("which profile? a file, a folder of ranks, or the folder of a run")
    from maxbench.traces import report

    found = report.trace(asked)
    print(json.dumps(found.data(), indent=1) if asked.json else found)
    return 0
