"""Constants of Efficiency from what was measured: each fitted to what is about it, in turn.

A case is something that ran for so many seconds, and what a set of constants predicts of it.
"""

import dataclasses
import datetime
import functools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from maxbench.config import environment
from maxbench.hardware.gpus import GPU_TYPES, Efficiency, Fraction, Gpu, Microseconds, PeakFraction

ROUNDS = 12  # over all constants, at most: some depend on others
FOUND = 0.005  # a constant is found to so many of its value
LIMITS = {
    PeakFraction: (1e-3, 1.0),
    Fraction: (1e-3, 1.0),
    Microseconds: (1e-2, 1e5),
}  # of what is found
SMOOTH = 0.1  # errors below count by their square
SEEN = 0.002  # share of a prediction that half of a constant must move to count
POINTS = 9  # of the whole range, before the best of them is looked at closely
# Of a device that gpus.toml does not have, what is written beside its constants.
MADE = ("bf16_tflops", "fp8_tflops", "memory_gb", "memory_gbps", "nvlink_gbps", "nvlink_gpus")
MADE += ("gpus_per_node", "network_gbps")
MADE_CHIP = ("name", "cores", "memory_bytes", "memory_bytes_per_s")


@dataclasses.dataclass(frozen=True)
class Observation:
    """What ran, its seconds, and what is predicted of it."""

    name: str
    seconds: float
    predict: Callable[[Efficiency], float]

    def error(self, efficiency: Efficiency) -> float:
        """Predicted less measured, as a share of measured."""
        return self.predict(efficiency) / self.seconds - 1


def median_error(cases: Sequence[Observation], efficiency: Efficiency) -> float:
    return statistics.median(abs(case.error(efficiency)) for case in cases)


def fit(
    about: Mapping[str, Sequence[Observation]], efficiency: Efficiency, far: float = math.inf
) -> tuple[Efficiency, list[str]]:
    """The constants that predict best what each is about, and the names of those that were found:
    one that no prediction of its cases depends on stays as it is.

    Args:
      about: constant -> its cases, in the order in which they are found.
      efficiency: the constants to start from.
      far: the largest factor by which one may move.
    """
    found = [name for name, cases in about.items() if depends(name, cases, efficiency)]
    within = {name: limits(name, getattr(efficiency, name), far) for name in found}
    for _ in range(ROUNDS):
        before = efficiency
        for name in found:
            value = best(name, about[name], efficiency, *within[name])
            efficiency = with_constant(efficiency, name, value)
        moved = (getattr(efficiency, name) / max(getattr(before, name), 1e-9) for name in found)
        if all(abs(math.log(one)) < 2 * FOUND for one in moved):
            break
    return efficiency, found


def with_constant(efficiency: Efficiency, name: str, value: float) -> Efficiency:
    return dataclasses.replace(efficiency, **{name: value})


def hidden(name: str, efficiency: Efficiency) -> bool:
    """Whether a latency was found to be none at all: what was measured takes less than the model
    says without it, and tells nothing of it."""
    kind = Efficiency.__dataclass_fields__[name].type
    return kind is Microseconds and getattr(efficiency, name) < 2 * LIMITS[Microseconds][0]


def limits(name: str, value: float, far: float) -> tuple[float, float]:
    """The lowest and the highest that a constant of that value may be found to be."""
    low, high = LIMITS[Efficiency.__dataclass_fields__[name].type]
    return max(low, value / far), min(high, max(value, low) * far)


def depends(name: str, cases: Sequence[Observation], efficiency: Efficiency) -> bool:
    """Whether a prediction changes with the constant."""
    value = max(getattr(efficiency, name), 1e-3)
    half, whole = (with_constant(efficiency, name, x) for x in (value / 2, value))
    moved = (math.log(case.predict(half) / case.predict(whole)) for case in cases)
    return any(abs(one) > SEEN for one in moved)


def best(
    name: str, cases: Sequence[Observation], efficiency: Efficiency, lowest: float, highest: float
) -> float:
    """The value with the smallest mean error: of a few over the whole range, then by golden section
    around the best of them, all in logarithms.

    Large errors are not squared: one measurement that went wrong moves little.
    """

    @functools.cache
    def loss(x: float) -> float:
        tried = with_constant(efficiency, name, math.exp(x))
        logs = (math.log(case.predict(tried) / case.seconds) for case in cases)
        return sum(math.hypot(one, SMOOTH) for one in logs)

    low, high = math.log(lowest), math.log(highest)
    points = [low + (high - low) * i / (POINTS - 1) for i in range(POINTS)]
    i = min(range(POINTS), key=lambda i: loss(points[i]))
    low, high = points[max(0, i - 1)], points[min(POINTS - 1, i + 1)]
    golden = (math.sqrt(5) - 1) / 2
    while high - low > FOUND:
        left, right = high - golden * (high - low), low + golden * (high - low)
        if loss(left) <= loss(right):
            high = right
        else:
            low = left
    return math.exp((low + high) / 2)


def toml(
    name: str,
    efficiency: Efficiency,
    names: Sequence[str],
    how: str,
    about: str,
    gpu: Gpu | None = None,
    tables: Mapping[str, Sequence] = {},
) -> str:
    """A file for --hardware: the constants of those names, each marked.

    Args:
      how: 'measured' or 'fitted'.
      about: when, on what, and versions, the most important first.
      gpu: the record of a type that gpus.toml does not have, measured too.
      tables: key of Gpu -> rows.
    """
    mark = ", ".join(about.split(", ")[:3])
    number = lambda value: f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
    line = lambda record, key: f"{key} = {number(getattr(record, key))}  # {how} {mark}"
    lines = [f"# {how.capitalize()} by maxbench: {about}.", f"[{name}]"]
    lines.append(f'like = "{"h100" if gpu else name}"')
    if gpu:
        like = GPU_TYPES["h100"]
        lines += [line(gpu, key) for key in MADE if getattr(gpu, key) != getattr(like, key)]
    for key, rows in tables.items():
        lines += [f"{key} = [  # {how} {mark}", *(f"  {json.dumps(row)}," for row in rows), "]"]
    if gpu:
        lines += [f"\n[{name}.chip]", *(line(gpu.chip, key) for key in MADE_CHIP)]
    lines += [f"\n[{name}.efficiency]", *(line(efficiency, key) for key in names)]
    return "\n".join(lines) + "\n"


def describe(what: str) -> str:
    """'2026-01-31, 8 x NVIDIA H100 80GB HBM3, jax 0.10.2, python 3.11.7, ...'."""
    known = environment.versions()
    versions = {"jax": known.pop("jax")} | known
    words = (f"{name} {version}" for name, version in versions.items())
    return ", ".join([datetime.date.today().isoformat(), what, *words])
