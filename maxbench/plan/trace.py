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
    scale, left = (wide - 140) / end, 120
    text = lambda x, y, t: (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="13" font-family="sans-serif">'
        f"{html.escape(t)}</text>"
    )
    height = 60 + row * len(STREAMS)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{height + 30}">',
        text(8, 20, f"{title}: {end:.3f} s"),
    ]
    for i, stream in enumerate(STREAMS):
        lines.append(text(8, 60 + row * i, stream))
    for s in spans:
        if s.seconds * scale >= 0.1:
            y = 40 + row * STREAMS.index(s.stream)
            lines.append(
                f'<rect x="{left + s.start * scale:.2f}" y="{y}" '
                f'width="{s.seconds * scale:.2f}" height="{row - 12}" '
                f'fill="{COLORS.get(s.kind, COMMUNICATION)}"/>'
            )
    kinds = [*COLORS.items(), ("communication", COMMUNICATION)]
    for i, (kind, color) in enumerate(kinds):
        x = left + 150 * i
        lines.append(f'<rect x="{x}" y="{height}" width="14" height="14" fill="{color}"/>')
        lines.append(text(x + 20, height + 12, {"loop": "more iterations"}.get(kind, kind)))
    return "\n".join([*lines, "</svg>"])
