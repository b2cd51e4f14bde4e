"""Fields of settings with their constraints, and the parser that checks a value against them.

Values are those of a workload file, of JSON, or the text of a flag.
"""

import ast
import dataclasses
import functools
import math
import numbers
import operator
import os
import re
import types
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
COMBINE = (lambda sizes: True, "bytes for all-reduce, all-gather and reduce-scatter, as 1,2,3")
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
    """Checks every field of a dataclass.

    Args:
      prefix: of field names in messages, as 'train.'.

    Raises:
      UserError: the first field with an invalid value.
    """
    for name in section.__dataclass_fields__:
        value = getattr(section, name)
        # A search builds thousands of layouts of the same few numbers.
        check: Any = _check_again if isinstance(value, int | str | None) else _check_value
        check(type(section), prefix, name, type(value), value)


def _check_value(cls: Any, prefix: str, name: str, _: Any, value: Any) -> None:
    field = cls.__dataclass_fields__[name]
    if parse(prefix + name, field.type, value, field.metadata) != value:
        raise UserError(f"{prefix}{name}={value!r} is text; give the value itself")


_check_again = functools.lru_cache(1 << 14)(_check_value)


def build(cls: type, section: str, values: Mapping[str, Any]) -> Any:
    """A dataclass from values of its fields, or their texts.

    Raises:
      UserError: a value is invalid, a field is unknown, or a required one is absent.
    """
    parsed = parse_fields(cls, values, f"{section}." if section else "")
    required(cls, parsed, section)
    return cls(**parsed)


def parse(name: str, kind: Any, raw: Any, constraints: Mapping[str, Any]) -> Any:
    """A value of type `kind` from a value or its text, checked. The text of None is 'auto'.

    Raises:
      UserError: the name, the invalid value, and what would work.
    """
    if isinstance(kind, types.UnionType):  # KIND | None
        if raw is None or raw == "auto":
            return None
        kind, _ = typing.get_args(kind)
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
    except UserError:
        raise  # it says more
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        limits = (f"{bound.replace('_', ' ')} {limit}" for bound, limit in bounds.items())
        must = ", ".join([words, *limits])
        raise UserError(f"{name}={_shown(kind, raw)} must be {must}") from None
    return value


def parse_fields(
    cls: type, values: Mapping[str, Any], prefix: str = "", kinds: Mapping[Any, Any] | None = None
) -> dict[str, Any]:
    """Checked values of some fields of a dataclass.

    Args:
      prefix: of field names in messages, as 'train.'.
      kinds: type of a field -> type of its values, and their constraints; of other types, and
        without it, they are those of the field.

    Raises:
      UserError: a name is no field, or a value is invalid.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    parsed = {}
    for name, value in values.items():
        check_choice(f"{prefix.rstrip('.')}: a field" if prefix else "a field", name, fields)
        field = fields[name]
        kind, constraints = (kinds or {}).get(field.type, (field.type, field.metadata))
        parsed[name] = parse(prefix + name, kind, value, constraints)
    return parsed


def required(cls: type, values: Mapping[str, Any], name: str, hint: str = "") -> None:
    """Raises UserError if fields of a dataclass have neither a value nor a default."""
    needed = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    if missing := [field for field in needed if field not in values]:
        raise UserError(f"{name} has no {', '.join(missing)}{hint}")


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
    if typing.get_origin(kind) is Mapping:
        return types.MappingProxyType({_convert(str, k): _convert(str, raw[k]) for k in raw})
    if hasattr(kind, "from_written"):
        return kind.from_written(raw)
    if hasattr(kind, "_fields"):  # a NamedTuple
        hints = typing.get_type_hints(kind).values()
        if len(raw) > len(hints):
            raise ValueError
        return kind(*(_convert(t, x) for t, x in zip(hints, raw, strict=False)))
    if kind in (int, float) and isinstance(raw, str):
        raw = kind(raw)
    elif kind is bool and isinstance(raw, str):
        raw = {"true": True, "false": False}.get(raw, raw)
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
