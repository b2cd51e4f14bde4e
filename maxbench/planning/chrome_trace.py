"""A simulated step as files: Chrome's trace format, which Perfetto opens, and SVG."""

import json
import pathlib
import types
from typing import Any

from maxbench.cost_model.simulate import STREAMS, TraceEvent

COLORS = types.MappingProxyType({  # kind of an event -> fill
    "gemm": "#4878a8",
    "attention": "#e49444",
    "memory": "#85b6b2",
    "copy": "#b6992d",
    "amax": "#b07aa1",
    "wait": "#d1615d",
    "loop": "#9a9a9a",
    "communication": "#6a9f58",
    "offload": "#967662",
})  # fmt: skip


def write(path: str, events: list[TraceEvent], title: str) -> list[pathlib.Path]:
    """Writes the trace to `path` (.json) and a drawing of it next to it (.svg); returns both."""
    trace = pathlib.Path(path)
    trace.write_text(json.dumps(trace_json(events, title)))
    end = max(event.end for event in events)
    drawing = trace.with_suffix(".svg")
    drawing.write_text(
        render(
            "timeline.svg",
            title=title,
            streams=STREAMS,
            colors=COLORS,
            events=events,
            end=end,
            tick=round_step(end, 10),
        )
    )
    return [trace, drawing]


def render(template: str, **variables: Any) -> str:
    """A template of this folder, rendered."""
    import jinja2  # late: takes 50 ms, and a plan without drawings needs none

    text = pathlib.Path(__file__).with_name(template).read_text()
    compiled = jinja2.Template(text, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return compiled.render(**variables)


def round_step(end: float, count: int) -> float:
    """The smallest of 1, 2 and 5 times powers of ten that divides 0 to `end` into at most `count`
    intervals."""
    steps = (m * 10.0**e for e in range(-9, 13) for m in (1, 2, 5))
    return next(step for step in steps if end / step <= count)


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
