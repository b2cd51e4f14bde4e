"""Results in Python: rows of figures that become tables of a notebook or a pandas DataFrame."""

import html
from collections.abc import Iterable, Sequence
from typing import Any

from maxbench.config.errors import UserError


class Records:
    """Base of what maxbench.plan(), train(), report() and sweep() return."""

    def records(self) -> list[dict[str, Any]]:
        """Rows of figures, with the same names in each."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return str(self)

    def to_dataframe(self) -> Any:
        """records() as a pandas DataFrame.

        Raises:
          UserError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise UserError("to_dataframe() needs pandas: pip install pandas") from None
        return pandas.DataFrame.from_records(self.records())


def html_table(
    heads: Sequence[str], rows: Iterable[Sequence[object]], *, text: bool = False
) -> str:
    """An HTML table. The first column is left-aligned; the others too if they are text."""
    sides = ["left"] + ["left" if text else "right"] * (len(heads) - 1)

    def line(kind: str, row: Sequence[object]) -> str:
        cells = (
            f'<{kind} style="text-align:{side};padding:1px 8px">{html.escape(str(x))}</{kind}>'
            for side, x in zip(sides, row, strict=True)
        )
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<table><thead>{line('th', heads)}</thead><tbody>{body}</tbody></table>"


def html_lines(texts: Iterable[str]) -> str:
    """Lines of text as one HTML paragraph."""
    return f"<p>{'<br>'.join(map(html.escape, texts))}</p>"
