"""`maxbench COMMAND ...`; without a command, a list of them."""

import difflib
import platform
import sys

from maxbench.cli import entry
from maxbench.config import commands
from maxbench.config.errors import UserError
from maxbench.config.options import COMMANDS
from maxbench.host import environment


def main() -> int:
    """Runs the command that sys.argv names; returns the exit code."""
    name, words = (sys.argv[1:2] or ["--help"])[0], sys.argv[2:]
    if name in COMMANDS:
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
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"no command {name!r}; {hint}commands: {', '.join(COMMANDS)}")
    return 0


def version() -> str:
    """Versions of maxbench, jax and Python."""
    ours, jax = (environment.version(name) or "(not installed)" for name in ("maxbench", "jax"))
    return f"maxbench {ours}, jax {jax}, Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())
