"""How a plan would scale: the fastest layout by arithmetic on 8 to 65,536 GPUs.

Arithmetic is off by some factor; the plan's own compiled program says which, and all points are
multiplied by it.
"""

import dataclasses
import pathlib

from maxbench.config.run import Run
from maxbench.planning import search, svg
from maxbench.planning.planner import Plan, title

SIZES = [8 << i for i in range(14)]
SEARCHED = 1024  # GPUs up to which weak scaling looks for layouts; then copies of the last one
Points = dict[int, tuple[Run, float]]  # GPUs -> run, seconds of a step


def scaling(p: Plan) -> dict[str, Points]:
    """'weak', a global batch that grows with the GPUs, and 'strong', one that stays; without the
    numbers of GPUs on which nothing fits, or which the batch is too small for."""
    a, factor = p.run.layout, p.step_s / search.estimate_step_s(p.run)
    found: dict[str, Points] = {"weak": {}, "strong": {}}
    for gpus in sorted({*SIZES, a.gpus}):
        runs = {"weak": _weak(p, gpus, found["weak"]), "strong": _best(p, gpus, a.gbs)}
        for name, run in runs.items():
            if run:
                found[name][gpus] = run, search.estimate_step_s(run) * factor
    return found


def _best(p: Plan, gpus: int, gbs: int) -> Run | None:
    runs = search.rank_layouts(p.run, gpus, gbs)
    runs += [p.run] * (gpus == p.run.layout.gpus)
    return min(runs, key=search.estimate_step_s, default=None)


def _weak(p: Plan, gpus: int, before: Points) -> Run | None:
    last = max(before, default=0)
    if last < SEARCHED or gpus % last:
        return _best(p, gpus, max(1, round(p.run.layout.gbs * gpus / p.run.layout.gpus)))
    run, times = before[last][0], gpus // last
    more = dict(dp=run.layout.dp * times, gbs=run.layout.gbs * times)
    return dataclasses.replace(run, layout=dataclasses.replace(run.layout, **more))


def rate(run: Run, seconds: float) -> float:
    """Tokens per second."""
    return run.layout.gbs * run.train.seq / seconds


def table(found: dict[str, Points]) -> str:
    """Points as lines: both kinds of scaling side by side."""
    head = f"{'GPUs':>7} {'scaling':>8} {'step s':>9} {'tokens/s':>13} {'efficiency':>11}  layout"
    lines = [head]
    for name, points in found.items():
        best = max((rate(*point) / gpus for gpus, point in points.items()), default=0)
        for gpus, (run, seconds) in points.items():
            speed = rate(run, seconds)
            lines.append(
                f"{gpus:>7,} {name:>8} {seconds:9.3f} {speed:13,.0f} {speed / gpus / best:>11.1%}"
                f"  {run.layout.describe().partition(', ')[2]}; {run.train.remat_summary}"
            )
    none = [gpus for gpus in SIZES if gpus not in found["weak"]]
    if none:
        lines.append(f"no layout is legal and fits on so many GPUs: {', '.join(map(str, none))}")
    return "\n".join([*lines, "by arithmetic, at the scale of the compiled program"])


def figures(found: dict[str, Points]) -> dict:
    """Points as plain data: {'weak': [{gpus, step_s, tokens_per_s, layout, remat}]}."""
    one = lambda gpus, run, seconds: {
        "gpus": gpus,
        "step_s": seconds,
        "tokens_per_s": rate(run, seconds),
        "layout": run.layout.describe(),
        "remat": run.train.remat,
    }
    return {name: [one(n, *point) for n, point in points.items()] for name, points in found.items()}


def draw(p: Plan, found: dict[str, Points], path: pathlib.Path) -> None:
    """Writes tokens/s over GPUs as a picture."""
    lines = {
        f"{name} scaling": {n: rate(*point) for n, point in points.items()}
        for name, points in found.items()
        if points
    }
    each = rate(p.run, p.step_s) / p.run.layout.gpus
    lines["as fast on each GPU as the plan"] = {n: n * each for n in found["weak"]}
    path.write_text(svg.curves(title(p.run), lines, "tokens/s over GPUs, by arithmetic"))
