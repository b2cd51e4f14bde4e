"""Result of `maxbench plan` and `maxbench.plan(...)`: the plans, and the best of them."""

import dataclasses
import functools
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from maxbench.config import command_line, gpu_files, precedence, resolve
from maxbench.config.errors import UserError
from maxbench.config.options import Cluster, PlanOptions
from maxbench.config.run import Run
from maxbench.cost_model.memory import GIB
from maxbench.metrics import records
from maxbench.planning import budget, explain, plan_text, planner, scaling, search
from maxbench.planning.planner import Plan

FASTEST_NETWORK = 200  # GB/s of a GPU, one direction: two adapters of 800 Gb/s


class CannotFit(UserError):
    """No program of the run can fit."""


@dataclasses.dataclass(frozen=True, repr=False)
class PlanResult(records.Records):
    """Plans of a run. Prints as one screen; in a notebook as tables.

    Attributes:
      run: as described by the flags.
      plans: of the run, or of the layouts of a search.
      searched: whether other layouts were searched.
      sensitivity: part of the cluster -> seconds of a step at each of planner.FACTORS; None where
        the run does not fit.
      budget: of budget.budget(), or empty.
      curves: of scaling.scaling(), or empty.
      explanation: of the best plan, or None.
      flags: of the best plan of a search: `maxbench plan FLAGS` plans it; '' otherwise.
    """

    run: Run
    plans: Sequence[Plan]
    searched: bool
    sensitivity: Mapping[str, Sequence[float | None]]
    budget: Mapping[str, float] = dataclasses.field(default_factory=dict)
    curves: Mapping[str, scaling.Points] = dataclasses.field(default_factory=dict)
    explanation: explain.Explanation | None = None
    flags: str = ""

    @property
    def best(self) -> Plan:
        """The fastest plan that fits; if none fits, the fastest."""
        return min(self.plans, key=lambda p: (not p.fits, p.step_s))

    @functools.cached_property
    def figures(self) -> dict[str, Any]:
        """The best plan as plain data; seconds and bytes unless a name has another unit."""
        more: dict[str, Any] = {"sensitivity_s": self.sensitivity, "budget": self.budget}
        more |= {"scaling": scaling.figures(dict(self.curves))}
        more |= {"explain": self.explanation.data() if self.explanation else {}}
        more |= {"flags": self.flags}
        return planner.figures(self.best) | {k: v for k, v in more.items() if v}

    def data(self) -> dict | list[dict]:
        """The output of --json: the plan, or the plans of a search."""
        if not self.searched:
            return self.figures
        return [self.figures if p is self.best else planner.figures(p) for p in self.plans]

    def __str__(self) -> str:
        parts = [plan_text.format_ranking(self.plans, self.run)] if self.searched else []
        parts += [f"flags of the first: {self.flags}"] if self.flags else []
        parts.append(plan_text.format_plan(self.best, self._budget_lines()))
        if self.explanation:
            parts.append(str(self.explanation))
        if self.sensitivity:
            parts.append(plan_text.format_sensitivity(self.best, self.sensitivity))
        if self.curves:
            parts.append(scaling.table(dict(self.curves)))
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        p, f = self.best, self.figures
        memory = {n: getattr(p.memory, n) for n in (*plan_text.PURPOSES, "total", "spare")}
        step = {text: f["parts_s"].get(part, 0.0) for part, text in plan_text.PARTS.items()}
        gib = [(name, f"{size / GIB:.2f}") for name, size in memory.items()]
        shares = [(text, f"{s:.3f}", f"{s / p.step_s:.1%}") for text, s in step.items() if s]
        text = [plan_text.title(p.run), p.run.layout.describe(), *plan_text.headline(p, f)]
        text += self._budget_lines() + ([f"flags: {self.flags}"] if self.flags else [])
        forms = {"layout": "", "remat": "", "step_s": ".3f", "mfu_full": ".1%", "spare_gib": ".1f"}
        rows = [[format(x[name], form) for name, form in forms.items()] for x in self.records()]
        heads = ("a step with", *(f"x {factor:g}" for factor in planner.FACTORS))
        cell = lambda s: f"{s:.3f} s" if s else "does not fit"
        changed = [(part, *map(cell, xs)) for part, xs in self.sensitivity.items()]
        return "".join([
            records.html_lines(text),
            records.html_table([*forms], rows) if self.searched else "",
            records.html_table(("predicted step", "s", "share"), shares),
            records.html_table(("memory of a GPU", "GiB"), gib),
            records.html_table(heads, changed) if changed else "",
            self.explanation._repr_html_() if self.explanation else "",
        ])  # fmt: skip

    def explain(self) -> explain.Explanation:
        """Where the seconds of the best plan's step go, op by op."""
        return self.explanation or explain.explain(self.best)

    def _budget_lines(self) -> list[str]:
        return budget.budget_lines(self.budget) if self.budget else []

    def records(self) -> list[dict[str, Any]]:
        """A row of figures per plan, the best first."""
        return [_record(p) for p in sorted(self.plans, key=lambda p: (not p.fits, p.step_s))]


def _record(p: Plan) -> dict[str, Any]:
    f = planner.figures(p)
    row = {name: f[name] for name in ("name", "gpu_type", "layout", "remat", "fits", "step_s")}
    row |= {"tokens_per_s": f["tokens_per_s"], "days_to_1t_tokens": f["days_to_1t_tokens"]}
    row |= {f"mfu_{c}": share for c, share in f["mfu"].items()}
    row |= {"memory_gib": p.memory.total / GIB, "spare_gib": p.memory.spare / GIB}
    return row | {"published_step_s": (f["published"] or {}).get("step_s")}


def plan_of(asked: PlanOptions) -> PlanResult:
    """The result of options.

    Raises:
      CannotFit: no program of the run can fit.
      UserError: other invalid input.
    """
    run, candidates = run_of(asked)
    if asked.as_published:
        if asked.best_remat or asked.search:
            raise UserError("as_published excludes --best_remat and --search")
        run = planner.as_published(run)
    if not candidates and (why := search.why_it_cannot_fit(run)):
        raise CannotFit(why)
    if asked.search and not candidates:
        candidates = search.shortlist(run, asked.compiled)
    if candidates:
        plans = search.search(candidates, run, asked.search_s)
    else:
        plans = [planner.best_remat(run) if asked.best_remat else planner.plan(run)]
    result = PlanResult(run, plans, bool(candidates), {})
    if candidates or asked.best_remat:
        words = command_line.words_for(result.best.run, asked)
        result = dataclasses.replace(result, flags=shlex.join(words))
    if asked.explain:
        result = dataclasses.replace(result, explanation=result.explain())
    if asked.sensitivity:
        seconds: dict[str, Sequence[float | None]] = {**planner.sensitivity(result.best)}
        seconds |= {"memory size": search.memory_sensitivity(result.best)}
        result = dataclasses.replace(result, sensitivity=seconds)
    if asked.tokens:
        result = dataclasses.replace(result, budget=budget.budget(result.best, asked))
    if asked.scaling:
        result = dataclasses.replace(result, curves=scaling.scaling(result.best))
    return result


def run_of(asked: PlanOptions, schedule: bool = False) -> tuple[Run, list[Run]]:
    """The run, and no candidates. If the recipe table has no row for that number of GPUs: the run
    of the nearest row, and candidate layouts on that number, with that row's batch per GPU or the
    batch that is asked for.

    Args:
      schedule: whether the run's schedule is what is asked for.
    """
    try:
        return with_cluster(command_line.resolve_run(asked), asked), []
    except precedence.NoRow as e:
        if schedule or asked.as_published or asked.best_remat:
            raise  # these options need the layout of a row
        assert asked.gpus
        nearest = with_cluster(command_line.resolve_run(asked, e.nearest), asked)
        given = asked.gbs or "layout.gbs" in (asked.settings or {})
        gbs = nearest.layout.gbs if given else None
        return nearest, search.fastest_on(nearest, asked.gpus, asked.compiled, gbs)


def with_cluster(run: Run, asked: Cluster) -> Run:
    """The run on a cluster with the figures that options give, which are keys of a GPU type.

    Raises:
      UserError: a figure is invalid.
    """
    values = {field.name: getattr(asked, field.name) for field in dataclasses.fields(Cluster)}
    figures = {name: value for name, value in values.items() if value is not None}
    hardware = gpu_files.override(run.hardware, run.layout.gpu_type, figures)
    rate = hardware[run.layout.gpu_type].network_gbytes_per_s
    if rate > FASTEST_NETWORK:
        text = f"network_gbytes_per_s={rate:g} is {8 * rate:,.0f} Gb/s for each GPU"
        hint = "more than any has; an adapter of 400 Gb/s has 50"
        print(f"maxbench plan: note: {text}, {hint}", file=sys.stderr)
    return resolve.resolve(run.config, hardware, run.device)
