"""Prediction of a program's step on a cluster: what plans of runs and of other programs share."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

from maxbench.cost_model import buffer_liveness, compile_cache, hlo
from maxbench.cost_model.compile_cache import Compiled
from maxbench.cost_model.costs import Costs
from maxbench.cost_model.meaning import Meaning
from maxbench.cost_model.memory import Sizes
from maxbench.cost_model.simulate import Timeline
from maxbench.evidence.error_band import ErrorBand
from maxbench.hardware.gpus import Efficiency, Gpu
from maxbench.planning.op_names import OpNames
from maxbench.terminal import console

SENSITIVITY = {  # part of the cluster -> fields of Efficiency
    "network bandwidth": ("network",),
    "NVLink bandwidth": ("nvlink",),
    "memory bandwidth": ("memory",),
    "GEMMs": ("gemm_bf16", "gemm_fp8", "gemm_fp4"),
    "latency of links": ("network_us", "nvlink_us"),
}
FACTORS = (0.5, 0.8, 1.25, 2.0)  # of a bandwidth, rate or latency in sensitivity()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction(abc.ABC):
    """A compiled program, its memory on one GPU, and its predicted step.

    Attributes:
      cached: whether the program was in the cache.
    """

    compiled: Compiled
    memory: Sizes
    timeline: Timeline
    cached: bool = False

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Name in drawings and tables."""

    @property
    @abc.abstractmethod
    def gpu_type(self) -> str: ...

    @property
    @abc.abstractmethod
    def gpu(self) -> Gpu: ...

    @property
    @abc.abstractmethod
    def peak(self) -> str:
        """Name of the GPU's peak rate, for Gpu.peak_tflops()."""

    @property
    @abc.abstractmethod
    def band(self) -> ErrorBand:
        """Error band of the predicted step."""

    @abc.abstractmethod
    def costs(self) -> Costs:
        """Costs of ops on the cluster."""

    @abc.abstractmethod
    def meaning(self, program: hlo.Program) -> Meaning:
        """Meaning of the names in the program."""

    @abc.abstractmethod
    def op_names(self, program: hlo.Program) -> OpNames:
        """Names of the program's ops for people."""

    @abc.abstractmethod
    def simulate(
        self, program: hlo.Program, record: bool = False, efficiency: Efficiency | None = None
    ) -> Timeline:
        """The program's predicted step.

        Args:
          record: keep the events, for drawing.
          efficiency: replaces the GPU type's own.
        """

    @property
    def ticks(self) -> int:
        """Ticks of a pipeline's schedule; 0 where it is not known."""
        return 0

    @property
    def step_s(self) -> float:
        return self.timeline.seconds

    def text_s(self, seconds: float) -> str:
        """Seconds of the step as text, with three digits more where the step is short."""
        return console.fixed(seconds, 3 if self.step_s >= 0.1 else 6)

    @property
    def fits(self) -> bool:
        return self.memory.spare >= 0

    @property
    def hfu(self) -> float:
        """Executed FLOP/s over the peak."""
        return self.timeline.flops / self.step_s / 1e12 / self.gpu.peak_tflops(self.peak)

    @property
    def parts_s(self) -> dict[str, float]:
        """Seconds of the step by kind of work; they sum to the step."""
        t = self.timeline
        return dict(t.compute) | {"exposed": t.exposed_s, "idle": t.idle_s}

    def liveness(self, program: hlo.Program) -> buffer_liveness.Liveness:
        """The program's live buffers over a step."""
        return buffer_liveness.liveness(program, self.costs(), self.meaning(program))

    def sensitivity(self) -> dict[str, list[float]]:
        """Part of the cluster -> seconds of a step with it scaled by each of FACTORS."""
        program, efficiency = hlo.parse(self.compiled.text), self.gpu.efficiency

        def seconds(names: tuple[str, ...], factor: float) -> float:
            scaled = {name: getattr(efficiency, name) * factor for name in names}
            changed = dataclasses.replace(efficiency, **scaled)
            return self.simulate(program, efficiency=changed).seconds

        return {part: [seconds(names, f) for f in FACTORS] for part, names in SENSITIVITY.items()}

    def figures(self) -> dict[str, Any]:
        """The prediction as plain data; seconds and bytes unless a name has another unit."""
        t, m, band, c = self.timeline, self.memory, self.band, self.compiled
        return {
            "name": self.name,
            "gpu_type": self.gpu_type,
            "fits": self.fits,
            "memory": {**m.parts, "capacity": m.capacity, "total": m.total, "spare": m.spare}
            | {"host": c.host},
            "communication": [*map(_traffic, t.traffic.values())],
            "step_s": t.seconds,
            "band_s": {"low": t.seconds * band.low, "high": t.seconds * band.high}
            | {"rows_like_it": band.like, "programs": band.programs, "validated": band.validated},
            "parts_s": self.parts_s,
            "unknown": [dataclasses.asdict(x) for x in t.unknown.values()],
            "hfu": self.hfu,
            "compile": {
                "lower_s": c.lower_s,
                "compile_s": c.compile_s,
                "peak_rss_gib": c.peak_rss_gib,
                "cached": self.cached,
                "versions": compile_cache.versions(),
            },
        }


def _traffic(x: Any) -> Mapping[str, Any]:
    """A CollectiveStats as plain data."""
    return {
        "kind": x.kind,
        "axes": x.link.axes,
        "link": x.link.name,
        "members": x.link.members,
        "count": round(x.count),
        "bytes": round(x.bytes),
        "busy_s": x.busy_s,
        "exposed_s": x.exposed_s,
    }
