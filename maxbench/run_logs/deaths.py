"""Why a run died: the cause in the text of its logs, by the table deaths.toml."""

import dataclasses
import functools
import pathlib
import re
import tomllib
from typing import Any, NamedTuple

from maxbench.run_logs import log_files
from maxbench.run_logs.line_prefixes import strip_prefixes

LENGTH = 160  # characters of a line that are shown
TRACE = 1200  # bytes before an exception without a message in which its source line is searched
_SOURCE = re.compile(rb'File "([^"\n]{1,300})", line (\d{1,7})[^\n]*\n((?: *[^\n]+)?)')
# Where the message of a line begins: an exception, Slurm's "error: ", what follows a log's header.
_MESSAGE = re.compile(rb"(?<![\w.])[\w.]+(?:Error|Exception): |(?<![\w.])error: |(?<=\] )\S")
_WITHOUT_MESSAGE = re.compile(r"[\w.]+Error")


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
    return re.compile("|".join(f"(?:{line})" for line in lines).encode())


class Table(NamedTuple):
    """deaths.toml."""

    rows: tuple[Row, ...]
    hints: tuple[bytes, ...]
    survived: re.Pattern[bytes]
    special: re.Pattern[bytes]  # of all rows but general ones
    outside: re.Pattern[bytes]  # of all rows with decisions from outside


@functools.cache
def table() -> Table:
    """The table of causes."""
    data: dict[str, Any] = tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text())
    rows = tuple(Row(_pattern(row.pop("texts")), **row) for row in data["cause"])
    any_of = lambda rows: re.compile(b"|".join(b"(?:%b)" % row.pattern.pattern for row in rows))
    return Table(
        rows,
        tuple(hint.encode() for hint in data["hints"]),
        _pattern(data["survived"]),
        special=any_of(row for row in rows if not row.general),
        outside=any_of(row for row in rows if row.outside),
    )


def cause(text: bytes, certain: bool = False) -> Cause | None:
    """The cause of a death in the end of a log, None if there is none.

    Args:
      text: lines, with the prefixes of launchers.
      certain: leaves out the general rows and those below, which a run may survive.
    """
    text, known = text.replace(b"\r", b"\n"), table()
    spans = log_files.lines_with(text.lower(), known.hints)
    lines = [(start, strip_prefixes(text[start:end])) for start, end in spans]
    lines = [(start, line) for start, line in lines if not known.survived.search(line)]
    decision = next((i for i, (_, x) in enumerate(lines) if known.outside.search(x)), len(lines))
    for rank, row in enumerate(known.rows):
        if row.general and certain:
            return None
        for start, line in lines if row.outside else lines[:decision]:
            match = row.pattern.search(line)
            if match and not (row.general and known.special.search(line)):
                shown = _with_source(_shown(line, match), text[:start])
                return Cause(rank, shown, row.remedy, row.state)
    return None


def of_reason(reason: str) -> Cause:
    """The cause that the reason in a run's files names; NONE if the table has none."""
    return cause(reason.encode(errors="replace")) or NONE


def _shown(line: bytes, match: re.Match[bytes]) -> str:
    """A line without what stands before its message, at most LENGTH characters with its match."""
    starts = [m.start() for m in _MESSAGE.finditer(line, 0, match.end())]
    start = next((start for start in starts if start <= match.start()), 0)
    found = line[match.start() if match.start() - start > LENGTH // 2 else start :]
    return re.sub(r"\s+", " ", found.decode("utf-8", "replace"))[:LENGTH].strip()


def _with_source(shown: str, before: bytes) -> str:
    """An exception without a message, with the line of its source from the trace before it."""
    if not _WITHOUT_MESSAGE.fullmatch(shown):
        return shown
    trace = b"\n".join(map(strip_prefixes, before[-TRACE:].splitlines()))
    found = _SOURCE.findall(trace)
    if not found:
        return shown
    path, number, code = (part.decode("utf-8", "replace") for part in found[-1])
    return f"{shown}: {code.strip()} ({path.rpartition('/')[2]}:{number})"[:LENGTH]
