"""Files of GPU types (--hardware): tables in the form of hardware/gpus.toml, checked."""

import os
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from maxbench.config.errors import UserError, check_choice
from maxbench.config.validation import parse, parse_fields, required
from maxbench.hardware import gpus
from maxbench.hardware.gpus import GPU_TYPES, PARTS, Gpu, GpuTypes
from maxbench.hardware.networks import networks

_BAND = (
    lambda band: not band or (len(band) == 2 and 0 < band[0] < band[1]),
    "two numbers above 0, the lower first, as [0.95, 1.08]",
)
_Product = tuple[str, str, float, float, float, float, float]
_Kernel = tuple[str, float, float]
# Tables of measurements, checked row by row: the type and the constraints of a row.
ROWS: dict[str, tuple[Any, Mapping[str, Any]]] = {
    "products": (
        _Product,
        {"check": (lambda row: min(row[2:]) > 0, 'as ["bf16", "nt", 4096, 4096, 4096, 1, 1.05]')},
    ),
    "kernels": (
        _Kernel,
        {"check": (lambda row: min(row[1:]) > 0, 'as ["plain", 65536, 1.5]')},
    ),
}
# Type of a field of a record -> the type of its values, and their constraints.
KINDS: dict[Any, tuple[Any, Mapping[str, Any]]] = {
    str: (str, {"check": (bool, "text")}),
    int: (int, {"at_least": 1, "at_most": 2**63 - 1}),
    float: (float, {"above": 0}),
    gpus.PeakFraction: (float, {"above": 0, "at_most": 1}),
    gpus.Fraction: (float, {"at_least": 0, "at_most": 1}),
    gpus.OptionalPeak: (float, {"at_least": 0}),
    gpus.OptionalCount: (int, {"at_least": 0}),
    gpus.Oversubscription: (float, {"at_least": 1}),
    gpus.Microseconds: (float, {"at_least": 0}),
    gpus.Band: (gpus.Band, {"check": _BAND}),
    tuple[int, int]: (tuple[int, int], {"check": (lambda pair: min(pair) >= 0, "as [9, 0]")}),
    tuple[str, ...]: (tuple[str, ...], {}),
    Mapping[str, str]: (Mapping[str, str], {"check": (lambda _: True, "a table of texts")}),
    gpus.Products: (tuple[_Product, ...], {}),
    gpus.Kernels: (tuple[_Kernel, ...], {}),
}


def read(path: str | os.PathLike, gpu_types: GpuTypes = GPU_TYPES) -> GpuTypes:
    """These types and those of a file, which replace types of the same name.

    Raises:
      UserError: the file cannot be read, is not TOML, or an entry of it is invalid.
    """
    where = f"hardware={str(path)!r}"
    try:
        with open(path, "rb") as f:
            tables = tomllib.load(f)
    except OSError as e:
        raise UserError(f"{where} cannot be read: {e.strerror}") from None
    except ValueError as e:
        raise UserError(f"{where}: {e}") from None
    for name, values in tables.items():
        if not re.fullmatch(r"[a-z][a-z0-9]*", name) or not isinstance(values, dict):
            raise UserError(
                f"{where}: {name!r} must be a table named in small letters and digits, [h100]"
            )
        try:
            gpu_types = gpu_types.replace(name, _checked(values, gpu_types))
        except UserError as e:
            raise UserError(f"{where}: [{name}] {e}") from None
    return gpu_types


def override(gpu_types: GpuTypes, name: str, values: Mapping[str, Any]) -> GpuTypes:
    """These types with other figures of one of them.

    Raises:
      UserError: a figure is invalid.
    """
    return gpu_types.replace(name, _checked({"like": name, **values}, gpu_types))


def _checked(values: Mapping[str, Any], known: GpuTypes) -> Gpu:
    """The record of a table."""
    parsed = {}
    for key, names in (("like", known), ("network", networks())):
        if key in values:
            check_choice(key, values[key], names)
            parsed[key] = values[key]
    for key, part in PARTS.items():
        table = values.get(key, {})
        if not isinstance(table, dict):
            raise UserError(f"{key}={table!r} must be a table")
        parsed[key] = parse_fields(part, table, f"{key}.", KINDS)
    own = {key: value for key, value in values.items() if key not in parsed}
    for key, (kind, constraints) in ROWS.items():
        if isinstance(rows := own.get(key), list):
            own[key] = tuple(parse(key, kind, row, constraints) for row in rows)
    parsed |= parse_fields(Gpu, own, "", KINDS)
    if "like" not in parsed:
        given = networks()[parsed["network"]].figures if "network" in parsed else {}
        hint = '; add them, or like = "h100"'
        for key, part in PARTS.items():
            required(part, {**given.get(key, {}), **parsed[key]}, key, hint)
        required(Gpu, {**given, **parsed}, "the table", hint)
    gpu = gpus.record(parsed, known)
    if gpu.nvlink_gpus % gpu.gpus_per_node:
        raise UserError(
            f"nvlink_gpus={gpu.nvlink_gpus} is not a whole number of nodes of gpus_per_node="
            f"{gpu.gpus_per_node}"
        )
    for field, twin in (
        ("memory_gb", "memory_bytes"),
        ("memory_gbytes_per_s", "memory_bytes_per_s"),
    ):
        datasheet, driver = getattr(gpu, field), getattr(gpu.chip, twin)
        if not 0.9 < driver / (datasheet * 1e9) < 1.1:
            raise UserError(
                f"{field}={datasheet:g} and chip.{twin}={driver} must agree within 10 %: both are "
                "the same figure"
            )
    return gpu
