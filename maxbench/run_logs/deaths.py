"""Why a run died: the cause in the text of its logs, by the table deaths.toml."""

import dataclasses
import functools
import pathlib
import re
import tomllib
from typing import Any, NamedTuple

from maxbench.run_logs.line_prefixes import strip_prefixes

LENGTH = 160  # characters of a line that are shown
TRACE = 1200  # bytes before an exception without a message in which its source line is searched
_SOURCE = re.compile(rb'File "([^"\n]{1,300})", line (\d{1,7})[^\n]*\n((?: *[^\n]+)?)')
# Where the message of a line begins: an exception, Slurm's "error: ", what follows a log's header.
_MESSAGE = re.compile(rb"(?<![\w.])[\w.]+(?:Error|Exception): |(?<![\w.])error: |(?<=\] )\S")
_WITHOUT_MESSAGE = re.compile(rb"[\w.]+\s*\Z")


class Cause(NamedTuple):
    """The cause of a death. Of several, the smallest is nearest to the start of the failure."""

    rank: int  # number of its row in deaths.toml
    line: str  # of the log, at most LENGTH characters
    remedy: str
    state: str = "FAILED"  # of the job, in Slurm's words


NONE = Cause(1 << 30, "", "")


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of deaths.toml, which documents the fields."""

    pattern: re.Pattern[bytes]
    remedy: str
    state: str = "FAILED"
    outside: bool = False
    general: bool = False


def _pattern(lines: list[str]) -> re.Pattern[bytes]:
    return re.compile("|".join(f"(?:{line})" for line in lines).encode(), re.MULTILINE)


@functools.cache
def _table() -> tuple[tuple[Row, ...], re.Pattern[bytes], re.Pattern[bytes]]:
    """The rows, the pattern of lines that are no cause, and that of all rows but general ones."""
    data: dict[str, Any] = tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text())
    rows = tuple(Row(_pattern(row.pop("texts")), **row) for row in data["cause"])
    special = b"|".join(b"(?:%b)" % row.pattern.pattern for row in rows if not row.general)
    return rows, _pattern(data["survived"]), re.compile(special, re.MULTILINE)


def cause(text: bytes, certain: bool = False) -> Cause | None:
    """The cause of a death in the end of a log, None if there is none.

    Args:
      text: lines, with the prefixes of launchers.
      certain: leaves out the general rows and those below, which a run may survive.
    """
    rows, survived, special = _table()
    lines = map(strip_prefixes, text.splitlines())
    text = b"\n".join(line for line in lines if not survived.search(line))
    decisions = [m.start() for row in rows if row.outside and (m := row.pattern.search(text))]
    before = text[: min(decisions, default=len(text))]
    for rank, row in enumerate(rows):
        if row.general and certain:
            return None
        for match in row.pattern.finditer(text if row.outside else before):
            if not (row.general and special.search(_line(text, match))):
                return Cause(rank, _shown(text, match), row.remedy, row.state)
    return None


def _line(text: bytes, match: re.Match[bytes]) -> bytes:
    """The whole line of a match."""
    return text[text.rfind(b"\n", 0, match.start()) + 1 : _end(text, match)]


def _end(text: bytes, match: re.Match[bytes]) -> int:
    end = text.find(b"\n", match.end())
    return len(text) if end < 0 else end


def _shown(text: bytes, match: re.Match[bytes]) -> str:
    """The line of a match, without what stands before the message.

    An exception without a message has the line of its source.
    """
    line = _line(text, match)
    at = match.start() - (_end(text, match) - len(line))
    starts = [m.start() for m in _MESSAGE.finditer(line[: at + len(match[0])]) if m.start() <= at]
    start = starts[0] if starts else 0
    found = line[at if at - start > LENGTH // 2 else start :].strip()
    if _WITHOUT_MESSAGE.fullmatch(found) and b"Error" in found:
        sources = [*_SOURCE.finditer(text, max(0, match.start() - TRACE), match.start())]
        if sources:
            path, number, code = sources[-1].groups()
            found += b": %b (%b:%b)" % (code.strip(), path.rpartition(b"/")[2], number)
    return re.sub(r"\s+", " ", found.decode("utf-8", "replace"))[:LENGTH].strip()
