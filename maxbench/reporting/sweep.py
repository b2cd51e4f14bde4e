"""Several plans or runs, one after another, as one table: maxbench.sweep()."""

import dataclasses
import itertools
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from maxbench.config import options, precedence, resolve
from maxbench.config.errors import UserError
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.metrics import records
from maxbench.terminal import console

Point = Mapping[str, Any]  # one combination: config, flags, and settings by SECTION.FIELD
OPTIONS = {"plan": options.PlanOptions, "train": options.TrainOptions}
# Figures of the table, in this order, and their formats.
COLUMNS = {
    "fits": "", "step_s": ".3f", "tokens_per_s": ",.0f", "mfu_full": ".1%", "memory_gib": ".2f",
    "loss": ".4f", "error": "",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, repr=False)
class Sweep(records.Records):
    """Several plans or runs. Prints as a table with a row for each; in a notebook as HTML."""

    points: Sequence[Point]
    results: Sequence[Any]  # PlanResult or TrainResult of each point; None if it raised
    errors: Sequence[str]  # why each point failed, or ''

    def records(self) -> list[dict[str, Any]]:
        """A row for each point: its keywords, figures and error."""
        return [
            {**point, **(figures(result) if result else {}), "error": error}
            for point, result, error in zip(self.points, self.results, self.errors, strict=True)
        ]

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Column heads and rows: the keywords that differ between points, and the known figures."""
        rows, names = self.records(), dict.fromkeys(itertools.chain(*self.points))
        varied = [n for n in names if len({str(point.get(n)) for point in self.points}) > 1]
        known = [n for n in COLUMNS if any(row.get(n) not in ("", None) for row in rows)]
        heads = (varied or ["config"]) + known
        return heads, [[_cell(name, row.get(name)) for name in heads] for row in rows]

    def __str__(self) -> str:
        return "\n".join(console.table(*self.cells()))

    def _repr_html_(self) -> str:
        return records.html_table(*self.cells())


def _cell(name: str, value: Any) -> str:
    return "" if value is None else format(value, COLUMNS.get(name, ""))


def figures(result: Any) -> dict[str, Any]:
    """Figures of a PlanResult or TrainResult, under the same names where both have them."""
    if not hasattr(result, "result"):  # a plan
        return result.records()[0]
    r = result.result
    run = resolve.resolve(precedence.without_processes(r["config"]), GPU_TYPES)
    row = {"layout": run.layout.describe(), "status": r["status"]}
    if "step_s" in r:
        row |= {"step_s": r["step_s"]["mean"], "tokens_per_s": r["tokens_per_s"]}
        row |= {f"mfu_{convention}": share for convention, share in r["mfu"].items()}
        row |= {"loss": r["loss"]["last"][1], "memory_gib": r["peak_bytes"] / 2**30}
    return row


def combinations(
    kind: str,
    config: str | Sequence[str],
    layouts: Sequence[Point],
    flags: Point,
    settings: Point,
) -> list[Point]:
    """Every combination of workloads, layouts and values; a list, tuple or array stands for its
    values.

    Raises:
      UserError: a keyword that the function of that kind has not.
    """
    keywords = {field.name for field in dataclasses.fields(OPTIONS[kind])}
    for name in {*flags, *itertools.chain(*layouts)} - keywords:
        raise UserError(f"maxbench.{kind} has no keyword {name!r}")
    axes: list[Sequence[Point]] = [[{"config": name} for name in _values("config", config)]]
    axes.append(layouts)
    for name, value in {**flags, **settings}.items():
        axes.append([{name: one} for one in _values(name, value)])
    return [
        dict(itertools.chain(*(part.items() for part in parts)))
        for parts in itertools.product(*axes)
    ]


def _values(name: str, given: Any) -> Sequence[Any]:
    """The values to try of a keyword or setting: those of a list, an array, a range or a tuple,
    unless its value is a tuple itself; otherwise the one given."""
    if hasattr(given, "tolist"):  # of numpy or pandas
        given = given.tolist()
    field = options.SETTINGS.get(name)
    is_tuple = field is not None and typing.get_origin(options.type_of(field)) is tuple
    return given if isinstance(given, list | range | (list if is_tuple else tuple)) else [given]


def run(call: Callable[..., Any], points: Sequence[Point], show: bool) -> Sweep:
    """Calls plan() or train() for each point; prints a line for each if `show`."""
    results, errors = [], []
    for number, point in enumerate(points, 1):
        result, error = attempt(call, point)
        results.append(result)
        errors.append(error)
        if show:
            keywords = " ".join(f"{name}={value}" for name, value in point.items())
            outcome = error or f"{figures(result)['step_s']:.3f} s per step"
            print(f"{number} of {len(points)}: {keywords}: {outcome}", flush=True)
    return Sweep(points, results, errors)


def attempt(call: Callable[..., Any], point: Point) -> tuple[Any, str]:
    """The result of one point or None, and its error or ''."""
    flags = {name: value for name, value in point.items() if "." not in name}
    settings = {name: value for name, value in point.items() if "." in name}
    try:
        result = call(**flags, settings=settings)
    except Exception as e:  # one failing point must not lose the others
        return None, str(e) if isinstance(e, UserError) else f"{type(e).__name__}: {e}"
    outcome = getattr(result, "result", {"status": "done"})
    return result, "" if outcome["status"] == "done" else outcome["reason"]
