"""Error band of a predicted step: the range in which nine of ten measured steps are.

It follows from errors.csv, which tools/very_programs.py writes: programs whose step was measured
were compiled unchanged and predicted three times, each time with constants that were fitted without
some steps: all of the workload, all of the GPU type, or all of the source. A user's run differs
from the known steps in one or more of these.

A band is two factors of the predicted step, for nine of ten steps. For a GPU type with rows: the
median of those, or of all types' if they are few, left out by workload and source, and a factor to
both sides that covers 0.9 (n + 1) / n of n programs (split conformal prediction, arXiv:2107.07511),
so that few rows give a wider band. For one without: the prediction interval of a further GPU type,
by Student's t, from the means of those that were left out.
"""

import csv
import functools
import math
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from maxbench.hardware.gpus import Gpu

COVERAGE = 0.9
# 95th percentiles of Student's t distribution with 1, 2, ... degrees of freedom.
T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
# Of a kind, by weight, for a band of its own: with fewer, the largest error would be the band.
MIN_PROGRAMS = 9
MIN_WORKLOADS = 3  # with fewer, the band is at least that of the next kind
WAYS = ("workload", "gpu_type", "source")  # in which a row is left out


class Error(NamedTuple):
    """The error of a prediction of a step that the constants were not fitted to."""

    workload: str  # model and size
    dtype: str
    gpu_type: str
    source: str  # document of the measured step
    gpus: int
    left_out: str  # one of WAYS
    # 1 / number of rows with the same program, which differ in data-parallel size; a quarter of
    # that for software of 2023 and 2024 and for assumed details (measured.GRADES)
    weight: float
    error: float  # predicted / measured - 1

    @property
    def log_ratio(self) -> float:
        """Logarithm of measured over predicted."""
        return -math.log1p(self.error)


class ErrorBand(NamedTuple):
    """Nine of ten measured steps are between `low` and `high` times the predicted step."""

    low: float
    high: float
    like: str  # kind of the rows that the band is of, as 'h100 fp8'
    programs: int  # of that kind, by weight; 0: the band is of a file of --hardware
    validated: bool  # whether there are rows of the GPU type


def error_band(
    gpu_type: str, dtype: str, rows: Sequence[Error] | None = None, gpu: Gpu | None = None
) -> ErrorBand:
    """The band of predictions for a GPU type and dtype.

    With MIN_PROGRAMS programs of the GPU type it is of these, and of those of the dtype if they are
    as many. With fewer, it is of all rows, whose constants were fitted to other rows of their type.
    Without any, it is of all GPU types that were left out: wider, and centered on their mean.

    Args:
      rows: replaces errors().
      gpu: the GPU type's record, which has a band of its own if its constants were fitted to runs.
    """
    if gpu and gpu.band:
        low, high = gpu.band
        return ErrorBand(low, high, "runs that the constants were fitted to", 0, True)
    rows = errors() if rows is None else rows
    known = [e for e in rows if e.left_out != "gpu_type"]
    of_type = [e for e in known if e.gpu_type == gpu_type]
    if not of_type:
        return _band_of_types(rows)
    if _programs(of_type) < MIN_PROGRAMS:
        return _band(known, "all GPU types")
    widest = _band(of_type, gpu_type)
    chosen = [e for e in of_type if e.dtype == dtype]
    if _programs(chosen) < MIN_PROGRAMS:
        return widest
    band = _band(chosen, f"{gpu_type} {dtype}")
    few = len({e.workload for e in chosen}) < MIN_WORKLOADS
    return widest if few and widest.high / widest.low > band.high / band.low else band


def _programs(rows: Sequence[Error]) -> int:
    """Weight of the rows; those that were left out in several ways count once."""
    by_way = dict.fromkeys(WAYS, 0.0)
    for e in rows:
        by_way[e.left_out] += e.weight
    return round(max(by_way.values()))


def _band(rows: Sequence[Error], like: str, validated: bool = True) -> ErrorBand:
    """The band of rows: their median, and a factor to both sides."""
    weights = [e.weight for e in rows]
    programs = max(1, _programs(rows))
    center = quantile([e.log_ratio for e in rows], weights, 0.5)
    share = min(1.0, COVERAGE * (programs + 1) / programs)
    half = quantile([abs(e.log_ratio - center) for e in rows], weights, share)
    return ErrorBand(math.exp(center - half), math.exp(center + half), like, programs, validated)


def _band_of_types(rows: Sequence[Error]) -> ErrorBand:
    """The band of a further GPU type; rows left out by GPU type are those that count."""
    left_out = [e for e in rows if e.left_out == "gpu_type"]
    means = []
    for gpu_type in sorted({e.gpu_type for e in left_out}):
        of_type = [e for e in left_out if e.gpu_type == gpu_type]
        total = sum(e.weight for e in of_type)
        means.append(sum(e.weight * e.log_ratio for e in of_type) / total)
    if len(means) < 2:
        return _band(rows, "all GPU types", False)
    like = f"{len(means)} GPU types that were left out"
    return ErrorBand(*prediction_interval(means), like, _programs(left_out), False)


def prediction_interval(log_ratios: Sequence[float]) -> tuple[float, float]:
    """Factors between which a further ratio is in nine of ten cases, by Student's t.

    Args:
      log_ratios: logarithms of at least two ratios of measured to predicted steps.
    """
    n, center = len(log_ratios), statistics.fmean(log_ratios)
    deviation = statistics.stdev(log_ratios) * math.sqrt(1 + 1 / n)
    half = T95[min(n - 1, len(T95)) - 1] * deviation
    return math.exp(center - half), math.exp(center + half)


def is_covered(e: Error, rows: Sequence[Error]) -> bool:
    """Whether a row is in the band of the rows of other workloads, GPU types or sources, whichever
    the row is left out by: that of a prediction which knows nothing of its group."""
    others = [x for x in rows if getattr(x, e.left_out) != getattr(e, e.left_out)]
    band = error_band(e.gpu_type, e.dtype, others)
    return band.low <= math.exp(e.log_ratio) <= band.high


def covered(rows: Sequence[Error]) -> dict[str, float]:
    """Share of the weight of rows that is_covered(): by WAYS, and of 'all'."""
    inside, total = dict.fromkeys(WAYS, 0.0), dict.fromkeys(WAYS, 0.0)
    for e in rows:
        total[e.left_out] += e.weight
        inside[e.left_out] += e.weight * is_covered(e, rows)
    shares = {way: inside[way] / total[way] for way in WAYS}
    return shares | {"all": sum(inside.values()) / sum(total.values())}


@functools.cache
def errors() -> tuple[Error, ...]:
    """All rows of errors.csv."""
    with open(pathlib.Path(__file__).with_name("errors.csv"), newline="") as f:
        kinds = Error.__annotations__.items()
        return tuple(Error(**{k: kind(x[k]) for k, kind in kinds}) for x in csv.DictReader(f))


def quantile(values: Iterable[float], weights: Iterable[float], share: float) -> float:
    """The smallest value such that at least `share` of the weight is at or below it."""
    pairs = sorted(zip(values, weights, strict=True))
    left = share * sum(weight for _, weight in pairs) - 1e-9
    for value, weight in pairs:
        left -= weight
        if left <= 0:
            return value
    raise ValueError("a quantile needs at least one value")
