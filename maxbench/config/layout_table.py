"""Tables of layouts of workload files: rows of settings by GPU type, number format and number of
GPUs, as text. A cell is checked as its setting is on the command line."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from maxbench.config.errors import UserError, check_choice
from maxbench.config.number_formats import DTYPES
from maxbench.config.run import DEGREES, SECTIONS, LayoutConfig
from maxbench.config.validation import parse, parse_fields
from maxbench.hardware.gpus import GPU_TYPES

KEYS = ("gpus", "dtype", "scaling", "gpu_type")  # columns that select a row
REQUIRED = (*KEYS, "layers", "seq", *DEGREES, "vp", "mbs", "gbs")
# Column -> section of the setting of that name, of which a row has a value.
COLUMNS = dict.fromkeys(LayoutConfig.__dataclass_fields__, "layout") | {"layers": "model"}
COLUMNS |= dict.fromkeys(("seq", "microbatch_group_size", "remat", "remat_layers"), "train")
COLUMNS |= dict.fromkeys(("unroll_layers", "two_batch_overlap"), "train")
COLUMNS |= {"format": "precision"} | dict.fromkeys(KEYS, "")  # format: its field `scaling`
SCALINGS = ("weak", "strong")


def field_of(column: str) -> str:
    """The name of a column's field in its section."""
    return "scaling" if column == "format" else column


def table(layouts: str) -> list[dict[str, Any]]:
    """Rows of a table, which check() accepts; a cell 'bf16,fp8' makes one row of each dtype."""
    header, *lines = [line.split() for line in layouts.splitlines() if line.strip()] or [[]]
    value = lambda text: int(text) if text.isdecimal() else text
    rows = [dict(zip(header, map(value, cells), strict=True)) for cells in lines]
    return [row | {"dtype": dtype} for row in rows for dtype in str(row["dtype"]).split(",")]


def check(layouts: str, source: str, gpu_types: Collection[str] = GPU_TYPES) -> None:
    """Checks the table of a file.

    Args:
      source: the text of the file.
      gpu_types: that a row may name.

    Raises:
      UserError: an invalid word; with its line and column in the file, if the table is in it.
    """
    header: list[str] = []
    for line in (line for line in layouts.splitlines() if line.strip()):
        cells = line.split()
        try:
            if header:
                _check_row(header, cells, gpu_types)
            else:
                header = cells
                _check_header(header)
        except InvalidCell as e:
            place = ""
            for number, text in enumerate(source.splitlines(), 1):
                if line in text:
                    starts = [word.start() for word in re.finditer(r"\S+", line)]
                    place = f":{number}:{text.index(line) + starts[e.number] + 1}"
                    break
            raise UserError(f"{place}: {e}") from None


class InvalidCell(UserError):
    """An invalid cell of a line; `number` is its index."""

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.number = number


def _check_header(header: Sequence[str]) -> None:
    for i, column in enumerate(header):
        try:
            check_choice("a column of layouts", column, COLUMNS)
        except UserError as e:
            raise InvalidCell(str(e), i) from None
    if missing := [column for column in REQUIRED if column not in header]:
        raise InvalidCell(f"layouts has no column {', '.join(missing)}", 0)


def _check_row(header: Sequence[str], cells: Sequence[str], gpu_types: Collection[str]) -> None:
    if len(cells) != len(header):
        message = f"the row has {len(cells)} cells, its header has {len(header)}; give as many"
        raise InvalidCell(message, min(len(cells), len(header)) - 1)
    row = dict(zip(header, cells, strict=True))
    sections: dict[str, dict[str, Any]] = {}
    for column, cell in row.items():
        try:
            if section := COLUMNS[column]:
                fields = {field_of(column): cell}
                parsed = parse_fields(SECTIONS[section], fields, f"{section}.")
                sections.setdefault(section, {}).update(parsed)
            else:
                _check_key(column, cell, gpu_types)
        except UserError as e:
            raise InvalidCell(str(e), header.index(column)) from None
    _check_together(header, row, sections)


def _check_key(column: str, cell: str, gpu_types: Collection[str]) -> None:
    options = {"dtype": DTYPES, "scaling": SCALINGS, "gpu_type": gpu_types}
    if column == "gpus":
        parse("gpus", int, cell, {"at_least": 1})
    for word in cell.split(",") if column == "dtype" else [cell]:
        if column in options:
            check_choice(column, word, options[column])


def _check_together(
    header: Sequence[str], row: Mapping[str, str], sections: Mapping[str, Mapping[str, Any]]
) -> None:
    """Checks what the fields of a section, and the axes and the number of GPUs, say together."""
    for section in ("layout", "train"):
        try:
            built = SECTIONS[section](**sections[section])
        except UserError as e:
            named = (i for i, column in enumerate(header) if re.search(rf"\b{column}=", str(e)))
            raise InvalidCell(str(e), next(named, 0)) from None
        if isinstance(built, LayoutConfig) and built.gpus != int(row["gpus"]):
            axes = " x ".join(f"{x}={n}" for x in DEGREES if (n := getattr(built, x)) > 1)
            message = f"gpus={row['gpus']}, but its axes ({axes or 'one device'}) are {built.gpus}"
            raise InvalidCell(message, header.index("gpus"))
