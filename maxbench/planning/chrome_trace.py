"""A simulated step in Chrome's trace format, which Perfetto opens."""

import json
import pathlib

from maxbench.cost_model.simulate import STREAMS, TraceEvent


def write(path: pathlib.Path, events: list[TraceEvent], title: str) -> None:
    """Writes the trace of a step."""
    path.write_text(json.dumps(trace_json(events, title)))


def trace_json(events: list[TraceEvent], title: str) -> dict:
    """Chrome trace: a complete event ('X') per TraceEvent in microseconds, a thread per stream."""

    def name(kind: str, tid: int, text: str) -> dict:
        return {"ph": "M", "pid": 0, "tid": tid, "name": kind, "args": {"name": text}}

    lines = [name("process_name", 0, title)]
    lines += [name("thread_name", i, stream) for i, stream in enumerate(STREAMS)]
    for event in events:
        sizes = {"bytes": event.bytes, "flops": event.flops}
        lines.append({
            "ph": "X",
            "pid": 0,
            "tid": STREAMS.index(event.stream),
            "ts": event.start * 1e6,
            "dur": event.seconds * 1e6,
            "name": event.name,
            "cat": event.kind,
            "args": {key: value for key, value in sizes.items() if value},
        })  # fmt: skip
    return {"traceEvents": lines, "displayTimeUnit": "ms"}
