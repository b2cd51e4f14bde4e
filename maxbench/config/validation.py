"""What a setting may be: declared beside its field, judged here, wherever its value comes from.

That is a workload file, JSON, or the text of a flag.
"""

import ast
import dataclasses
import math
import operator
import re
import typing
import warnings
from collections.abc import Mapping
from typing import Any

from maxbench.config.errors import UserError, check_choice, escape_control

NOUNS = {int: "a whole number", float: "a finite number", bool: "true or false", str: "plain text"}
BOUNDS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le}
BOUNDS |= {"below": operator.lt}
LARGEST = {int: 2**31 - 1, float: 3e38}  # what 32 bits hold; a field's at_most= goes before it

# What a value must be, and that in words.
WINDOW = (lambda window: window[0] <= window[1], "first and last step, as 35,44")
COMBINE = (lambda sizes: len(sizes) in (0, 3), "() or bytes of three, as step/compiler.COMBINE")
PORT = r"([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"
ADDRESS = (re.compile(rf"|[\w.:\[\]-]+:{PORT}", re.ASCII).fullmatch, "host:port, as node1:1234")
RANKS = (re.compile(r" *\d+ *(, *\d+ *)*").fullmatch, "process numbers joined by commas, as 0,1,2")


def field(default: Any = dataclasses.MISSING, **rules: Any) -> Any:
    """A field and what it may be.

    Args:
      default: its value where none is given.
      rules: BOUNDS of a number, or of each in a tuple; options=, names to choose from; check=(what
        tells whether a value can be, and in words what it must be).
    """
    return dataclasses.field(default=default, metadata=rules)


def validate(section: Any, prefix: str = "") -> None:
    """Makes each field of a dataclass what it is declared to be.

    Raises:
      UserError: the first field whose value cannot be.
    """
    for field in dataclasses.fields(section):
        value = parse(prefix + field.name, field.type, getattr(section, field.name), field.metadata)
        object.__setattr__(section, field.name, value)


def parse(name: str, kind: Any, given: Any, rules: Mapping[str, Any]) -> Any:
    """A value of a kind, from itself or from its text.

    Raises:
      UserError: the name, what was given and what would work.
    """
    if options := rules.get("options"):
        check_choice(name, given, options)
    bounds = {rule: rules[rule] for rule in BOUNDS if rule in rules}
    fits, must = rules.get("check", (None, NOUNS.get(kind, "")))
    try:
        value = _typed(kind, given)
        for number in value if isinstance(value, tuple) else (value,):
            if type(number) in LARGEST and abs(number) > LARGEST[type(number)]:
                bounds = {"at_most": LARGEST[type(number)]} | bounds
            if not all(BOUNDS[rule](number, bound) for rule, bound in bounds.items()):
                raise ValueError
        if fits and not fits(value):
            raise ValueError
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        words = (f"{rule.replace('_', ' ')} {bound}" for rule, bound in bounds.items())
        shown = escape_control(str(given))
        shown = repr(given) if kind is str or len(shown.split()) != 1 else shown
        shown = shown if len(shown) <= 60 else f"{shown[:50]}... ({len(shown)} characters)"
        raise UserError(f"{name}={shown} must be {', '.join([must, *words])}") from None
    return value


def _typed(kind: Any, given: Any) -> Any:
    """What was given, as a value of a kind; raises ValueError or TypeError where it is none."""
    if typing.get_origin(kind) is tuple:
        if isinstance(given, str):
            with warnings.catch_warnings(action="error"):  # of text that is nearly Python
                given = ast.literal_eval(given)
        first, *others = typing.get_args(kind)
        kinds = [first] * len(given) if others == [...] else [first, *others]
        return tuple(_typed(k, x) for k, x in zip(kinds, given, strict=True))
    if hasattr(kind, "_fields"):  # a NamedTuple
        return kind(*(_typed(int, x) for x in given))
    if kind in (int, float) and isinstance(given, str):
        given = kind(given)
    if kind is float and type(given) is int:
        given = float(given)
    if type(given) is not kind:
        raise TypeError
    if (kind is str and not given.isprintable()) or (kind is float and not math.isfinite(given)):
        raise ValueError
    return given
