"""Statistics of step times, and a run's performance."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping

from maxbench.config.run import Run
from maxbench.metrics import flops


@dataclasses.dataclass
class Devices:
    """Devices that a run found."""

    platform: str  # jax's name: gpu, cpu
    kind: str  # as the driver reports it
    count: int
    gpu_type: str | None  # a name of Run.hardware; None for devices of no known type


def performance_figures(run: Run, gpu_type: str | None, step_s: float) -> dict:
    """flops.figures() of a run on GPUs of a type, a name of run.hardware.

    With None, the peak is unknown and MFU is None.
    """
    a = run.layout
    peak = run.hardware[gpu_type].peak_tflops(run.format.peak) if gpu_type else 0
    return flops.figures(run.model, run.train.seq, a.gbs, a.gpus, step_s, peak)


def measured_window(
    window: tuple[int, int], times: Mapping[int, float], interval: int = 1
) -> tuple[list[int], list[float]]:
    """The steps that are measured, and their times.

    Args:
      window: first and last step, inclusive. If `times` does not span it, or usually has no step in
        so many, the last half of the steps is measured; if they start later, at most as many as
        the window has.
      times: step -> seconds.
      interval: steps of which each time is the mean, the last of which is the key of `times`. A
        mean counts if the window has one of its steps; that of the first steps has the start of
        the program, and counts only if it is the only one.
    """
    first, last = window
    steps = sorted(times)
    if interval > 1 and len(steps) > 1:
        steps = [i for i in steps if i > steps[0] and i >= interval] or steps[1:]
    starts_later = steps and steps[0] - interval + 1 > first
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    is_rare = gaps and statistics.mode(gaps) > max(interval, last - first + 1)
    if not steps or steps[-1] < last or starts_later or is_rare:
        half = steps[len(steps) // 2 :]
        most = math.ceil((last - first + 1) / interval) if starts_later else len(half)
        first, last = (half[-most:][0], half[-1]) if half else (0, -1)
    measured = [i for i in steps if first <= i and i - interval < last]
    return measured, [times[i] for i in measured]


def statistics_of(values: list[float]) -> dict[str, float]:
    """Mean, population standard deviation, median, p10 and p90, in the unit of the values."""
    ordered = sorted(values)
    percentile = lambda q: ordered[round(q * (len(ordered) - 1))]
    return {
        "mean": statistics.fmean(values),
        "std": statistics.pstdev(values),
        "median": statistics.median(values),
        "p10": percentile(0.1),
        "p90": percentile(0.9),
    }
