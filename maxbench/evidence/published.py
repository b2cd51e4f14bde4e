"""Published step times. Each row of published.csv has a source and a FLOPs convention."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

from maxbench.config.run import Run
from maxbench.evidence import tables


@dataclasses.dataclass(frozen=True)
class Published:
    """One published figure; a field that its source does not give is None.

    Rows of Megatron-Bridge give tokens/s and TFLOP/s per GPU, and step_s follows from tokens/s.
    The releases ROUNDED round tokens/s to whole sequences/s over all GPUs: `rounding` is how
    far the true step may be from step_s.
    """

    release: str  # of the software, '26.08'; 'dev' = none
    model: str
    size: str
    dtype: str  # of precision.dtype
    format: str  # of GEMMs: bf16, or a scaling of config.number_formats
    gpu_type: str
    gpus: int
    scaling: str  # weak | strong
    layers: int
    seq: int
    gbs: int
    mbs: int
    # parallelism of the published run; ep is a part of its data parallelism, as in config.run
    pp: int
    vp: int
    cp: int
    tp: int
    ep: int
    fsdp: int
    step_s: float
    tokens_per_s: float
    tflops_per_gpu: float | None
    mfu_pct: float | None
    days_to_1t: float | None
    remat: str  # remat policy of the published run, a name of config.run.REMATS
    convention: str  # of its FLOPs, a key of PUBLISHED_CONVENTIONS in metrics.flops, or words
    source: str

    @property
    def age(self) -> tuple[int, ...]:
        """Sorts rows by release, the newest first."""
        parts = [int(part) for part in self.release.split(".") if part.isdecimal()]
        return tuple(-part for part in (*parts, 0, 0, 0)[:3])

    @property
    def framework(self) -> str:
        """The software that ran it: 'maxtext', 'nemo' or 'megatron-bridge'."""
        return FRAMEWORKS.get(self.release, "megatron-bridge")

    @property
    def layout(self) -> dict[str, int]:
        """Sizes of the axes that set the published program, by their names in config.run.Layout.

        dp is left out: it follows from the number of GPUs.
        """
        return {axis: getattr(self, axis) for axis in LAYOUT}

    @property
    def rounding(self) -> float:
        """Largest relative error of step_s by rounding of sequences/s."""
        return 0.5 * self.seq / self.tokens_per_s if self.release in ROUNDED else 0.0


# Framework of each release; all others are of Megatron-Bridge.
FRAMEWORKS = {"24.12.09": "maxtext", "24.09": "nemo", "25.02.01": "nemo", "dev": "nemo"}
ROUNDED = ("26.04.01", "26.06.01", "26.08")  # releases of Megatron-Bridge
LAYOUT = ("pp", "vp", "cp", "tp", "ep", "fsdp")


@functools.cache
def rows() -> tuple[Published, ...]:
    """All rows of published.csv, whose columns are the fields of Published."""
    return tables.read(Published, "published.csv")


def step_time_rows() -> tuple[Published, ...]:
    """Rows of MaxText and NeMo, which give step times; those of Megatron-Bridge give rates."""
    return tuple(row for row in rows() if row.tflops_per_gpu is None)


class Comparison(NamedTuple):
    """A run and the published row of the same workload, precision and GPU type."""

    row: Published | None  # of the same work, or the nearest
    differences: list[str]  # that make the step times incomparable, in words
    notes: tuple[str, ...] = ()  # differences of two programs that do the same work, in words

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
        if row is None:
            return {}
        about = {"step_s": row.step_s, "gpus": row.gpus, "source": row.source}
        return about | {"release": row.release, "layout": row.layout, "notes": [*self.notes]}

    def share(self, step_s: float) -> float | None:
        """Fraction of the published tokens/s at a step time; None if there is a refusal."""
        return None if self.row is None or self.refusal else self.row.step_s / step_s

    def verdict(self, step_s: float) -> str:
        """'98.1% of published 14.66 s (25.02.01)', with the notes; or the refusal."""
        if self.row is None or self.refusal:
            return self.refusal
        about = "; ".join([self.row.release, *self.notes])
        return f"{self.share(step_s):.1%} of published {self.row.step_s:g} s ({about})"


def compare(
    model: str,
    size: str,
    dtype: str,
    gpu_type: str,
    *,
    gpus: int,
    gbs: int,
    seq: int,
    layers: int,
    format: str = "",
    layout: Mapping[str, int] | None = None,
    release: str = "",
) -> Comparison:
    """Finds the published row that a run is compared with.

    Rows of the same work (GPUs, batch, sequence, layers) come first, among those the rows of the
    same number format, then of the same layout, then of the newest release.

    Args:
      dtype: of precision.dtype, or a format name as logs have it: 'mxfp8'.
      format: name of the run's number format; '' = unknown: one scale per tensor is assumed where
        there is such a row.
      layout: sizes of axes of LAYOUT; those that are missing are unknown.
      release: only rows of this release.

    Returns:
      The row; differences read 'GBS 64, published 128', notes 'pp 2, published 4'.
    """
    if any(r.format == dtype != r.dtype for r in rows()):
        dtype, format = next(r.dtype for r in rows() if r.format == dtype), dtype
    key = (model, size, dtype, gpu_type)
    same = [r for r in rows() if (r.model, r.size, r.dtype, r.gpu_type) == key]
    same = [r for r in same if release in ("", r.release)]
    if not same:
        of_release = f" in {release}" if release else ""
        nothing = f"nothing published for {model} {size} {dtype} on {gpu_type}{of_release}"
        return Comparison(None, [nothing])

    def differences(row: Published) -> list[str]:
        pairs: dict[str, tuple] = {"GPUs": (gpus, row.gpus), "GBS": (gbs, row.gbs)}
        pairs |= {"sequence": (seq, row.seq), "layers": (layers, row.layers)}
        if format and gemms(format) != gemms(row.format):
            pairs["number format"] = (format, row.format)
        return [f"{name} {ours}, published {its}" for name, (ours, its) in pairs.items()
                if ours != its]  # fmt: skip

    def notes(row: Published) -> tuple[str, ...]:
        ours_of = layout or {}
        pairs: dict[str, tuple] = {x: (ours_of.get(x), size) for x, size in row.layout.items()}
        pairs["number format"] = (format or row.dtype, row.format)
        if gemms(format or row.dtype) == gemms(row.format):
            del pairs["number format"]
        return tuple(f"{name} {ours}, published {its}" for name, (ours, its) in pairs.items()
                     if ours and ours != its)  # fmt: skip

    def distance(row: Published) -> tuple:
        of_work, of_program = differences(row), notes(row)
        other_gpus = abs(row.gpus / gpus - 1)
        return bool(of_work), other_gpus, len(of_work), len(of_program), row.age

    row = min(same, key=distance)
    return Comparison(row, differences(row), notes(row))


def compare_run(run: Run, gpu_type: str) -> Comparison:
    """The published row of a run's workload on GPUs of a type, and what differs from it."""
    model, layout = run.model, run.layout
    return compare(
        model.name, model.size, run.precision.dtype, gpu_type,
        gpus=layout.gpus, gbs=layout.gbs, seq=run.train.seq, layers=model.layers,
        format=run.format.name, layout={axis: getattr(layout, axis) for axis in LAYOUT},
    )  # fmt: skip


def gemms(format: str) -> str:
    """A number format, with those whose GEMMs cost the same as one: a scale per tensor."""
    return "fp8" if format in ("current", "delayed") else format
