"""Plots as SVG text: lines, curves, bars. Colours are CSS variables of the page around them."""

import html
import math
from collections.abc import Mapping, Sequence

WIDE, HIGH = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 34


def escape(text: object) -> str:
    """Text that may stand in HTML and in attributes."""
    return html.escape(str(text), quote=True)


def element(tag: str, inside: str = "", /, **attributes: object) -> str:
    """An SVG element: element('rect', x=1.25, class_='bar') -> '<rect x="1.2" class="bar"></rect>'.

    `inside` is SVG and not escaped; attributes are, and numbers keep one decimal.
    """
    text = lambda v: f"{v:.1f}" if isinstance(v, float) else escape(v)
    names = (f' {k.rstrip("_").replace("_", "-")}="{text(v)}"' for k, v in attributes.items())
    return f"<{tag}{''.join(names)}>{inside}</{tag}>"


def svg(title: str, high: int, inside: str, **attributes: object) -> str:
    """A plot of WIDE x high; the title is read out by screen readers."""
    named = element("title", escape(title)) + inside
    box = f"0 0 {WIDE} {high}"
    return element("svg", named, viewBox=box, role="img", aria_label=title, **attributes)


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
        self.log2, self.x, self.y = log2, x, y
        self.parts: list[str] = []

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Pixels of a point."""
        scale = math.log2 if self.log2 else float
        x, first, last = map(scale, (x, *self.x))
        across = (x - first) / ((last - first) or 1)
        up = (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1)
        return LEFT + across * (WIDE - LEFT - RIGHT), HIGH - BOTTOM - up * (HIGH - TOP - BOTTOM)

    def draw(self, tag: str, inside: str = "", /, **attributes: object) -> None:
        """Adds an element."""
        self.parts.append(element(tag, inside, **attributes))

    def grid(self, xs: Mapping[float, str], ys: Mapping[float, str], x_name: str, y_name: str):
        """Lines and labels: position -> label."""
        for y, label in ys.items():
            _, py = self.at(self.x[0], y)
            self.draw("line", class_="grid", x1=LEFT, x2=WIDE - RIGHT, y1=py, y2=py)
            self.draw("text", label, x=LEFT - 7, y=py + 4, text_anchor="end")
        for x, label in xs.items():
            px, _ = self.at(x, self.y[0])
            self.draw("text", label, x=px, y=HIGH - BOTTOM + 17, text_anchor="middle")
        name = escape(x_name)
        self.draw("text", name, class_="name", x=WIDE - RIGHT, y=HIGH - 3, text_anchor="end")
        self.draw("text", escape(y_name), class_="name", x=LEFT - 44, y=13)

    def band(self, first: float, last: float) -> None:
        """A shaded range of x."""
        (a, _), (b, _) = self.at(first, self.y[0]), self.at(last, self.y[0])
        high = HIGH - TOP - BOTTOM
        self.draw("rect", class_="band", x=a, y=TOP, width=max(1.0, b - a), height=high)

    def line(self, points: Sequence[tuple[float, float]], kind: str, dots: bool = False) -> None:
        """A line; `kind` is its CSS class."""
        spots = [self.at(x, y) for x, y in points]
        self.draw("polyline", class_=kind, points=_points(spots))
        for x, y in spots if dots else ():
            self.draw("circle", class_=kind, cx=x, cy=y, r=4)

    def text(self, x: float, y: float, what: str, lift: float = 10) -> None:
        """A label above a point."""
        px, py = self.at(x, y)
        px = min(max(px, LEFT + 16), WIDE - RIGHT - 16)
        self.draw("text", escape(what), class_="value", x=px, y=py - lift, text_anchor="middle")

    def svg(self, title: str) -> str:
        """The finished plot."""
        return svg(title, HIGH, "".join(self.parts))


def _points(spots: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)


def step_times(times: Mapping[int, float], window: tuple[int, int] | None, title: str) -> str:
    """Seconds of every step after the first, which holds the compile; the window shaded."""
    steps = sorted(times)
    shown = steps[1:] if len(steps) > 3 else steps
    values = sorted(times[i] for i in shown)
    # One outlier must not flatten everything else: the axis ends a little above p98.
    top = max(values[round(0.98 * (len(values) - 1))] * 1.15, 1e-9)
    low = min(values) * 0.9
    low = 0.0 if low < 0.5 * top else low
    axes = Axes((steps[0], max(steps[-1], steps[0] + 1)), (low, top))
    if window:
        axes.band(max(window[0] - 0.5, steps[0]), min(window[1] + 0.5, steps[-1]))
    digits = max(0, min(6, 2 - math.floor(math.log10(top - low or 1))))
    xs = {x: f"{x:.0f}" for x in ticks(steps[0], steps[-1], 6) if x == int(x)}
    axes.grid(xs, {y: f"{y:.{digits}f}" for y in ticks(low, top)}, "step", "seconds")
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
    high = [20 - 18 * min(1, (v - low) / span) for v in values]
    line = element("polyline", points=_points([(i * across, y) for i, y in enumerate(high)]))
    return element("svg", line, class_="spark", viewBox="0 0 90 22", aria_hidden="true")


def scaling(points: Sequence, title: str) -> str:
    """Efficiency over GPUs, the published curve laid over. Points are compare.Point."""
    ours = [(p.gpus, p.efficiency) for p in points]
    theirs = [(p.gpus, p.published) for p in points if p.published is not None]
    values = [1.0, *(y for _, y in ours + theirs)]
    low = max(0.0, math.floor((min(values) - 0.05) * 20) / 20)
    top = math.ceil((max(values) + 0.05) * 20) / 20
    first, last = points[0].gpus, points[-1].gpus
    axes = Axes((first / 1.15, last * 1.15), (low, top), log2=True)
    ys = {y: f"{y:.0%}" for y in ticks(low, top)}
    name = "tokens/s per GPU, of the smallest scale's"
    axes.grid({p.gpus: str(p.gpus) for p in points}, ys, "GPUs", name)
    axes.line([(first, 1.0), (last, 1.0)], "ideal")
    if theirs:
        axes.line(theirs, "theirs", dots=True)
    axes.line(ours, "ours", dots=True)
    for x, y in ours:
        axes.text(x, y, f"{y:.1%}")
    return axes.svg(title)


def shares(rows: Sequence[tuple[str, float, str]], title: str, marks: tuple[float, float]) -> str:
    """Bars of a share of the published figure: (label, share, kind)."""
    line, left = 34, 8
    high = line * len(rows) + 26
    top = max(1.1, *(share for _, share, _ in rows)) * 1.02
    x = lambda v: left + (WIDE - left - 70) * v / top
    out = []
    for y, (label, share, kind) in zip(range(4, high, line), rows, strict=False):
        out.append(element("text", escape(label), x=left, y=y + 10))
        long = max(1.0, x(share) - left)
        out.append(
            element("rect", class_=f"bar {kind}", x=left, y=y + 14, rx=3, height=12, width=long)
        )
        out.append(element("text", f"{share:.1%}", class_="value", x=x(share) + 6, y=y + 25))
    for mark, side, off in zip(marks, ("end", "start"), (-4, 4), strict=True):  # they stand close
        out.append(element("line", class_="mark", x1=x(mark), x2=x(mark), y1=0, y2=high - 10))
        text = f"{mark:.0%}"
        out.append(element("text", text, x=x(mark) + off, y=high - 10, text_anchor=side))
    return svg(title, high, "".join(out))


def stack(parts: Mapping[str, float], title: str, full: float = 0, kind: str = "part") -> str:
    """One bar of seconds in pieces, and its legend; `full` seconds fill the width."""
    total = sum(parts.values()) or 1
    out, legend, x = [], [], 0.0
    for i, (name, value) in enumerate(parts.items()):
        color, width = f"{kind}{i % 8}", WIDE * value / (full or total)
        said = element("title", f"{escape(name)}: {value:.3g} s")
        out.append(element("rect", said, class_=color, x=x, y=0, width=width, height=22))
        share = f" {value / total:.0%}" if len(parts) > 1 else ""
        text = f'<i class="{color}"></i>{escape(name)} <b>{value:,.3g} s</b>{share}'
        legend.append(f"<span>{text}</span>")
        x += width
    bar = svg(title, 22, "".join(out), preserveAspectRatio="none", class_="stack")
    return f'{bar}<p class="legend">{"".join(legend)}</p>'
