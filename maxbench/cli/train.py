"""Trains a workload and measures it: `maxbench train`.

Read next: run/loop.py (the run), step/train_step.py (one step), model/transformer.py (the network).
"""

import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from maxbench.cli import entry
from maxbench.config import command_line, exit_codes, ineffective, options, recipes
from maxbench.config.errors import UserError
from maxbench.config.run import DEGREES, Run
from maxbench.distributed import runtime
from maxbench.evidence import published
from maxbench.host import xla_flags
from maxbench.metrics import flops
from maxbench.run import terminal
from maxbench.run_logs import folders

MEMORY_ERROR = 0.2  # of memory_estimate(), of the compiled memory, at most on docs/plan.csv


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 the run failed, 75 stopped by SIGTERM or a hang, 130
    by Ctrl-C.

    Raises:
      UserError: invalid flags, or a run that cannot be.
    """
    asked = command_line.read(options.Train, argv)
    run = command_line.resolve_run(asked)
    if asked.json:
        print(json.dumps(describe(run), indent=2))
        return 0
    if asked.dry_run:
        print(terminal.text(overview(run)))
        return 0
    return train(run)


def from_files(place: pathlib.Path) -> int:
    """Trains for maxbench.train(), which starts this process (run/subprocess_run.py).

    The options are in options.json of `place`. The run's folder and the reason of a failure are
    written to outcome.json.

    Returns:
      As main().
    """
    outcome: dict[str, str] = {}

    def report(**more: str) -> None:
        outcome.update(more)
        (place / "outcome.json").write_text(json.dumps(outcome))

    asked = options.TrainOptions(**json.loads((place / "options.json").read_text()))
    sys.argv = ["maxbench", "train", *command_line.words_of(asked)]  # for result.json
    try:
        return train(command_line.resolve_run(asked), report)
    except UserError as e:
        report(error=str(e))
        raise


def train(run: Run, report: Callable[..., None] | None = None) -> int:
    """Trains on the devices of this process; returns the exit code.

    Args:
      report: as loop.train() calls it.

    Raises:
      UserError: the run cannot start here.
    """
    runtime.set_environment(run)
    flags = xla_flags.Check()
    screen = terminal.on_screen()
    try:
        from maxbench.run import loop  # imports jax, which reads the environment set above

        runtime.require_flags(flags)
        return loop.train(run, screen, report)
    except UserError:
        if screen:
            screen.stop()
        raise
    except KeyboardInterrupt:  # while jax was loading; the loop handles later ones
        if screen:
            screen.stop()
        print("maxbench train: interrupted before the first step", file=sys.stderr)
        return exit_codes.INTERRUPTED


def describe(run: Run) -> dict[str, Any]:
    """The resolved run as plain data: every setting, parameters, FLOPs per sequence, layout."""
    m, seq = run.model, run.train.seq
    return {
        "name": run.name,
        "layout": run.layout.describe(),
        "gpus": run.layout.gpus,
        "microbatches": run.layout.microbatches,
        "parameters": flops.params(m),
        "flops_per_sequence": {c: flops.per_sequence(m, seq, c) for c in flops.CONVENTIONS},
        "config": run.config.asdict(),
        "run": run.asdict(),
    }


def overview(run: Run) -> terminal.Parts:
    """The page of --dry_run: model, layout, batch, FLOPs, memory and the published figure."""
    m, a, t = run.model, run.layout, run.train
    title = f"{recipes.display_name(m.name, m.size)} {run.precision.dtype} on {devices(run)}"
    axes = " x ".join(f"{x} {n}" for x in (*DEGREES, "vp") if (n := getattr(a, x)) > 1)
    per_shard = f"{a.microbatches} microbatch{'es' * (a.microbatches > 1)} of {a.mbs}"
    flop = flops.per_sequence(m, t.seq) * a.gbs
    window = f"steps {t.window[0]} to {t.window[1]}" if t.steps > t.window[1] else "the last half"
    rows = {
        "model": f"{flops.params(m):,} parameters, {m.layers} layers, sequences of {t.seq:,}",
        "layout": axes or "one device",
        "batch": f"{a.gbs:,} sequences, {a.gbs * t.seq:,} tokens per step: {per_shard} on each of "
        f"{a.shards} data-parallel shard{'s' * (a.shards > 1)}",
        "work": f"{flop:.3g} FLOP per step, {flop / a.gpus:.3g} per device",
        "steps": f"{t.steps}; measured over {window}",
    }
    if t.reads_files:
        rows["data"] = files(run)
    if t.eval_data:
        rows["evaluation"] = evaluation(run)
    if for_gpus(run):
        rows |= {"memory": memory_estimate(run), "published": published_figure(run)}
    else:
        rows["published"] = "no figure for a run of toy size"
    if without_effect := ineffective.of_a_file(run):
        texts = [text.partition("; use")[0] for text in without_effect]
        rows["no effect"] = "; ".join(texts).replace(" has no effect", "")
    rows["results"] = f"{folders.run_folder(run, run.output.stamp).parent}/"
    return {title: rows, "more": {"--json": "print every setting", "--help": "list the flags"}}


def files(run: Run) -> str:
    """A line on the tokens and sequences of the run's files, and the epochs that the run reads."""
    from maxbench.step import token_files  # imports numpy, which takes 0.1 s

    found = token_files.of_run(run)
    return f"{found.describe()}, {run.train.steps * run.layout.gbs / len(found):.3g} epochs"


def evaluation(run: Run) -> str:
    """A line on the sequences of an evaluation, and on its interval in steps."""
    from maxbench.step import token_files  # imports numpy, which takes 0.1 s

    t = run.train
    found, count = token_files.held_out(run)
    every = f"every {t.eval_every} steps" if t.eval_every else "after the last step"
    target = f" until a loss of {t.target_loss:g}" if t.target_loss else ""
    return f"{every}{target}: the first {count * run.layout.gbs:,} of {found.describe()}"


def memory_estimate(run: Run) -> str:
    """Memory of a GPU, estimated without compiling."""
    from maxbench.cost_model import memory
    from maxbench.planning import search  # imports numpy, which takes 0.1 s

    needed = search.estimate_bytes(run) + memory.activation_bytes(run)
    available = memory.capacity(run.gpu)
    surely = needed > available * (1 + MEMORY_ERROR)
    verdict = "" if needed <= available else ": does not fit" if surely else ": may not fit"
    return (
        f"about {needed / 2**30:.0f} of {available / 2**30:.0f} GiB per GPU, estimated{verdict}; "
        "`maxbench plan` with the same flags compiles the step"
    )


def published_figure(run: Run) -> str:
    """The published step time of the run, or why no figure compares with it."""
    comparison = published.compare_run(run, run.layout.gpu_type)
    row = comparison.row
    figure = f"{row.step_s} s per step on {row.gpus} GPUs" if row else ""
    text = ", ".join(filter(None, [figure, comparison.refusal])) or "no figure"
    return f"{text}, {row.source}" if row else text


def for_gpus(run: Run) -> bool:
    """Whether the run is of a size for GPUs."""
    return not (run.runtime.cpu_devices or run.runtime.any_device)


def devices(run: Run) -> str:
    """'512 x H100', '1 x any device', '8 virtual CPU devices'."""
    if run.runtime.cpu_devices:
        return f"{run.runtime.cpu_devices} virtual CPU devices"
    kind = run.layout.gpu_type.upper() if for_gpus(run) else "any device"
    return f"{run.layout.gpus} x {kind}"


if __name__ == "__main__":
    sys.exit(entry.guard("train", lambda: from_files(pathlib.Path(sys.argv[1]))))
