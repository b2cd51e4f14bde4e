"""`maxbench.sweep(...)`: several plans or runs, one after another, as one table.

Python alone has it: of the commands, a shell's loop does the same on one machine, and
`maxbench launch` takes lists of values on a cluster.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from maxbench import planning
from maxbench.cli import train
from maxbench.config import commands, python_api, recipes
from maxbench.config.errors import UserError, check_choice
from maxbench.reporting import tables

CALLS = {"plan": planning, "train": train}
# What people are shown of one, beside what it was given.
SHOWN = {
    "fits": "", "step_s": ".3f", "tokens_per_s": ",.0f", "mfu_full": ".1%", "memory_gib": ".2f",
    "loss": ".4f", "error": "",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, repr=False)
class Sweep(python_api.Records):
    """Several plans or runs. Prints as a table, a line for each; in a notebook as a table."""

    given: Sequence[Mapping[str, Any]]  # of each: config, flags, settings
    answers: Sequence[Any]  # of each: what maxbench.planning or .train returned; None if it raised
    errors: Sequence[str]  # of each: why it failed, or ''

    def records(self) -> list[dict[str, Any]]:
        """A row for each: what it was given, its figures, its error."""
        every = zip(self.given, self.answers, self.errors, strict=True)
        return [{**g, **(figures(a) if a else {}), "error": error} for g, a, error in every]

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Heads, and a line for each: what differs between them, and the figures that they have."""
        rows, names = self.records(), dict.fromkeys(itertools.chain(*self.given))
        differ = [n for n in names if len({str(one.get(n)) for one in self.given}) > 1]
        shown = [n for n in SHOWN if any(row.get(n) not in ("", None) for row in rows)]
        told = lambda n, x: "" if x is None else format(x, SHOWN.get(n, ""))
        heads = (differ or ["config"]) + shown
        return heads, [[told(n, row.get(n)) for n in heads] for row in rows]

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for line in tables.layout(*self.cells()))

    def _repr_html_(self) -> str:
        return python_api.table(*self.cells())


def figures(answer) -> dict[str, Any]:
    """What a plan and a run both have, by the same names, and what is of one alone."""
    if not hasattr(answer, "result"):
        return answer.records()[0]
    r = answer.result
    made = {"layout": recipes.run_from_dict(r["config"]).layout.describe(), "status": r["status"]}
    if "step_s" in r:
        made |= {"step_s": r["step_s"]["mean"], "tokens_per_s": r["tokens_per_s"]}
        made |= {f"mfu_{c}": share for c, share in r["mfu"].items()}
        made |= {"loss": r["loss"]["last"][1], "memory_gib": r["peak_bytes"] / 2**30}
    return made


def sweep(
    kind: str,
    config: str | Sequence[str],
    *,
    layouts: Sequence[Mapping[str, Any]] = ({},),
    settings: Mapping[str, Any] | None = None,
    show: bool = True,
    **given: Any,
) -> Sweep:
    """Plans or trains every combination of workloads, layouts and settings, one after another.

    `maxbench.sweep("plan", "llama31_8b", gpus=[8, 16], dtype=["bf16", "fp8"])` is four plans. One
    that cannot be, or fails, is a row with its error.

    Args:
      kind: 'plan' or 'train'.
      config: a workload, as maxbench.planning takes it, or several.
      layouts: flags that go together, [{'fsdp': 8}, {'fsdp': 4, 'tp': 2}].
      settings: any setting by its place; as of flags, a list is tried value by value.
      show: print a line for each that is done.
      given: flags of the command; a list is tried value by value.

    Raises:
      UserError: there is no such kind, or no such flag.
    """
    check_choice("kind", kind, CALLS)
    for name in {*given, *itertools.chain(*layouts)} - {*commands.flag_names(kind)}:
        raise UserError(f"unknown flag {name!r} of maxbench {kind}")
    axes = [[{"config": one} for one in ([config] if isinstance(config, str) else config)], layouts]
    for name, value in {**given, **(settings or {})}.items():
        axes.append([{name: one} for one in (value if isinstance(value, list) else [value])])
    chosen = [dict(itertools.chain(*(x.items() for x in one))) for one in itertools.product(*axes)]
    answers, errors = [], []
    for number, one in enumerate(chosen, 1):
        answer, error = attempt(kind, one)
        answers, errors = [*answers, answer], [*errors, error]
        if show:
            told = " ".join(f"{name}={value}" for name, value in one.items())
            said = error or f"{figures(answer)['step_s']:.3f} s a step"
            print(f"{number} of {len(chosen)}: {told}: {said}", flush=True)
    return Sweep(chosen, answers, errors)


def attempt(kind: str, given: Mapping[str, Any]) -> tuple[Any, str]:
    """One of them: what it returned, and its error. Names with a dot are settings."""
    flags = {name: value for name, value in given.items() if "." not in name}
    flags |= {"settings": {name: value for name, value in given.items() if "." in name}}
    try:
        answer = CALLS[kind](**flags, **({"show": False} if kind == "train" else {}))
    except Exception as e:  # a defect of one is no reason to lose the others
        return None, str(e) if isinstance(e, UserError) else f"{type(e).__name__}: {e}"
    result = getattr(answer, "result", {"status": "done"})
    return answer, "" if result["status"] == "done" else result["reason"]


python_api.make_callable(__name__, "maxbench.sweep.sweep")
