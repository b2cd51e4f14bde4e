"""Files of any size, compression and encoding, read in blocks that end at the end of a line."""

import codecs
import os
import pathlib
import re
import stat
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

BLOCK = 4 << 20  # bytes of a file in memory at a time
COMPRESSED = 1 << 12  # bytes that are decompressed at a time: those before a damaged place are read
BOMS = (  # the longest first
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)
GZIP, ZSTANDARD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"  # first bytes of compressed files
# Colours and other control sequences of terminals; `cat -v` writes the escape character as ^[.
ANSI = re.compile(
    rb"(?:\x1b|\^\[)(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\r\n]*(?:\x07|\x1b\\)?)|\x1b[@-Z\\-_]"
)


class DamagedFile(OSError):
    """A compressed file that ends early or is damaged. Raised after its readable part."""


def blocks(path: pathlib.Path) -> Iterator[bytes]:
    """Blocks of a file as it is, each of which ends at the end of a line; longer lines are cut.

    Raises:
      OSError: the file cannot be read, or is not regular: a pipe would wait for a writer.
    """
    return _whole_lines(_read(path, BLOCK))


def log_blocks(path: pathlib.Path) -> Iterator[bytes]:
    """Blocks of a log as UTF-8 text without the control sequences of terminals.

    gzip and Zstandard are decompressed, UTF-16 and UTF-32 are decoded; both are recognized by the
    first bytes of the file, whatever its name is.

    Raises:
      OSError: as blocks(); or Zstandard is not installed.
      DamagedFile: after the readable part of a damaged compressed file.
    """
    for block in _whole_lines(_decode(_decompress(path))):
        yield ANSI.sub(b"", block) if b"\x1b" in block or b"^[[" in block else block


def lines_with(block: bytes, texts: Iterable[bytes]) -> list[tuple[int, int]]:
    """Begin and end of each line of a block that contains one of several texts."""
    spans = set()
    for text in texts:
        at = block.find(text)
        while at >= 0:
            end = block.find(b"\n", at)
            end = len(block) if end < 0 else end
            spans.add((block.rfind(b"\n", 0, at) + 1, end))
            at = block.find(text, end)
    return sorted(spans)


def tail(path: pathlib.Path, size: int) -> bytes:
    """The last `size` bytes of a file as it is.

    Raises:
      OSError: as blocks().
    """
    with open(path, "rb", opener=_open_regular) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read(size)


def _read(path: pathlib.Path, size: int) -> Iterator[bytes]:
    with open(path, "rb", opener=_open_regular) as file:
        while data := file.read(size):
            yield data


def _open_regular(path: str, flags: int) -> int:
    """os.open() for regular files alone."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "not a regular file")
    return descriptor


def _whole_lines(data: Iterable[bytes]) -> Iterator[bytes]:
    """The data in blocks that end at the end of a line; a DamagedFile is raised after the last."""
    rest, error = b"", None
    chunks = iter(data)
    while True:
        try:
            chunk = next(chunks, None)
        except DamagedFile as e:
            error, chunk = e, None
        if chunk is None:
            break
        rest += chunk
        if cut := max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1 or (len(rest) >= BLOCK) * len(rest):
            yield rest[:cut]
            rest = rest[cut:]
    yield rest
    if error:
        raise error


def _decompress(path: pathlib.Path) -> Iterator[bytes]:
    """The content of a file, decompressed if its first bytes are those of gzip or Zstandard."""
    start = next(_read(path, 4), b"")
    if start.startswith(GZIP):
        yield from _inflate(path, lambda: zlib.decompressobj(31), "gzip")
    elif start == ZSTANDARD:
        yield from _inflate(path, _zstandard(), "Zstandard")
    else:
        yield from _read(path, BLOCK)


def _zstandard() -> Any:
    """A function that makes a decompressor: of the standard library from Python 3.14 on.

    Raises:
      OSError: there is none.
    """
    try:
        from compression import zstd  # type: ignore[import-not-found]

        return zstd.ZstdDecompressor
    except ImportError:
        pass
    try:
        import zstandard
    except ImportError:
        reason = "compressed with Zstandard, which Python reads from 3.14 on, or with: "
        raise OSError(0, f"{reason}pip install zstandard") from None
    return lambda: zstandard.ZstdDecompressor().decompressobj()


def _inflate(path: pathlib.Path, decompressor: Any, name: str) -> Iterator[bytes]:
    """The content of a compressed file, which may have several members.

    Raises:
      DamagedFile: after the readable part.
    """
    stream, size, begun = decompressor(), 0, False
    try:
        for data in _read(path, COMPRESSED):
            while data and (begun or data.strip(b"\0")):  # members may be padded with zeros
                begun = True
                text = stream.decompress(data)
                size += len(text)
                yield text
                data = b""
                if stream.eof:
                    data, stream, begun = stream.unused_data, decompressor(), False
    except OSError:
        raise
    except Exception as e:  # zlib.error, and each Zstandard library's own class
        raise DamagedFile(0, f"its {name} data is damaged after {size:,} bytes") from e
    if begun:
        raise DamagedFile(0, f"its {name} data ends early, after {size:,} bytes")


def _decode(data: Iterable[bytes]) -> Iterator[bytes]:
    """UTF-16 and UTF-32 as UTF-8; other text as it is."""
    decoder = None
    chunks = iter(data)
    for start in chunks:
        encoding = next((name for bom, name in BOMS if start.startswith(bom)), "")
        head = start[:4096]
        if not encoding and len(head) > 8 and head[1::2].count(0) > 0.8 * (len(head) // 2):
            encoding = "utf-16-le"  # without a mark, as some shells append it
        if not encoding:
            yield start
            break
        decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
        yield decoder.decode(start).encode("utf-8", "replace")
        break
    for chunk in chunks:
        yield decoder.decode(chunk).encode("utf-8", "replace") if decoder else chunk
    if decoder:
        yield decoder.decode(b"", final=True).encode("utf-8", "replace")
