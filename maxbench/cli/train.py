"""Trains a workload and measures it.

  maxbench train --config llama31_8b:tiny
  maxbench train --config llama31_405b --gpus 512 --dry_run

Read next: run/loop.py (the run), step/train_step.py (one step), model/transformer.py (the network).
"""

import json
import sys
from collections.abc import Sequence

from maxbench.config import command_line, commands, folders, recipes
from maxbench.config.run import AXES, Run
from maxbench.distributed import runtime
from maxbench.metrics import flops, step_stats
from maxbench.run import terminal


def describe(run: Run) -> dict:
    """The resolved run as plain data: every setting, parameters, FLOPs per sequence, layout."""
    m, seq = run.model, run.train.seq
    return {
        "name": run.name,
        "layout": run.layout.describe(),
        "gpus": run.layout.gpus,
        "microbatches": run.layout.microbatches,
        "parameters": flops.params(m),
        "flops_per_sequence": {c: flops.per_sequence(m, seq, c) for c in flops.CONVENTIONS},
        "config": run.asdict(),
    }


def page(run: Run) -> terminal.Parts:
    """What would run, for people: model, layout, batch, memory, what it will be held against."""
    m, a, t = run.model, run.layout, run.train
    title = f"{recipes.display_name(m.name, m.size)} {run.precision.dtype} on {devices(run)}"
    axes = " x ".join(f"{x} {n}" for x in (*AXES, "vp") if (n := getattr(a, x)) > 1)
    each = (
        f"{a.microbatches} microbatch{'es' * (a.microbatches > 1)} of {a.mbs} on each of {a.shards}"
    )
    flop = flops.per_sequence(m, t.seq) * a.gbs
    kept = f"steps {t.window[0]} to {t.window[1]}" if t.steps > t.window[1] else "the last half"
    rows = {
        "model": f"{flops.params(m):,} parameters, {m.layers} layers, sequences of {t.seq:,}",
        "layout": axes or "one device",
        "batch": f"{a.gbs:,} sequences, {a.gbs * t.seq:,} tokens a step: {each}",
        "work": f"{flop:.3g} FLOP a step, {flop / a.gpus:.3g} per device",
        "steps": f"{t.steps}; {kept} count",
    }
    if for_gpus(run):
        from maxbench.cost_model import memory
        from maxbench.planning import search  # late: numpy takes a tenth of a second

        held, room = (
            search.estimate_bytes(run) + memory.activation_bytes(run),
            memory.capacity(run.gpu),
        )
        rows["memory"] = f"about {held / 2**30:.0f} GiB of {room / 2**30:.0f} on each GPU, by "
        rows["memory"] += "arithmetic; `maxbench plan` with the same flags compiles it"
        beside = step_stats.compare_with_published(run, a.gpu_type)
        told = f"{beside.row.step_s} s a step on {beside.row.gpus}" if beside.row else ""
        rows["published"] = ", ".join(filter(None, [told, beside.refusal])) or "nothing"
        rows["published"] += f", {beside.row.source}" if beside.row else ""
    else:
        rows["published"] = "nothing to hold a toy against"
    rows["results"] = f"{folders.run_folder(run, run.output.stamp).parent}/"
    return {title: rows, "more": {"--json": "every setting", "--help": "what changes them"}}


def for_gpus(run: Run) -> bool:
    """Whether the run is of the size that GPUs are for."""
    return not (run.runtime.cpu_devices or run.runtime.any_device)


def devices(run: Run) -> str:
    """'512 x H100', '1 of whatever is here', '8 virtual CPU devices'."""
    if run.runtime.cpu_devices:
        return f"{run.runtime.cpu_devices} virtual CPU devices"
    return f"{run.layout.gpus} x " + (
        run.layout.gpu_type.upper() if for_gpus(run) else "any device"
    )


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 a run that failed, 2 bad input, 75 stopped by
    SIGTERM, 130 by Ctrl-C."""
    if commands.print_help_if_asked("train", argv):
        return 0
    fv = commands.define("train")
    with command_line.clear_errors("train"):
        run = command_line.parse(fv, argv)
        if fv["json"].value:
            print(json.dumps(describe(run), indent=2))
            return 0
        if fv["dry_run"].value:
            print(terminal.text(page(run)))
            return 0
        runtime.set_environment(run)
    screen = terminal.on_screen()
    try:
        from maxbench.run import loop  # the one late import: jax must start after runtime.prepare

        return loop.train(run, screen)
    except KeyboardInterrupt:  # while jax was loaded
        if screen:
            screen.stop()
        print("maxbench train: stopped by you before the first step", file=sys.stderr)
        return 130
