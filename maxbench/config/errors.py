"""Errors of the user's input, and the helpers that word them."""

import difflib
import re
from collections.abc import Iterable


class UserError(ValueError):
    """Invalid input. The message names the value, the reason and what would work.

    Every command prints it as one line and exits with code 2 (cli/entry.py); any other exception is
    a defect of the program and keeps its traceback.
    """


def check_choice(field: str, value: str, options: Iterable[str]) -> None:
    """Raises UserError, with the nearest match, unless value is one of options."""
    options = list(options)
    if value in options:
        return
    near = difflib.get_close_matches(str(value), options, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UserError(f"{field}={value!r:.60} is not one of {', '.join(filter(None, options))}{hint}")


def escape_control(text: str) -> str:
    """Text for a terminal line: control and invisible characters are escaped."""
    return re.sub(r"[^ -~]", lambda c: c[0] if c[0].isprintable() else repr(c[0])[1:-1], text)


def one_line(text: str, longest: int = 1000) -> str:
    """A message as one line of a terminal; the middle of a longer one is left out."""
    text = escape_control(" ".join(text.split()))
    return text if len(text) < longest else f"{text[: longest - 200]} ... {text[-150:]}"


def nearest(value: float, step: int) -> int:
    """The nearest positive multiple of step, for messages."""
    return max(step, round(value / step) * step)


def divisors(n: int) -> str:
    """The divisors of n as text, for messages."""
    return ", ".join(str(d) for d in range(1, min(n, 4096) + 1) if n % d == 0)
