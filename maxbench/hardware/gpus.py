"""GPU types as data: peaks, memory and links, and the efficiency that programs reach on them.

GPU_TYPES are the built-in types, from gpus.toml, which gives the source of every figure.
config/gpu_files.py reads the types of a user's file. Records and mappings are immutable.

Units: TFLOP/s are dense (no sparsity), memory sizes are the vendor's (GB, 1e9 bytes), bandwidths
are GB/s (1e9 bytes per second). NVLink bandwidth counts both directions, network bandwidth one.
"""

import copyreg
import dataclasses
import functools
import math
import pathlib
import re
import tomllib
import types
from collections.abc import Iterator, Mapping
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
# Words after which a name is that of another part: 'a100' is not in 'a100 MIG 1g.5gb'.
VARIANT = r" ?(?:pcie|nvl|sxm|mig|hbm|\d+ ?gb?(?![a-z0-9])|\de(?![a-z0-9]))"


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
    memory: PeakFraction  # of memory_gbytes_per_s: streaming kernels
    nvlink: PeakFraction  # of nvlink_gbytes_per_s / 2: bus bandwidth of a ring collective
    network: PeakFraction  # of network_gbytes_per_s
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
    memory_gbytes_per_s: float
    nvlink_gbytes_per_s: float
    nvlink_gpus: int  # GPUs of an NVLink domain: one node, or several
    gpus_per_node: int
    network_gbytes_per_s: float  # per GPU, one direction
    host_gbytes_per_s: float  # per GPU, one direction, between GPU and host memory
    memory_margin: Fraction  # of the memory that a plan leaves free, in addition to the runtime's
    recipes: str  # GPU type whose rows of the workload tables apply, usually its own
    xla_options: Mapping[str, str]  # that replace those of step/xla_options.py
    environment: Mapping[str, str]  # variables of a job
    products: Products  # empty: GEMMs follow `efficiency` alone
    kernels: Kernels
    chip: Chip
    efficiency: Efficiency
    names: tuple[str, ...] = ()  # other names of the device than chip.name, as in labels and logs
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

    def replace(self, name: str, gpu: Gpu) -> "GpuTypes":
        """These types with another record under a name, new or known."""
        return GpuTypes({**self, name: gpu})

    def type_of(self, text: str) -> str:
        """The type of a driver's device name, or of the name in a label, path or word; '' if none.

        After the word NVIDIA only a whole device name counts.
        """
        words = _words(text)
        if name := self._spellings.get(words.replace(" ", "")):
            return name
        match = self._named.search(words)
        if not match or words[: match.start()].endswith("nvidia "):
            return ""
        return self._spellings[match[1].replace(" ", "")]

    @functools.cached_property
    def _spellings(self) -> dict[str, str]:
        """Types by all their names, without spaces.

        `like` copies names: of types with one of `names` the first counts, of those with one
        chip.name the last, which is a user's.
        """
        found: dict[str, str] = {}
        for name in reversed([*self]):
            for spelling in self[name].names:
                key = _words(spelling).replace(" ", "")
                found |= {key: name, f"nvidia{key}": name}
        found |= {_words(self[name].chip.name).replace(" ", ""): name for name in self}
        return found | {name: name for name in self}

    @functools.cached_property
    def _named(self) -> re.Pattern:
        """Names and spellings in a longer text; longest first: 'gb200' before 'b200'."""
        spelled = {_words(s).replace(" ", " ?") for gpu in self.values() for s in gpu.names}
        longest_first = "|".join(sorted(spelled | {*self}, key=len, reverse=True))
        return re.compile(rf"(?<![a-z0-9])({longest_first})(?![0-9]|{VARIANT})")


def _words(text: str) -> str:
    """A text in small letters, with one space for each run of other characters."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


PARTS: Mapping[str, Any] = {"chip": Chip, "efficiency": Efficiency}  # tables of a type


def record(values: Mapping[str, Any], known: Mapping[str, Gpu]) -> Gpu:
    """The record of a table whose values are valid (config/gpu_files.py checks those of a user).

    Args:
      values: of the fields of Gpu; `like` names one of the known types, and `network` one of
        networks.toml: the table's own values replace theirs, in PARTS key by key.
    """
    values = dict(values)
    base = known.get(values.pop("like", ""))
    network = values.pop("network", "")
    figures = networks()[network].figures if network else {}
    fields = {**(vars(base) if base else {}), **figures, **values}
    for name, part in PARTS.items():
        inherited = vars(getattr(base, name)) if base else {}
        own = {**inherited, **figures.get(name, {}), **values.get(name, {})}
        fields[name] = part(**{key: _frozen(value) for key, value in own.items()})
    return Gpu(**{key: _frozen(value) for key, value in fields.items()})


def _frozen(value: Any) -> Any:
    """A TOML value as immutable data."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    return types.MappingProxyType(value) if isinstance(value, dict) else value


def _builtin() -> GpuTypes:
    gpu_types = GpuTypes({})
    tables = tomllib.loads(pathlib.Path(__file__).with_name("gpus.toml").read_text())
    for name, values in tables.items():
        gpu_types = gpu_types.replace(name, record(values, gpu_types))
    return gpu_types


GPU_TYPES = _builtin()
