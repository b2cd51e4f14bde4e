"""Trains a workload and measures it.

  maxbench train --config llama31_8b:tiny
  maxbench train --config llama31_405b --gpus 512 --dry_run

Read next: run/loop.py (the run), step/step.py (one step), model/network.py (the network).
"""

import json
import sys
from collections.abc import Sequence

from maxbench.run import runtime, terminal
from maxbench.spec import cli, commands, flops
from maxbench.spec.run import Run


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


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 2 bad input, 1 a run that failed, 130 stopped by Ctrl-C."""
    if commands.helped("train", argv):
        return 0
    fv = commands.define("train")
    with cli.clear_errors("train"):
        run = cli.parse(fv, argv)
        if fv["dry_run"].value:
            print(json.dumps(describe(run), indent=2))
            return 0
        runtime.prepare(run)
    screen = terminal.on_screen()
    try:
        from maxbench.run import loop  # the one late import: jax must start after runtime.prepare

        return loop.train(run, screen)
    except KeyboardInterrupt:  # while jax was loaded
        if screen:
            screen.stop()
        print("maxbench train: stopped by you before the first step", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv))
