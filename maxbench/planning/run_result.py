"""Result of `maxbench plan` and `maxbench.plan(...)`: the plans, and the best of them."""

import dataclasses
import functools
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from maxbench.config import command_line, gpu_files, precedence, recipes, resolve
from maxbench.config.errors import UserError
from maxbench.config.options import Cluster, PlanOptions
from maxbench.config.run import Run
from maxbench.cost_model.memory import GIB
from maxbench.planning import budget, plan_text, planner, results, scaling, search
from maxbench.planning.planner import Plan

FASTEST_NETWORK = 200  # GB/s of a GPU, one direction: two adapters of 800 Gb/s


class CannotFit(UserError):
    """No program of the run can fit."""


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class PlanResult(results.Result[Plan]):
    """Plans of a run, or of the layouts of a search. Prints as one screen; in a notebook as tables.

    Attributes:
      run: as described by the flags.
      budget: of budget.budget(), or empty.
      curves: of scaling.scaling(), or empty.
      flags: of the best plan of a search: `maxbench plan FLAGS` plans it; '' otherwise.
    """

    run: Run
    budget: Mapping[str, float] = dataclasses.field(default_factory=dict)
    curves: Mapping[str, scaling.Points] = dataclasses.field(default_factory=dict)
    flags: str = ""

    @functools.cached_property
    def figures(self) -> dict[str, Any]:
        """The best plan as plain data; seconds and bytes unless a name has another unit."""
        more: dict[str, Any] = {"budget": self.budget, "flags": self.flags}
        more |= {"scaling": scaling.figures(dict(self.curves))}
        return super().figures | {k: v for k, v in more.items() if v}

    def ranking(self) -> str:
        return plan_text.format_ranking(self.plans, self.run)

    def screen(self) -> str:
        first = f"flags of the first: {self.flags}\n\n" if self.flags else ""
        return first + plan_text.format_plan(self.best, self._budget_lines())

    def curves_table(self) -> str:
        return scaling.table(dict(self.curves)) if self.curves else ""

    def head(self) -> list[str]:
        p = self.best
        text = [plan_text.title(p.run), p.run.layout.describe()]
        flags = [f"flags: {self.flags}"] if self.flags else []
        return [*text, *plan_text.headline(p, self.figures), *self._budget_lines(), *flags]

    def record(self, p: Plan) -> dict[str, Any]:
        return _record(p)

    def _budget_lines(self) -> list[str]:
        return budget.budget_lines(self.budget) if self.budget else []


def _record(p: Plan) -> dict[str, Any]:
    f = p.figures()
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
    result = PlanResult(run=run, plans=plans, searched=bool(candidates))
    if candidates or asked.best_remat:
        words = command_line.words_for(result.best.run, asked)
        result = dataclasses.replace(result, flags=shlex.join(words))
    if asked.explain:
        result = dataclasses.replace(result, explanation=result.explain())
    if asked.sensitivity:
        seconds: dict[str, Sequence[float | None]] = {**result.best.sensitivity()}
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
    batch that is asked for, by a flag or by a preset.

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
        workload = recipes.load_workload(asked.config, nearest.hardware)
        presets = [workload.known[name] for name in workload.presets]
        of_preset = any("gbs" in sections.get("layout", {}) for sections in presets)
        gbs = nearest.layout.gbs if given or of_preset else None
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
