"""Lines of values as text, for terminals."""

import statistics
from collections.abc import Mapping

HIGH = 10  # lines of a chart
MARGIN = 9  # columns of the numbers beside it


def chart(
    lines: Mapping[str, Mapping[int, float] | Mapping[float, float]],
    across: str,
    up: str,
    width: int = 72,
) -> list[str]:
    """A chart of some lines over common axes; [] without two values to compare.

    Args:
      lines: the character of a line -> x -> y. The mean of a column counts; a later line is above
        an earlier one.
      across, up: names of the axes.
      width: columns.
    """
    xs = sorted({x for line in lines.values() for x in line})
    ys = [y for line in lines.values() for y in line.values()]
    if len(xs) < 2:
        return []
    low, high, columns = min(ys), max(ys), width - MARGIN
    grid = [[" "] * columns for _ in range(HIGH)]
    column = lambda x: round((x - xs[0]) / (xs[-1] - xs[0]) * (columns - 1))
    row = lambda y: round((high - y) / ((high - low) or 1) * (HIGH - 1))
    for mark, line in lines.items():
        in_column: dict[int, list[float]] = {}
        for x, y in line.items():
            in_column.setdefault(column(x), []).append(y)
        for at, values in in_column.items():
            grid[row(statistics.fmean(values))][at] = mark
    label = {0: high, HIGH // 2: high - (high - low) * (HIGH // 2) / (HIGH - 1), HIGH - 1: low}
    numbers = (f"{label[i]:{MARGIN - 2}.4g}" if i in label else "" for i in range(HIGH))
    body = ["".join(cells).rstrip() for cells in grid]
    rows = [f"{n:>{MARGIN - 2}} |{cells}" for n, cells in zip(numbers, body, strict=True)]
    ends = f"{xs[0]:,.0f}", f"{xs[-1]:,.0f}"
    axis = f"{ends[0]} {across} ".ljust(columns - len(ends[1])) + ends[1]
    return [f"{up:>{MARGIN - 2}}", *rows, " " * MARGIN + axis]
