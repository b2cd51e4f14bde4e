"""Published step times: published.csv, each row with its source and FLOPs convention.

And how far off predictions of them are: errors.csv, each row's error with constants that were
fitted to other workloads, as benchmarks/fit_constants.py writes it.
"""

import csv
import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterable
from typing import NamedTuple

ENOUGH = 3  # programs that say how far off a kind of prediction is


@dataclasses.dataclass(frozen=True)
class Published:
    """One published figure. Fields that the source left out are None."""

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
    remat: str  # a name of config.REMATS: what the published run computed again
    convention: str
    source: str


@functools.cache
def rows() -> tuple[Published, ...]:
    """All published figures, in the order of the file, whose columns are the fields."""
    kinds = [f.type if f.type in (str, int) else float for f in dataclasses.fields(Published)]
    with open(pathlib.Path(__file__).with_name("published.csv"), newline="") as f:
        _, *lines = csv.reader(f)
    read = lambda kind, text: kind(text) if text else None
    return tuple(Published(*map(read, kinds, line)) for line in lines)


class Comparison(NamedTuple):
    """Some work beside the published row of the same workload, precision and GPU type."""

    row: Published | None  # the one whose GPU count is nearest
    differences: list[str]  # what keeps the two from being compared

    @property
    def refusal(self) -> str:
        """Why there is no verdict, or ''."""
        if self.row is None:
            return "; ".join(self.differences)
        return f"not comparable: {'; '.join(self.differences)}" if self.differences else ""

    @property
    def about(self) -> dict:
        """The row as a result names it; {} without one."""
        row = self.row
        return {"step_s": row.step_s, "gpus": row.gpus, "source": row.source} if row else {}

    def share(self, step_s: float) -> float | None:
        """Of the published tokens/s, with steps of so many seconds; None where it is refused."""
        return None if self.refusal else self.row.step_s / step_s


def compare(
    model: str, size: str, dtype: str, gpu_type: str, *, gpus: int, gbs: int, seq: int, layers: int
) -> Comparison:
    """Sets work beside its published row; says what differs, as 'GBS 64, published 128'."""
    key = (model, size, dtype, gpu_type)
    same = [r for r in rows() if (r.model, r.size, r.dtype, r.gpu_type) == key]
    if not same:
        return Comparison(None, [f"nothing published for {model} {size} {dtype} on {gpu_type}"])
    row = min(same, key=lambda r: abs(r.gpus / gpus - 1))
    ours = {"GPUs": (gpus, row.gpus), "GBS": (gbs, row.gbs)}
    ours |= {"sequence": (seq, row.seq), "layers": (layers, row.layers)}
    return Comparison(
        row, [f"{what} {a}, published {b}" for what, (a, b) in ours.items() if a != b]
    )


class Error(NamedTuple):
    """How far off the prediction of a published row is."""

    model: str
    size: str
    dtype: str
    gpu_type: str
    gpus: int
    parallelism: str
    weight: float  # 1 over the rows that are the same program but for more copies of it
    error: float  # predicted over published, less 1


class ErrorBand(NamedTuple):
    """Where a step is in nine of ten published rows like it: between predicted / factor and
    predicted x factor."""

    factor: float
    like: str  # 'h100 fp8 pp': what the rows have in common with it
    programs: int
    validated: bool  # whether any row is of its GPU type


def parallelism(experts: bool, pp: int, tp: int, fsdp: int) -> str:
    """What most of a layout's communication is for."""
    kinds = {"experts": experts, "pp": pp > 1, "tp": tp > 1, "fsdp": fsdp > 1}
    return next((kind for kind, there in kinds.items() if there), "dp")


def error_band(gpu_type: str, dtype: str, parallelism: str) -> ErrorBand:
    """How far off predictions of the nearest kind are that has ENOUGH programs.

    Where those are of one workload only, not less than of the next kind.
    """
    wanted = {"gpu_type": gpu_type, "dtype": dtype, "parallelism": parallelism}
    kinds = [("gpu_type", "dtype", "parallelism"), ("gpu_type", "dtype"), ("gpu_type",)]
    kinds += [("dtype", "parallelism"), ("dtype",), ()]
    factor, like, programs = 1.0, "", 0
    for kind in kinds:
        found = [e for e in errors() if all(getattr(e, k) == wanted[k] for k in kind)]
        count = round(sum(e.weight for e in found))
        if count < ENOUGH:
            continue
        most = quantile((abs(math.log1p(e.error)) for e in found), [e.weight for e in found], 0.9)
        if math.exp(most) > factor:
            factor, like, programs = math.exp(most), " ".join(wanted[k] for k in kind), count
        if len({(e.model, e.size) for e in found}) > 1:
            break
    return ErrorBand(factor, like, programs, any(e.gpu_type == gpu_type for e in errors()))


@functools.cache
def errors() -> tuple[Error, ...]:
    """All of errors.csv; constants stand in further columns."""
    kinds = [*Error.__annotations__.values()]
    with open(pathlib.Path(__file__).with_name("errors.csv"), newline="") as f:
        _, *lines = csv.reader(f)
    read = lambda line: (kind(x) for kind, x in zip(kinds, line, strict=False))
    return tuple(Error(*read(line)) for line in lines)


def quantile(values: Iterable[float], weights: Iterable[float], share: float) -> float:
    """The smallest of the values that so much of the weight does not exceed."""
    pairs = sorted(zip(values, weights, strict=True))
    left = share * sum(weight for _, weight in pairs) - 1e-9
    for value, weight in pairs:
        left -= weight
        if left <= 0:
            return value
    raise ValueError("a quantile of nothing")
