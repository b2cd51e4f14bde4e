"""Plots as SVG text: lines, curves, bars. Colours are CSS variables of the page around them."""

import html
import math
from collections.abc import Mapping, Sequence

WIDE, HIGH = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 34


def escape(text: object) -> str:
    """Text that may stand in HTML and in attributes."""
    return html.escape(str(text), quote=True)


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers from low to high."""
    span = high - low
    if not span > 0:
        return [low]
    raw = span / about
    step = 10 ** math.floor(math.log10(raw))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if m * step >= raw)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


class Axes:
    """A frame with scales: data to pixels."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], log2: bool = False):
        self.log2 = log2
        self.x = tuple(map(math.log2, x)) if log2 else x
        self.y = y
        self.parts: list[str] = []

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Pixels of a point."""
        x = math.log2(x) if self.log2 else x
        across = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1)
        up = (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1)
        return (
            LEFT + across * (WIDE - LEFT - RIGHT),
            HIGH - BOTTOM - up * (HIGH - TOP - BOTTOM),
        )

    def grid(self, xs: Mapping[float, str], ys: Mapping[float, str], x_name: str, y_name: str):
        """Lines and labels: position -> label."""
        for y, label in ys.items():
            _, py = self.at(2 ** self.x[0] if self.log2 else self.x[0], y)
            self.parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{py:.1f}" '
                              f'y2="{py:.1f}"/>')  # fmt: skip
            self.parts.append(
                f'<text x="{LEFT - 7}" y="{py + 4:.1f}" text-anchor="end">{label}</text>'
            )
        for x, label in xs.items():
            px, _ = self.at(x, self.y[0])
            self.parts.append(f'<text x="{px:.1f}" y="{HIGH - BOTTOM + 17}" text-anchor="middle">'
                              f"{label}</text>")  # fmt: skip
        self.parts.append(f'<text class="name" x="{WIDE - RIGHT}" y="{HIGH - 3}" '
                          f'text-anchor="end">{escape(x_name)}</text>')  # fmt: skip
        self.parts.append(f'<text class="name" x="{LEFT - 44}" y="13">{escape(y_name)}</text>')

    def band(self, first: float, last: float) -> None:
        """A shaded range of x."""
        (a, _), (b, _) = self.at(first, self.y[0]), self.at(last, self.y[0])
        self.parts.append(f'<rect class="band" x="{a:.1f}" y="{TOP}" width="{max(1, b - a):.1f}" '
                          f'height="{HIGH - TOP - BOTTOM}"/>')  # fmt: skip

    def line(self, points: Sequence[tuple[float, float]], kind: str, dots: bool = False) -> None:
        """A line; `kind` is its CSS class."""
        spots = [self.at(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        self.parts.append(f'<polyline class="{kind}" points="{path}"/>')
        if dots:
            self.parts += [
                f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in spots
            ]

    def text(self, x: float, y: float, what: str, lift: float = 10) -> None:
        """A label above a point."""
        px, py = self.at(x, y)
        px = min(max(px, LEFT + 16), WIDE - RIGHT - 16)
        self.parts.append(f'<text class="value" x="{px:.1f}" y="{py - lift:.1f}" '
                          f'text-anchor="middle">{escape(what)}</text>')  # fmt: skip

    def svg(self, title: str) -> str:
        """The finished plot; the title is read out by screen readers."""
        return (
            f'<svg viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{escape(title)}">'
            f"<title>{escape(title)}</title>{''.join(self.parts)}</svg>"
        )


def step_times(times: Mapping[int, float], window: tuple[int, int] | None, title: str) -> str:
    """Seconds of every step after the first, which holds the compile; the window shaded."""
    steps = sorted(times)
    shown = steps[1:] if len(steps) > 3 else steps
    values = sorted(times[i] for i in shown)
    # One outlier must not flatten everything else: the axis ends a little above p98.
    top = max(values[min(len(values) - 1, round(0.98 * (len(values) - 1)))] * 1.15, 1e-9)
    low = min(values) * 0.9
    low = 0.0 if low < 0.5 * top else low
    axes = Axes((steps[0], max(steps[-1], steps[0] + 1)), (low, top))
    if window:
        axes.band(window[0] - 0.5, window[1] + 0.5)
    digits = max(0, min(6, 2 - math.floor(math.log10(top - low or 1))))
    axes.grid(
        {x: f"{x:.0f}" for x in ticks(steps[0], steps[-1], 6) if x == int(x)},
        {y: f"{y:.{digits}f}" for y in ticks(low, top)},
        "step",
        "seconds",
    )
    axes.line([(i, min(times[i], top)) for i in shown], "ours")
    return axes.svg(title)


def sparkline(times: Mapping[int, float]) -> str:
    """A small line of step times for a table's cell."""
    steps = sorted(times)[1:] or sorted(times)
    if len(steps) < 2:
        return ""
    values = [times[i] for i in steps]
    top, low = sorted(values)[round(0.95 * (len(values) - 1))], min(values)
    span = max(top - low, 0.1 * top) or 1  # noise of a percent must not look like a storm
    across = 90 / (len(values) - 1)
    points = " ".join(
        f"{i * across:.1f},{20 - 18 * min(1, (v - low) / span):.1f}" for i, v in enumerate(values)
    )
    line = f'<polyline points="{points}"/>'
    return f'<svg class="spark" viewBox="0 0 90 22" aria-hidden="true">{line}</svg>'


def scaling(points: Sequence, title: str) -> str:
    """Efficiency over GPUs, the published curve laid over. Points are compare.Point."""
    theirs = [(p.gpus, p.published) for p in points if p.published is not None]
    values = [p.efficiency for p in points] + [y for _, y in theirs] + [1.0]
    low, top = min(values), max(values)
    low = max(0.0, math.floor((low - 0.05) * 20) / 20)
    top = math.ceil((top + 0.05) * 20) / 20
    axes = Axes((points[0].gpus / 1.15, points[-1].gpus * 1.15), (low, top), log2=True)
    axes.grid(
        {p.gpus: str(p.gpus) for p in points},
        {y: f"{y:.0%}" for y in ticks(low, top)},
        "GPUs",
        "tokens/s per GPU, of the smallest scale's",
    )
    axes.line([(points[0].gpus, 1.0), (points[-1].gpus, 1.0)], "ideal")
    if theirs:
        axes.line(theirs, "theirs", dots=True)
    axes.line([(p.gpus, p.efficiency) for p in points], "ours", dots=True)
    for p in points:
        axes.text(p.gpus, p.efficiency, f"{p.efficiency:.1%}")
    return axes.svg(title)


def shares(rows: Sequence[tuple[str, float, str]], title: str, marks: tuple[float, float]) -> str:
    """Bars of a share of the published figure: (label, share, kind)."""
    wide, line, left = 640, 34, 8
    high = line * len(rows) + 26
    top = max(1.1, *(share for _, share, _ in rows)) * 1.02
    x = lambda v: left + (wide - left - 70) * v / top
    out = []
    for i, (label, share, kind) in enumerate(rows):
        y = 4 + i * line
        out.append(f'<text x="{left}" y="{y + 10}">{escape(label)}</text>')
        out.append(f'<rect class="bar {kind}" x="{left}" y="{y + 14}" rx="3" height="12" '
                   f'width="{max(1, x(share) - left):.1f}"/>')  # fmt: skip
        out.append(f'<text class="value" x="{x(share) + 6:.1f}" y="{y + 25}">{share:.1%}</text>')
    for mark, side in zip(marks, ("end", "start"), strict=True):  # 95 and 100 % stand close
        out.append(f'<line class="mark" x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="0" '
                   f'y2="{high - 10}"/>')  # fmt: skip
        px = x(mark) - 4 if side == "end" else x(mark) + 4
        out.append(f'<text x="{px:.1f}" y="{high - 10}" text-anchor="{side}">{mark:.0%}</text>')
    return (
        f'<svg viewBox="0 0 {wide} {high}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(out)}</svg>"
    )


def stack(parts: Mapping[str, float], title: str, unit: str = "s") -> str:
    """One bar whose pieces are parts of a whole, and its legend."""
    total = sum(parts.values()) or 1
    out, legend, x = [], [], 0.0
    for i, (name, value) in enumerate(parts.items()):
        width = 640 * value / total
        out.append(f'<rect class="part{i % 6}" x="{x:.1f}" y="0" width="{width:.1f}" height="22">'
                   f"<title>{escape(name)}: {value:.3g} {unit}</title></rect>")  # fmt: skip
        legend.append(f'<span><i class="part{i % 6}"></i>{escape(name)} '
                      f"<b>{value:,.3g} {unit}</b> {value / total:.0%}</span>")  # fmt: skip
        x += width
    return (
        f'<svg viewBox="0 0 640 22" preserveAspectRatio="none" class="stack" role="img" '
        f'aria-label="{escape(title)}"><title>{escape(title)}</title>{"".join(out)}</svg>'
        f'<p class="legend">{"".join(legend)}</p>'
    )
