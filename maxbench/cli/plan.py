"""Compiles a run for another cluster and predicts its memory and speed: `maxbench plan`.

Planning loads numpy (0.2 s), so it is imported after the flags are checked.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

from maxbench.config import command_line, commands
from maxbench.config.errors import UserError

if TYPE_CHECKING:
    from maxbench.planning.result import PlanResult

FITS, DOES_NOT_FIT = 0, 3  # exit codes


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 the run fits in memory, 3 it does not.

    Raises:
      UserError: invalid flags, or a run that cannot be.
    """
    fv = commands.define("plan")
    if any(word.partition("=")[0] == "--calibrate" for word in argv):
        raise UserError("--calibrate is a command: maxbench calibrate RUN ... --write FILE")
    command_line.parse_flags(fv, argv)
    if fv.schedule:
        print(schedule(fv, argv))
        return FITS
    from maxbench.planning.result import CannotFit

    try:
        plans, written = plan_and_draw(fv, argv)
    except CannotFit as e:
        print(f"maxbench plan: {e}", file=sys.stderr)
        return DOES_NOT_FIT
    print(json.dumps(plans.data(), indent=1) if fv.json else plans)
    for kind, path in written:
        print(f"{kind}: {path}", file=sys.stderr)
    return FITS if plans.best.fits else DOES_NOT_FIT


def plan_and_draw(
    fv: flags.FlagValues, argv: Sequence[str]
) -> tuple[PlanResult, list[tuple[str, pathlib.Path]]]:
    """The plan, and the files of --scaling and --timeline that were written: (flag, path) each.

    Raises:
      CannotFit: no program of the run can fit.
      UserError: invalid flags, or a run that cannot be.
    """
    command_line.parse_flags(fv, argv)
    curves = command_line.writable("scaling", fv.scaling, ".svg")
    timeline = command_line.writable("timeline", fv.timeline, ".json")
    from maxbench.planning import result, scaling, svg

    plans = result.plan_from_flags(fv, argv)
    written = []
    if curves:
        scaling.draw(plans.best, dict(plans.curves), curves)
        written.append(("scaling", curves))
    if timeline:
        written += [("timeline", path) for path in svg.draw(plans.best, str(timeline))]
    return plans, written


def schedule(fv: flags.FlagValues, argv: Sequence[str]) -> str:
    """The pipeline's schedule as text, as wide as the terminal.

    Raises:
      UserError: the run has no pipeline.
    """
    from maxbench.pipeline import tick_order
    from maxbench.pipeline.schedule import schedule_for
    from maxbench.planning import result

    run, _ = result.run_from_flags(fv, argv)
    if run.layout.pp == 1:
        raise UserError("--schedule draws a pipeline, and pp=1 has none; use --pp 2 or more")
    ticks = schedule_for(run).render(shutil.get_terminal_size((120, 24)).columns)
    return f"{ticks}\n\n{tick_order.render(run)}"
