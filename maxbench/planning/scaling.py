"""Scaling of a plan: the fastest layout on 8 to 65,536 GPUs, by the search's estimate.

All points are multiplied by the ratio of the plan's compiled step to its estimate.
"""

import pathlib
from collections.abc import Mapping

from maxbench.config import resolve
from maxbench.config.run import Run
from maxbench.planning import search, svg
from maxbench.planning.plan_text import title
from maxbench.planning.planner import Plan
from maxbench.terminal import console

SIZES = [8 << i for i in range(14)]
SEARCHED = 1024  # GPUs up to which weak scaling searches; above, dp copies of the last layout
Points = dict[int, tuple[Run, float]]  # GPUs -> run, seconds of a step


def scaling(p: Plan) -> dict[str, Points]:
    """Points of 'weak' scaling (global batch in proportion to the GPUs) and of 'strong' scaling
    (constant global batch), for the numbers of GPUs with a legal layout that fits."""
    a, factor = p.run.layout, p.step_s / search.estimate_step_s(p.run)
    curves: dict[str, Points] = {"weak": {}, "strong": {}}
    for gpus in sorted({*SIZES, a.gpus}):
        runs = {"weak": _weak(p, gpus, curves["weak"]), "strong": _fastest(p, gpus, a.gbs)}
        for name, run in runs.items():
            if run:
                curves[name][gpus] = run, search.estimate_step_s(run) * factor
    return curves


def _fastest(p: Plan, gpus: int, gbs: int) -> Run | None:
    runs = search.rank_layouts(p.run, gpus, gbs)
    if gpus == p.run.layout.gpus:
        runs.append(p.run)
    return min(runs, key=search.estimate_step_s, default=None)


def _weak(p: Plan, gpus: int, smaller: Points) -> Run | None:
    """The run on `gpus` GPUs with the plan's batch per GPU; `smaller` are the points so far."""
    last = max(smaller, default=0)
    if last < SEARCHED or gpus % last:
        return _fastest(p, gpus, max(1, round(p.run.layout.gbs * gpus / p.run.layout.gpus)))
    run, copies = smaller[last][0], gpus // last
    a = run.layout
    return resolve.changed(run, layout={"dp": a.dp * copies, "gbs": a.gbs * copies})


def rate(run: Run, seconds: float) -> float:
    """Tokens per second."""
    return run.layout.gbs * run.train.seq / seconds


def table(curves: Mapping[str, Points]) -> str:
    """Table of all points. Efficiency is tokens/s per GPU over the best of the curve."""
    rows = []
    for name, points in curves.items():
        best = max((rate(*point) / gpus for gpus, point in points.items()), default=0)
        for gpus, (run, seconds) in points.items():
            speed = rate(run, seconds)
            layout = f"{run.layout.describe().partition(', ')[2]}; {run.remat_summary}"
            efficiency = f"{speed / gpus / best:.1%}"
            row = [f"{gpus:,}", name, f"{seconds:.3f}", f"{speed:,.0f}", efficiency, layout]
            rows.append(row)
    heads = ["GPUs", "scaling", "step s", "tokens/s", "efficiency", "layout"]
    lines = console.table(heads, rows, text=(1, 5))
    missing = [gpus for gpus in SIZES if gpus not in curves["weak"]]
    if missing:
        lines.append(f"no layout is legal and fits on {', '.join(map(str, missing))} GPUs")
    return "\n".join([*lines, "estimates, scaled to the compiled program"])


def figures(curves: Mapping[str, Points]) -> dict:
    """Points as plain data: {'weak': [{gpus, step_s, tokens_per_s, layout, remat}]}."""
    point = lambda gpus, run, seconds: {
        "gpus": gpus,
        "step_s": seconds,
        "tokens_per_s": rate(run, seconds),
        "layout": run.layout.describe(),
        "remat": run.train.remat,
    }
    return {name: [point(n, *p) for n, p in points.items()] for name, points in curves.items()}


def draw(p: Plan, curves: Mapping[str, Points], path: pathlib.Path) -> None:
    """Writes a plot of tokens/s over GPUs as SVG."""
    lines = {
        f"{name} scaling": {n: rate(*point) for n, point in points.items()}
        for name, points in curves.items()
        if points
    }
    per_gpu = rate(p.run, p.step_s) / p.run.layout.gpus
    lines["linear from the plan"] = {n: n * per_gpu for n in curves["weak"]}
    path.write_text(svg.curves(title(p.run), lines, "tokens/s over GPUs, estimates"))
