"""`maxbench COMMAND ...`; without a command, a list of them."""

import difflib
import importlib
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

from maxbench.config import commands


def main() -> int:
    """Does what sys.argv says; returns the exit code."""
    name, words = (sys.argv[1:2] or ["--help"])[0], sys.argv[2:]
    known = commands.commands()
    try:
        if name in ("--help", "-h", "help"):
            print(commands.command_list(), flush=True)
        elif name == "--version":
            print(version(), flush=True)
        elif name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            there = ", ".join(known)
            print(f"maxbench: error: no command {name!r}; {hint}there are {there}", file=sys.stderr)
            return 2
        elif not known[name].own_help and commands.print_help_if_asked(name, ["maxbench", *words]):
            sys.stdout.flush()
        else:
            run: Callable[[Sequence[str]], int] = importlib.import_module(known[name].module).main
            code = run([f"maxbench {name}", *words])
            sys.stdout.flush()
            return code
    except BrokenPipeError:  # `| head` has seen enough; Python would complain at exit too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def version() -> str:
    """This program's version, jax's and Python's."""

    def of(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return "(not installed)"

    return f"maxbench {of('maxbench')}, jax {of('jax')}, Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())
