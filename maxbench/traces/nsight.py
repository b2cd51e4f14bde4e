"""Profiles of Nsight Systems: its SQLite export, or a report where `nsys` is installed."""

import contextlib
import pathlib
import re
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator

from maxbench.config.errors import UserError
from maxbench.traces.events import COPY, MARK, SHORT, WAITS, Event, Mark, RankTrace, Work, kind_of

EXPORT = "nsys export --type sqlite --output {stem}.sqlite {name}"
# Rows of device work: table -> columns that stand for a name, bytes.
DEVICE = {
    "CUPTI_ACTIVITY_KIND_KERNEL": ("(SELECT value FROM StringIds WHERE id = t.demangledName)", "0"),
    "CUPTI_ACTIVITY_KIND_MEMCPY": ("'Memcpy ' || t.copyKind", "t.bytes"),
    "CUPTI_ACTIVITY_KIND_MEMSET": ("'Memset'", "t.bytes"),
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": ("'CUDA graph ' || t.graphId", "0"),
}
# With nsys profile --gpu-metrics-devices=all. The lowest byte of a type is the device.
CLOCKS = """
SELECT m.typeId & 255, m.timestamp, m.value FROM GPU_METRICS m
JOIN TARGET_INFO_GPU_METRICS i ON i.typeId = m.typeId AND i.metricId = m.metricId
WHERE i.metricName LIKE 'GPC Clock Frequency%' AND m.value > 0 ORDER BY m.timestamp
"""
COPIES = {"1": "HtoD", "2": "DtoH", "8": "DtoD", "10": "PtoP"}  # CUPTI's copy kinds


def export(path: pathlib.Path, folder: str) -> pathlib.Path:
    """The SQLite export of a report, in a folder.

    Raises:
      UserError: nsys is not installed, or fails.
    """
    command = EXPORT.format(stem=path.name.removesuffix(".nsys-rep"), name=path.name)
    if not shutil.which("nsys"):
        raise UserError(f"{path.name} needs nsys, which is not installed; where it is: {command}")
    out = pathlib.Path(folder, f"{path.name}.sqlite")
    words = ["nsys", "export", "--type", "sqlite", "--output", str(out), str(path)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode or not out.is_file():
        said = (done.stderr or done.stdout).strip().splitlines()
        raise UserError(
            f"{path.name} cannot be exported by nsys: {said[-1] if said else 'no output'}"
        )
    return out


def read(path: pathlib.Path, name: str) -> list[RankTrace]:
    """The GPUs of an export, or of a report.

    Raises:
      UserError: it is no such export, is damaged, or has no work of a GPU.
    """
    if path.suffix == ".nsys-rep":
        with tempfile.TemporaryDirectory() as folder:
            return read(export(path, folder), name)
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
            return _ranks(database, name)
    except sqlite3.Error as e:
        raise UserError(
            f"{name} is no export of nsys, or is damaged: {e}; export it again"
        ) from None


def _ranks(database: sqlite3.Connection, name: str) -> list[RankTrace]:
    tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master")}
    if not tables & {*DEVICE}:
        raise UserError(f"{name} has no work of a GPU: record with nsys profile --trace cuda,nvtx")
    launches, host = _calls(database) if "CUPTI_ACTIVITY_KIND_RUNTIME" in tables else ({}, [])
    marks, ranges = _ranges(database) if "NVTX_EVENTS" in tables else ([], [])
    threads = {call.stream for call in host}
    host += [call for call in ranges if call.stream in threads]
    names = {}
    if "TARGET_INFO_GPU" in tables:
        names = dict(database.execute("SELECT id, name FROM TARGET_INFO_GPU"))
    devices: dict[int, list[Event]] = {}
    for table in DEVICE:
        for device, event in _device(database, table, launches) if table in tables else ():
            devices.setdefault(device, []).append(event)
    if not devices:
        raise UserError(f"{name} has no work of a GPU: does its range cover a step?")
    clocks: dict[int, list[tuple[int, float]]] = {}
    if {"GPU_METRICS", "TARGET_INFO_GPU_METRICS"} <= tables:
        for device, time, value in database.execute(CLOCKS):
            mhz = value / 1e6 if value > 1e6 else value  # some versions export Hz
            clocks.setdefault(device, []).append((time, mhz))
    in_name = re.search(r"(?i)rank[-_]?(\d{1,6})(?!\d)", name)
    first = int(in_name[1]) if in_name else 0
    return [
        RankTrace(
            first if len(devices) == 1 else device, name, names.get(device, ""), events, host,
            marks, clocks=clocks.get(device, []),
        )
        for device, events in sorted(devices.items())
    ]  # fmt: skip


def _device(
    database: sqlite3.Connection, table: str, launches: dict[tuple[int, int], int]
) -> Iterator[tuple[int, Event]]:
    """Device and event of each row."""
    text, size = DEVICE[table]
    columns = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
    process = "t.globalPid" if "globalPid" in columns else "0"
    rows = database.execute(
        "SELECT t.start, t.end, t.deviceId, t.streamId, t.correlationId, "
        f"{process}, {text}, {size} FROM {table} t WHERE t.end >= t.start"
    )
    for start, end, device, stream, correlation, pid, name, moved in rows:
        name = str(name)
        if name.startswith("Memcpy "):
            name = f"Memcpy {COPIES.get(name[7:], name[7:])}"
        kind = COPY if name.startswith("Mem") else kind_of(name)
        launched = launches.get((pid >> 24, correlation), 0)
        work = Work(bytes=float(moved or 0))
        yield device, Event(start, end, kind, name, f"stream {stream}", "", "", launched, work)


def _calls(database: sqlite3.Connection) -> tuple[dict[tuple[int, int], int], list[Event]]:
    """Start of each launch by process and correlation, and the calls of CUDA that are long."""
    launches, calls = {}, []
    rows = database.execute(
        "SELECT t.start, t.end, t.globalTid, t.correlationId, s.value "
        "FROM CUPTI_ACTIVITY_KIND_RUNTIME t LEFT JOIN StringIds s ON s.id = t.nameId"
    )
    for start, end, thread, correlation, name in rows:
        launches[thread >> 24, correlation] = start  # the upper bits are the process
        if end - start >= SHORT or WAITS.search(str(name)):
            name = re.sub(r"_v\d+$", "", str(name))
            calls.append(Event(start, end, "host", name, f"thread {thread & 0xFFFFFF}"))
    return launches, calls


def _ranges(database: sqlite3.Connection) -> tuple[list[Mark], list[Event]]:
    """Steps and other ranges of NVTX."""
    marks, ranges = [], []
    rows = database.execute(
        "SELECT t.start, t.end, t.globalTid, coalesce(t.text, s.value, '') "
        "FROM NVTX_EVENTS t LEFT JOIN StringIds s ON s.id = t.textId WHERE t.end > t.start"
    )
    for start, end, thread, text in rows:
        if mark := MARK.match(str(text)):
            marks.append(Mark(int(mark[1]), start, end))
        elif end - start >= SHORT:
            ranges.append(
                Event(start, end, "host", str(text), f"thread {(thread or 0) & 0xFFFFFF}")
            )
    return marks, ranges
