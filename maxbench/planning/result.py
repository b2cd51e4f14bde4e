"""What `maxbench plan` and `maxbench.plan(...)` answer: the plans that were asked for, and the best
of them."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from maxbench.config import command_line, recipes, records, validation
from maxbench.config.errors import UserError
from maxbench.config.run import Run
from maxbench.cost_model import memory
from maxbench.cost_model.memory import GIB
from maxbench.hardware.gpus import Gpu
from maxbench.planning import budget, planner, scaling, search
from maxbench.planning.planner import Plan

CLUSTER = ("memory_margin", "network_gbps", "gpus_per_node", "nvlink_gpus")  # of Gpu, and flags


class CannotFit(UserError):
    """No program of the run can fit, whatever the compiler does."""


@dataclasses.dataclass(frozen=True, repr=False)
class PlanResult(records.Records):
    """Plans of a run. Prints as one screen; in a notebook as tables."""

    run: Run  # as it was given
    plans: Sequence[Plan]
    searched: bool  # other layouts too
    sensitivity: Mapping[str, Sequence[float | None]]  # seconds of a step, by part of the cluster
    budget: Mapping[str, float] = dataclasses.field(default_factory=dict)
    curves: Mapping[str, scaling.Points] = dataclasses.field(default_factory=dict)

    @property
    def best(self) -> Plan:
        """The fastest that fits; of none that does, the fastest."""
        return min(self.plans, key=lambda p: (not p.fits, p.step_s))

    @functools.cached_property
    def figures(self) -> dict[str, Any]:
        """The best plan as plain data; seconds and bytes unless a name says otherwise."""
        more = {"sensitivity_s": self.sensitivity, "budget": self.budget}
        more |= {"scaling": scaling.figures(dict(self.curves))}
        return planner.figures(self.best) | {k: v for k, v in more.items() if v}

    def data(self) -> dict | list[dict]:
        """What --json prints: the plan, or those of a search."""
        if not self.searched:
            return self.figures
        return [self.figures if p is self.best else planner.figures(p) for p in self.plans]

    def __str__(self) -> str:
        parts = [planner.ranking(list(self.plans), self.run)] if self.searched else []
        spent = budget.words(dict(self.budget)) if self.budget else ()
        parts.append(planner.format_plan(self.best, spent))
        if self.sensitivity:
            parts.append(planner.sensitivities(self.best, dict(self.sensitivity)))
        if self.curves:
            parts.append(scaling.table(dict(self.curves)))
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        p, f = self.best, self.figures
        memory = {n: getattr(p.memory, n) for n in (*planner.PURPOSES, "total", "spare")}
        step = {text: f["parts_s"].get(part, 0.0) for part, text in planner.PARTS.items()}
        gib = [(name, f"{size / GIB:.2f}") for name, size in memory.items()]
        shares = [(text, f"{s:.3f}", f"{s / p.step_s:.1%}") for text, s in step.items() if s]
        told = [planner.title(p.run), p.run.layout.describe(), *planner.headline(p, f)]
        told += budget.words(dict(self.budget)) if self.budget else ()
        forms = {"layout": "", "remat": "", "step_s": ".3f", "mfu_full": ".1%", "spare_gib": ".1f"}
        rows = [[format(x[name], form) for name, form in forms.items()] for x in self.records()]
        heads = ("a step with", *(f"x {factor:g}" for factor in planner.FACTORS))
        said = lambda s: f"{s:.3f} s" if s else "does not fit"
        changed = [(part, *map(said, xs)) for part, xs in self.sensitivity.items()]
        return "".join([
            records.html_lines(told),
            records.html_table([*forms], rows) if self.searched else "",
            records.html_table(("predicted step", "s", "share"), shares),
            records.html_table(("memory of a GPU", "GiB"), gib),
            records.html_table(heads, changed) if changed else "",
        ])  # fmt: skip

    def records(self) -> list[dict[str, Any]]:
        """A row of figures for each plan, the best first."""
        return [_record(p) for p in sorted(self.plans, key=lambda p: (not p.fits, p.step_s))]


def _record(p: Plan) -> dict[str, Any]:
    f = planner.figures(p)
    row = {name: f[name] for name in ("name", "gpu_type", "layout", "remat", "fits", "step_s")}
    row |= {"tokens_per_s": f["tokens_per_s"], "days_to_1t_tokens": f["days_to_1t_tokens"]}
    row |= {f"mfu_{c}": share for c, share in f["mfu"].items()}
    row |= {"memory_gib": p.memory.total / GIB, "spare_gib": p.memory.spare / GIB}
    return row | {"published_step_s": (f["published"] or {}).get("step_s")}


def plan_from_flags(fv: flags.FlagValues, argv: Sequence[str]) -> PlanResult:
    """The answer to flags of the command.

    Raises:
      Hopeless: it cannot fit.
      UserError: anything else that cannot be.
    """
    run, found = given_run(fv, argv)
    asked = lambda name: fv[name].value
    money = budget.budget_options({name: asked(name) for name in budget.FLAGS if fv[name].present})
    if asked("as_published"):
        if asked("best_remat") or asked("search"):
            raise UserError("as_published excludes --best_remat and --search")
        run = planner.as_published(run)
    if why := "" if found else search.why_it_cannot_fit(run):
        raise CannotFit(why)
    if asked("search"):
        found = found or search.shortlist(run, asked("compiled"))
    if found:
        plans = search.search(found, run)
    else:
        plans = [planner.best_remat(run) if asked("best_remat") else planner.plan(run)]
    made = PlanResult(run, plans, bool(found), {})
    if asked("sensitivity"):
        changed = planner.sensitivity(made.best) | {"memory size": search.memory_sizes(made.best)}
        made = dataclasses.replace(made, sensitivity=changed)
    if money:
        made = dataclasses.replace(made, budget=budget.budget(made.best, money))
    if asked("scaling"):
        made = dataclasses.replace(made, curves=scaling.scaling(made.best))
    return made


def given_run(fv: flags.FlagValues, argv: Sequence[str]) -> tuple[Run, list[Run]]:
    """The run; or where the table has no row for so many GPUs, the nearest row's, and the runs that
    promise most on so many."""
    try:
        return with_cluster(command_line.parse(fv, argv), fv), []
    except recipes.NoRow as e:
        if any(fv[name].value for name in ("schedule", "as_published", "best_remat")):
            raise  # they are of the layout that was meant
        count = int(fv["gpus"].value)
        near = with_cluster(command_line.parse(fv, argv, e.nearest), fv)
        return near, search.at(near, count, fv["compiled"].value)


def with_cluster(run: Run, fv: flags.FlagValues) -> Run:
    """The run on a cluster with the figures that flags give (CLUSTER).

    Raises:
      UserError: a figure is invalid.
    """
    kinds, found = {f.name: f.type for f in dataclasses.fields(Gpu)}, {}
    for name in CLUSTER:
        if (text := fv[name].value) is not None:
            rules = {"below": memory.FRACTION} if name == "memory_margin" else {}
            found[name] = validation.parse(name, int if kinds[name] is int else float, text, rules)
    try:
        gpu_types = run.gpu_types.override(run.layout.gpu_type, found)
    except ValueError as e:
        raise UserError(str(e)) from None
    return dataclasses.replace(run, gpu_types=gpu_types)
