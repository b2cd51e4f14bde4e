"""Data, axes and coordinates of the page's plots, which parts.html draws."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from maxbench.run_logs.record import RunRecord

Points = Sequence[tuple[float, float]]
UNITS = {"T": 1e12, "B": 1e9, "M": 1e6, "K": 1e3}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frame:
    """A plot: axes and lines, in units of the data; left() and down() give pixels."""

    title: str  # for screen readers
    x: tuple[float, float]
    y: tuple[float, float]
    xs: Mapping[float, str]  # tick labels of the axes
    ys: Mapping[float, str]
    names: tuple[str, str]  # of the x and the y axis
    lines: Mapping[str, Points]  # CSS class -> points
    band: tuple[float, float] | None = None  # a shaded range of x
    values: Mapping[tuple[float, float], str] = dataclasses.field(default_factory=dict)  # labels
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)  # CSS class -> name of a line
    dots: Mapping[str, Points] = dataclasses.field(default_factory=dict)  # CSS class -> points
    note: str = ""  # below the x axis

    # About as wide as a phone, so that text is legible there.
    WIDE, HIGH = 400, 230
    LEFT, RIGHT, TOP, BOTTOM = 52, 390, 34, 190

    def left(self, x: float) -> float:
        share = (x - self.x[0]) / (self.x[1] - self.x[0] or 1)
        return round(self.LEFT + share * (self.RIGHT - self.LEFT), 1)

    def down(self, y: float) -> float:
        share = (y - self.y[0]) / (self.y[1] - self.y[0] or 1)
        return round(self.BOTTOM - share * (self.BOTTOM - self.TOP), 1)

    def pixels(self, points: Points) -> list[tuple[float, float]]:
        return [(self.left(x), self.down(y)) for x, y in points]


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """About `about` round numbers from low to high."""
    span = high - low
    if not span > 0:
        return [low]
    raw = span / about
    step = 10 ** math.floor(math.log10(raw))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if m * step >= raw)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def thin(points: Points, most: int = 120) -> Points:
    """At most `most` points of a line: the lowest and the highest of each segment."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / (most // 2))
    parts = (points[i : i + size] for i in range(0, len(points), size))
    height = lambda point: point[1]
    ends = ({min(part, key=height), max(part, key=height)} for part in parts)
    return [point for part in ends for point in sorted(part)]


def over_steps(
    lines: Mapping[str, Mapping[int, float]],
    title: str,
    unit: str,
    keys: Mapping[str, str] | None = None,
    band: tuple[int, int] | None = None,
    dots: Mapping[str, Mapping[int, float]] | None = None,
    across: str = "step",
) -> Frame:
    """A plot of values over steps, or over `across`: CSS class -> step -> value. Steps of `band`
    are shaded; `dots` are values that no line joins."""
    dots = dots or {}
    values = sorted(y for line in lines.values() for y in line.values())
    marked = [y for line in dots.values() for y in line.values()]
    steps = sorted({i for line in (*lines.values(), *dots.values()) for i in line})
    # One outlier must not flatten the rest: the axis ends a little above p98.
    top = max(values[round(0.98 * (len(values) - 1))] * 1.1, 1e-9, *marked)
    low = min((*values, *marked)) * 0.95
    low = 0.0 if low < 0.5 * top else low
    digits = max(0, min(6, 2 - math.floor(math.log10(top - low or 1))))
    first, last = steps[0], max(steps[-1], steps[0] + 1)
    return Frame(
        title=title,
        x=(first, last),
        y=(low, top),
        xs={x: short(x) for x in ticks(first, last, 5) if x == int(x)},
        ys={y: f"{y:.{digits}f}" for y in ticks(low, top)},
        names=(across, unit),
        lines={k: [(i, min(y, top)) for i, y in thin(sorted(v.items()))] for k, v in lines.items()},
        dots={k: sorted(v.items()) for k, v in dots.items()},
        band=band and (max(band[0] - 0.5, first), min(band[1] + 0.5, last)),
        keys=keys or {},
    )


def short(x: float) -> str:
    """A whole number in few characters: 2500, 25K, 1500K, 20M."""
    name, unit = next(((n, u) for n, u in UNITS.items() if x >= 10 * u), ("", 1))
    return f"{x / unit:.6g}{name}"


def of_loss(
    records: Mapping[str, RunRecord], title: str, keys: Mapping[str, str] | None = None
) -> Frame | None:
    """A plot of the losses of runs, CSS class -> run, with dots for those of held-out data.

    Over steps, or over tokens if the runs differ in tokens of a step. None without losses.
    """
    work = {k: r.gbs * r.seq for k, r in records.items()}
    by_tokens = len({*work.values()}) > 1 and all(work.values())
    at = lambda k, i: (i + 1) * work[k] if by_tokens else i
    of = lambda k, values: {at(k, i): y for i, y in finite(values).items()}
    lines = {k: line for k, r in records.items() if len(line := of(k, r.loss)) > 1}
    if not lines:
        return None
    dots = {k: of(k, records[k].eval_loss) for k in lines if records[k].eval_loss}
    across = "tokens" if by_tokens else "step"
    frame = over_steps(lines, title, "loss", keys, dots=dots, across=across)
    notes = ["dots: held-out data"] if dots else []
    if not by_tokens and (tokens := max(work.values())):
        notes.append(f"a step is {tokens:,} tokens")
    return dataclasses.replace(frame, note="; ".join(notes))


def after_the_first(times: Mapping[int, float]) -> dict[int, float]:
    """Step times without the first one, which includes the compile; all if there are few."""
    return {i: times[i] for i in (sorted(times)[1:] if len(times) > 3 else times)}


def finite(values: Mapping[int, float]) -> dict[int, float]:
    """Values that fit on an axis: finite, and not absurdly large."""
    return {i: y for i, y in values.items() if abs(y) < 1e30}


def sparkline(times: Mapping[int, float]) -> list[tuple[float, float]]:
    """Pixels of a small line of step times, 90 x 22, for a table cell."""
    steps = sorted(times)[1:] or sorted(times)
    if len(steps) < 2:
        return []
    values = [y for _, y in thin([(i, times[i]) for i in steps], 30)]
    top, low = sorted(values)[round(0.95 * (len(values) - 1))], min(values)
    span = max(top - low, 0.1 * top) or 1  # noise of a percent must look small
    across = 90 / (len(values) - 1)
    high = (20 - 18 * min(1, (v - low) / span) for v in values)
    return [(round(i * across, 1), round(y, 1)) for i, y in enumerate(high)]


def scaling(points: Sequence, title: str) -> Frame:
    """Efficiency over log2(GPUs), with the published curve. Points are compare.Point."""
    ours = [(math.log2(p.gpus), p.efficiency) for p in points]
    published = [(math.log2(p.gpus), p.published) for p in points if p.published is not None]
    values = [1.0, *(y for _, y in ours + published)]
    low = max(0.0, math.floor((min(values) - 0.05) * 20) / 20)
    top = math.ceil((max(values) + 0.05) * 20) / 20
    first, last = ours[0][0], ours[-1][0]
    return Frame(
        title=title,
        x=(first - math.log2(1.15), last + math.log2(1.15)),
        y=(low, top),
        xs={math.log2(p.gpus): str(p.gpus) for p in points},
        ys={y: f"{y:.0%}" for y in ticks(low, top)},
        names=("GPUs", "tokens/s per GPU, relative to the smallest scale"),
        keys={"ours": "these runs", "published": "published", "ideal": "ideal"},
        lines={"ideal": [(first, 1.0), (last, 1.0)], "published": published, "ours": ours},
        values={(x, y): f"{y:.1%}" for x, y in ours},
    )
