"""Identity of a process, and whether it still exists: of runs on this machine that were killed.

Importing this module needs no jax.
"""

import contextlib
import os
import pathlib
from collections.abc import Mapping
from typing import TypedDict

_START = 19  # of /proc/PID/stat behind the name of the program: clock ticks since the boot


class Process(TypedDict):
    """A process. Its number alone is used again."""

    pid: int
    start: int  # clock ticks from the boot to its start
    machine: str  # the boot of the kernel, and the namespace in which the number counts


def of_this_process() -> Process | None:
    """This process; None where there is no /proc, as on macOS."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pid = os.getpid()
        return Process(pid=pid, start=int(_stat(pid)[_START]), machine=_machine())
    return None


def is_gone(process: Mapping) -> bool:
    """Whether a process, as of_this_process() describes it, ran on this machine and has ended.

    False if it ran elsewhere, as in another container, about which nothing is known here.

    Args:
      process: the content of a file, of any form.
    """
    pid, start = process.get("pid"), process.get("start")
    if type(pid) is not int or not 0 < pid < 1 << 31:
        return False
    with contextlib.suppress(OSError, ValueError, IndexError):
        if process.get("machine") != _machine():
            return False
        try:
            os.kill(pid, 0)  # sees those of other users, whose folders in /proc may be hidden
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        stat = _stat(pid)
        return stat[0] == "Z" or int(stat[_START]) != start  # a zombie has ended
    return False


def _stat(pid: int) -> list[str]:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _machine() -> str:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
