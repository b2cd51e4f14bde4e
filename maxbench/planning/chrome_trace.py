"""A played step as files: Chrome's trace format, which Perfetto opens, and SVG."""

import json
import pathlib

from maxbench.cost_model.simulate import STREAMS, TraceEvent

COLORS = {"gemm": "#4878a8", "attention": "#e49444", "memory": "#85b6b2", "copy": "#b6992d"}
COLORS |= {"amax": "#b07aa1", "wait": "#d1615d", "loop": "#9a9a9a", "communication": "#6a9f58"}
COLORS |= {"offload": "#967662"}


def write(path: str, spans: list[TraceEvent], title: str) -> list[pathlib.Path]:
    """Writes PATH (.json) and, beside it, the same as .svg; returns both paths."""
    trace = pathlib.Path(path)
    trace.write_text(json.dumps(events(spans, title)))
    end = max(span.end for span in spans)
    picture = trace.with_suffix(".svg")
    about = {"title": title, "streams": STREAMS, "colors": COLORS}
    about |= {"spans": spans, "end": end, "tick": round_step(end, 10)}
    picture.write_text(render("timeline.svg", **about))
    return [trace, picture]


def render(template: str, **about) -> str:
    """A picture of this folder, filled in."""
    import jinja2  # late: nothing else of a plan needs it, and it takes 50 ms

    text = pathlib.Path(__file__).with_name(template).read_text()
    made = jinja2.Template(text, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return made.render(**about)


def round_step(most: float, count: int) -> float:
    """The least of 1, 2 and 5 times powers of ten of which at most `count` reach up to most."""
    return next(s for e in range(-9, 13) for m in (1, 2, 5) if most / (s := m * 10.0**e) <= count)


def events(spans: list[TraceEvent], title: str) -> dict:
    """Trace events: a complete event ('X') per bar, microseconds, one thread per stream."""
    name = lambda kind, tid, text: {
        "ph": "M", "pid": 0, "tid": tid, "name": kind, "args": {"name": text}
    }  # fmt: skip
    found = [name("process_name", 0, title)]
    found += [name("thread_name", i, stream) for i, stream in enumerate(STREAMS)]
    for span in spans:
        where = {"ph": "X", "pid": 0, "tid": STREAMS.index(span.stream)}
        when = {"ts": span.start * 1e6, "dur": span.seconds * 1e6}
        about = {"bytes": span.bytes, "flops": span.flops}
        args = {name: value for name, value in about.items() if value}
        found.append(where | when | {"name": span.name, "cat": span.kind, "args": args})
    return {"traceEvents": found, "displayTimeUnit": "ms"}
