"""The Python API, `import maxbench as mb`: mb.plan(), mb.plan_program(), mb.search_program(),
mb.train(), mb.report(), mb.trace() and mb.sweep().

Keywords are the options of the commands with the same names (config/options.py), from which their
signatures and docstrings derive. Functions import the rest when called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from maxbench.config import options

if TYPE_CHECKING:
    from maxbench.planning.program_result import ProgramResult
    from maxbench.planning.run_result import PlanResult
    from maxbench.reporting.build_report import Report
    from maxbench.reporting.sweep import Sweep
    from maxbench.run.subprocess_run import TrainResult
    from maxbench.traces.report import TraceReport

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
    if "\nArgs:" in text:
        return text.replace("\n\nReturns:", "\n".join(["", *lines, "", "Returns:"]))
    return text.replace("\nReturns:", "\n".join(["\nArgs:", *lines, "", "Returns:"]))


def keywords_too(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorates a function of **asked, keywords of options.ProgramOptions, to name them."""
    own = [*inspect.signature(function).parameters.values()][:-1]
    asked = inspect.signature(options.ProgramOptions).parameters.values()
    signature = inspect.signature(function).replace(parameters=[*own, *asked])
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__doc__ = _documented(inspect.getdoc(function) or "", options.ProgramOptions)
    return function


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


@keywords_too
def plan_program(factory: Callable[..., Any], **asked: Any) -> ProgramResult:
    """Plans any JAX program for GPUs that need not be present.

    `mb.plan_program(factory, gpu_type="h100", gpus=128)` is `maxbench plan --program
    FILE.py:factory --gpu_type h100 --gpus 128`.

    Args:
      factory: takes compile-only devices, in the order of nodes; returns a jitted function and a
        tuple of its abstract arguments (jax.ShapeDtypeStruct with shardings), or its lower().

    Returns:
      The plan.

    Raises:
      UserError: an argument is invalid, or the program does not lower or compile.
    """
    return search_program(factory, ({},), **asked)


@keywords_too
def search_program(
    factory: Callable[..., Any], layouts: Sequence[Mapping[str, Any]], **asked: Any
) -> ProgramResult:
    """Plans any JAX program with several layouts, which are compiled in parallel.

    `mb.search_program(factory, layouts=[{"tp": 1}, {"tp": 8}], gpus=64)` compares programs of
    factory(devices, tp=1) and factory(devices, tp=8). `best` is the fastest that fits.

    Args:
      factory: as of plan_program(), with the keywords of a layout.
      layouts: keywords of each.

    Returns:
      The plans; failures has the layouts that do not lower or compile, and why.

    Raises:
      UserError: an argument is invalid, or no layout has a plan.
    """
    from maxbench.cli import plan as command
    from maxbench.planning import program_result

    given, title = options.ProgramOptions(**asked), getattr(factory, "__name__", "program")
    command.check_files(given)
    with _unchanged_environment():
        if [*layouts] == [{}]:
            found = program_result.plan_factory(factory, title, given)
        else:
            found = program_result.search(factory, title, given, layouts)
    program_result.draw(found, given)
    return found


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


@keywords(options.TraceOptions)
def trace(asked: options.TraceOptions) -> TraceReport:
    """Reads profiles, at and below paths, and says where their measured steps went.

    `mb.trace("experiments/NAME/NAME_STAMP")` is `maxbench trace experiments/NAME/NAME_STAMP`.

    Returns:
      The seconds of each step of each rank by part, kernels, gaps, and who waits for whom.

    Raises:
      UserError: an argument is invalid, or there is no profile that can be read.
    """
    from maxbench.traces import report as traces

    return traces.trace(asked)


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
      settings: any other setting by its path; a list, tuple or array is tried value by value.
      show: print a line for each combination that is done.
      values: all other keywords are those of plan() or train(); likewise.

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


@contextlib.contextmanager
def _unchanged_environment() -> Iterator[None]:
    """Restores the environment: child processes must not inherit what the compiler sets in it."""
    environment = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
