"""A played step as files: Chrome's trace format, which Perfetto opens, and SVG."""

import html
import json
import pathlib

from maxbench.plan.simulate import STREAMS, Span

COLORS = {"gemm": "#4878a8", "attention": "#e49444", "memory": "#85b6b2"}
COLORS |= {"wait": "#d1615d", "loop": "#d8d8d8"}
COMMUNICATION = "#6a9f58"


def write(path: str, spans: list[Span], title: str) -> list[pathlib.Path]:
    """Writes PATH (.json) and, beside it, the same as .svg; returns both paths."""
    trace = pathlib.Path(path)
    trace.write_text(json.dumps(events(spans, title)))
    picture = trace.with_suffix(".svg")
    picture.write_text(svg(spans, title))
    return [trace, picture]


def events(spans: list[Span], title: str) -> dict:
    """Trace events: a complete event ('X') per bar, microseconds, one thread per stream."""
    name = lambda kind, tid, text: {
        "ph": "M", "pid": 0, "tid": tid, "name": kind, "args": {"name": text}
    }  # fmt: skip
    found = [name("process_name", 0, title)]
    found += [name("thread_name", i, stream) for i, stream in enumerate(STREAMS)]
    for span in spans:
        where = {"ph": "X", "pid": 0, "tid": STREAMS.index(span.stream)}
        when = {"ts": span.start * 1e6, "dur": span.seconds * 1e6}
        found.append(where | when | {"name": span.name, "cat": span.kind})
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def svg(spans: list[Span], title: str, wide: int = 1600, row: int = 40) -> str:
    """Bars over time, one row per stream. Bars thinner than a tenth of a pixel are left out."""
    end = max((s.start + s.seconds for s in spans), default=1.0)
    scale, left, height = (wide - 140) / end, 120, 60 + row * len(STREAMS)
    text = lambda x, y, t: (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="13" font-family="sans-serif">'
        f"{html.escape(t)}</text>"
    )
    bar = lambda x, y, width, height, kind: (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" '
        f'fill="{COLORS.get(kind, COMMUNICATION)}"/>'
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{height + 30}">',
        text(8, 20, f"{title}: {end:.3f} s"),
        *(text(8, 60 + row * i, stream) for i, stream in enumerate(STREAMS)),
    ]
    for s in spans:
        x, width = f"{left + s.start * scale:.2f}", s.seconds * scale
        if width >= 0.1:
            y = 40 + row * STREAMS.index(s.stream)
            lines.append(bar(x, y, f"{width:.2f}", row - 12, s.kind))
    for i, kind in enumerate([*COLORS, "communication"]):
        lines.append(bar(left + 150 * i, height, 14, 14, kind))
        name = "more iterations" if kind == "loop" else kind
        lines.append(text(left + 150 * i + 20, height + 12, name))
    return "\n".join([*lines, "</svg>"])
