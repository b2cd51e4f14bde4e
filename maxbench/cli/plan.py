"""Compiles a run for another cluster and predicts its memory and speed: `maxbench plan`.

Planning loads numpy (0.2 s), so it is imported after the flags are checked.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from maxbench.config import command_line, options
from maxbench.config.errors import UserError
from maxbench.distributed import runtime
from maxbench.host import xla_flags

if TYPE_CHECKING:
    from maxbench.planning.run_result import PlanResult

FITS, DOES_NOT_FIT = 0, 3  # exit codes


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 the run fits in memory, 3 it does not.

    Raises:
      UserError: invalid flags, or a run that cannot be.
    """
    if any(word.partition("=")[0] == "--calibrate" for word in argv):
        raise UserError("--calibrate is a command: maxbench calibrate RUN ... --write FILE")
    asked = command_line.read(options.Plan.taking(argv), argv)
    if isinstance(asked, options.PlanProgram):
        return plan_program(asked)
    assert isinstance(asked, options.Plan)
    if asked.schedule:
        print(schedule(asked))
        return FITS
    from maxbench.planning.run_result import CannotFit

    try:
        plans, written = plan_and_draw(asked)
    except CannotFit as e:
        print(f"maxbench plan: {e}", file=sys.stderr)
        return DOES_NOT_FIT
    print(json.dumps(plans.data(), indent=1) if asked.json else plans)
    for kind, path in written:
        print(f"{kind}: {path}", file=sys.stderr)
    return FITS if plans.best.fits else DOES_NOT_FIT


def plan_program(asked: options.PlanProgram) -> int:
    """Plans a program of a factory, of MaxText, or of a file; returns the exit code."""
    from maxbench.planning import program_result, program_sources

    check_files(asked)
    runtime.require_flags(xla_flags.Check())
    with contextlib.redirect_stdout(sys.stderr):  # what the program prints
        if asked.hlo:
            found = program_result.plan_hlo(asked.hlo, asked)
        else:
            factory, title = program_sources.factory_of(asked)
            found = program_result.plan_factory(factory, title, asked)
    written = program_result.draw(found, asked)
    print(json.dumps(found.data(), indent=1) if asked.json else found)
    for kind, path in written:
        print(f"{kind}: {path}", file=sys.stderr)
    return FITS if found.best.fits else DOES_NOT_FIT


def check_files(asked: options.PlanOptions | options.ProgramOptions) -> None:
    """Raises UserError if a file of --scaling or --timeline cannot be written."""
    command_line.writable("scaling", asked.scaling, ".svg")
    command_line.writable("timeline", asked.timeline, ".json")


def plan_and_draw(
    asked: options.PlanOptions,
) -> tuple[PlanResult, list[tuple[str, pathlib.Path]]]:
    """The plan, and the files of --scaling and --timeline that were written: (flag, path) each.

    Raises:
      CannotFit: no program of the run can fit.
      UserError: a run that cannot be, or a file that cannot be written.
    """
    curves = command_line.writable("scaling", asked.scaling, ".svg")
    timeline = command_line.writable("timeline", asked.timeline, ".json")
    from maxbench.planning import drawings, run_result, scaling

    plans = run_result.plan_of(asked)
    written = []
    try:
        if curves:
            scaling.draw(plans.best, dict(plans.curves), curves)
            written.append(("scaling", curves))
        if timeline:
            written += [("timeline", path) for path in drawings.draw(plans.best, str(timeline))]
    except OSError as e:
        raise UserError(
            f"{e.filename or curves or timeline} cannot be written: {e.strerror}"
        ) from e
    return plans, written


def schedule(asked: options.Plan) -> str:
    """The pipeline's schedule as text, as wide as the terminal.

    Raises:
      UserError: the run has no pipeline.
    """
    from maxbench.pipeline import tick_order
    from maxbench.pipeline.schedule import schedule_for
    from maxbench.planning import run_result

    run, _ = run_result.run_of(asked, schedule=True)
    if run.layout.pp == 1:
        raise UserError("--schedule draws a pipeline, and pp=1 has none; use --pp 2 or more")
    ticks = schedule_for(run).render(shutil.get_terminal_size((120, 24)).columns)
    return f"{ticks}\n\n{tick_order.render(run)}"
