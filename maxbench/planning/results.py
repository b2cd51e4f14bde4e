"""Results of planning: what those of runs and of other programs share."""

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from maxbench.cost_model.memory import GIB
from maxbench.metrics import records
from maxbench.planning import explain, plan_text
from maxbench.planning.prediction import FACTORS, Prediction
from maxbench.terminal import console

Planned = TypeVar("Planned", bound=Prediction)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Result(records.Records, abc.ABC, Generic[Planned]):
    """Predictions, and the best of them.

    Attributes:
      plans: one, or those of a search.
      searched: whether other layouts were searched.
      sensitivity: part of the cluster -> seconds of a step at each of FACTORS; None where the
        program does not fit.
      explanation: of the best plan, or None.
    """

    plans: Sequence[Planned]
    searched: bool = False
    sensitivity: Mapping[str, Sequence[float | None]] = dataclasses.field(default_factory=dict)
    explanation: explain.Explanation | None = None

    @property
    def ranked(self) -> list[Planned]:
        """The plans that fit, the fastest first, then the others."""
        return sorted(self.plans, key=lambda p: (not p.fits, p.step_s))

    @property
    def best(self) -> Planned:
        """The fastest plan that fits; if none fits, the fastest."""
        return self.ranked[0]

    @functools.cached_property
    def figures(self) -> dict[str, Any]:
        """The best plan as plain data; seconds and bytes unless a name has another unit."""
        more = {"sensitivity_s": self.sensitivity}
        more |= {"explain": self.explanation.data() if self.explanation else {}}
        return self.best.figures() | {k: v for k, v in more.items() if v}

    def data(self) -> dict | list[dict]:
        """The output of --json: the plan, or the plans of a search."""
        if not self.searched:
            return self.figures
        return [self.figures if p is self.best else p.figures() for p in self.plans]

    def explain(self) -> explain.Explanation:
        """Seconds of the best plan's step, op by op."""
        return self.explanation or explain.explain(self.best)

    def records(self) -> list[dict[str, Any]]:
        """A row of figures per plan, the best first."""
        return [self.record(p) for p in self.ranked]

    @abc.abstractmethod
    def record(self, p: Planned) -> dict[str, Any]:
        """The row of a plan."""

    @abc.abstractmethod
    def ranking(self) -> str:
        """Table of the plans of a search."""

    @abc.abstractmethod
    def screen(self) -> str:
        """The best plan on one screen."""

    @abc.abstractmethod
    def head(self) -> list[str]:
        """The first lines of the screen: what is planned, whether it fits, and its step."""

    @abc.abstractmethod
    def curves_table(self) -> str:
        """Table of scaling; '' without."""

    def __str__(self) -> str:
        parts = [self.ranking()] if self.searched else []
        parts.append(self.screen())
        if self.explanation:
            parts.append(str(self.explanation))
        if self.sensitivity:
            parts.append(plan_text.format_sensitivity(self.best, self.sensitivity))
        return "\n\n".join([*parts, *filter(None, [self.curves_table()])])

    def _repr_html_(self) -> str:
        p, f, forms = self.best, self.figures, {"mfu_full": ".1%", "spare_gib": ".1f"}
        step = {text: f["parts_s"].get(part, 0.0) for part, text in plan_text.PARTS.items()}
        sizes = {**p.memory.parts, "total": p.memory.total, "spare": p.memory.spare}
        gib = [(name, console.fixed(size / GIB, 2)) for name, size in sizes.items()]
        seconds = {text: p.text_s(s) for text, s in step.items() if s}
        shares = [(text, s, console.share(step[text] / p.step_s)) for text, s in seconds.items()]
        names = [n for n in ("layout", "remat", "step_s", *forms) if n in self.records()[0]]
        form = {"step_s": ".3f", **forms}
        rows = [[format(x[name], form.get(name, "")) for name in names] for x in self.records()]
        heads = ("a step with", *(f"x {factor:g}" for factor in FACTORS))
        cell = lambda s: f"{s:.3f} s" if s else "does not fit"
        changed = [(part, *map(cell, xs)) for part, xs in self.sensitivity.items()]
        return "".join([
            records.html_lines(self.head()),
            records.html_table(names, rows) if self.searched else "",
            records.html_table(("predicted step", "s", "share"), shares),
            records.html_table(("memory of a GPU", "GiB"), gib),
            records.html_table(heads, changed) if changed else "",
            self.explanation._repr_html_() if self.explanation else "",
        ])  # fmt: skip
