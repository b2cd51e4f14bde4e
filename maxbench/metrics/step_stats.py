"""Statistics of step times, performance figures, and the published figure of the same work."""

import dataclasses
import statistics
from collections.abc import Mapping

from maxbench.config.run import Run
from maxbench.hardware import published
from maxbench.metrics import flops


@dataclasses.dataclass
class Devices:
    """Devices of a run."""

    platform: str  # jax's name: gpu, cpu
    kind: str  # as the driver reports it
    count: int
    gpu_type: str | None  # a name of Run.gpu_types; None for devices of no known type


def performance_figures(run: Run, gpu_type: str | None, step_s: float) -> dict:
    """flops.figures() of a run on GPUs of a type; on devices without a known peak if None."""
    a = run.layout
    peak = run.gpu_types[gpu_type].peak_tflops(run.format.peak) if gpu_type else 0
    return flops.figures(run.model, run.train.seq, a.gbs, a.gpus, step_s, peak)


def measured_window(
    chosen: tuple[int, int], times: Mapping[int, float]
) -> tuple[list[int], list[float]]:
    """Steps that count and their times: the chosen ones, or the last half of a shorter run."""
    first, last = chosen
    steps = sorted(times)
    if not steps or steps[-1] < last or steps[0] > first:
        first, last = (steps[len(steps) // 2], steps[-1]) if steps else (0, -1)
    kept = [i for i in steps if first <= i <= last]
    return kept, [times[i] for i in kept]


def statistics_of(values: list[float]) -> dict[str, float]:
    """Mean, standard deviation (of the population), median, p10, p90; in the unit of the values."""
    ordered = sorted(values)
    at = lambda q: ordered[round(q * (len(ordered) - 1))]
    return {
        "mean": statistics.fmean(values),
        "std": statistics.pstdev(values),
        "median": statistics.median(values),
        "p10": at(0.1),
        "p90": at(0.9),
    }


def compare_with_published(run: Run, gpu_type: str) -> published.Comparison:
    """The run on GPUs of a type, and the published row of the same workload."""
    model, layout = run.model, run.layout
    return published.compare(
        model.name, model.size, run.precision.dtype, gpu_type,
        gpus=layout.gpus, gbs=layout.gbs, seq=run.train.seq, layers=model.layers,
    )  # fmt: skip
