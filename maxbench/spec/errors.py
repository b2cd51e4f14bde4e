"""What is wrong with what the user gave: said once, the same way everywhere."""

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any


class UserError(ValueError):
    """Input that cannot be. Its message names what was given, why not, and what would work.

    The doors print it and end with exit code 2; every other exception is a defect of the program
    and keeps its traceback.
    """


def choose(field: str, value: str, options: Iterable[str]) -> None:
    """Raises UserError, with the nearest match, unless value is one of options."""
    options = list(options)
    if value in options:
        return
    near = difflib.get_close_matches(str(value), options, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UserError(f"{field}={value!r} is not one of {', '.join(options)}{hint}")


def setting(default: Any = dataclasses.MISSING, **allowed: Any) -> Any:
    """A field of a section and what judge() lets it be: at_least=, above= or options=."""
    return dataclasses.field(default=default, metadata=allowed)


def judge(section: Any, prefix: str = "") -> None:
    """Raises UserError for the first field of a section that its setting() does not allow."""
    for field in dataclasses.fields(section):
        name, value = f"{prefix}{field.name}", getattr(section, field.name)
        for rule, bound in field.metadata.items():
            if rule == "options":
                choose(name, value, bound)
            elif value < bound or (rule == "above" and value == bound):
                raise UserError(f"{name}={value} must be {rule.replace('_', ' ')} {bound}")


def nearest(value: float, step: int) -> int:
    """The positive multiple of step that is nearest, for messages that say what would work."""
    return max(step, round(value / step) * step)


def divisors(n: int) -> str:
    """The divisors of n as text, for messages that say what would work."""
    return ", ".join(str(d) for d in range(1, min(n, 4096) + 1) if n % d == 0)
