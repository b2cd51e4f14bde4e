"""Published step times, and the errors of predictions of them.

Each row of published.csv has a source and a FLOPs convention. errors.csv has the error of each
row's prediction by constants fitted to the other workloads (benchmarks/fit_constants.py).
"""

import csv
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

MIN_PROGRAMS = 3  # with published rows, for an error band of their kind


@dataclasses.dataclass(frozen=True)
class Published:
    """One published figure; a field that its source does not give is None."""

    model: str
    size: str
    dtype: str
    gpu_type: str
    gpus: int
    scaling: str
    layers: int
    seq: int
    gbs: int
    mbs: int
    step_s: float
    tokens_per_s: float
    mfu_pct: float | None
    days_to_1t: float | None
    remat: str  # remat policy of the published run, a name of config.run.REMATS
    convention: str
    source: str


@functools.cache
def rows() -> tuple[Published, ...]:
    """All rows of published.csv, whose columns are the fields of Published."""
    kinds = [f.type if f.type in (str, int) else float for f in dataclasses.fields(Published)]
    with open(pathlib.Path(__file__).with_name("published.csv"), newline="") as f:
        _, *lines = csv.reader(f)
    value: Callable[[Any, str], Any] = lambda kind, text: kind(text) if text else None
    return tuple(Published(*map(value, kinds, line)) for line in lines)


class Comparison(NamedTuple):
    """A run and the published row of the same workload, precision and GPU type."""

    row: Published | None  # with the nearest number of GPUs
    differences: list[str]  # that make the step times incomparable, in words

    @property
    def refusal(self) -> str:
        """Why the step times are incomparable, or ''."""
        if self.row is None:
            return "; ".join(self.differences)
        return f"not comparable: {'; '.join(self.differences)}" if self.differences else ""

    @property
    def about(self) -> dict:
        """The row as result.json has it; {} without one."""
        row = self.row
        return {"step_s": row.step_s, "gpus": row.gpus, "source": row.source} if row else {}

    def share(self, step_s: float) -> float | None:
        """Fraction of the published tokens/s at a step time; None if there is a refusal."""
        return None if self.row is None or self.refusal else self.row.step_s / step_s


def compare(
    model: str, size: str, dtype: str, gpu_type: str, *, gpus: int, gbs: int, seq: int, layers: int
) -> Comparison:
    """Finds the published row of a run; differences read 'GBS 64, published 128'."""
    key = (model, size, dtype, gpu_type)
    same = [r for r in rows() if (r.model, r.size, r.dtype, r.gpu_type) == key]
    if not same:
        return Comparison(None, [f"nothing published for {model} {size} {dtype} on {gpu_type}"])
    row = min(same, key=lambda r: abs(r.gpus / gpus - 1))
    pairs = {"GPUs": (gpus, row.gpus), "GBS": (gbs, row.gbs)}
    pairs |= {"sequence": (seq, row.seq), "layers": (layers, row.layers)}
    return Comparison(
        row,
        [f"{name} {ours}, published {its}" for name, (ours, its) in pairs.items() if ours != its],
    )


class Error(NamedTuple):
    """The error of the prediction of a published row, a row of errors.csv."""

    model: str
    size: str
    dtype: str
    gpu_type: str
    gpus: int
    parallelism: str
    weight: float  # 1 / number of rows with the same program, which differ in data-parallel size
    error: float  # predicted / published - 1


class ErrorBand(NamedTuple):
    """The band of a prediction: nine of ten published steps of the same kind are between
    predicted / factor and predicted x factor."""

    factor: float
    like: str  # kind of those rows, as 'h100 fp8 pp'
    programs: int  # of that kind
    validated: bool  # whether there is a published row of the GPU type


def parallelism(experts: bool, pp: int, tp: int, fsdp: int) -> str:
    """The kind of parallelism that dominates a layout's communication."""
    kinds = {"experts": experts, "pp": pp > 1, "tp": tp > 1, "fsdp": fsdp > 1}
    return next((kind for kind, used in kinds.items() if used), "dp")


def error_band(gpu_type: str, dtype: str, parallelism: str) -> ErrorBand:
    """The band by errors of the most specific kind of rows with at least MIN_PROGRAMS programs.

    If those are of one workload only, the band is at least that of the next kind.
    """
    wanted = {"gpu_type": gpu_type, "dtype": dtype, "parallelism": parallelism}
    kinds = [("gpu_type", "dtype", "parallelism"), ("gpu_type", "dtype"), ("gpu_type",)]
    kinds += [("dtype", "parallelism"), ("dtype",), ()]
    factor, like, programs = 1.0, "", 0
    for kind in kinds:
        rows_of_kind = [e for e in errors() if all(getattr(e, k) == wanted[k] for k in kind)]
        weights = [e.weight for e in rows_of_kind]
        count = round(sum(weights))
        if count < MIN_PROGRAMS:
            continue
        p90 = math.exp(quantile((abs(math.log1p(e.error)) for e in rows_of_kind), weights, 0.9))
        if p90 > factor:
            factor, like, programs = p90, " ".join(wanted[k] for k in kind), count
        if len({(e.model, e.size) for e in rows_of_kind}) > 1:
            break
    return ErrorBand(factor, like, programs, any(e.gpu_type == gpu_type for e in errors()))


@functools.cache
def errors() -> tuple[Error, ...]:
    """All rows of errors.csv. Its further columns, the fitted constants, are left out."""
    kinds = [*Error.__annotations__.values()]
    with open(pathlib.Path(__file__).with_name("errors.csv"), newline="") as f:
        _, *lines = csv.reader(f)
    read = lambda line: (kind(x) for kind, x in zip(kinds, line, strict=False))
    return tuple(Error(*read(line)) for line in lines)


def quantile(values: Iterable[float], weights: Iterable[float], share: float) -> float:
    """The smallest value such that at least `share` of the weight is at or below it."""
    pairs = sorted(zip(values, weights, strict=True))
    left = share * sum(weight for _, weight in pairs) - 1e-9
    for value, weight in pairs:
        left -= weight
        if left <= 0:
            return value
    raise ValueError("a quantile needs at least one value")
