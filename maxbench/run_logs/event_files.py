"""TensorBoard event files of any program: records of scalars by tag and step.

An event file is a sequence of records: length (8 bytes), CRC of the length (4), data, CRC of the
data (4), all little-endian (TensorFlow, core/lib/io/record_writer.cc). The data is a protocol
buffer Event (core/util/event.proto), of which wall_time, step and summary values are read.
"""

import itertools
import pathlib
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from maxbench.run_logs import log_files
from maxbench.run_logs.record import Given, Origin, RunRecord
from maxbench.run_logs.scalar_tags import field_of, fields_of, is_evaluation
from maxbench.run_logs.step_series import StepSeries, several_runs
from maxbench.run_logs.workload_name import complete

NAME = "tfevents"  # in the name of an event file
LONGEST = 1 << 16  # bytes of a record; longer ones are images or histograms
BLOCKS = 64  # of 4 MiB of a file that are read
FLOAT, DOUBLE = 1, 2  # TensorFlow's numbers of types


class Scalar(NamedTuple):
    """A value of a tag at a step."""

    tag: str
    step: int
    value: float
    wall_time: float


def read_event_files(paths: Sequence[pathlib.Path], given: Given) -> RunRecord | None:
    """The run whose event files are in one folder; None if they have no step time and no rate.

    Raises:
      OSError: a file cannot be read.
    """
    first = paths[0]
    name = next((part for part in reversed(first.parts[:-1]) if part not in _COMMON), first.name)
    record = RunRecord(path=first, name=name, source="tensorboard", status="done")
    record.started = max(path.stat().st_mtime for path in paths)
    runs = Runs()
    for path in sorted(paths, key=lambda path: path.name):  # which has the time of its creation
        blocks = log_files.blocks(path)
        data = b"".join(itertools.islice(blocks, BLOCKS))
        if next(blocks, b""):
            record.unread.append(f"{path.name}: only its first {len(data) >> 20} MiB are read")
        for item in scalars(data, record):
            runs.add(item)
    values = runs.values
    record.inferred += several_runs(runs.count)
    series = StepSeries(means=True)
    series.evaluations = {step for tag in values if is_evaluation(tag) for step in values[tag]}
    for tag, (field, factor) in fields_of(values).items():
        for step, (value, wall_time) in values[tag].items():
            series.steps.setdefault(step, {"elapsed": wall_time})[field] = value * factor
    held_out = [tag for tag in sorted(values) if is_evaluation(tag) and "loss" in tag.lower()]
    for tag in held_out[:1]:
        record.eval_loss = {step: value for step, (value, _) in sorted(values[tag].items())}
    fill(record, series, sorted(values), given)
    return record if values or record.unread else None


class Runs:
    """Values of the last of several runs that write to one folder.

    A tag whose steps begin again, later than all else was written, is of another run; one that
    begins at a later step is of a run that was resumed.

    Attributes:
      count: of the runs so far.
      values: tag -> step -> value and wall time.
    """

    def __init__(self) -> None:
        self.count, self.newest = 1, 0.0
        self.values: dict[str, dict[int, tuple[float, float]]] = {}
        self._last: dict[str, int] = {}  # tag -> its last step

    def add(self, item: Scalar) -> None:
        goes_back = item.step < self._last.get(item.tag, -1) and item.wall_time > self.newest
        if goes_back and item.step <= min(self.values[item.tag]) and field_of(item.tag):
            self.values, self._last, self.count = {}, {}, self.count + 1
        self.newest, self._last[item.tag] = max(self.newest, item.wall_time), item.step
        self.values.setdefault(item.tag, {})[item.step] = (item.value, item.wall_time)


_COMMON = ("", "/", "tb_logs", "tensorboard", "tb", "logs", "runs", "version_0", "default")


def fill(record: RunRecord, series: StepSeries, tags: Sequence[str], given: Given) -> None:
    """Completes a record from its series; says which tags there are if none has a step time."""
    gpus = [int(f["gpus"]) for f in series.steps.values() if 0 < f.get("gpus", 0) < 1e7]
    record.learn(Origin.LOG, gpus=max(gpus, default=0))
    loss = {i: f["loss"] for i, f in series.steps.items() if "loss" in f}
    # Step times are known: rows of other values have no step.
    unused = {"gpus", "elapsed"} if series.has("step_s") else {"gpus"}
    steps, series.steps = series.steps, {}
    for step, fields in steps.items():
        series.add(step, 0, {k: v for k, v in fields.items() if k not in unused})
    series.set_work(record)
    complete(record, f"{record.path.parent} {record.name}", given)
    if series.steps:
        series.fill(record)
        record.loss = dict(sorted({**loss, **record.loss}.items()))
        return
    record.status, record.loss = "skipped", loss
    shown = ", ".join(tags[:8]) + (f" and {len(tags) - 8} more" if len(tags) > 8 else "")
    record.reason = f"no tag of a step time; its tags are {shown or 'none'}"


def scalars(data: bytes, record: RunRecord) -> Iterator[Scalar]:
    """Scalars of an event file. Damaged records are left out, and noted in the RunRecord."""
    at = damaged = 0
    while at + 12 <= len(data):
        size, check = struct.unpack_from("<QI", data, at)
        if crc(data[at : at + 8]) != check or size > len(data) - at - 16:
            if size <= len(data) and crc(data[at : at + 8]) == check:
                break  # the last record is incomplete: the program writes it
            damaged += 1
            at = _next_record(data, at + 1)
            continue
        body = data[at + 12 : at + 12 + size]
        (check,) = struct.unpack_from("<I", data, at + 12 + size)
        at += size + 16
        if size > LONGEST:
            continue
        if crc(body) != check:
            damaged += 1
            continue
        yield from _event(body)
    if damaged:
        record.unread.append(f"{damaged} damaged places in its event file")


def _next_record(data: bytes, start: int) -> int:
    """The next place where a length has its CRC: the records behind a damaged one are read."""
    at = start
    while (at := data.find(b"\0\0\0\0", at + 4)) >= 0:
        # The upper half of a length is zero; further zeros may precede it.
        for place in range(at - 4, min(at + 1, len(data) - 12)):
            size, check = struct.unpack_from("<QI", data, place)
            if place >= start and 0 < size < len(data) and crc(data[place : place + 8]) == check:
                return place
        at -= 3
    return len(data)


def _event(body: bytes) -> Iterator[Scalar]:
    """The scalars of an Event; nothing if it is malformed."""
    fields = [*_fields(body)]
    wall_time = next((_double(v) for n, v in fields if n == 1 and isinstance(v, bytes)), 0.0)
    step = next((v for n, v in fields if n == 2 and isinstance(v, int)), 0)
    if not 0 <= step < 1 << 40:
        return
    for summary in (v for n, v in fields if n == 5 and isinstance(v, bytes)):
        for value in (v for n, v in _fields(summary) if n == 1 and isinstance(v, bytes)):
            if (scalar := _scalar(value)) and scalar[0]:
                yield Scalar(scalar[0], step, scalar[1], wall_time)


def _scalar(data: bytes) -> tuple[str, float] | None:
    """Tag and number of a Summary.Value, whose number may be a tensor of one element."""
    tag, number = "", None
    for name, value in _fields(data):
        if not isinstance(value, bytes):
            continue
        if name == 1:
            tag = value.decode("utf-8", "replace")
        elif name == 2 and len(value) == 4:
            number = struct.unpack("<f", value)[0]
        elif name == 8:
            number = _tensor(value)
    return None if number is None else (tag, number)


def _tensor(data: bytes) -> float | None:
    """The element of a TensorProto with one float or double."""
    fields = dict(_fields(data))
    kind, content = fields.get(1), fields.get(4) or fields.get(5) or fields.get(6)
    form = {FLOAT: "<f", DOUBLE: "<d"}.get(kind if isinstance(kind, int) else 0)
    if not form or not isinstance(content, bytes) or len(content) != struct.calcsize(form):
        return None
    return struct.unpack(form, content)[0]


def _double(data: bytes) -> float:
    return struct.unpack("<d", data)[0] if len(data) == 8 else 0.0


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a message's fields; those of fixed size are bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind, size = key & 7, 0
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        if not 0 <= size <= len(data) - at or kind not in (1, 2, 5):
            return
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of variable length, and the place behind it."""
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            break
    return value, at


def _table() -> tuple[int, ...]:
    """The table of CRC-32C (Castagnoli)."""
    entries = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        entries.append(value)
    return tuple(entries)


_CRC = _table()


def crc(data: bytes) -> int:
    """The masked CRC-32C of a record."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _CRC[(value ^ byte) & 0xFF] ^ value >> 8
    value ^= 0xFFFFFFFF
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF
