"""Published step times: published.csv, each row with its source and FLOPs convention."""

import csv
import dataclasses
import functools
import pathlib
from typing import NamedTuple


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
