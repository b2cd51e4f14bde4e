"""The drawings of a plan: its streams at scale, and the files of --timeline."""

import bisect
import dataclasses
import math
import pathlib
import re
import types
from collections.abc import Iterator, Mapping, Sequence

from maxbench.cost_model import hlo
from maxbench.cost_model.simulate import STREAMS, TraceEvent
from maxbench.pipeline.schedule import schedule_for
from maxbench.planning import chrome_trace, explain, planner, svg
from maxbench.planning.prediction import Prediction
from maxbench.planning.svg import LEFT, RIGHT, ROW, WIDTH, Shape, Text

MORE = re.compile(r"(\d+) more iterations of ")  # name of an event
PANELS = 3  # the step, an iteration of its longest loop, an iteration of the longest loop in that
LONG = 0.2  # of a panel, from which on a loop has a panel
AXIS = WIDTH - LEFT - RIGHT  # pixels of a time axis
SAMPLES = 6  # of a column of a pixel
TOOLTIP = 2  # pixels of an event that has one
COLORS = types.MappingProxyType({  # kind of an event -> fill
    "gemm": "#4878a8",
    "attention": "#e49444",
    "memory": "#85b6b2",
    "copy": "#b6992d",
    "amax": "#a87c9f",
    "communication": "#6a9f58",
    "offload": "#967662",
    "wait": svg.IDLE,
    "others": svg.GREY,
})  # fmt: skip
NAMES = {"memory": "memory-bound", "amax": "passes for scales", "wait": "waiting"}


def draw(p: Prediction, path: str) -> list[pathlib.Path]:
    """Writes the trace to `path` (.json), and drawings next to it: the streams (.svg), memory
    (.memory.svg), operations (.explain.svg) and, of a run's pipeline, the schedule (.schedule.svg).
    Returns all paths."""
    program = hlo.parse(p.compiled.text)
    timeline = p.simulate(program, record=True)
    events = [*timeline.events, _slowest(timeline.events, timeline.seconds)]
    live = p.liveness(program)
    total = p.compiled.arguments + p.compiled.temporaries
    texts = {
        "": streams({p.name: events}),
        ".memory": svg.memory(live, p.name, total, p.memory.capacity),
        ".explain": explain.explain(p).svg(),
    }
    if isinstance(p, planner.Plan) and p.ticks:
        texts[".schedule"] = svg.schedule(schedule_for(p.run), p.name)
    trace = pathlib.Path(path)
    chrome_trace.write(trace, events, p.name)
    for name, text in texts.items():
        trace.with_suffix(f"{name}.svg").write_text(text)
    return [trace, *(trace.with_suffix(f"{name}.svg") for name in texts)]


def _slowest(events: Sequence[TraceEvent], end: float) -> TraceEvent:
    """The wait for the slowest GPU, with which a step ends."""
    begin = max(event.end for event in events)
    return TraceEvent("compute", "wait for the slowest GPU", "wait", begin, end - begin)


@dataclasses.dataclass(frozen=True)
class Repeats:
    """Iterations of a loop that are not recorded: they are as the one before them."""

    start: float
    end: float
    period: float

    @property
    def before(self) -> tuple[float, float]:
        """Start and end of the recorded iteration."""
        return self.start - self.period, self.start


class Recording:
    """Recorded events of a step, and those that follow from them."""

    def __init__(self, events: Sequence[TraceEvent]):
        self.loops = [
            Repeats(e.start, e.end, e.seconds / int(more[1]))
            for e in events
            if (more := MORE.match(e.name)) and e.seconds
        ]
        self.loop_starts = [loop.start for loop in self.loops]
        own = [e for e in events if not MORE.match(e.name)]
        of = lambda stream: sorted((e for e in own if e.stream == stream), key=lambda e: e.start)
        self.events = {stream: of(stream) for stream in STREAMS}
        self.starts = {stream: [e.start for e in es] for stream, es in self.events.items()}
        self.end = max(e.end for e in events)

    def event(self, stream: str, time: float) -> TraceEvent | None:
        """The event of a stream at a time, or of the iteration that stands for it."""
        while (i := bisect.bisect_right(self.loop_starts, time) - 1) >= 0:
            loop = self.loops[i]
            if time >= loop.end or loop.period > loop.start:
                break
            time = loop.start - loop.period + (time - loop.start) % loop.period
        i = bisect.bisect_right(self.starts[stream], time) - 1
        event = self.events[stream][i] if i >= 0 else None
        return event if event and time < event.end else None

    def windows(self) -> Iterator[tuple[float, float]]:
        """Start and end of each panel."""
        window = 0.0, self.end
        for _ in range(PANELS):
            yield window
            begin, end = window
            inside = [x for x in self.loops if begin <= x.start and x.end <= end + 1e-9]
            longest = max(inside, key=lambda x: x.end - x.start, default=None)
            if longest is None or longest.end - longest.start < LONG * (end - begin):
                return
            window = longest.before


def color_of(event: TraceEvent) -> str:
    """The key of COLORS of an event."""
    if event.kind in COLORS:
        return event.kind
    return "communication" if event.stream == "communication" else "others"


def streams(steps: Mapping[str, Sequence[TraceEvent]]) -> str:
    """The streams of steps by title, each at scale, and below it one iteration of its longest
    loop."""
    shapes: list[Shape] = []
    texts: list[Text] = []
    used: set[str] = set()
    y = 0.0
    for title, events in steps.items():
        recording = Recording(events)
        y = _step(recording, title, y, shapes, texts)
        used |= {color_of(event) for own in recording.events.values() for event in own}
    entries = [(color, NAMES.get(kind, kind)) for kind, color in COLORS.items() if kind in used]
    keys, key_texts = svg.legend(entries, y + 10)
    height = y + 20 + 22 * math.ceil(len(entries) / 3)
    return svg.svg(height, shapes + keys, texts + key_texts)


def _step(
    recording: Recording, title: str, y: float, shapes: list[Shape], texts: list[Text]
) -> float:
    """Adds the panels of a step from `y` down; returns where they end."""
    rows = [stream for stream in STREAMS if recording.events[stream]]
    windows = [*recording.windows()]
    for i, (begin, end) in enumerate(windows):
        unit, scale = ("s", 1.0) if end - begin >= 0.1 else ("ms", 1e3)
        what = "one iteration of its longest loop, outlined above" if i else title
        texts.append(Text(8, y + 18, f"{what}: {(end - begin) * scale:.3f} {unit}"))
        top, bottom = y + 30, y + 30 + ROW * len(rows)
        x = lambda t, begin=begin, end=end: LEFT + (t - begin) / (end - begin) * AXIS
        for value in svg.axis_values((end - begin) * scale, 10):
            at = x(begin + value / scale)
            shapes.append(Shape(f"M{at:.1f} {top - 4}V{bottom}", kind="line"))
            texts.append(Text(at, bottom + 14, f"{value:g} {unit}", "middle"))
        for row, stream in enumerate(rows):
            texts.append(Text(8, top + row * ROW + 18, stream))
            shapes += _bars(recording, stream, begin, end, top + row * ROW)
        if windows[i + 1 :]:
            left, right = map(x, windows[i + 1])
            outline = svg.rectangle(left - 1, top - 3, right - left + 2, bottom - top + 2)
            shapes.append(Shape(outline, kind="limit"))
        y = bottom + 24
    return y


def _bars(
    recording: Recording, stream: str, begin: float, end: float, top: float
) -> Iterator[Shape]:
    """A stream from `begin` to `end`: a column per pixel, divided by the kinds that run in it, and
    a tooltip for each event that is wide enough."""
    height, pixel = ROW - 4, (end - begin) / AXIS
    paths: dict[str, list[str]] = {}
    for column in range(AXIS):
        # Offsets by the golden ratio: iterations of any period are sampled evenly.
        times = (column + (column * SAMPLES + i) * 0.618034 % 1 for i in range(SAMPLES))
        found = [recording.event(stream, begin + time * pixel) for time in times]
        kinds = sorted((color_of(e) for e in found if e), key=[*COLORS].index)
        y = top + height
        for kind in dict.fromkeys(kinds):
            part = height * kinds.count(kind) / SAMPLES
            y -= part
            paths.setdefault(kind, []).append(f"M{LEFT + column} {y:.1f}h1v{part:.1f}h-1z")
    for kind, parts in paths.items():
        yield Shape("".join(parts), COLORS[kind])
    for event in recording.events[stream]:
        if begin <= event.start and event.end <= end and event.seconds >= TOOLTIP * pixel:
            at, width = LEFT + (event.start - begin) / pixel, event.seconds / pixel
            label = f"{event.name}: {event.seconds * 1e3:.3f} ms"
            yield Shape(svg.rectangle(at, top, width, height), COLORS[color_of(event)], label)
