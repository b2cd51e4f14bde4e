"""The Python API, `import maxbench as mb`: mb.plan(), mb.train(), mb.report() and mb.sweep().

Keywords are the options of the commands with the same names (config/options.py), from which their
signatures and docstrings derive. Functions import the rest when called.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from maxbench.config import options

if TYPE_CHECKING:
    from maxbench.planning.result import PlanResult
    from maxbench.reporting.build_report import Report
    from maxbench.reporting.sweep import Sweep
    from maxbench.run.subprocess_run import TrainResult

P = ParamSpec("P")
Asked = TypeVar("Asked")
Result = TypeVar("Result")


def keywords(cls: Callable[P, Asked]) -> Callable[[Callable[[Asked], Result]], Callable[P, Result]]:
    """Decorates a function of options, so that it takes the fields of their class as keywords."""

    def decorate(function: Callable[[Asked], Result]) -> Callable[P, Result]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            return function(cls(*args, **kwargs))

        returns = function.__annotations__["return"]
        call.__signature__ = inspect.signature(cls).replace(return_annotation=returns)  # type: ignore[attr-defined]
        call.__doc__ = _documented(inspect.getdoc(function) or "", cls)
        return call

    return decorate


def _documented(text: str, cls: Any) -> str:
    """A docstring with a line for each keyword before its section `Returns`."""
    wrap = textwrap.TextWrapper(100, initial_indent="  ", subsequent_indent="    ").wrap
    texts = (f"{field.name}: {options.help_line(field)}." for field in dataclasses.fields(cls))
    lines = [line for each in texts for line in wrap(each)]
    return text.replace("\nReturns:", "\n".join(["\nArgs:", *lines, "", "Returns:"]))


@keywords(options.TrainOptions)
def train(asked: options.TrainOptions) -> TrainResult:
    """Trains a workload on the local devices and measures it, in a process of its own.

    `mb.train("llama31_8b:tiny", steps=8)` is `maxbench train --config llama31_8b:tiny --steps 8`.

    Returns:
      The run's summary, its folder, and its figures per step.

    Raises:
      UserError: an argument is invalid, or the run did not start.
    """
    from maxbench.config import command_line
    from maxbench.run import subprocess_run

    command_line.resolve_run(asked)  # invalid arguments raise here, before a process starts
    return subprocess_run.train(asked)


@keywords(options.PlanOptions)
def plan(asked: options.PlanOptions) -> PlanResult:
    """Compiles a run for GPUs that need not be present, and predicts its memory and step time.

    `mb.plan("llama31_405b", gpus=512)` is `maxbench plan --config llama31_405b --gpus 512`. A
    program that is not cached is compiled in another process.

    Returns:
      The plan, or the plans of a search.

    Raises:
      UserError: an argument is invalid, or no program of the run can fit.
    """
    from maxbench.cli import plan as command

    return command.plan_and_draw(asked)[0]


@keywords(options.ReportOptions)
def report(asked: options.ReportOptions) -> Report:
    """Reads finished runs, at and below paths.

    `mb.report("experiments", cost=2.5)` is `maxbench report --cost 2.5 experiments`.

    Returns:
      The runs with their figures; text(format) is the output of `maxbench report --format`.

    Raises:
      UserError: an argument is invalid, or there is no run.
    """
    from maxbench.reporting import build_report

    return build_report.read(asked)


def sweep(
    kind: Literal["plan", "train"],
    config: str | Sequence[str],
    *,
    layouts: Sequence[Mapping[str, Any]] = ({},),
    settings: Mapping[str, Any] | None = None,
    show: bool = True,
    **values: Any,
) -> Sweep:
    """Plans or trains every combination of workloads, layouts and values, one after another.

    `mb.sweep("plan", "llama31_8b", gpus=[8, 16], dtype=["bf16", "fp8"])` is four plans. A
    combination that fails is a row with its error.

    Args:
      kind: 'plan' or 'train', the function that is called.
      config: one workload or several.
      layouts: keywords that vary together, [{'fsdp': 8}, {'fsdp': 4, 'tp': 2}].
      settings: any other setting by its path; a list is tried value by value.
      show: print a line for each combination that is done.
      values: all other keywords are those of plan() or train(); a list is tried value by value.

    Returns:
      A row per combination.

    Raises:
      UserError: an unknown kind, or a keyword that plan() or train() has not.
    """
    from maxbench.config.errors import check_choice
    from maxbench.reporting import sweep as sweeps

    calls: dict[str, Callable[..., Any]] = {
        "plan": plan,
        "train": functools.partial(train, show=False),
    }
    check_choice("kind", kind, calls)
    given = {name: value for name, value in values.items() if value is not None}
    points = sweeps.combinations(kind, config, layouts, given, settings or {})
    return sweeps.run(calls[kind], points, show)


def _signature_of_sweep() -> inspect.Signature:
    """The signature of sweep(), with the keywords of plan() and train() instead of **values."""
    own = [*inspect.signature(sweep).parameters.values()][:-1]
    both = {
        name: parameter.replace(annotation=parameter.annotation | list, default=None)
        for function in (plan, train)
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in inspect.signature(sweep).parameters
    }
    return inspect.signature(sweep).replace(parameters=[*own, *both.values()])


sweep.__signature__ = _signature_of_sweep()  # type: ignore[attr-defined]
