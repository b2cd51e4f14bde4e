"""Tables of text for terminals, pipes and Markdown: the one table printer of all commands."""

import itertools
import math
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence

UNLIMITED = 100_000  # columns: no table is that wide, and nothing is folded
NARROWEST = 16  # columns of text in which a cell may be folded
# A rule under the heads, one space between columns, nothing around them (rich.box.Box has eight
# rows of left, fill, divider and right).
BOX = "    \n    \n -  \n    \n    \n    \n    \n    \n"


def terminal_width() -> int:
    """Columns of the terminal; 0 if the output is a file or a pipe, where no line is folded."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    text: Collection[int] = (0,),
    width: int = 0,
    indent: str = "",
) -> list[str]:
    """Lines of a table.

    Args:
      heads: of the columns; () for a table without heads and rule.
      rows: their cells; a row may be short.
      text: columns that are left-aligned, of which the last folds where the table is too wide.
        All other columns are right-aligned. No other cell is broken.
      width: columns of the terminal; 0 = any. If the table cannot be that narrow, each row becomes
        a line of its first cell and indented lines of `head value` pairs.
      indent: at the start of each line, within `width`.
    """
    from rich import box, cells, console, table  # late: 30 ms, and many commands print no table

    body = [list(row) for row in rows]
    columns = max(map(len, (heads, *body)), default=0)
    folding = max((i for i in text if i < columns), default=-1)
    made = table.Table(
        box=box.Box(BOX),
        show_header=bool(heads),
        show_edge=False,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    narrowest = 2 * (columns - 1)
    for i in range(columns):
        head = heads[i] if i < len(heads) else ""
        longest = max(cells.cell_len(row[i]) for row in ([head] * columns, *body) if i < len(row))
        made.add_column(
            head,
            justify="left" if i in text else "right",
            no_wrap=i != folding,
            overflow="fold",
        )
        narrowest += min(longest, NARROWEST) if i == folding else longest
    for row in body:
        made.add_row(*row)
    limit = max(1, width - len(indent)) if width else UNLIMITED
    if width and narrowest > limit:
        return [indent + line for row in body for line in _as_lines(heads, row, limit)]
    screen = console.Console(
        width=limit, color_system=None, markup=False, emoji=False, highlight=False,
        force_terminal=False, force_jupyter=False,
    )  # fmt: skip
    with screen.capture() as printed:
        screen.print(made)
    return [(indent + line).rstrip() for line in printed.get().splitlines()]


def size(of_bytes: float) -> str:
    """Bytes for people: '1.23 GiB', or '12.3 MiB' below a tenth of a GiB."""
    gib = of_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{of_bytes / 2**20:.1f} MiB"


def fixed(value: float, decimals: int) -> str:
    """A number with so many decimals: '0.12'; of one that they round to 0, the bound: '<0.01'."""
    least = 10**-decimals
    return f"<{least:.{decimals}f}" if 0 < value < least / 2 else f"{value:.{decimals}f}"


def share(value: float) -> str:
    """A share as percent with one decimal: '12.3%', '<0.1%'."""
    return f"{fixed(100 * value, 1)}%"


def change(value: float, decimals: int = 1) -> str:
    """A relative change as percent: '+1.2%'; without a sign if it rounds to 0: '0.0%'."""
    text = f"{value:+z.{decimals}%}"
    return text if text.strip("+-0.%") else text.lstrip("+-")


def interval(low: float, high: float) -> str:
    """Two numbers with as many decimals as make three digits of the lower one: '7.00 to 11.23'."""
    decimals = max(0, 2 - math.floor(math.log10(low))) if low > 0 else 0
    return f"{low:.{decimals}f} to {high:.{decimals}f}"


def natural_width(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> int:
    """Columns that a table takes where nothing folds."""
    from rich import cells

    columns = itertools.zip_longest(heads, *rows, fillvalue="")
    widths = [max(map(cells.cell_len, column)) for column in columns]
    return sum(widths) + 2 * (len(widths) - 1)


def _as_lines(heads: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    """A row of a table that is too wide: its first cell, then the others below it."""
    names = [*heads, *[""] * (len(row) - len(heads))]
    pairs = [f"{n} {x}".strip() for n, x in zip(names[1:], row[1:], strict=False) if x]
    others = fold(f"  {', '.join(pairs)}", width, "  ") if pairs else []
    return [*fold(row[0], width), *others]


def definitions(
    pairs: Iterable[tuple[str, str]], *, width: int = 0, indent: str = "  ", column: int = 22
) -> list[str]:
    """Names and their meanings, which start `column` columns after the indent; meanings fold.

    A name that is too long for its column has its line to itself.
    """
    lines = []
    for name, meaning in pairs:
        head = f"{indent}{name}"
        if len(name) < column:
            head = head.ljust(len(indent) + column)
        elif meaning:
            lines.append(head)
            head = indent.ljust(len(indent) + column)
        lines += fold(head + meaning, width, " " * (len(indent) + column)) or [head.rstrip()]
    return lines


def fold(line: str, width: int, indent: str = "") -> list[str]:
    """A text in lines of up to `width` columns (0 = any); its own line breaks stay."""
    each = line.rstrip().split("\n")
    if not width:
        return each
    wrap = lambda x: textwrap.wrap(x, width, subsequent_indent=indent, break_on_hyphens=False)
    return [y for x in each for y in (wrap(x) if len(x) > width else [x])]


def markdown(
    heads: Sequence[str], rows: Iterable[Sequence[str]], text: Collection[int] = (0,)
) -> list[str]:
    """Lines of a table in Markdown; columns in `text` are left-aligned, others right-aligned."""
    bars = lambda cells: "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"
    rule = "".join("|---" if i in text else "|---:" for i in range(len(heads)))
    return [bars(heads), f"{rule}|", *map(bars, rows)]
