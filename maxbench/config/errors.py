"""What is wrong with what the user gave: said once, the same way everywhere."""

import difflib
import re
from collections.abc import Iterable


class UserError(ValueError):
    """Input that cannot be. Its message names what was given, why not, and what would work.

    The doors print it and end with exit code 2; every other exception is a defect of the program
    and keeps its traceback.
    """


def check_choice(field: str, value: str, options: Iterable[str]) -> None:
    """Raises UserError, with the nearest match, unless value is one of options."""
    options = list(options)
    if value in options:
        return
    near = difflib.get_close_matches(str(value), options, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UserError(f"{field}={value!r:.60} is not one of {', '.join(options)}{hint}")


def escape_control(text: str) -> str:
    """Text for one line of a terminal: what would move the cursor, or hide, is escaped."""
    return re.sub(r"[^ -~]", lambda c: c[0] if c[0].isprintable() else repr(c[0])[1:-1], text)


def nearest(value: float, step: int) -> int:
    """The positive multiple of step that is nearest, for messages that say what would work."""
    return max(step, round(value / step) * step)


def divisors(n: int) -> str:
    """The divisors of n as text, for messages that say what would work."""
    return ", ".join(str(d) for d in range(1, min(n, 4096) + 1) if n % d == 0)
