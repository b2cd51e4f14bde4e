"""Fit of Efficiency constants to observations.

An observation is a program with its measured seconds, and a function that predicts them from the
constants. Each constant is fitted to the observations that concern it.
"""

import dataclasses
import datetime
import functools
import json
import math
import statistics
import types
from collections.abc import Callable, Mapping, Sequence

from scipy import optimize

from maxbench.hardware.gpus import GPU_TYPES, Efficiency, Fraction, Gpu, Microseconds, PeakFraction
from maxbench.host import environment

MAX_ROUNDS = 12  # over all constants, because some depend on others
TOLERANCE = 0.005  # relative, of a constant
# Type of a constant -> its lowest and highest value.
LIMITS = ((PeakFraction, (1e-3, 1.0)), (Fraction, (1e-3, 1.0)), (Microseconds, (1e-2, 1e5)))
# Lowest and highest plausible value of each constant of a GPU. A value outside has another cause: a
# throttled GPU, a busy host, a wrong link.
PLAUSIBLE: Mapping[str, tuple[float, float]] = types.MappingProxyType({
    "gemm_bf16": (0.35, 0.95),
    "gemm_fp8": (0.25, 0.95),
    "gemm_fp4": (0.20, 0.95),
    "attention_forward": (0.20, 0.90),
    "attention_backward": (0.15, 0.80),
    "memory": (0.50, 0.98),
    "nvlink": (0.30, 0.98),
    "network": (0.30, 1.00),
    "nvlink_us": (0.5, 40.0),
    "network_us": (1.0, 100.0),
    "wave_us": (0.3, 20.0),
    "launch_us": (0.3, 20.0),
    "host_sync_us": (2.0, 300.0),
    "contention": (0.0, 0.6),
    "step_jitter": (0.0, 0.05),
})  # fmt: skip
HUBER = 0.1  # log error below which errors count by their square
# Change of a log prediction, for half the constant, from which on an observation depends on it.
DEPENDS = 0.002
GRID = 9  # points over the whole range, before the minimum is refined
# Keys of a new GPU type in a file for --hardware.
GPU_KEYS = ("bf16_tflops", "fp8_tflops", "memory_gb", "memory_gbytes_per_s", "nvlink_gbytes_per_s",
            "nvlink_gpus", "gpus_per_node", "network_gbytes_per_s")  # fmt: skip
CHIP_KEYS = ("name", "cores", "memory_bytes", "memory_bytes_per_s")


@dataclasses.dataclass(frozen=True)
class Observation:
    """Measured seconds of a program, and their prediction."""

    name: str
    seconds: float
    predict: Callable[[Efficiency], float]

    def error(self, efficiency: Efficiency) -> float:
        """Predicted over measured, less 1."""
        return self.predict(efficiency) / self.seconds - 1


def median_error(observations: Sequence[Observation], efficiency: Efficiency) -> float:
    """Median of the absolute errors."""
    return statistics.median(abs(o.error(efficiency)) for o in observations)


def fit(
    observations: Mapping[str, Sequence[Observation]],
    efficiency: Efficiency,
    max_factor: float = math.inf,
) -> tuple[Efficiency, list[str]]:
    """Fits constants one after the other, in rounds, until none changes.

    Args:
      observations: constant -> the observations it is fitted to, in the order of fitting.
      efficiency: initial values.
      max_factor: the largest factor by which a constant may change.

    Returns:
      The constants, and the names of those that were fitted: a constant that no prediction of its
      observations depends on keeps its value.
    """
    names = [name for name, some in observations.items() if depends(name, some, efficiency)]
    bounds = {name: limits(name, getattr(efficiency, name), max_factor) for name in names}
    for _ in range(MAX_ROUNDS):
        before = efficiency
        for name in names:
            value = minimize(name, observations[name], efficiency, *bounds[name])
            efficiency = with_constant(efficiency, name, value)
        ratios = (getattr(efficiency, name) / max(getattr(before, name), 1e-9) for name in names)
        if all(abs(math.log(ratio)) < 2 * TOLERANCE for ratio in ratios):
            break
    return efficiency, names


def with_constant(efficiency: Efficiency, name: str, value: float) -> Efficiency:
    """The constants with one of them replaced."""
    return dataclasses.replace(efficiency, **{name: value})  # type: ignore[arg-type]


def _limits_of(name: str) -> tuple[float, float]:
    kind = Efficiency.__dataclass_fields__[name].type
    return next(limit for known, limit in LIMITS if known is kind)


def is_unresolved(name: str, efficiency: Efficiency) -> bool:
    """Whether a latency was fitted to its lower limit: the measured programs take less than the
    model predicts without it, and do not determine it."""
    kind = Efficiency.__dataclass_fields__[name].type
    return kind is Microseconds and getattr(efficiency, name) < 2 * _limits_of(name)[0]


def is_plausible(name: str, value: float) -> bool:
    """Whether a constant of a GPU can have this value (PLAUSIBLE)."""
    low, high = PLAUSIBLE[name]
    return low <= value <= high


def limits(name: str, value: float, max_factor: float) -> tuple[float, float]:
    """Bounds of a constant in a fit that starts from `value`. With a finite max_factor they are
    plausible, if `value` is."""
    low, high = _limits_of(name)
    if max_factor < math.inf and is_plausible(name, value):
        low, high = max(low, PLAUSIBLE[name][0]), min(high, PLAUSIBLE[name][1])
    return max(low, value / max_factor), min(high, max(value, low) * max_factor)


def at_limit(name: str, efficiency: Efficiency) -> bool:
    """Whether a constant was fitted to a limit of its plausible range."""
    value = getattr(efficiency, name)
    return any(abs(math.log(value / x)) < 2 * TOLERANCE for x in PLAUSIBLE[name] if value and x)


def depends(name: str, observations: Sequence[Observation], efficiency: Efficiency) -> bool:
    """Whether any prediction depends on a constant."""
    value = max(getattr(efficiency, name), 1e-3)
    half, whole = (with_constant(efficiency, name, x) for x in (value / 2, value))
    changes = (math.log(o.predict(half) / o.predict(whole)) for o in observations)
    return any(abs(change) > DEPENDS for change in changes)


def minimize(
    name: str,
    observations: Sequence[Observation],
    efficiency: Efficiency,
    low: float,
    high: float,
) -> float:
    """The value of a constant in [low, high] with the smallest mean pseudo-Huber loss of the log
    errors, so that one bad measurement has little weight.

    The loss may have several local minima, so a grid selects the one to refine.
    """

    @functools.cache
    def loss(log_value: float) -> float:
        changed = with_constant(efficiency, name, math.exp(log_value))
        log_errors = (math.log(o.predict(changed) / o.seconds) for o in observations)
        return sum(math.hypot(error, HUBER) for error in log_errors)

    start, end = math.log(low), math.log(high)
    grid = [start + (end - start) * i / (GRID - 1) for i in range(GRID)]
    i = min(range(GRID), key=lambda i: loss(grid[i]))
    bounds = grid[max(0, i - 1)], grid[min(GRID - 1, i + 1)]
    found = optimize.minimize_scalar(
        loss, bounds=bounds, method="bounded", options={"xatol": TOLERANCE / 2}
    )
    return math.exp(found.x)


def toml(
    name: str,
    efficiency: Efficiency,
    names: Sequence[str],
    verb: str,
    source: str,
    gpu: Gpu | None = None,
    tables: Mapping[str, Sequence] | None = None,
    band: Sequence[float] = (),
) -> str:
    """A file for --hardware with the constants `names`, each with its source in a comment.

    Args:
      name: of the GPU type.
      verb: 'measured' or 'fitted'.
      source: date, devices and versions, the most important first.
      gpu: the measured record of a type that gpus.toml does not have.
      tables: key of Gpu -> rows.
      band: of a plan with these constants (Gpu.band).
    """
    comment = f"# {verb} {', '.join(source.split(', ')[:3])}"
    number = lambda value: f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
    line = lambda record, key: f"{key} = {number(getattr(record, key))}  {comment}"
    lines = [f"# {verb.capitalize()} by maxbench: {source}.", f"[{name}]"]
    lines.append(f'like = "{"h100" if gpu else name}"')
    if gpu:
        like = GPU_TYPES["h100"]
        lines += [line(gpu, key) for key in GPU_KEYS if getattr(gpu, key) != getattr(like, key)]
    if band:
        lines.append(f"band = [{band[0]:.3f}, {band[1]:.3f}]  {comment}")
    for key, rows in (tables or {}).items():
        lines += [f"{key} = [  {comment}", *(f"  {json.dumps(row)}," for row in rows), "]"]
    if gpu:
        lines += [f"\n[{name}.chip]", *(line(gpu.chip, key) for key in CHIP_KEYS)]
    lines += [f"\n[{name}.efficiency]", *(line(efficiency, key) for key in names)]
    return "\n".join(lines) + "\n"


def describe(devices: str) -> str:
    """'2026-01-31, 8 x NVIDIA H100 80GB HBM3, jax 0.10.2, python 3.11.7, ...'."""
    versions = environment.versions()
    versions = {"jax": versions.pop("jax")} | versions
    parts = (f"{name} {version}" for name, version in versions.items())
    return ", ".join([datetime.date.today().isoformat(), devices, *parts])
