"""Published step times: published.csv, each row with its source and FLOPs convention."""

import csv
import dataclasses
import functools
import pathlib


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
    """All published figures, in the order of the file."""
    kinds = {f.name: f.type for f in dataclasses.fields(Published)}

    def read(name: str, text: str):
        if kinds[name] is str:
            return text
        return None if text == "" else (int if kinds[name] is int else float)(text)

    with open(pathlib.Path(__file__).with_name("published.csv"), newline="") as f:
        return tuple(
            Published(**{k: read(k, v) for k, v in row.items()}) for row in csv.DictReader(f)
        )


def nearest(model: str, size: str, dtype: str, gpu_type: str, gpus: int) -> Published | None:
    """The published row of this workload and precision whose GPU count is nearest, or None."""
    same = [
        r
        for r in rows()
        if (r.model, r.size, r.dtype, r.gpu_type) == (model, size, dtype, gpu_type)
    ]
    return min(same, key=lambda r: abs(r.gpus / gpus - 1), default=None)


def differences(row: Published, *, gpus: int, gbs: int, seq: int, layers: int) -> list[str]:
    """What keeps a run from being compared with a published row, as 'GBS 64, published 128'."""
    ours = {"GPUs": (gpus, row.gpus), "GBS": (gbs, row.gbs)}
    ours |= {"sequence": (seq, row.seq), "layers": (layers, row.layers)}
    return [f"{what} {a}, published {b}" for what, (a, b) in ours.items() if a != b]
