"""GPU types: peaks, memory and links; what programs reach of them; what compiler and job are told.

The figures stand in gpus.toml, each with its source, and add() takes more from a user's file.
Units: TFLOP/s are dense (no sparsity), memory is what the vendor sells (GB, 1e9 bytes), bandwidths
are GB/s (1e9 bytes per second). NVLink counts both directions, the network one.
"""

import dataclasses
import difflib
import math
import pathlib
import re
import tomllib
from collections.abc import Mapping
from typing import Any, NewType

PeakFraction = NewType("Reach", float)  # above 0 and up to 1
Fraction = NewType("Share", float)  # from 0 to 1
Microseconds = NewType("Latency", float)  # microseconds, from 0
# Rows that `maxbench calibrate` measured, last in each how many times as long it took as by the
# constants: operands as HLO calls them, layout (nn, nt or tn), m, n, k and batch of a product; kind
# (plain, turned or joined) of another kernel, and the bytes it moves.
Products, Kernels = NewType("Products", tuple), NewType("Kernels", tuple)


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
class Efficiency:
    """What programs reach of a GPU's datasheet. One set per GPU type, none per workload.

    Fractions are of the figure in Gpu that each names.
    """

    gemm_bf16: PeakFraction  # of bf16_tflops, a large matrix product inside a training step
    gemm_fp8: PeakFraction  # of fp8_tflops
    attention_forward: PeakFraction  # of bf16_tflops, causal FLOPs counted once
    attention_backward: PeakFraction
    memory: PeakFraction  # of memory_gbps, kernels that stream
    nvlink: PeakFraction  # of nvlink_gbps / 2, a ring collective's bus bandwidth
    network: PeakFraction  # of network_gbps
    nvlink_us: Microseconds  # of one step of a collective with NCCL's Simple protocol
    network_us: Microseconds
    wave_us: Microseconds  # of a round of a matrix product's tiles, beside its loop over k
    launch_us: Microseconds  # from one kernel's end to the next one's start
    host_sync_us: (
        Microseconds  # idle while the host reads a condition: a branch, a loop of unknown length
    )
    contention: Fraction  # a kernel and a collective beside it each run longer by this fraction
    step_jitter: (
        Fraction  # standard deviation of a GPU's time for a second's work, each second anew
    )


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
    host_gbps: float  # per GPU, one direction, to and from its host's memory
    memory_margin: Fraction  # of its memory that a plan leaves free, beside what the runtime keeps
    recipes: str  # the GPU type whose rows it takes of the workloads' tables, its own as a rule
    xla_options: dict[str, str]  # options of XLA's that differ from step/xla_options.py's
    environment: dict[str, str]  # variables of a job
    products: Products  # none: by its efficiency alone
    kernels: Kernels
    chip: Chip
    efficiency: Efficiency

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

    def topology(self, gpus: int, of_host: int = 0) -> str:
        """Of a job, as XLA wants it: NVLink domains x hosts of each x GPUs of a host, a node's or
        `of_host`.

        A cluster tells XLA its domains: hosts of one fabric, by NVML, or else each host
        (openxla/xla, xla/pjrt/distributed/topology_util.cc). Since jax 0.12 it schedules by them.
        """
        domain = math.gcd(gpus, self.nvlink_domain(gpus))
        host = of_host or math.gcd(domain, self.gpus_per_node)
        return f"{gpus // domain}x{domain // host}x{host}"


GPUS: dict[str, Gpu] = {}  # gpus.toml's, and those of users' files
_number = lambda v, low, high: type(v) in (int, float) and low <= v <= high
_cell = lambda x, text: isinstance(x, str) if text else _number(x, 1e-9, 1e30)
_row = lambda row, texts: len(row) == len(texts) and all(map(_cell, row, texts))
_rows = lambda v, texts: all(isinstance(row, list) and _row(row, texts) for row in v)
# Type of a field -> whether a value fits it, and what it must be.
KINDS = {
    str: (lambda v: isinstance(v, str) and v, "text"),
    int: (lambda v: type(v) is int and v >= 1, "a whole number, at least 1"),
    float: (lambda v: _number(v, 1e-9, 1e30), "a number above 0"),
    PeakFraction: (lambda v: _number(v, 1e-9, 1), "a number above 0 and up to 1"),
    Fraction: (lambda v: _number(v, 0, 1), "a number from 0 and up to 1"),
    Microseconds: (lambda v: _number(v, 0, 1e30), "a number from 0"),
    Products: (
        lambda v: isinstance(v, list) and _rows(v, (1, 1, 0, 0, 0, 0, 0)),
        'as ["bf16", "nt", 4096, 4096, 4096, 1, 1.05], row by row',
    ),
    Kernels: (
        lambda v: isinstance(v, list) and _rows(v, (1, 0, 0)),
        'as ["plain", 65536, 1.5], row by row',
    ),
    tuple[int, int]: (
        lambda v: isinstance(v, list) and len(v) == 2 and all(type(x) is int and x >= 0 for x in v),
        "as [9, 0]",
    ),
    dict[str, str]: (
        lambda v: isinstance(v, dict) and all(isinstance(x, str) for x in v.values()),
        'a table of texts, { NAME = "value" }',
    ),
    **dict.fromkeys((Chip, Efficiency), (lambda v: isinstance(v, dict), "a table")),
}


def add_file(path: str | pathlib.Path) -> None:
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


def override(name: str, values: Mapping[str, Any]) -> None:
    """Gives some figures of a GPU type another value, in this process.

    Raises:
      ValueError: what cannot be, with what would work.
    """
    GPUS[name] = _gpu({"like": name, **values})


def gpu_type_of(text: str) -> str:
    """The GPU type that a driver's name of a device, a path or a line of a log names, or ''."""
    for name in reversed(GPUS):
        if GPUS[name].chip.name == text:
            return name
    longest = "|".join(sorted(GPUS, key=len, reverse=True))  # 'gb200' before 'b200'
    found = re.search(rf"(?<![a-z0-9])({longest})(?![0-9])", text.lower())
    return found[1] if found else ""


def _gpu(values: Mapping[str, Any]) -> Gpu:
    """The Gpu of a table, checked."""
    values = {"chip": {}, "efficiency": {}} | values
    if (like := values.pop("like", "")) and like not in GPUS:
        raise ValueError(f"like={like!r} is not one of {', '.join(GPUS)}")
    gpu = _record(Gpu, values, GPUS.get(like))
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


def _record(cls: type, given: Mapping, base: Any, prefix: str = "") -> Any:
    """A cls with all fields of base, then the given ones, checked."""
    values = dict(vars(base)) if base else {}
    kinds = {f.name: f.type for f in dataclasses.fields(cls)}
    for key, value in given.items():
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(kinds)}"
            raise ValueError(f"no key {prefix}{key}; {hint}")
        fits, must = KINDS[kinds[key]]
        if not fits(value):
            if isinstance(value, list) and kinds[key] in (Products, Kernels):
                value = next((row for row in value if not fits([row])), value)
            raise ValueError(f"{prefix}{key}={value!r} must be {must}")
        if dataclasses.is_dataclass(kinds[key]):
            value = _record(kinds[key], value, values.get(key), f"{key}.")
        values[key] = tuple(value) if isinstance(value, list) else value
    if lacking := [k for k in kinds if k not in values]:
        raise ValueError(f'{prefix}{lacking[0]} is missing; give it, or like = "h100"')
    return cls(**values)


add_file(pathlib.Path(__file__).with_name("gpus.toml"))
