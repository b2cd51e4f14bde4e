"""Drawings of a plan as SVG: memory over a step, a pipeline's schedule, scaling curves."""

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence

from maxbench.cost_model import hlo
from maxbench.cost_model.buffer_liveness import Liveness
from maxbench.cost_model.memory import GIB
from maxbench.pipeline.schedule import Schedule, schedule_for
from maxbench.planning import chrome_trace, explain, planner
from maxbench.planning.prediction import Prediction

COLORS = ("#4878a8", "#e49444", "#85b6b2", "#d1615d", "#6a9f58", "#b6992d", "#a87c9f", "#967662")
GREY, IDLE = "#9a9a9a", "#d1615d"
WIDTH, LEFT, TOP = 1200, 90, 40  # of a drawing; margins of its axes
HEIGHT = 400  # of the axes
ROW = 30  # height of a stage
MAX_TICKS = 160  # of a schedule; from a longer one the first and last are drawn


@dataclasses.dataclass(frozen=True)
class Shape:
    """An SVG path `d`, filled; of kind 'line' or 'curve', stroked. The label is its tooltip."""

    d: str
    color: str = ""
    label: str = ""
    kind: str = ""


@dataclasses.dataclass(frozen=True)
class Text:
    x: float
    y: float
    text: str
    anchor: str = "start"


def svg(width: float, height: float, shapes: Sequence[Shape], texts: Sequence[Text]) -> str:
    """An SVG document."""
    return chrome_trace.render(
        "picture.svg", width=width, height=height, shapes=shapes, texts=texts
    )


def axis_values(end: float, count: int = 8) -> list[float]:
    """At most count + 1 round numbers from 0 to `end`."""
    step = chrome_trace.round_step(end, count)
    return [i * step for i in range(int(end / step) + 1)]


def rectangle(x: float, y: float, width: float, height: float) -> str:
    """Path of a rectangle."""
    return f"M{x:.2f} {y:.2f}h{width:.2f}v{height:.2f}h{-width:.2f}z"


def legend(entries: Sequence[tuple[str, str]], y: float) -> tuple[list[Shape], list[Text]]:
    """(color, label) entries, three in a row, from `y` down."""
    shapes, texts = [], []
    for i, (color, label) in enumerate(entries):
        x, row = LEFT + i % 3 * 370, y + i // 3 * 22
        shapes.append(Shape(rectangle(x, row, 14, 14), color))
        texts.append(Text(x + 20, row + 12, label))
    return shapes, texts


def draw(p: Prediction, path: str) -> list[pathlib.Path]:
    """Writes the trace to `path` (.json), and drawings next to it: the streams (.svg), memory
    (.memory.svg), operations (.explain.svg) and, of a run's pipeline, the schedule (.schedule.svg).
    Returns all paths."""
    program = hlo.parse(p.compiled.text)
    timeline = p.simulate(program, record=True)
    paths = chrome_trace.write(path, timeline.events, p.name)
    live = p.liveness(program)
    total = p.compiled.arguments + p.compiled.temporaries
    drawings = {
        "memory": memory(live, p.name, total, p.memory.capacity),
        "explain": explain.explain(p).svg(),
    }
    if isinstance(p, planner.Plan) and p.ticks:
        drawings["schedule"] = schedule(schedule_for(p.run), p.name)
    for name, drawing in drawings.items():
        paths.append(pathlib.Path(path).with_suffix(f".{name}.svg"))
        paths[-1].write_text(drawing)
    return paths


def memory(live: Liveness, title: str, compiled: int, capacity: int) -> str:
    """Live bytes over a step, stacked by buffer name, the largest at the peak at the bottom.

    Args:
      compiled: bytes of the compiler's buffer assignment.
      capacity: bytes that a step may use.
    """
    peak_step, names = live.peak()
    shown, total = [*names][: len(COLORS)], live.total()
    columns = WIDTH - LEFT - 20
    groups, end = _columns(live.seconds, columns)
    top_value = max(max(total), capacity)
    y = lambda size: TOP + HEIGHT * (1 - size / top_value)
    shapes, base = [], [0] * columns
    entries = [(COLORS[i], name) for i, name in enumerate(shown)] + [(GREY, "everything else")]
    for color, name in entries:
        is_in_area = lambda b, name=name: b.name == name if name in shown else b.name not in shown
        sizes = Liveness([b for b in live.buffers if is_in_area(b)], live.seconds).total()
        highest = [max(sizes[step] for step in group) for group in groups]
        top = [low + size for low, size in zip(base, highest, strict=True)]
        shapes.append(Shape(_area(base, top, y), color, f"{name}: {names.get(name, 0) / GIB:.2f}"))
        base = top
    x = LEFT + next(i for i, group in enumerate(groups) if peak_step in group)
    head = f"{title}: {max(total) / GIB:.1f} GiB at the peak; the compiler's buffer assignment has"
    texts = [
        Text(8, 20, f"{head} {compiled / GIB:.1f} GiB"),
        Text(x, y(top_value) - 4, "peak", "middle"),
    ]
    shapes.append(Shape(f"M{x} {TOP}V{TOP + HEIGHT}", kind="line"))
    shapes.append(Shape(f"M{LEFT} {y(capacity):.1f}H{LEFT + columns}", IDLE, "capacity", "curve"))
    for gib in axis_values(top_value / GIB):
        texts.append(Text(LEFT - 8, y(gib * GIB) + 4, f"{gib:g} GiB", "end"))
    for s in axis_values(end):
        texts.append(Text(LEFT + s / end * columns, TOP + HEIGHT + 18, f"{s:g} s", "middle"))
    at_peak = {name: names.get(name, 0) for name in shown}
    at_peak["everything else"] = max(total) - sum(at_peak.values())
    labels = [(color, f"{at_peak[name] / GIB:.2f} GiB {name}"[:52]) for color, name in entries]
    keys, key_texts = legend(labels, TOP + HEIGHT + 35)
    height = TOP + HEIGHT + 45 + 22 * math.ceil(len(labels) / 3)
    return svg(WIDTH, height, shapes + keys, texts + key_texts)


def _columns(seconds: Sequence[float], columns: int) -> tuple[list[range], float]:
    """Indices of `seconds` in each column of a drawing, at least one, and the sum of `seconds`."""
    end = sum(seconds)
    starts, clock = [], 0.0
    for duration in seconds:
        starts.append(min(columns - 1, int(clock / end * columns)))
        clock += duration
    groups, last = [], 0
    for column in range(columns):
        first = last
        while last < len(starts) and starts[last] <= column:
            last += 1
        groups.append(range(first, last) if last > first else range(last - 1, last))
    return groups, end


def _area(low: Sequence[float], high: Sequence[float], y: Callable[[float], float]) -> str:
    """Path of the area between two series, one value per column."""
    forward = "L".join(f"{LEFT + i} {y(v):.1f}" for i, v in enumerate(high))
    back = "L".join(f"{LEFT + i} {y(v):.1f}" for i, v in reversed([*enumerate(low)]))
    return f"M{forward}L{back}z"


def schedule(s: Schedule, title: str) -> str:
    """Stages as rows, ticks as columns as wide as the work of their busiest stage; the rest of a
    stage's tick is bubble. A backward pass is twice as wide as a forward pass."""
    ticks = [*range(s.ticks)]
    if s.ticks > MAX_TICKS:
        ticks = ticks[: MAX_TICKS // 2] + ticks[-MAX_TICKS // 2 :]
    cost = {"fwd": 1, "bwd": 2}
    microbatch = {way: s.column(f"{way}_microbatch") for way in cost}
    chunk = {way: s.column(f"{way}_chunk") for way in cost}
    busy = lambda t, p: sum(cost[way] for way in cost if microbatch[way][t, p] >= 0)
    widths = [max(busy(t, p) for p in range(s.pp)) for t in ticks]
    unit, shapes = (WIDTH - LEFT - 20) / sum(widths), []
    texts = [Text(8, 20, f"{title}, {s.name}: {s.ticks} ticks, bubble {s.bubble():.1%}")]
    bottom, x = TOP + s.pp * ROW, float(LEFT)
    for i, (t, width) in enumerate(zip(ticks, widths, strict=True)):
        if i == len(ticks) // 2 < s.ticks // 2:
            shapes.append(Shape(f"M{x:.1f} {TOP - 6}V{bottom}", kind="line"))
            texts.append(Text(x, TOP - 8, f"{s.ticks - len(ticks)} ticks left out", "middle"))
        for p in range(s.pp):
            left, y = x, TOP + p * ROW
            for color, way in zip(COLORS, cost, strict=False):
                if (m := microbatch[way][t, p]) >= 0:
                    label = f"tick {t}: microbatch {m}, chunk {chunk[way][t, p]}"
                    path = rectangle(left, y, unit * cost[way], ROW - 4)
                    shapes.append(Shape(path, color, label))
                    left += unit * cost[way]
            if left < x + unit * (width - 0.5):
                bubble = rectangle(left, y, x + unit * width - left, ROW - 4)
                shapes.append(Shape(bubble, IDLE, f"tick {t}: bubble"))
        x += unit * width
    texts += [Text(8, TOP + p * ROW + 18, f"stage {p}") for p in range(s.pp)]
    entries = [(COLORS[0], "forward"), (COLORS[1], "backward"), (IDLE, "bubble")]
    keys, key_texts = legend(entries, bottom + 10)
    return svg(WIDTH, bottom + 40, shapes + keys, texts + key_texts)


def bars_and_roofline(
    title: str,
    parts: Mapping[str, Mapping[str, float]],
    points: Sequence[tuple[float, float, float, str]],
    peak_tflops: float,
    memory_gbytes_per_s: float,
) -> str:
    """A stacked bar per pass of a step, and a roofline of its operations.

    Args:
      parts: pass -> part -> seconds.
      points: FLOPs per byte, TFLOP/s, seconds of the step and label of each operation; the area of
        its square is proportional to the seconds.
      peak_tflops, memory_gbytes_per_s: the roofs.
    """
    total = sum(sum(x.values()) for x in parts.values())
    names = list(dict.fromkeys(name for x in parts.values() for name in x))
    color = dict(zip(names, itertools.cycle(COLORS), strict=False))
    shapes, texts = [], [Text(8, 20, f"{title}: {total:.3f} s a step")]
    longest = max(sum(x.values()) for x in parts.values())
    width = (WIDTH - LEFT - 90) / longest
    for i, (which, x) in enumerate(parts.items()):
        y, left = TOP + i * ROW, float(LEFT + 30)
        seconds = sum(x.values())
        texts.append(Text(8, y + 18, which))
        for name, s in x.items():
            label = f"{which} {name}: {s:.3f} s, {s / total:.1%}"
            shapes.append(Shape(rectangle(left, y, s * width, ROW - 4), color[name], label))
            left += s * width
        texts.append(Text(left + 4, y + 18, f"{seconds / total:.0%}"))
    below = TOP + len(parts) * ROW + 10
    keys, key_texts = legend([(color[name], name[:48]) for name in names], below)
    top = below + 22 * math.ceil(len(names) / 3) + 40
    roof, roof_texts = _roofline(points, peak_tflops, memory_gbytes_per_s, top, total)
    return svg(WIDTH, top + HEIGHT + 60, shapes + keys + roof, texts + key_texts + roof_texts)


def _roofline(
    points: Sequence[tuple[float, float, float, str]],
    peak_tflops: float,
    memory_gbytes_per_s: float,
    top: float,
    total: float,
) -> tuple[list[Shape], list[Text]]:
    """Shapes and texts of bars_and_roofline()'s lower half, from `top` down."""
    low_x, high_x = 10.0, 1e5
    high_y = 10.0 ** math.ceil(math.log10(peak_tflops))
    low_y = high_y / 100
    scale = (WIDTH - LEFT - 60) / math.log(high_x / low_x)
    x = lambda v: LEFT + scale * math.log(min(max(v, low_x), high_x) / low_x)
    y = lambda v: top + HEIGHT * (1 - math.log(max(v, low_y) / low_y) / math.log(high_y / low_y))
    shapes, texts = [], [Text(8, top - 14, "TFLOP/s over FLOPs per byte of memory")]
    for e in range(1, 6):
        shapes.append(Shape(f"M{x(10.0**e):.1f} {top}V{top + HEIGHT}", kind="line"))
        texts.append(Text(x(10.0**e), top + HEIGHT + 18, f"{10.0**e:g}", "middle"))
    for e in range(3):
        v = low_y * 10.0**e
        shapes.append(Shape(f"M{LEFT} {y(v):.1f}H{WIDTH - 60}", kind="line"))
        texts.append(Text(LEFT - 8, y(v) + 4, f"{v:g}", "end"))
    ridge = peak_tflops * 1e3 / memory_gbytes_per_s  # FLOPs per byte
    start = max(low_x, low_y * 1e3 / memory_gbytes_per_s)
    roof = f"M{x(start):.1f} {y(start * memory_gbytes_per_s / 1e3):.1f}"
    roof += f"L{x(ridge):.1f} {y(peak_tflops):.1f}"
    label = f"{memory_gbytes_per_s:g} GB/s, {peak_tflops:g} TFLOP/s"
    shapes.append(Shape(f"{roof}H{WIDTH - 60}", GREY, label, "curve"))
    for intensity, rate, seconds, label in points:
        half = 2 + 40 * math.sqrt(seconds / total)
        square = rectangle(x(intensity) - half / 2, y(rate) - half / 2, half, half)
        shapes.append(Shape(square, COLORS[0], label))
    return shapes, texts


def curves(title: str, lines: Mapping[str, Mapping[int, float]], unit: str) -> str:
    """Curves over numbers of GPUs, on logarithmic axes."""
    points = [(n, v) for line in lines.values() for n, v in line.items()]
    (low_x, high_x), (low_y, high_y) = (
        (min(values), max(values)) for values in zip(*points, strict=True)
    )
    decades = range(math.floor(math.log10(low_y)), math.ceil(math.log10(high_y)) + 1)
    bottom, top = 10.0 ** decades[0], 10.0 ** decades[-1]
    x_scale = (WIDTH - LEFT - 60) / max(1e-9, math.log(high_x / low_x))
    x = lambda n: LEFT + x_scale * math.log(n / low_x)
    y = lambda v: TOP + HEIGHT * (1 - math.log(v / bottom) / math.log(top / bottom))
    shapes, texts = [], [Text(8, 20, f"{title}: {unit}")]
    for n in sorted({n for n, _ in points}):
        texts.append(Text(x(n), TOP + HEIGHT + 18, f"{n:,}", "middle"))
        shapes.append(Shape(f"M{x(n):.1f} {TOP}V{TOP + HEIGHT}", kind="line"))
    for e in decades:
        texts.append(Text(LEFT - 8, y(10.0**e) + 4, f"{10.0**e:g}", "end"))
        shapes.append(Shape(f"M{LEFT} {y(10.0**e):.1f}H{WIDTH - 60}", kind="line"))
    for color, (name, line) in zip(COLORS, lines.items(), strict=False):
        path = "L".join(f"{x(n):.1f} {y(v):.1f}" for n, v in sorted(line.items()))
        shapes.append(Shape(f"M{path}", color, name, "curve"))
        for n, v in line.items():
            marker = rectangle(x(n) - 4, y(v) - 4, 8, 8)
            shapes.append(Shape(marker, color, f"{name}, {n:,} GPUs: {v:.4g}"))
    keys, key_texts = legend([*zip(COLORS, lines, strict=False)], TOP + HEIGHT + 35)
    return svg(WIDTH, TOP + HEIGHT + 70, shapes + keys, texts + key_texts)
