"""Python stacks of this process: of its main thread, or of all if it stops answering."""

import faulthandler
import os
import tempfile
import threading
from typing import IO

STDERR = 2


def main_thread_stack() -> str:
    """Stack of this process's main thread, most recent call first, by faulthandler."""
    with _memory_file() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode(errors="replace")
    ident = f"0x{threading.main_thread().ident:016x}"
    blocks = (block.strip() for block in text.split("\n\n"))
    return next((block for block in blocks if ident in block.partition("\n")[0]), "")


def _memory_file() -> IO[bytes]:
    """A file in memory, which a full disk does not affect; elsewhere than on Linux a file."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("stack"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def print_stacks_after(seconds: float) -> None:
    """Prints the stacks of all threads to stderr, unless this function is called again before.

    faulthandler's timer needs no lock of Python: it also works if an extension keeps the lock.
    """
    faulthandler.dump_traceback_later(seconds, file=STDERR)


def cancel() -> None:
    """Ends print_stacks_after()."""
    faulthandler.cancel_dump_traceback_later()
