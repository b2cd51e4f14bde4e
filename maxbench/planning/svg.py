"""Drawings of a plan as SVG: memory over a step, a pipeline's schedule, scaling curves."""

import collections
import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence

from maxbench.cost_model.buffer_liveness import Liveness
from maxbench.cost_model.memory import GIB
from maxbench.pipeline.schedule import Schedule

COLORS = (
    "#4878a8", "#e49444", "#85b6b2", "#6a9f58", "#b6992d", "#a87c9f", "#967662", "#f1c8a0",
    "#a9c6e0", "#3b5f53", "#c98bb9",
)  # fmt: skip
GREY, IDLE = "#9a9a9a", "#d1615d"  # everything else; time in which a GPU waits
WIDTH, LEFT, TOP, RIGHT = 1000, 112, 40, 34  # of a drawing; margins of its axes
HEIGHT = 400  # of the axes
ROW = 30  # height of a stage
OTHERS, WAITING = "others", "waiting: communication, stages, GPUs"
WAITS = re.compile("exposed communication|pipeline idle|waiting")  # names of parts
LEGEND = 38  # characters of a label
MAX_TICKS = 160  # of a schedule; from a longer one the first and last are drawn


@dataclasses.dataclass(frozen=True)
class Shape:
    """An SVG path `d`, filled; of kind 'line', 'curve' or 'limit', stroked; of kind 'point', filled
    in the colour of text. The label is its tooltip."""

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
    turned: bool = False  # by 90 degrees, to be read from below


def svg(height: float, shapes: Sequence[Shape], texts: Sequence[Text]) -> str:
    """An SVG document of WIDTH pixels, which a narrower page scales down."""
    import jinja2  # late: takes 50 ms, and a plan without drawings needs none

    text = pathlib.Path(__file__).with_name("picture.svg").read_text()
    template = jinja2.Template(text, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return template.render(width=WIDTH, height=height, shapes=shapes, texts=texts)


def axis_values(end: float, count: int = 8) -> list[float]:
    """At most count + 1 round numbers from 0 to `end`."""
    steps = (m * 10.0**e for e in range(-9, 13) for m in (1, 2, 5))
    step = next(step for step in steps if end / step <= count)
    return [i * step for i in range(int(end / step) + 1)]


def rectangle(x: float, y: float, width: float, height: float) -> str:
    """Path of a rectangle."""
    return f"M{x:.2f} {y:.2f}h{width:.2f}v{height:.2f}h{-width:.2f}z"


def legend(entries: Sequence[tuple[str, str]], y: float) -> tuple[list[Shape], list[Text]]:
    """(color, label) entries, three in a row, from `y` down."""
    shapes, texts, column = [], [], (WIDTH - LEFT) // 3
    for i, (color, label) in enumerate(entries):
        x, row = LEFT + i % 3 * column, y + i // 3 * 22
        shapes.append(Shape(rectangle(x, row, 14, 14), color, label))
        short = label if len(label) <= LEGEND else f"{label[: LEGEND - 1]}…"
        texts.append(Text(x + 20, row + 12, short))
    return shapes, texts


def axis_titles(x: str, y: str, top: float = TOP) -> list[Text]:
    """Titles of the axes of a plot whose upper end is at `top`."""
    middle = top + HEIGHT / 2
    right = Text(WIDTH - RIGHT, top + HEIGHT + 36, x, "end")
    return [right, Text(18, middle, y, "middle", turned=True)]


def memory(live: Liveness, title: str, compiled: int, capacity: int) -> str:
    """Live bytes over a step, stacked by buffer name, the largest at the peak at the bottom.

    Args:
      compiled: bytes of the compiler's buffer assignment.
      capacity: bytes that a step may use.
    """
    peak_step, names = live.peak()
    shown, total = [*names][: len(COLORS)], live.total()
    columns = WIDTH - LEFT - RIGHT
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
        label = f"{name}: {names.get(name, 0) / GIB:.2f} GiB at the peak"
        shapes.append(Shape(_area(base, top, y), color, label))
        base = top
    x = LEFT + next(i for i, group in enumerate(groups) if peak_step in group)
    head = f"{title}: {max(total) / GIB:.1f} GiB at the peak; the compiler's buffer assignment has"
    texts = [
        Text(8, 18, f"{head} {compiled / GIB:.1f} GiB"),
        Text(x, TOP + HEIGHT - 6, "peak", "end" if x > WIDTH / 2 else "start"),
        Text(LEFT + columns, y(capacity) - 5, f"capacity {capacity / GIB:.1f} GiB", "end"),
        *axis_titles("seconds of kernels from the start of the step", "GiB"),
    ]
    shapes.append(Shape(f"M{x} {TOP}V{TOP + HEIGHT}", kind="line"))
    shapes.append(Shape(f"M{LEFT} {y(capacity):.1f}H{LEFT + columns}", kind="limit"))
    for gib in axis_values(top_value / GIB):
        texts.append(Text(LEFT - 8, y(gib * GIB) + 4, f"{gib:g}", "end"))
    for s in axis_values(end):
        texts.append(Text(LEFT + s / end * columns, TOP + HEIGHT + 18, f"{s:g}", "middle"))
    at_peak = {name: names.get(name, 0) for name in shown}
    at_peak["everything else"] = max(total) - sum(at_peak.values())
    labels = [(color, f"{at_peak[name] / GIB:.2f} GiB {name}") for color, name in entries]
    keys, key_texts = legend(labels, TOP + HEIGHT + 50)
    height = TOP + HEIGHT + 60 + 22 * math.ceil(len(labels) / 3)
    return svg(height, shapes + keys, texts + key_texts)


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
    unit, shapes = (WIDTH - LEFT - RIGHT) / sum(widths), []
    texts = [Text(8, 18, f"{title}, {s.name}: {s.ticks} ticks, bubble {s.bubble():.1%}")]
    bottom, x = TOP + s.pp * ROW, float(LEFT)
    for i, (t, width) in enumerate(zip(ticks, widths, strict=True)):
        if i == len(ticks) // 2 < s.ticks // 2:
            shapes.append(Shape(f"M{x:.1f} {TOP - 3}V{bottom + 4}", kind="limit"))
            texts.append(Text(x, bottom + 18, f"{s.ticks - len(ticks)} ticks left out", "middle"))
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
    keys, key_texts = legend(entries, bottom + 30)
    return svg(bottom + 60, shapes + keys, texts + key_texts)


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
    seconds = collections.Counter[str]()
    for x in parts.values():
        seconds.update(x)
    own = [name for name, _ in seconds.most_common() if name != OTHERS and not WAITS.match(name)]
    colors = dict(zip(own, COLORS, strict=False)) | {OTHERS: GREY, WAITING: IDLE}
    entry = lambda name: WAITING if WAITS.match(name) else name if name in colors else OTHERS
    shapes, texts = [], [Text(8, 18, f"{title}: {total:.3f} s a step")]
    longest = max(sum(x.values()) for x in parts.values())
    width = (WIDTH - LEFT - RIGHT - 60) / longest
    for i, (which, x) in enumerate(parts.items()):
        y, left = TOP + i * ROW, float(LEFT)
        texts.append(Text(8, y + 18, which))
        for name, s in sorted(x.items(), key=lambda item: [*colors].index(entry(item[0]))):
            label = f"{which} {name}: {s:.3f} s, {s / total:.1%}"
            shapes.append(Shape(rectangle(left, y, s * width, ROW - 4), colors[entry(name)], label))
            left += s * width
        texts.append(Text(left + 4, y + 18, f"{sum(x.values()) / total:.0%}"))
    below = TOP + len(parts) * ROW + 10
    used = dict.fromkeys(map(entry, sorted(seconds, key=lambda n: [*colors].index(entry(n)))))
    keys, key_texts = legend([(colors[name], name) for name in used], below)
    top = below + 22 * math.ceil(len(used) / 3) + 30
    roof, roof_texts = _roofline(points, peak_tflops, memory_gbytes_per_s, top, total)
    return svg(top + HEIGHT + 50, shapes + keys + roof, texts + key_texts + roof_texts)


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
    scale, right = (WIDTH - LEFT - RIGHT) / math.log(high_x / low_x), WIDTH - RIGHT
    x = lambda v: LEFT + scale * math.log(min(max(v, low_x), high_x) / low_x)
    y = lambda v: top + HEIGHT * (1 - math.log(max(v, low_y) / low_y) / math.log(high_y / low_y))
    shapes, texts = [], axis_titles("FLOPs per byte of memory", "TFLOP/s", top)
    for e in range(1, 6):
        shapes.append(Shape(f"M{x(10.0**e):.1f} {top}V{top + HEIGHT}", kind="line"))
        texts.append(Text(x(10.0**e), top + HEIGHT + 18, f"{10**e:,}", "middle"))
    for e in range(3):
        v = low_y * 10.0**e
        shapes.append(Shape(f"M{LEFT} {y(v):.1f}H{right}", kind="line"))
        texts.append(Text(LEFT - 8, y(v) + 4, f"{v:g}", "end"))
    ridge = peak_tflops * 1e3 / memory_gbytes_per_s  # FLOPs per byte
    start = max(low_x, low_y * 1e3 / memory_gbytes_per_s)
    roof = f"M{x(start):.1f} {y(start * memory_gbytes_per_s / 1e3):.1f}"
    roof += f"L{x(ridge):.1f} {y(peak_tflops):.1f}"
    label = f"{memory_gbytes_per_s:,.0f} GB/s, {peak_tflops:,.0f} TFLOP/s"
    shapes.append(Shape(f"{roof}H{right}", kind="limit"))
    texts.append(Text(right, y(peak_tflops) - 6, label, "end"))
    for intensity, rate, seconds, label in points:
        half = 2 + 40 * math.sqrt(seconds / total)
        square = rectangle(x(intensity) - half / 2, y(rate) - half / 2, half, half)
        shapes.append(Shape(square, label=label, kind="point"))
    return shapes, texts


def curves(title: str, lines: Mapping[str, Mapping[int, float]], unit: str) -> str:
    """Curves over numbers of GPUs, on logarithmic axes; `unit` is the title of the other axis."""
    points = [(n, v) for line in lines.values() for n, v in line.items()]
    (low_x, high_x), (low_y, high_y) = (
        (min(values), max(values)) for values in zip(*points, strict=True)
    )
    decades = range(math.floor(math.log10(low_y)), math.ceil(math.log10(high_y)) + 1)
    bottom, top, right = 10.0 ** decades[0], 10.0 ** decades[-1], WIDTH - RIGHT
    x_scale = (right - LEFT) / max(1e-9, math.log(high_x / low_x))
    x = lambda n: LEFT + x_scale * math.log(n / low_x)
    y = lambda v: TOP + HEIGHT * (1 - math.log(v / bottom) / math.log(top / bottom))
    shapes, texts = [], [Text(8, 18, title), *axis_titles("GPUs", unit)]
    free = 0.0  # pixels; a label that starts before it would overlap another
    for n in sorted({n for n, _ in points}):
        shapes.append(Shape(f"M{x(n):.1f} {TOP}V{TOP + HEIGHT}", kind="line"))
        half = 4 * len(f"{n:,}")
        if x(n) - half >= free:
            texts.append(Text(x(n), TOP + HEIGHT + 18, f"{n:,}", "middle"))
            free = x(n) + half + 6
    for e in decades:
        texts.append(Text(LEFT - 8, y(10.0**e) + 4, _decade(e), "end"))
        shapes.append(Shape(f"M{LEFT} {y(10.0**e):.1f}H{right}", kind="line"))
    for color, (name, line) in zip(COLORS, lines.items(), strict=False):
        path = "L".join(f"{x(n):.1f} {y(v):.1f}" for n, v in sorted(line.items()))
        shapes.append(Shape(f"M{path}", color, name, "curve"))
        for n, v in line.items():
            marker = rectangle(x(n) - 4, y(v) - 4, 8, 8)
            shapes.append(Shape(marker, color, f"{name}, {n:,} GPUs: {v:,.4g}"))
    keys, key_texts = legend([*zip(COLORS, lines, strict=False)], TOP + HEIGHT + 50)
    return svg(TOP + HEIGHT + 80, shapes + keys, texts + key_texts)


def _decade(exponent: int) -> str:
    """A power of ten: '0.01', '1', '100 k', '10 M'."""
    if exponent < 3:
        return f"{10.0**exponent:g}"
    thousands = min(exponent // 3, 4)
    return f"{10 ** (exponent - 3 * thousands)} {' kMGT'[thousands]}"
