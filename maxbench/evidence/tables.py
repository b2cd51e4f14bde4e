"""Tables of measurements: CSV files whose columns are the fields of a dataclass."""

import csv
import dataclasses
import pathlib
import typing
from typing import Any, TypeVar

Row = TypeVar("Row")


def read(cls: type[Row], file: str) -> tuple[Row, ...]:
    """The rows of a file of this folder; an empty cell is None.

    Its columns are the fields of `cls`, in their order: of type KIND or KIND | None.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    kinds: list[Any] = [next(iter(typing.get_args(f.type)), f.type) for f in fields]
    with open(pathlib.Path(__file__).with_name(file), newline="") as f:
        heads, *lines = csv.reader(f)
    if heads != [f.name for f in fields]:
        raise ValueError(f"{file} has other columns than {cls.__name__}")
    return tuple(
        cls(*(kind(text) if text else None for kind, text in zip(kinds, line, strict=True)))
        for line in lines
    )
