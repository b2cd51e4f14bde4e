"""GPU types: peaks, memory and links; what programs reach of them; what compiler and job are told.

The figures stand in gpus.toml, each with its source, and add() takes more from a user's file.
Units: TFLOP/s are dense (no sparsity), memory is what the vendor sells (GB, 1e9 bytes), bandwidths
are GB/s (1e9 bytes per second). NVLink counts both directions, the network one.
"""

import dataclasses
import difflib
import pathlib
import re
import tomllib
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """What XLA's GPU compiler must know of a GPU to compile for it."""

    name: str  # as the driver says it
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    clock_ghz: float
    l2_bytes: int
    memory_bytes: int
    memory_bytes_per_s: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Physics:
    """What programs reach of a GPU's datasheet. One set per GPU type, none per workload.

    Fractions are of the figure in Gpu that each names.
    """

    gemm_bf16: float  # of bf16_tflops, a large matrix product inside a training step
    gemm_fp8: float  # of fp8_tflops
    attention_forward: float  # of bf16_tflops, causal FLOPs counted once
    attention_backward: float
    memory: float  # of memory_gbps, kernels that stream
    nvlink: float  # of nvlink_gbps / 2, a ring collective's bus bandwidth
    network: float  # of network_gbps
    nvlink_us: float  # latency of one step of a collective
    network_us: float
    launch_us: float  # from one kernel's end to the next one's start
    host_us: float  # idle while the host reads a condition: a branch, a loop of unknown length
    contention: float  # a kernel runs longer by this fraction beside a collective


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU type, whole."""

    bf16_tflops: float
    fp8_tflops: float
    memory_gb: float
    memory_gbps: float
    nvlink_gbps: float
    nvlink_gpus: int  # GPUs that reach each other over NVLink: a node, or several
    gpus_per_node: int
    network_gbps: float  # per GPU, one direction
    recipes: str  # the GPU type whose rows it takes of the workloads' tables, its own as a rule
    xla_options: dict[str, str]  # options of XLA's that differ from step/compiler.py's
    environment: dict[str, str]  # variables of a job
    chip: Chip
    physics: Physics

    def peak_tflops(self, peak: str) -> float:
        """Dense peak in TFLOP/s for 'fp8' or 'bf16', Format.peak."""
        return getattr(self, f"{peak}_tflops")

    def segment(self, nodes: int) -> int:
        """Nodes of a job that share one NVLink domain.

        A job of n nodes takes as many nodes of each domain as divide n evenly, which is how a
        scheduler is asked to place it (Slurm's --segment): 16 of the 18 nodes of an NVL72.
        """
        most = self.nvlink_gpus // self.gpus_per_node
        return max(n for n in range(1, most + 1) if nodes % n == 0)

    def nvlink_domain(self, gpus: int) -> int:
        """GPUs of a job of so many that share one NVLink domain."""
        return self.segment(-(-gpus // self.gpus_per_node)) * self.gpus_per_node


GPUS: dict[str, Gpu] = {}  # gpus.toml's, and those of users' files
MAY_BE_ZERO = ("nvlink_us", "network_us", "launch_us", "host_us", "contention")
PARTS = {"chip": Chip, "physics": Physics}


def add(path: str | pathlib.Path) -> None:
    """Puts the GPU types of a file into GPUS; one that is there already is replaced.

    Raises:
      OSError, ValueError: no such file, or what of it cannot be, with what would work.
    """
    with open(path, "rb") as f:
        tables = tomllib.load(f)
    for name, values in tables.items():
        if not re.fullmatch(r"[a-z][a-z0-9]*", name) or not isinstance(values, dict):
            raise ValueError(f"{name!r} must be a table named in small letters and digits, [h100]")
        try:
            GPUS[name] = _gpu(values)
        except ValueError as e:
            raise ValueError(f"[{name}] {e}") from None


def named(text: str) -> str:
    """The GPU type that a driver's name of a device, a path or a line of a log names, or ''."""
    for name in reversed(GPUS):
        if GPUS[name].chip.name == text:
            return name
    longest = "|".join(sorted(GPUS, key=len, reverse=True))  # 'gb200' before 'b200'
    found = re.search(rf"(?<![a-z0-9])({longest})(?![0-9])", text.lower())
    return found[1] if found else ""


def _gpu(values: Mapping[str, Any]) -> Gpu:
    """The Gpu of a table, checked."""
    values, base = dict(values), {}
    if (like := values.pop("like", None)) is not None:
        if like not in GPUS:
            raise ValueError(f"like={like!r} is not one of {', '.join(GPUS)}")
        base = vars(GPUS[like])
    for part, cls in PARTS.items():
        given = values.get(part, {})
        if not isinstance(given, dict):
            raise ValueError(f"{part}={given!r} must be a table")
        values[part] = cls(**_fields(cls, given, vars(base[part]) if base else {}, f"{part}."))
    gpu = Gpu(**_fields(Gpu, values, base))
    if gpu.nvlink_gpus % gpu.gpus_per_node:
        raise ValueError(
            f"nvlink_gpus={gpu.nvlink_gpus} is not a whole number of nodes of gpus_per_node="
            f"{gpu.gpus_per_node}"
        )
    for field, twin in (("memory_gb", "memory_bytes"), ("memory_gbps", "memory_bytes_per_s")):
        sold, there = getattr(gpu, field), getattr(gpu.chip, twin)
        if not 0.9 < there / (sold * 1e9) < 1.1:
            raise ValueError(
                f"{field}={sold} and chip.{twin}={there} are to be the same figure, within a tenth"
            )
    return gpu


def _fields(cls: type, given: Mapping, base: Mapping, prefix: str = "") -> dict[str, Any]:
    """All fields of cls: those of base, then the given ones, checked."""
    kinds = {f.name: f.type for f in dataclasses.fields(cls)}
    for key, value in given.items():
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(kinds)}"
            raise ValueError(f"no key {prefix}{key}; {hint}")
        if why := _wrong(key, kinds[key], value, fraction=cls is Physics):
            raise ValueError(f"{prefix}{key}={value!r} must be {why}")
    if lacking := [k for k in kinds if k not in base and k not in given]:
        raise ValueError(f'{prefix}{lacking[0]} is missing; give it, or like = "h100"')
    return {**base, **{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}}


def _wrong(key: str, kind: Any, value: Any, fraction: bool) -> str:
    """What a value must be to be of its kind and possible; '' where it is."""
    number = lambda v, types: isinstance(v, types) and not isinstance(v, bool)
    if kind is str:
        return "" if isinstance(value, str) and value else "text"
    if kind == dict[str, str]:
        words = isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
        return "" if words else 'a table of texts, { NAME = "value" }'
    if kind == tuple[int, int]:
        two = isinstance(value, list) and len(value) == 2
        return "" if two and all(number(v, int) and v >= 0 for v in value) else "as [9, 0]"
    if kind in (int, float):
        most = 1 if fraction and not key.endswith("_us") else 1e30
        least = 0 if key in MAY_BE_ZERO else 1 if kind is int else 1e-9
        fits = number(value, kind if kind is int else (int, float)) and least <= value <= most
        what = "a whole number, at least 1" if kind is int else "a number above 0"
        what = what.replace("above", "from") if least == 0 else what
        return "" if fits else what + " and up to 1" * (most == 1)
    return ""  # a part, made by now


add(pathlib.Path(__file__).with_name("gpus.toml"))
