"""Scaling of a plan: its step on 8 to 65,536 GPUs, by the search's estimate.

Estimates are multiplied by the ratio of the plan's compiled step to its own estimate, and their
memory is corrected by the plan's.
"""

import contextlib
import itertools
import pathlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from maxbench.config import resolve
from maxbench.config.errors import UserError
from maxbench.config.run import Run
from maxbench.cost_model import memory, remat
from maxbench.planning import plan_text, search, svg
from maxbench.planning.planner import Plan

SIZES = [8 << i for i in range(14)]
SEARCHED = 1024  # GPUs up to which other axes are searched where the plan's are illegal
# Nine of ten pairs of compiled programs of one model, number format, GPU type and axes differ by at
# most this in the ratio of their step to its estimate (docs/plan.csv).
ERROR = 0.12
COMPILED, ESTIMATE, OTHER = "compiled", "estimate", "other axes"


class Point(NamedTuple):
    """A run, seconds of its step, and how they are known: COMPILED, ESTIMATE or OTHER."""

    run: Run
    step_s: float
    how: str

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.run.layout.gbs * self.run.train.seq / self.step_s


Points = dict[int, Point]  # by the number of GPUs


def scaling(p: Plan) -> dict[str, Points]:
    """Points of 'weak' scaling (global batch in proportion to the GPUs) and of 'strong' scaling
    (constant global batch), for the numbers of GPUs with a legal layout that fits.

    The plan's point is the plan. Others keep its axes but dp and fsdp, and its microbatch size and
    remat policy where they fit; without such a layout, axes are searched.
    """
    a, curves = p.run.layout, {"weak": Points(), "strong": Points()}
    for gpus in sorted({*SIZES, a.gpus}):
        batches = {"weak": max(1, round(a.gbs * gpus / a.gpus)), "strong": a.gbs}
        for name, gbs in batches.items():
            if point := _point(p, gpus, gbs):
                curves[name][gpus] = point
    return curves


def _point(p: Plan, gpus: int, gbs: int) -> Point | None:
    if (gpus, gbs) == (p.run.layout.gpus, p.run.layout.gbs):
        return Point(p.run, p.step_s, COMPILED)
    seconds = lambda run: search.estimate_step_s(run) * p.step_s / search.estimate_step_s(p.run)
    if runs := [*_of_its_axes(p, gpus, gbs)]:
        own = p.run.train.remat, p.run.layout.mbs
        unlike = lambda run: (run.train.remat != own[0], run.layout.mbs != own[1])
        run = min(runs, key=lambda run: (*unlike(run), seconds(run)))
        return Point(run, seconds(run), ESTIMATE)
    ranked = search.rank_layouts(p.run, gpus, gbs) if gpus <= SEARCHED else []
    return Point(ranked[0], seconds(ranked[0]), OTHER) if ranked else None


def _of_its_axes(p: Plan, gpus: int, gbs: int) -> Iterator[Run]:
    """Runs that should fit on `gpus` GPUs, with the plan's axes but dp and fsdp, and its remat
    policy or the one that recomputes least."""
    a = p.run.layout
    shards, left = divmod(gpus, a.pp * a.ep * a.cp * a.tp)
    fsdps = search.degrees(shards, shards)[1:] if a.fsdp > 1 else [1]
    needed = lambda run: search.estimate_bytes(run) + memory.activation_bytes(run)
    capacity = p.memory.capacity - (p.memory.total - needed(p.run))
    for fsdp, mbs in itertools.product([] if left else fsdps, search.powers(search.MAX_MBS)):
        axes = {"dp": shards // fsdp, "fsdp": fsdp, "mbs": mbs, "gbs": gbs}
        with contextlib.suppress(UserError):  # an illegal layout
            run = resolve.changed(p.run, layout=axes)
            if needed(run) <= capacity:
                yield run
            if other := remat.least_recomputed(run, capacity - search.estimate_bytes(run)):
                yield other


def table(curves: Mapping[str, Points]) -> str:
    """Table of all points. Efficiency is tokens/s per GPU over the best of the curve."""
    rows = []
    for name, points in curves.items():
        best = max((point.rate / gpus for gpus, point in points.items()), default=0)
        for gpus, point in points.items():
            layout = f"{point.run.layout.describe().partition(', ')[2]}; {point.run.remat_summary}"
            speed, efficiency = f"{point.rate:,.0f}", f"{point.rate / gpus / best:.1%}"
            row = [f"{gpus:,}", name, f"{point.step_s:.3f}", speed, efficiency, point.how, layout]
            rows.append(row)
    heads = ["GPUs", "scaling", "step s", "tokens/s", "efficiency", "known by", "layout"]
    lines = plan_text.table(heads, rows, text=(1, 5, 6))
    missing = [gpus for gpus in SIZES if gpus not in curves["weak"]]
    if missing:
        lines.append(f"no layout is legal and fits on {', '.join(map(str, missing))} GPUs")
    return plan_text.folded([
        *lines,
        f"{ESTIMATE}: arithmetic scaled to the compiled program, with the plan's axes but dp and "
        f"fsdp: within {ERROR:.0%} in nine of ten known pairs",
        f"{OTHER}: arithmetic for other axes, which no pair confirms",
    ])  # fmt: skip


def figures(curves: Mapping[str, Points]) -> dict:
    """Points as plain data: {'weak': [{gpus, step_s, known_by, tokens_per_s, layout, remat}]}."""
    figures_of = lambda gpus, point: {
        "gpus": gpus,
        "step_s": point.step_s,
        "known_by": point.how,
        "tokens_per_s": point.rate,
        "layout": point.run.layout.describe(),
        "remat": point.run.train.remat,
    }
    return {name: [figures_of(*item) for item in points.items()] for name, points in curves.items()}


def draw(p: Plan, curves: Mapping[str, Points], path: pathlib.Path) -> None:
    """Writes a plot of tokens/s over GPUs as SVG."""
    per_gpu = Point(p.run, p.step_s, COMPILED).rate / p.run.layout.gpus
    lines = {"linear from the plan": {n: n * per_gpu for n in curves["weak"]}}
    lines |= {
        f"{name} scaling": {n: point.rate for n, point in points.items()}
        for name, points in curves.items()
        if points
    }
    title = f"{plan_text.title(p.run)}: weak and strong scaling"
    path.write_text(svg.curves(title, lines, "tokens/s"))
