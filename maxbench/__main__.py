"""`maxbench COMMAND ...`; without a command, a list of them."""

import difflib
import platform
import sys
from importlib import metadata

from maxbench.cli import entry
from maxbench.config import commands
from maxbench.config.errors import UserError


def main() -> int:
    """Runs the command that sys.argv names; returns the exit code."""
    name, words = (sys.argv[1:2] or ["--help"])[0], sys.argv[2:]
    if name in commands.commands():
        return entry.run(name, words)
    return entry.guard("", lambda: _overview(name))


def _overview(name: str) -> int:
    """Prints the list of commands or the version.

    Raises:
      UserError: any other name.
    """
    if name in ("--help", "-h", "help"):
        print(commands.command_list())
    elif name == "--version":
        print(version())
    else:
        known = list(commands.commands())
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"no command {name!r}; {hint}commands: {', '.join(known)}")
    return 0


def version() -> str:
    """Versions of maxbench, jax and Python."""

    def installed(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return "(not installed)"

    return (
        f"maxbench {installed('maxbench')}, jax {installed('jax')}, "
        f"Python {platform.python_version()}"
    )


if __name__ == "__main__":
    sys.exit(main())
