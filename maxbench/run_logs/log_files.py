"""Files of any size and content, read in blocks."""

import functools
import os
import pathlib
import stat
from collections.abc import Iterable, Iterator

BLOCK = 4 << 20  # bytes of a file in memory at a time


def blocks(path: pathlib.Path) -> Iterator[bytes]:
    """Blocks of a file, each of which ends at the end of a line; longer lines are cut.

    Raises:
      OSError: the file cannot be read, or is not regular: a pipe would wait for a writer.
    """
    with open(path, "rb", opener=_open_regular) as file:
        rest = b""
        while data := file.read(BLOCK):
            rest += data
            cut = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1 or len(rest)
            yield rest[:cut]
            rest = rest[cut:]
        yield rest


def _open_regular(path: str, flags: int) -> int:
    """os.open() for regular files alone."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "not a regular file")
    return descriptor


def tail(data: Iterable[bytes], size: int) -> bytes:
    """The last `size` bytes of blocks."""
    return functools.reduce(lambda end, block: (end + block)[-size:], data, b"")
