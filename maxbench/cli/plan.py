"""Compiles a run for a cluster that is not there, and says whether it fits and how fast it is.

maxbench plan --config llama2_70b --gpus 128
"""

import json
import shutil
import sys
from collections.abc import Sequence

from absl import flags

from maxbench.calibration import fit, from_runs
from maxbench.config import command_line, commands
from maxbench.config.errors import UserError
from maxbench.pipeline.schedule import schedule_for
from maxbench.planning import result, scaling, svg

FITS, DOES_NOT_FIT = 0, 3  # exit codes; 2 is bad input, as of every command


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 fits, 3 does not fit, 2 bad input."""
    if commands.print_help_if_asked("plan", argv):
        return FITS
    fv = commands.define("plan")
    with command_line.clear_errors("plan"):
        if any(word.partition("=")[0] == "--calibrate" for word in argv):
            return calibrate(fv, argv)
        command_line.flags_of(fv, argv)
        curves = command_line.writable("scaling", fv["scaling"].value, ".svg")
        timeline = fv["timeline"].value
        if timeline and not timeline.endswith(".json"):
            raise UserError(f"timeline={timeline!r} must end in .json; an .svg comes beside it")
        if fv["schedule"].value:
            print(schedule(fv, argv))
            return FITS
        try:
            found = result.plan_from_flags(fv, argv)
        except result.CannotFit as e:
            print(f"maxbench plan: {e}", file=sys.stderr)
            return DOES_NOT_FIT
    print(json.dumps(found.data(), indent=1) if fv["json"].value else found)
    if curves:
        scaling.draw(found.best, dict(found.curves), curves)
        print(f"scaling: {curves}", file=sys.stderr)
    if timeline:
        for path in svg.draw(found.best, timeline):
            print(f"timeline: {path}", file=sys.stderr)
    return FITS if found.best.fits else DOES_NOT_FIT


def schedule(fv: flags.FlagValues, argv: Sequence[str]) -> str:
    """The pipeline's schedule as text, as wide as the terminal.

    Raises:
      UserError: there is no pipeline.
    """
    run, _ = result.given_run(fv, argv)
    if run.layout.pp == 1:
        raise UserError("schedule draws a pipeline, and pp=1 has none; give --pp 2 or more")
    return schedule_for(run).render(shutil.get_terminal_size((120, 24)).columns)


def calibrate(fv: flags.FlagValues, argv: Sequence[str]) -> int:
    """Fits constants to runs, prints what moved, and writes them.

    Raises:
      UserError: runs that cannot be taken, or too few; a file that cannot be written.
    """
    _, *more = command_line.flags_of(fv, argv)
    gpu_types = command_line.gpu_types(fv["hardware"].value)
    path = command_line.writable("write", fv["write"].value, ".toml")
    found = from_runs.fit_runs([fv["calibrate"].value, *more], gpu_types)
    print(from_runs.screen(found))
    if path:
        about = fit.describe(f"{found.runs} runs of {len(found.cases)} programs")
        path.write_text(fit.toml(found.gpu_type, found.efficiency, found.names, "fitted", about))
        print(f"\nwritten: {path}; --hardware {path} reads it")
    return FITS
