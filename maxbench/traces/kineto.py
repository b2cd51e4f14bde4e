"""Profiles of PyTorch (Kineto): Chrome's JSON, of one rank each."""

import collections
import gzip
import math
import pathlib
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from maxbench.config.errors import UserError
from maxbench.traces.events import (
    COMMUNICATION,
    COPY,
    GEMM,
    MARK,
    NOTHING,
    SHORT,
    WAITS,
    Event,
    Mark,
    RankTrace,
    Work,
    kind_of,
)

BLOCK = 1 << 20  # bytes
# What a file says of its run, before its events or after them.
RANK = re.compile(r'"distributedInfo"\s*:\s*\{[^{}]*?"rank"\s*:\s*(\d{1,6})\b')
WORLD = re.compile(r'"distributedInfo"\s*:\s*\{[^{}]*?"world_size"\s*:\s*(\d{1,6})\b')
DEVICES = re.compile(r'"id"\s*:\s*(\d{1,3})\s*,\s*"name"\s*:\s*"([^"]+)"\s*,\s*"totalGlobalMem"')
KERNELS = {"kernel": "", "gpu_memcpy": COPY, "gpu_memset": COPY, "memcpy": COPY, "memset": COPY}
CALLS = {"cpu_op", "cuda_runtime", "cuda_driver", "user_annotation", "python_function"}
CALLS |= {"operator", "runtime"}
# GEMMs of PyTorch -> the place of their first factor among the inputs.
FACTORS = {
    "aten::mm": 0,
    "aten::addmm": 1,
    "aten::bmm": 0,
    "aten::baddbmm": 1,
    "aten::_scaled_mm": 0,
}
# PyTorch's type -> name in HLO, bytes, key of the peak rate.
TYPES = {
    "c10::BFloat16": ("bf16", 2, "bf16"),
    "c10::Half": ("f16", 2, "bf16"),
    "float": ("f32", 4, ""),
    "double": ("f64", 8, ""),
    "c10::Float8_e4m3fn": ("f8e4m3fn", 1, "fp8"),
    "c10::Float8_e5m2": ("f8e5m2", 1, "fp8"),
}
SIZES = {  # bytes of the types of collectives
    "BFloat16": 2, "Half": 2, "Float": 4, "Double": 8, "Int": 4, "Long": 8, "Byte": 1, "Char": 1,
    "Bool": 1, "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip
# Bytes that the slowest link of a collective carries, over the larger of its operand and result,
# for n ranks, as NCCL's tests define bus bandwidth.
BUS = {
    "allreduce": 2.0,
    "allgather": 1.0,
    "reduce_scatter": 1.0,
    "reducescatter": 1.0,
    "alltoall": 1.0,
}


def read(path: pathlib.Path, name: str, chunks: Iterator[bytes]) -> list[RankTrace]:
    """The rank of a file; one for each GPU of a process that has several.

    Args:
      name: of the file, for messages.
      chunks: its content, uncompressed. It is never whole in memory.

    Raises:
      UserError: it is no such profile, is not complete, or has no work of a GPU.
    """
    parts, first, last = _Parts(), b"", b""
    for chunk, events in _events(name, chunks):
        first, last = first or chunk, last[-BLOCK:] + chunk
        for event in events:
            parts.add(event)
    if not parts.seen:
        raise UserError(f"{name} has no events: it is empty, or no Chrome trace")
    if not parts.device_rows:
        xplane = next(path.parent.glob("*.xplane.pb"), None)
        hint = f"read {xplane.name} beside it" if xplane else "record with ProfilerActivity.CUDA"
        raise UserError(f"{name} has no kernels of a GPU; {hint}")
    return parts.ranks(name, (first + last).decode(errors="replace"))


def _events(name: str, chunks: Iterator[bytes]) -> Iterator[tuple[bytes, list[dict]]]:
    """Each chunk of a file, and the events that end in it."""
    import ijson

    found: Any = ijson.sendable_list()
    parser = None
    try:
        for chunk in chunks:
            if parser is None:
                listed = chunk.lstrip()[:1] == b"["
                prefix = "item" if listed else "traceEvents.item"
                parser = ijson.items_coro(found, prefix, use_float=True)
            parser.send(chunk)
            yield chunk, [event for event in found if isinstance(event, dict)]
            del found[:]
        if parser:
            parser.close()
    except ijson.JSONError as e:
        if "premature EOF" in str(e):
            raise UserError(f"{name} is truncated: copy it again, or record it again") from None
        text = " ".join(str(e).split())
        raise UserError(f"{name} is no JSON: {text:.80}") from None


class _Parts:
    """Events as they come in, which refer to others that may come later."""

    def __init__(self) -> None:
        self.seen = False
        self.device_rows: dict[int, list[tuple]] = collections.defaultdict(list)
        self.launches: dict[int, int] = {}  # correlation -> start of the call
        self.threads: dict[str, list[Event]] = collections.defaultdict(list)
        self.launching: set[str] = set()
        self.gemms: dict[int, Work] = {}  # External id -> work of the operator
        self.marks: list[Mark] = []

    def add(self, event: Mapping) -> None:
        self.seen = True
        category = str(event.get("cat") or "").lower()
        if event.get("ph") != "X" or not (category in KERNELS or category in CALLS):
            return
        try:
            start = round(event["ts"] * 1000)
            end = start + max(0, round(event["dur"] * 1000))
        except (KeyError, TypeError, ValueError, OverflowError):
            return
        given = event.get("args")
        args: dict = given if isinstance(given, dict) else {}
        name = sys.intern(str(event.get("name", "")))
        if category in KERNELS:
            device = args.get("device", event.get("pid"))
            device = device if isinstance(device, int) else 0
            self.device_rows[device].append(
                (start, end, KERNELS[category] or kind_of(name), name, args)
            )
        else:
            self._add_call(event, category, name, start, end, args)

    def _add_call(self, event, category, name, start, end, args) -> None:
        thread = sys.intern(f"thread {event.get('tid')}")
        mark = MARK.match(name) if category == "user_annotation" else None
        if mark:
            self.marks.append(Mark(int(mark[1]), start, end))
            self.launching.add(thread)
            return
        if "correlation" in args:
            self.launches[args["correlation"]] = start
            self.launching.add(thread)
        elif name in FACTORS and (work := _gemm(FACTORS[name], args)):
            self.gemms[args.get("External id", -1)] = work
        if end - start >= SHORT or WAITS.search(name):
            self.threads[thread].append(Event(start, end, "host", name, thread))

    def ranks(self, name: str, about: str) -> list[RankTrace]:
        """The traces of the GPUs.

        Args:
          about: the ends of the file, one of which describes the run.
        """
        known = {int(number): name for number, name in DEVICES.findall(about)}
        in_name = re.search(r"(?i)rank[-_]?(\d{1,6})(?!\d)", name)
        found = RANK.search(about)
        rank = int((found or in_name or (0, 0))[1])
        world = WORLD.search(about)
        host = [call for thread in sorted(self.launching) for call in self.threads[thread]]
        several = len(self.device_rows) > 1
        return [
            RankTrace(
                device if several else rank, name, known.get(device, ""), self._device_events(rows),
                host, self.marks, int(world[1]) if world else 0,
            )
            for device, rows in sorted(self.device_rows.items())
        ]  # fmt: skip

    def _device_events(self, rows: Sequence[tuple]) -> list[Event]:
        # An operator may launch several kernels of its GEMM, which share its work.
        shares = collections.Counter(
            args.get("External id") for _, _, kind, _, args in rows if kind == GEMM
        )
        events = []
        for start, end, kind, name, args in rows:
            work, own = NOTHING, args.get("External id")
            if kind == GEMM and own in self.gemms:
                whole = self.gemms[own]
                work = whole._replace(
                    flops=whole.flops / shares[own], bytes=whole.bytes / shares[own]
                )
            elif kind == COPY:
                work = Work(bytes=_number(args.get("bytes")))
            elif kind == COMMUNICATION:
                work = _collective(args)
            stream = sys.intern(f"stream {args.get('stream', '')}".strip())
            launched = self.launches.get(args.get("correlation", -1), 0)
            events.append(Event(start, end, kind, name, stream, "", "", launched, work))
        return events


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _gemm(first: int, args: Mapping) -> Work | None:
    """The work of a GEMM's operator, from the dimensions of its inputs; None without them."""
    try:
        a, b = args["Input Dims"][first : first + 2]
        (*batch, m, k), n = a, b[-1]
        dtype, size, peak = TYPES[args["Input type"][first]]
        count = math.prod(batch)
        flops, moved = 2.0 * m * n * k * count, float(size * count * (m * k + k * n + m * n))
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    shape = f"{dtype} {m}x{n}x{k}" + (f" x{count}" if count > 1 else "")
    return Work(shape, peak, flops, moved)


def _collective(args: Mapping) -> Work:
    """The work of a collective, from what PyTorch notes of it."""
    name = str(args.get("Collective name", "")).strip("_").removesuffix("_base")
    factor = next((x for known, x in BUS.items() if name.startswith(known)), 1.0)
    members, size = _number(args.get("Group size")), SIZES.get(str(args.get("dtype")), 0)
    elements = max(_number(args.get("In msg nelems")), _number(args.get("Out msg nelems")))
    group = str(args.get("Process Group Ranks") or "")
    group = "" if "..." in group else group
    moved = factor * elements * size * (members - 1) / members if members > 1 else 0.0
    gib = elements * size / 2**30
    shape = f"{name} {gib:.3f} GiB over {members:.0f}" if name and size else name
    return Work(shape, "", 0.0, moved, group)


def blocks(path: pathlib.Path, file: Any) -> Iterator[bytes]:
    """The content of an open file, uncompressed.

    Raises:
      UserError: its compressed data end early or are damaged.
    """
    opened: Any = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
    try:
        while block := opened.read(BLOCK):
            yield block
    except (EOFError, OSError, zlib.error) as e:
        raise UserError(f"{path.name} is truncated or damaged: {e}; copy it again") from None
