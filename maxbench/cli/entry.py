"""Entry point of every command, for `maxbench COMMAND` and `python -m maxbench.COMMAND` alike."""

import contextlib
import errno
import importlib
import os
import re
import select
import sys
from collections.abc import Callable, Sequence

from maxbench.config import commands, exit_codes
from maxbench.config.errors import UserError, one_line
from maxbench.config.options import COMMANDS

FULL = (errno.ENOSPC, errno.EDQUOT)  # a full disk, and a full quota
# In what jax raises when it is imported, of a variable whose value it does not take.
JAX_VARIABLE = re.compile(r"^invalid .*(?:environment '|JAX flag )(jax_\w+)", re.IGNORECASE)


def run(name: str, words: Sequence[str]) -> int:
    """Runs a command with the words after its name; returns the exit code.

    A UserError is printed as one line on stderr, exit code 2, and so is a full disk, exit code 1;
    Ctrl-C gives exit code 130. Any other exception is a defect of the program and keeps its
    traceback. A closed pipe (`maxbench report | head`) ends the command with exit code 0.
    """
    return guard(name, lambda: _main(name, words))


def guard(name: str, main: Callable[[], int]) -> int:
    """Calls main() and returns its exit code; handles user errors and closed pipes as run() does.

    Args:
      name: command that the error message names; '' for `maxbench` itself.
    """
    program = f"maxbench {name}".strip()
    try:
        try:
            code = main()
        except UserError as e:
            code = exit_codes.BAD_INPUT
            print(f"{program}: error: {one_line(str(e))}", file=sys.stderr)
        except ValueError as e:
            if not (named := JAX_VARIABLE.search(str(e))):
                raise
            code, variable = exit_codes.BAD_INPUT, named[1].upper()
            given = f"{variable}={os.environ.get(variable, '')}"
            print(f"{program}: error: {given}: jax takes no such value; unset it", file=sys.stderr)
        except KeyboardInterrupt:
            code = exit_codes.INTERRUPTED
            print(f"{program}: interrupted", file=sys.stderr)
        if sys.stdout:
            sys.stdout.flush()  # here, because an error at interpreter exit cannot be caught
    except BrokenPipeError:
        if not _discard_closed_streams():
            raise  # of a socket or another pipe
        return 0
    except OSError as e:
        if e.errno not in FULL:
            raise
        if e.filename is None and sys.stdout:  # Python flushes it again at exit
            with contextlib.suppress(OSError, ValueError):  # no file descriptor, as in _closed()
                _discard(sys.stdout.fileno())
        written = e.filename or "the output"
        print(f"{program}: error: {written} cannot be written: {e.strerror}", file=sys.stderr)
        return exit_codes.FAILED
    return code


def _main(name: str, words: Sequence[str]) -> int:
    if not COMMANDS[name].OWN_HELP and commands.help_requested(words):
        print(commands.help_text(name))
        return 0
    return importlib.import_module(f"maxbench.cli.{name}").main([f"maxbench {name}", *words])


def _discard_closed_streams() -> bool:
    """Sends stdout and stderr to the null device where their reader has closed the pipe, because
    Python flushes both again at exit; returns whether there was one."""
    closed = [stream.fileno() for stream in (sys.stdout, sys.stderr) if stream and _closed(stream)]
    for descriptor in closed:
        _discard(descriptor)
    return bool(closed)


def _discard(descriptor: int) -> None:
    """Sends what is written to a file descriptor to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def _closed(stream) -> bool:
    """Whether the reading end of a stream's pipe is closed."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # POLLERR and POLLHUP are always reported
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError):  # no file descriptor: a stream of a test or a notebook
        return False
