"""The commands in Python: modules that one may call, keywords as flags, results as tables."""

import html
import importlib
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from maxbench.config.errors import UserError


def make_callable(module: str, place: str) -> None:
    """Has `maxbench.plan(...)` be a call, beside `maxbench.planning.planner` and so on: of a function
    by its place, which is imported then, for numpy takes a tenth of a second."""
    where, _, name = place.rpartition(".")
    call = lambda *given, **more: getattr(importlib.import_module(where), name)(*given, **more)
    given = {"__call__": staticmethod(call), "__doc__": f"As {place}."}
    sys.modules[module].__class__ = type("CallableModule", (types.ModuleType,), given)


def words(given: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> list[str]:
    """Flags of a command from keywords: {'gpus': 8, 'fp8': True} is --gpus=8 --fp8.

    `settings` are any others, as {'train.remat': 'full'}. None stands for what is not given.
    """
    more = {f"config.{name}": value for name, value in (settings or {}).items()}
    made = []
    for name, value in (dict(given) | more).items():
        if isinstance(value, bool):
            made.append(f"--{name}" if value else f"--no{name}")
        elif value is not None:
            made.append(f"--{name}={value}")
    return made


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, words: bool = False) -> str:
    """An HTML table; the first column stands to the left, others to the right unless of words."""
    sides = ["left"] + ["left" if words else "right"] * (len(heads) - 1)

    def line(kind: str, row: Sequence[object]) -> str:
        style = '<{0} style="text-align:{1};padding:1px 8px">{2}</{0}>'
        cells = (
            style.format(kind, s, html.escape(str(x))) for s, x in zip(sides, row, strict=True)
        )
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<table><thead>{line('th', heads)}</thead><tbody>{body}</tbody></table>"


def lines(texts: Iterable[str]) -> str:
    """Lines of HTML."""
    return f"<p>{'<br>'.join(map(html.escape, texts))}</p>"


class Records:
    """What a command returns in Python: it prints itself, and has records(), rows of figures."""

    def __repr__(self) -> str:
        return str(self)

    def to_dataframe(self):
        """records() as a pandas DataFrame.

        Raises:
          UserError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise UserError("to_dataframe() needs pandas: pip install pandas") from None
        return pandas.DataFrame.from_records(self.records())
