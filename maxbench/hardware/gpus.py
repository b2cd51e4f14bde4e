"""GPU types as data: peaks, memory and links, and the efficiency that programs reach on them.

GPU_TYPES are the built-in types, from gpus.toml, which gives the source of every figure.
GpuTypes.read() adds the types of a user's file. Records and mappings are immutable.

Units: TFLOP/s are dense (no sparsity), memory sizes are the vendor's (GB, 1e9 bytes), bandwidths
are GB/s (1e9 bytes per second). NVLink bandwidth counts both directions, network bandwidth one.
"""

import copyreg
import dataclasses
import difflib
import math
import pathlib
import re
import tomllib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NewType

from maxbench.hardware.networks import networks

PeakFraction = NewType("PeakFraction", float)  # above 0, at most 1
Fraction = NewType("Fraction", float)  # from 0 to 1
OptionalPeak = NewType("OptionalPeak", float)  # 0 = none
OptionalCount = NewType("OptionalCount", int)  # at least 0
Oversubscription = NewType("Oversubscription", float)  # at least 1
Band = tuple[float, ...]  # none, or two numbers above 0
Microseconds = NewType("Microseconds", float)  # at least 0
# Rows that `maxbench calibrate` measures. The last value of a row is measured over modelled time.
# GEMMs: operand type as in HLO, layout (nn, nt or tn), m, n, k, batch.
# Kernels other than GEMMs: kind (calibration/microbenchmarks.py), bytes moved.
Products = NewType("Products", tuple)
Kernels = NewType("Kernels", tuple)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Properties of a GPU that XLA's compiler needs as its target."""

    name: str  # as the driver reports it
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    clock_ghz: float
    l2_bytes: int
    memory_bytes: int
    memory_bytes_per_s: int
    # of Hopper and Blackwell
    shared_memory_per_core: int = 233472  # bytes
    fpus_per_core: int = 128
    nvlinks: int = 18


@dataclasses.dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Fractions of the datasheet's figures that programs reach, and latencies.

    One set per GPU type, none per workload. Each fraction is of the field of Gpu that its comment
    names.
    """

    gemm_bf16: PeakFraction  # of bf16_tflops: a large GEMM inside a training step
    gemm_fp8: PeakFraction  # of fp8_tflops
    gemm_fp4: PeakFraction  # of fp4_tflops
    attention_forward: PeakFraction  # of bf16_tflops, with causal FLOPs counted once
    attention_backward: PeakFraction
    memory: PeakFraction  # of memory_gbps: streaming kernels
    nvlink: PeakFraction  # of nvlink_gbps / 2: bus bandwidth of a ring collective
    network: PeakFraction  # of network_gbps
    nvlink_us: Microseconds  # per step of a collective with NCCL's Simple protocol
    network_us: Microseconds
    wave_us: Microseconds  # per wave of a GEMM's tiles, outside the loop over k
    launch_us: Microseconds  # from the end of a kernel to the start of the next
    host_sync_us: Microseconds  # GPU idle time while the host reads a condition (device-to-host)
    contention: Fraction  # slowdown of a kernel and a collective that overlap, each
    step_jitter: Fraction  # standard deviation of a GPU's time for one second of work


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU type: datasheet, target of the compiler, efficiency, settings of a job."""

    bf16_tflops: float
    fp8_tflops: OptionalPeak
    memory_gb: float
    memory_gbps: float
    nvlink_gbps: float
    nvlink_gpus: int  # GPUs of an NVLink domain: one node, or several
    gpus_per_node: int
    network_gbps: float  # per GPU, one direction
    host_gbps: float  # per GPU, one direction, between GPU and host memory
    memory_margin: Fraction  # of the memory that a plan leaves free, in addition to the runtime's
    recipes: str  # GPU type whose rows of the workload tables apply, usually its own
    xla_options: Mapping[str, str]  # that replace those of step/xla_options.py
    environment: Mapping[str, str]  # variables of a job
    products: Products  # empty: GEMMs follow `efficiency` alone
    kernels: Kernels
    chip: Chip
    efficiency: Efficiency
    fp4_tflops: OptionalPeak = OptionalPeak(0.0)  # of NVFP4
    # of the network between NVLink domains, as in networks.Network
    pod_gpus: OptionalCount = OptionalCount(0)
    oversubscription: Oversubscription = Oversubscription(1.0)
    # Nine of ten steps are between these factors of the predicted one; () = by error_band.py
    band: Band = ()

    def peak_tflops(self, peak: str) -> float:
        """Dense peak in TFLOP/s for 'fp4', 'fp8' or 'bf16' (Format.peak)."""
        return getattr(self, f"{peak}_tflops")

    def segment(self, nodes: int) -> int:
        """Nodes of a job that share an NVLink domain.

        A job of n nodes takes as many nodes of each domain as divide n evenly, which is how a
        scheduler places it (Slurm's --segment): 16 of the 18 nodes of an NVL72.
        """
        most = self.nvlink_gpus // self.gpus_per_node
        return max(n for n in range(1, most + 1) if nodes % n == 0)

    def nvlink_domain(self, gpus: int) -> int:
        """GPUs of a job of `gpus` GPUs that share an NVLink domain."""
        return self.segment(-(-gpus // self.gpus_per_node)) * self.gpus_per_node

    def topology(self, gpus: int, gpus_per_host: int = 0) -> str:
        """Topology of a job in XLA's form: NVLink domains x hosts per domain x GPUs per host.

        A cluster reports its domains to XLA: the hosts of one fabric, by NVML, or else each host
        (openxla/xla, xla/pjrt/distributed/topology_util.cc). Since jax 0.12 XLA schedules by them.

        Args:
          gpus: of the job.
          gpus_per_host: 0 for those of a node.
        """
        domain = math.gcd(gpus, self.nvlink_domain(gpus))
        host = gpus_per_host or math.gcd(domain, self.gpus_per_node)
        return f"{gpus // domain}x{domain // host}x{host}"


# So that a Run can be sent to another process.
def _read_only(mapping: dict) -> types.MappingProxyType:
    return types.MappingProxyType(mapping)


copyreg.pickle(types.MappingProxyType, lambda proxy: (_read_only, (dict(proxy),)))


class GpuTypes(Mapping[str, Gpu]):
    """GPU types by name: immutable and hashable, so that a Run can carry them."""

    def __init__(self, gpu_types: Mapping[str, Gpu]):
        self._types = dict(gpu_types)

    def __getitem__(self, name: str) -> Gpu:
        return self._types[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._types)

    def __len__(self) -> int:
        return len(self._types)

    def __hash__(self) -> int:  # equal mappings have equal names
        return hash(frozenset(self._types))

    def read(self, path: str | pathlib.Path) -> "GpuTypes":
        """These types and those of a file, which replace types of the same name.

        Raises:
          OSError: the file cannot be read.
          ValueError: it is not TOML, or an entry is invalid; names the entry and what would work.
        """
        with open(path, "rb") as f:
            tables = tomllib.load(f)
        gpu_types = self
        for name, values in tables.items():
            if not re.fullmatch(r"[a-z][a-z0-9]*", name) or not isinstance(values, dict):
                raise ValueError(
                    f"{name!r} must be a table named in small letters and digits, [h100]"
                )
            try:
                gpu_types = gpu_types.replace(name, _gpu(values, gpu_types))
            except ValueError as e:
                raise ValueError(f"[{name}] {e}") from None
        return gpu_types

    def replace(self, name: str, gpu: Gpu) -> "GpuTypes":
        """These types with another record under a name, new or known."""
        return GpuTypes({**self, name: gpu})

    def override(self, name: str, values: Mapping[str, Any]) -> "GpuTypes":
        """These types with other figures of one of them.

        Raises:
          ValueError: a figure is invalid; says what would work.
        """
        return self.replace(name, _gpu({"like": name, **values}, self))

    def type_of(self, text: str) -> str:
        """The type in a driver's device name, a path or a line of a log; '' if there is none."""
        for name in reversed([*self]):
            if self[name].chip.name == text:
                return name
        longest_first = "|".join(sorted(self, key=len, reverse=True))  # 'gb200' before 'b200'
        match = re.search(rf"(?<![a-z0-9])({longest_first})(?![0-9])", text.lower())
        return match[1] if match else ""


def _is_number(value: Any, low: float, high: float) -> bool:
    return type(value) in (int, float) and low <= value <= high


def _is_rows(value: Any, *cells: type) -> bool:
    """Whether a value is a list of rows with texts and numbers above 0 as in `cells`."""
    fits = lambda x, kind: isinstance(x, str) if kind is str else _is_number(x, 1e-9, 1e30)
    row = lambda xs: isinstance(xs, list) and len(xs) == len(cells) and all(map(fits, xs, cells))
    return isinstance(value, list) and all(map(row, value))


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(x) is int for x in value)


def _is_band(value: list) -> bool:
    return len(value) == 2 and all(_is_number(x, 1e-3, 1e3) for x in value) and value[0] < value[1]


def _is_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(x, str) for x in value.values())


# Type of a field -> check of a value, and the words of a message for it.
_CHECKS: dict[Any, tuple[Callable[[Any], Any], str]] = {
    str: (lambda v: isinstance(v, str) and v, "text"),
    int: (lambda v: type(v) is int and v >= 1, "a whole number, at least 1"),
    float: (lambda v: _is_number(v, 1e-9, 1e30), "a number above 0"),
    PeakFraction: (lambda v: _is_number(v, 1e-9, 1), "a number above 0 and up to 1"),
    Fraction: (lambda v: _is_number(v, 0, 1), "a number from 0 and up to 1"),
    OptionalPeak: (lambda v: _is_number(v, 0, 1e30), "a number from 0"),
    OptionalCount: (lambda v: type(v) is int and v >= 0, "a whole number, at least 0"),
    Oversubscription: (lambda v: _is_number(v, 1, 1e30), "a number from 1"),
    Microseconds: (lambda v: _is_number(v, 0, 1e30), "a number from 0"),
    Products: (
        lambda v: _is_rows(v, str, str, *[float] * 5),
        'as ["bf16", "nt", 4096, 4096, 4096, 1, 1.05], row by row',
    ),
    Kernels: (
        lambda v: _is_rows(v, str, float, float),
        'as ["plain", 65536, 1.5], row by row',
    ),
    Band: (
        lambda v: isinstance(v, list) and (not v or _is_band(v)),
        "two numbers above 0, the lower first, as [0.95, 1.08]",
    ),
    tuple[int, int]: (lambda v: _is_pair(v) and min(v) >= 0, "as [9, 0]"),
    Mapping[str, str]: (_is_texts, 'a table of texts, { NAME = "value" }'),
    **dict.fromkeys((Chip, Efficiency), (lambda v: isinstance(v, dict), "a table")),
}


def _gpu(values: Mapping[str, Any], known: Mapping[str, Gpu]) -> Gpu:
    """The checked record of a table; `like` in it names one of the known types, and `network` one
    of networks.toml, whose figures the table's own replace."""
    values = {"chip": {}, "efficiency": {}} | dict(values)
    if (network := values.pop("network", None)) is not None:
        if network not in networks():
            raise ValueError(f"network={network!r} is not one of {', '.join(networks())}")
        figures = networks()[network].figures
        if isinstance(values["efficiency"], dict):
            figures["efficiency"] |= values["efficiency"]
        values = {**figures, **values, "efficiency": figures["efficiency"]}
    if (like := values.pop("like", "")) and like not in known:
        raise ValueError(f"like={like!r} is not one of {', '.join(known)}")
    gpu = _record(Gpu, values, known.get(like))
    if gpu.nvlink_gpus % gpu.gpus_per_node:
        raise ValueError(
            f"nvlink_gpus={gpu.nvlink_gpus} is not a whole number of nodes of gpus_per_node="
            f"{gpu.gpus_per_node}"
        )
    for field, twin in (("memory_gb", "memory_bytes"), ("memory_gbps", "memory_bytes_per_s")):
        datasheet, driver = getattr(gpu, field), getattr(gpu.chip, twin)
        if not 0.9 < driver / (datasheet * 1e9) < 1.1:
            raise ValueError(
                f"{field}={datasheet} and chip.{twin}={driver} must agree within 10 %: both are "
                "the same figure"
            )
    return gpu


def _record(cls: type, values: Mapping, base: Any, prefix: str = "") -> Any:
    """A record of class cls: the fields of base, if any, with checked values in their place."""
    fields = dict(vars(base)) if base else {}
    kinds: dict[str, Any] = {f.name: f.type for f in dataclasses.fields(cls)}
    defaults = {f.name for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}
    for key, value in values.items():
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(kinds)}"
            raise ValueError(f"no key {prefix}{key}; {hint}")
        fits, must = _CHECKS[kinds[key]]
        if not fits(value):
            if isinstance(value, list) and kinds[key] in (Products, Kernels):
                value = next((row for row in value if not fits([row])), value)
            raise ValueError(f"{prefix}{key}={value!r} must be {must}")
        if dataclasses.is_dataclass(kinds[key]):
            fields[key] = _record(kinds[key], value, fields.get(key), f"{key}.")
        else:
            fields[key] = _frozen(value)
    if missing := [key for key in kinds if key not in {*fields, *defaults}]:
        raise ValueError(f'{prefix}{missing[0]} is missing; give it, or like = "h100"')
    return cls(**fields)


def _frozen(value: Any) -> Any:
    """A TOML value as immutable data."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    return types.MappingProxyType(value) if isinstance(value, dict) else value


GPU_TYPES = GpuTypes({}).read(pathlib.Path(__file__).with_name("gpus.toml"))
