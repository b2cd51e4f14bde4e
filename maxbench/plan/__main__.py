"""Compiles a run for a cluster that is not there, and says whether it fits and how fast it is.

maxbench plan --config llama2_70b --gpus 128
"""

import json
import shutil
import sys
from collections.abc import Sequence

from absl import flags

from maxbench.plan import hlo, planner, search, trace
from maxbench.spec import cli, commands, recipes
from maxbench.spec.errors import UserError
from maxbench.spec.run import Run
from maxbench.step.schedule import schedule_of

FITS, DOES_NOT_FIT = 0, 3  # exit codes; 2 is bad input, as of every command


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 fits, 3 does not fit, 2 bad input."""
    if commands.helped("plan", argv):
        return FITS
    fv = commands.define("plan")
    asked = lambda name: fv[name].value
    with cli.clear_errors("plan"):
        run, found = given(fv, argv)
        timeline = asked("timeline")
        if asked("schedule"):
            if run.layout.pp == 1:
                raise UserError("schedule draws a pipeline, and pp=1 has none; give --pp 2 or more")
            print(schedule_of(run).picture(shutil.get_terminal_size((120, 24)).columns))
            return FITS
        if asked("as_published"):
            if asked("best_remat") or asked("search"):
                raise UserError("as_published excludes --best_remat and --search")
            run = planner.as_published(run)
        if timeline and not timeline.endswith(".json"):
            raise UserError(f"timeline={timeline!r} must end in .json; an .svg comes beside it")
        if why := "" if found else search.hopeless(run):
            print(f"maxbench plan: {why}", file=sys.stderr)
            return DOES_NOT_FIT
        if asked("search"):
            found = found or search.candidates(run, asked("compiled"))
        if found:
            plans = search.search(found, run)
        else:
            plans = [planner.best_remat(run) if asked("best_remat") else planner.plan(run)]
    p = plans[0] if not found else min(plans, key=lambda p: (not p.fits, p.step_s))
    changed = planner.sensitivity(p) if asked("sensitivity") else {}
    if asked("json"):
        told = [planner.figures(each) for each in plans]
        told[plans.index(p)] |= {"sensitivity_s": changed} if changed else {}
        print(json.dumps(told if found else told[0], indent=1))
    else:
        parts = [planner.ranking(plans, run)] if found else []
        parts += [planner.screen(p), *([planner.sensitivities(p, changed)] if changed else [])]
        print("\n\n".join(parts))
    if timeline:
        spans = planner.play(p.run, hlo.parse(p.compiled.text), record=True).spans
        for path in trace.write(timeline, spans, p.run.name):
            print(f"timeline: {path}", file=sys.stderr)
    return FITS if any(p.fits for p in plans) else DOES_NOT_FIT


def given(fv: flags.FlagValues, argv: Sequence[str]) -> tuple[Run, list[Run]]:
    """The run; or where the table has no row for so many GPUs, the nearest row's, and the runs that
    promise most on so many."""
    try:
        return cli.parse(fv, argv), []
    except recipes.NoRow as e:
        if any(fv[name].value for name in ("schedule", "as_published", "best_remat")):
            raise  # they are of the layout that was meant
        gpus, near = int(fv["gpus"].value), cli.parse(fv, argv, e.nearest)
        return near, search.at(near, gpus, fv["compiled"].value)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
