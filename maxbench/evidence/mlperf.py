"""Steps of MLPerf Training submissions, and how much steps of one program differ.

Each row of mlperf.csv is a system: the median of the step times of its runs, and their range. The
programs are those of NVIDIA and AMD (Megatron-LM, Transformer Engine): a step of maxbench over one
of theirs compares two programs. Systems that ran one configuration of a submission, and the runs of
each, say by how much steps of the same program differ.
"""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable
from typing import NamedTuple

from maxbench.evidence import tables


@dataclasses.dataclass(frozen=True)
class Submission:
    """The step of a system in a round; a field that the submission does not give is None."""

    round: str  # '5.1'
    org: str
    system: str
    model: str
    size: str
    dtype: str | None  # number format of GEMMs
    gpu_type: str
    gpus: int
    layers: int
    seq: int
    gbs: int
    mbs: int
    ga: int  # microbatches of a step of one GPU
    pp: int
    vp: int
    cp: int
    tp: int
    ep: int
    dp: int
    step_s: float  # median of the runs
    step_s_min: float | None  # of the fastest run
    step_s_max: float | None
    runs: int
    minutes_to_target: float | None
    tokens_per_s_per_gpu: float
    recompute: str | None
    config: str | None  # of the submission
    notes: str | None
    source: str

    @property
    def program(self) -> tuple:
        """Key of the program that a system ran."""
        layout = self.mbs, self.pp, self.vp, self.cp, self.tp, self.ep
        return self.round, self.work, self.dtype, layout

    @property
    def work(self) -> tuple:
        """Key of the work of a step: model, GPUs, batch and sequence."""
        return self.model, self.size, self.gpu_type, self.gpus, self.gbs, self.seq


@functools.cache
def rows() -> tuple[Submission, ...]:
    """All rows of mlperf.csv, whose columns are the fields of Submission."""
    return tables.read(Submission, "mlperf.csv")


class Noise(NamedTuple):
    """By how much steps of one program differ: (slowest - fastest) / median."""

    runs_median: float  # between runs of a system: the median system
    runs_p90: float  # the system at the 90th percentile
    runs_most: float
    systems: float  # between systems: the program with the largest difference
    counted: int  # systems with a range of runs
    programs: int  # programs that several systems ran


@functools.cache
def noise() -> Noise:
    """The noise of the submissions."""
    ranges = sorted(
        (row.step_s_max - row.step_s_min) / row.step_s
        for row in rows()
        if row.step_s_max is not None and row.step_s_min is not None
    )
    spreads = [
        (max(steps) - min(steps)) / statistics.median(steps)
        for _, group in itertools.groupby(_ordered(), lambda row: row.program)
        if len(steps := [row.step_s for row in group]) > 1
    ]
    return Noise(
        runs_median=statistics.median(ranges),
        runs_p90=ranges[round(0.9 * (len(ranges) - 1))],
        runs_most=ranges[-1],
        systems=max(spreads),
        counted=len(ranges),
        programs=len(spreads),
    )


def _ordered() -> list[Submission]:
    """Rows whose layout is known, sorted by program."""
    key: Callable[[Submission], str] = lambda row: repr(row.program)
    return sorted((row for row in rows() if row.tp), key=key)


class Criterion(NamedTuple):
    """Least shares of the published tokens/s of a verdict, and where they are from."""

    passes: float
    warns: float
    reason: str


# NVIDIA's DGX Cloud Benchmarking calls a cloud an Exemplar Cloud that reaches it.
EXEMPLAR = Criterion(
    0.95, 0.95, "NVIDIA's Exemplar Clouds reach 95% of the baseline in each workload"
)


@functools.cache
def noise_criterion() -> Criterion:
    """Shares below which a step is slower than noise of one program explains.

    PASS: its systems differ as much as those of a program at most, and its runs as those of nine
    of ten systems. WARN: its runs differ as those of the noisiest system.
    """
    n = noise()
    reason = (
        f"steps of one MLPerf program differ by up to {n.systems:.1%} between systems "
        f"({n.programs} programs) and from run to run by {n.runs_p90:.1%} on nine of ten systems, "
        f"{n.runs_most:.1%} at most ({n.counted} systems)"
    )
    share = lambda runs: 1 / (1 + n.systems) / (1 + runs)
    return Criterion(share(n.runs_p90), share(n.runs_most), reason)


class Systems(NamedTuple):
    """Submitted systems that did the work of a run."""

    rows: tuple[Submission, ...]  # the fastest first

    def verdict(self, step_s: float) -> str:
        """'as fast as 6 of 7 MLPerf systems that ran this work (0.4437 to 0.4557 s); ...'.

        A system is as fast if the step is not slower than its own by more than its runs differ.
        """
        n = noise()
        reached = sum(step_s <= row.step_s * (1 + n.runs_median) for row in self.rows)
        first, last = self.rows[0].step_s, self.rows[-1].step_s
        span = f"{first:g} to {last:g} s" if len(self.rows) > 1 else f"{first:g} s"
        of = f"{len(self.rows)} MLPerf system" + "s" * (len(self.rows) > 1)
        return (
            f"as fast as {reached} of {of} that ran this work ({span}); "
            f"one program differs by {n.runs_median:.1%} from run to run and by up to "
            f"{n.systems:.1%} between systems"
        )

    def share(self, step_s: float) -> float:
        """Fraction of the tokens/s of the median system."""
        return statistics.median(row.step_s for row in self.rows) / step_s


def systems(
    model: str, size: str, format: str, gpu_type: str, *, gpus: int, gbs: int, seq: int, layers: int
) -> Systems | None:
    """The systems of the latest round that did this work in this number format; None if none did.

    Args:
      format: the number format of GEMMs, 'fp8' if it has one scale per tensor.
    """
    work = model, size, gpu_type, gpus, gbs, seq
    found = [x for x in rows() if (x.work, x.dtype, x.layers) == (work, format, layers)]
    latest = max((row.round for row in found), default="")
    same = sorted((x for x in found if x.round == latest), key=lambda row: row.step_s)
    return Systems(tuple(same)) if same else None
