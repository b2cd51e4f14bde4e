"""Pictures of a plan as SVG: memory over the step, a pipeline's schedule, curves of scaling."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence

from maxbench.cost_model import buffer_liveness, hlo
from maxbench.cost_model.buffer_liveness import Liveness
from maxbench.cost_model.memory import GIB
from maxbench.pipeline.schedule import Schedule, schedule_for
from maxbench.planning import chrome_trace, planner

COLORS = ("#4878a8", "#e49444", "#85b6b2", "#d1615d", "#6a9f58", "#b6992d", "#a87c9f", "#967662")
GREY, IDLE = "#9a9a9a", "#d1615d"
WIDE, LEFT, TOP = 1200, 90, 40  # of a picture, and of what is left of and above its drawing
ROW = 30  # of a stage
MOST_TICKS = 160  # of a schedule that are drawn: the first and the last


@dataclasses.dataclass(frozen=True)
class Shape:
    d: str  # as a path of SVG
    color: str = ""
    words: str = ""
    kind: str = ""  # '' is filled; 'line' and 'curve' are strokes


@dataclasses.dataclass(frozen=True)
class Text:
    x: float
    y: float
    words: str
    anchor: str = "start"


def svg(width: float, height: float, shapes: Sequence[Shape], texts: Sequence[Text]) -> str:
    about = {"width": width, "height": height, "shapes": shapes, "texts": texts}
    return chrome_trace.render("picture.svg", **about)


def ticks(most: float, count: int = 8) -> list[float]:
    """Round numbers from 0 to most."""
    step = chrome_trace.round_step(most, count)
    return [i * step for i in range(int(most / step) + 1)]


def rectangle(x: float, y: float, width: float, height: float) -> str:
    return f"M{x:.2f} {y:.2f}h{width:.2f}v{height:.2f}h{-width:.2f}z"


def legend(entries: Sequence[tuple[str, str]], y: float) -> tuple[list[Shape], list[Text]]:
    """Colours and what they stand for, three in a line."""
    shapes, texts = [], []
    for i, (color, words) in enumerate(entries):
        x, row = LEFT + i % 3 * 370, y + i // 3 * 22
        shapes.append(Shape(rectangle(x, row, 14, 14), color))
        texts.append(Text(x + 20, row + 12, words))
    return shapes, texts


def draw(p: planner.Plan, path: str) -> list[pathlib.Path]:
    """Writes the step as PATH (.json) and as pictures beside it: both streams, the memory, and of a
    pipeline its schedule; returns all paths."""
    run, program = p.run, hlo.parse(p.compiled.text)
    written = chrome_trace.write(
        path, planner.simulate_plan(run, program, record=True).spans, run.name
    )
    found = buffer_liveness.liveness(
        program, planner.costs_of(run), planner.branch_frequencies(run, program)
    )
    total = p.compiled.arguments + p.compiled.temporaries
    made = {"memory": memory(found, run.name, total, p.memory.capacity)}
    if run.layout.pp > 1:
        made["schedule"] = schedule(schedule_for(run), run.name)
    for name, picture in made.items():
        written.append(pathlib.Path(path).with_suffix(f".{name}.svg"))
        written[-1].write_text(picture)
    return written


def memory(alive: Liveness, title: str, compiled: int, capacity: int) -> str:
    """What is alive at each moment of a step, stacked by name, the largest at the peak first.

    Args:
      compiled: bytes of the compiler's own assignment.
      capacity: bytes that the step may take.
    """
    at, names = alive.peak()
    shown, total = [*names][: len(COLORS)], alive.total()
    columns = WIDE - LEFT - 20
    moments, clock = _columns(alive.seconds, columns)
    high = max(max(total), capacity)
    y = lambda size: TOP + 400 * (1 - size / high)
    shapes, base = [], [0] * columns
    entries = [(COLORS[i], name) for i, name in enumerate(shown)] + [(GREY, "everything else")]
    for color, name in entries:
        chosen = [b for b in alive.buffers if (b.name == name) == (name in shown)]
        if name not in shown:
            chosen = [b for b in alive.buffers if b.name not in shown]
        sizes = Liveness(chosen, alive.seconds).total()
        top = [low + max(sizes[m] for m in group) for low, group in zip(base, moments, strict=True)]
        shapes.append(Shape(_area(base, top, y), color, f"{name}: {names.get(name, 0) / GIB:.2f}"))
        base = top
    x = LEFT + next(i for i, group in enumerate(moments) if at in group)
    texts = [
        Text(8, 20, f"{title}: {max(total) / GIB:.1f} GiB at the peak; as the compiler places its "
             f"buffers {compiled / GIB:.1f} GiB"),
        Text(x, y(high) - 4, "peak", "middle"),
    ]  # fmt: skip
    shapes.append(Shape(f"M{x} {TOP}V{TOP + 400}", kind="line"))
    shapes.append(Shape(f"M{LEFT} {y(capacity):.1f}H{LEFT + columns}", IDLE, "capacity", "curve"))
    texts += [Text(LEFT - 8, y(g * GIB) + 4, f"{g:g} GiB", "end") for g in ticks(high / GIB)]
    for s in ticks(clock):
        texts.append(Text(LEFT + s / clock * columns, TOP + 418, f"{s:g} s", "middle"))
    sizes = {name: names.get(name, 0) for name in shown}
    sizes["everything else"] = max(total) - sum(sizes.values())
    named = [(color, f"{sizes[name] / GIB:.2f} GiB {name}"[:52]) for color, name in entries]
    more, words = legend(named, TOP + 435)
    return svg(WIDE, TOP + 445 + 22 * math.ceil(len(named) / 3), shapes + more, texts + words)


def _columns(seconds: Sequence[float], columns: int) -> tuple[list[range], float]:
    """The moments that fall into each column of a picture, one at least; and the whole time."""
    whole = sum(seconds)
    starts, clock = [], 0.0
    for one in seconds:
        starts.append(min(columns - 1, int(clock / whole * columns)))
        clock += one
    found, last = [], 0
    for column in range(columns):
        first = last
        while last < len(starts) and starts[last] <= column:
            last += 1
        found.append(range(first, last) if last > first else range(last - 1, last))
    return found, whole


def _area(low: Sequence[float], high: Sequence[float], y) -> str:
    up = "L".join(f"{LEFT + i} {y(v):.1f}" for i, v in enumerate(high))
    down = "L".join(f"{LEFT + i} {y(v):.1f}" for i, v in reversed([*enumerate(low)]))
    return f"M{up}L{down}z"


def schedule(s: Schedule, title: str) -> str:
    """Stages as rows; a tick is as wide as its busiest stage, and the rest of it is the bubble.

    A backward piece is twice as wide as a forward one.
    """
    chosen = [*range(s.ticks)]
    if s.ticks > MOST_TICKS:
        chosen = chosen[: MOST_TICKS // 2] + chosen[-MOST_TICKS // 2 :]
    width = {"f": 1, "b": 2}
    micro, chunk = ({w: s.column(f"{w}_{what}") for w in "fb"} for what in ("micro", "chunk"))
    busy = lambda t, p: sum(width[w] for w in "fb" if micro[w][t, p] >= 0)
    ticks = [max(busy(t, p) for p in range(s.pp)) for t in chosen]
    unit, shapes = (WIDE - LEFT - 20) / sum(ticks), []
    texts = [Text(8, 20, f"{title}, {s.name}: {s.ticks} ticks, bubble {s.bubble():.1%}")]
    bottom, x = TOP + s.pp * ROW, LEFT
    for i, (t, tick) in enumerate(zip(chosen, ticks, strict=True)):
        if i == len(chosen) // 2 < s.ticks // 2:
            shapes.append(Shape(f"M{x:.1f} {TOP - 6}V{bottom}", kind="line"))
            texts.append(Text(x, TOP - 8, f"{s.ticks - len(chosen)} ticks left out", "middle"))
        for p in range(s.pp):
            left, y = x, TOP + p * ROW
            for color, w in zip(COLORS, "fb", strict=False):
                if (m := micro[w][t, p]) >= 0:
                    words = f"tick {t}: microbatch {m}, chunk {chunk[w][t, p]}"
                    shapes.append(Shape(rectangle(left, y, unit * width[w], ROW - 4), color, words))
                    left += unit * width[w]
            if left < x + unit * (tick - 0.5):
                wait = rectangle(left, y, x + unit * tick - left, ROW - 4)
                shapes.append(Shape(wait, IDLE, f"tick {t}: the stage waits"))
        x += unit * tick
    texts += [Text(8, TOP + p * ROW + 18, f"stage {p}") for p in range(s.pp)]
    entries = [(COLORS[0], "forward"), (COLORS[1], "backward"), (IDLE, "the stage waits: bubble")]
    more, words = legend(entries, bottom + 10)
    return svg(WIDE, bottom + 40, shapes + more, texts + words)


def curves(title: str, lines: Mapping[str, Mapping[int, float]], unit: str) -> str:
    """Curves over numbers of GPUs, both axes logarithms."""
    points = [(n, v) for line in lines.values() for n, v in line.items()]
    (low, high), (least, most) = (
        (min(values), max(values)) for values in zip(*points, strict=True)
    )
    least, most = 10 ** math.floor(math.log10(least)), 10 ** math.ceil(math.log10(most))
    across = lambda n: (
        LEFT + (WIDE - LEFT - 60) * math.log(n / low) / max(1e-9, math.log(high / low))
    )
    y = lambda v: TOP + 400 * (1 - math.log(v / least) / math.log(most / least))
    shapes, texts = [], [Text(8, 20, f"{title}: {unit}")]
    for n in sorted({n for n, _ in points}):
        texts.append(Text(across(n), TOP + 418, f"{n:,}", "middle"))
        shapes.append(Shape(f"M{across(n):.1f} {TOP}V{TOP + 400}", kind="line"))
    for e in range(round(math.log10(least)), round(math.log10(most)) + 1):
        texts.append(Text(LEFT - 8, y(10**e) + 4, f"{10.0**e:g}", "end"))
        shapes.append(Shape(f"M{LEFT} {y(10**e):.1f}H{WIDE - 60}", kind="line"))
    for color, (name, line) in zip(COLORS, lines.items(), strict=False):
        path = "L".join(f"{across(n):.1f} {y(v):.1f}" for n, v in sorted(line.items()))
        shapes.append(Shape(f"M{path}", color, name, "curve"))
        for n, v in line.items():
            spot = rectangle(across(n) - 4, y(v) - 4, 8, 8)
            shapes.append(Shape(spot, color, f"{name}, {n:,} GPUs: {v:.4g}"))
    more, words = legend([*zip(COLORS, lines, strict=False)], TOP + 435)
    return svg(WIDE, TOP + 470, shapes + more, texts + words)
