"""Fields of settings with their constraints, and the parser that checks a value against them.

Values are those of a workload file, of JSON, or the text of a flag.
"""

import ast
import dataclasses
import math
import numbers
import operator
import os
import re
import typing
import warnings
from collections.abc import Mapping
from typing import Any

from maxbench.config.errors import UserError, check_choice, escape_control

# Type of a field -> words for it in messages.
NOUNS = {int: "a whole number", float: "a finite number", bool: "true or false", str: "plain text"}
# Constraints of a number, or of every number of a tuple.
BOUNDS = {
    "at_least": operator.ge,
    "above": operator.gt,
    "at_most": operator.le,
    "below": operator.lt,
}
MAXIMUM = {int: 2**31 - 1, float: 3e38}  # what 32 bits represent, unless at_most says otherwise

# check= of fields: predicate, and words for it in messages.
WINDOW = (lambda window: window[0] <= window[1], "first and last step, as 35,44")
COMBINE = (
    lambda sizes: len(sizes) in (0, 3),
    "() or bytes for all-reduce, all-gather and reduce-scatter",
)
PORT = r"([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"
ADDRESS = (re.compile(rf"|[\w.:\[\]-]+:{PORT}", re.ASCII).fullmatch, "host:port, as node1:1234")
RANKS = (re.compile(r" *\d+ *(, *\d+ *)*").fullmatch, "process numbers joined by commas, as 0,1,2")


def field(default: Any = dataclasses.MISSING, **constraints: Any) -> Any:
    """A dataclass field with constraints, which validate() checks.

    Args:
      default: of the field; it is required without one.
      constraints: any of BOUNDS; options=, the allowed names; check=, a predicate and the words
        that tell the user what it accepts.
    """
    return dataclasses.field(default=default, metadata=constraints)


def validate(section: Any, prefix: str = "") -> None:
    """Converts and checks every field of a frozen dataclass, in place.

    Args:
      prefix: of field names in messages, as 'train.'.

    Raises:
      UserError: the first field with an invalid value.
    """
    for field in dataclasses.fields(section):
        value = parse(prefix + field.name, field.type, getattr(section, field.name), field.metadata)
        object.__setattr__(section, field.name, value)


def parse(name: str, kind: Any, raw: Any, constraints: Mapping[str, Any]) -> Any:
    """A value of type `kind` from a value or its text, checked.

    Raises:
      UserError: the name, the invalid value, and what would work.
    """
    if options := constraints.get("options"):
        check_choice(name, raw, options)
    bounds = {bound: constraints[bound] for bound in BOUNDS if bound in constraints}
    check, words = constraints.get("check", (None, NOUNS.get(kind, "")))
    try:
        value = _convert(kind, raw)
        for number in value if isinstance(value, tuple) else (value,):
            if type(number) in MAXIMUM and abs(number) > MAXIMUM[type(number)]:
                bounds = {"at_most": MAXIMUM[type(number)]} | bounds
            if not all(BOUNDS[bound](number, limit) for bound, limit in bounds.items()):
                raise ValueError
        if check and not check(value):
            raise ValueError
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        limits = (f"{bound.replace('_', ' ')} {limit}" for bound, limit in bounds.items())
        must = ", ".join([words, *limits])
        raise UserError(f"{name}={_shown(kind, raw)} must be {must}") from None
    return value


def _shown(kind: Any, raw: Any) -> str:
    """An invalid value as a message shows it: short, on one line."""
    text = escape_control(str(raw))
    text = repr(raw) if kind is str or len(text.split()) != 1 else text
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"


def _convert(kind: Any, raw: Any) -> Any:
    """`raw` as a value of `kind`; raises ValueError, TypeError or SyntaxError if it is none."""
    if typing.get_origin(kind) is tuple:
        if isinstance(raw, str):
            with warnings.catch_warnings(action="error"):  # literal_eval warns of text like '1is,2'
                raw = ast.literal_eval(raw)
        first, *others = typing.get_args(kind)
        kinds = [first] * len(raw) if others == [...] else [first, *others]
        return tuple(_convert(k, x) for k, x in zip(kinds, raw, strict=True))
    if hasattr(kind, "_fields"):  # a NamedTuple
        types = typing.get_type_hints(kind).values()
        if len(raw) > len(types):
            raise ValueError
        return kind(*(_convert(t, x) for t, x in zip(types, raw, strict=False)))
    if kind in (int, float) and isinstance(raw, str):
        raw = kind(raw)
    elif isinstance(raw, numbers.Number) and hasattr(raw, "item"):  # of numpy
        raw = raw.item()
    elif isinstance(raw, os.PathLike):
        raw = os.fspath(raw)
    if kind is float and type(raw) is int:
        raw = float(raw)
    if type(raw) is not kind:
        raise TypeError
    if (kind is str and not raw.isprintable()) or (kind is float and not math.isfinite(raw)):
        raise ValueError
    return raw
