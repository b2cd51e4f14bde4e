"""XPlane profiles, of any JAX program on GPUs or CPUs, by jax.profiler.ProfileData."""

import collections
import gzip
import pathlib
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from maxbench.config.errors import UserError
from maxbench.traces.events import COPY, SHORT, WAITS, Event, RankTrace, Work, kind_of

DEVICE = re.compile(r"/device:GPU:(\d+)")
# HLO operations that run others, whose time is that of the others.
CONTROL = re.compile(r"^(while|conditional|call|async-(start|done))([.\d]|$)")
SIZE = re.compile(r"size:(\d+)")


def read(path: pathlib.Path, name: str) -> list[RankTrace]:
    """The devices of a file, in their order.

    Raises:
      UserError: it is no XPlane, is not complete, or has no work of a GPU or CPU device.
    """
    from jax.profiler import ProfileData

    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        data = ProfileData.from_serialized_xspace(content)
        planes = [*data.planes]
    except (OSError, EOFError, zlib.error) as e:
        raise UserError(f"{name} is truncated or damaged: {e}; copy it again") from None
    except Exception as e:  # of the parser, whose class no release promises
        text = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise UserError(f"{name} is no XPlane, or truncated: {text:.80}") from None
    host = next((plane for plane in planes if plane.name == "/host:CPU"), None)
    calls, launches = _host(host) if host else ([], {})
    ranks = [
        RankTrace(int(found[1]), name, _name_of(plane), events, calls)
        for plane in planes
        if (found := DEVICE.match(plane.name)) and (events := _device(plane, launches))
    ]
    if not ranks and host:
        ranks = [RankTrace(rank, name, "cpu", x, calls) for rank, x in sorted(_cpu(host).items())]
    if not ranks:
        raise UserError(f"{name} has no work of a GPU or CPU device; which steps does it cover?")
    return ranks


def _name_of(plane: Any) -> str:
    """Name of the GPU."""
    stats = dict(plane.stats)
    return str(stats.get("gpu_device_name", stats.get("device_vendor", "")))


def _device(plane: Any, launches: Mapping[int, int]) -> list[Event]:
    """Kernels and copies of a GPU."""
    events = []
    for line in plane.lines:
        if not line.name.startswith("Stream"):  # others are derived from these
            continue
        stream = sys.intern(line.name.partition("(")[0].replace("Stream #", "stream "))
        for event in line.events:
            stats = dict(event.stats)
            kind = kind_of(event.name)
            details = str(stats.get("memcpy_details", "") or stats.get("Memset_details", ""))
            size = SIZE.search(details)
            work = Work(bytes=float(size[1])) if size and kind == COPY else Work()
            events.append(
                Event(
                    *_times(event), kind, sys.intern(event.name), stream,
                    sys.intern(str(stats.get("hlo_op", ""))), "",
                    launches.get(stats.get("correlation_id", -1), 0), work,
                )
            )  # fmt: skip
    return events


def _times(event: Any) -> tuple[int, int]:
    """Start and end in ns; the start of some files is a fraction."""
    start = round(event.start_ns)
    return start, start + max(0, round(event.duration_ns))


def _host(plane: Any) -> tuple[list[Event], dict[int, int]]:
    """Calls of the threads that launch programs, and the start of each launch by correlation."""
    launches: dict[int, int] = {}
    calls: list[Event] = []
    for number, line in enumerate(plane.lines):
        thread, launching, own = f"thread {number}", False, []
        for event in line.events:
            launching = launching or "Execute" in event.name or event.name.startswith("Pjit")
            if event.duration_ns >= SHORT or WAITS.search(event.name):
                own.append(Event(*_times(event), "host", sys.intern(event.name), thread))
            for key, value in event.stats:
                if key == "correlation_id":
                    launches.setdefault(value, round(event.start_ns))
        if launching and not line.name.startswith("tf_"):
            calls += own
    return calls, launches


def _cpu(plane: Any) -> dict[int, list[Event]]:
    """HLO operations that the threads of XLA's CPU client ran, by device."""
    devices: dict[int, list[Event]] = collections.defaultdict(list)
    for number, line in enumerate(plane.lines):
        thread = f"thread {number}"
        for event, stats in _operations(line):
            op = sys.intern(str(stats["hlo_op"]))
            run = sys.intern(f"{stats.get('hlo_module', '')}:{stats.get('run_id', '')}")
            device = int(stats.get("device_ordinal", 0))
            devices[device].append(Event(*_times(event), kind_of(op), op, thread, op, run))
    return devices


def _operations(line: Any) -> Iterator[tuple[Any, dict]]:
    for event in line.events:
        stats = dict(event.stats)
        if "hlo_op" in stats and not CONTROL.match(str(stats["hlo_op"])):
            yield event, stats
