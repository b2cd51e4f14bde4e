"""Meaning of the names in the step's program, for the cost model."""

import re

from maxbench.config import loop_lengths
from maxbench.config.run import LAYERS, Run
from maxbench.cost_model.meaning import Frequencies, Meaning
from maxbench.pipeline.schedule import STASH

BLOCK = "Block/"  # in the op_name of an op of a layer (model/transformer.py)
PASSES = {"rematted": "recomputed", "transpose(": "backward", "": "forward"}
ARGUMENTS = {
    re.compile(r"^\w+\W+params\b"): "weights",
    re.compile(r"^\w+\W+opt\b"): "optimizer",
}
AMAX = re.compile(f"{BLOCK}.*reduce_max$")
# Writes to the activation stash: in the forward scan over layers, and in a pipeline.
SCAN_STASH = re.compile(rf"/jvp\({LAYERS}\)/while/body/(?:jit\(\w+\)/)?dynamic_update_slice$")
PIPELINE_STASH = re.compile(rf"/{STASH}/(?:\w+/)*dynamic_update_slice$")


def meaning(run: Run, frequencies: Frequencies | None = None) -> Meaning:
    """Meaning of the names in a run's program, whose branches run with these frequencies."""
    return Meaning(
        trip_counts=loop_lengths.trip_counts(run),
        frequencies=frequencies or {},
        label=module_of,
        amax=AMAX,
        arguments=ARGUMENTS,
        stash=SCAN_STASH,
        shared_stash=PIPELINE_STASH,
    )


def module_of(op_name: str) -> str:
    """Pass and module of an op in a layer, 'backward mlp/up'; '' outside layers.

    `op_name` as JAX writes it: '.../transpose(jvp(jit(layer)))/checkpoint/Block/mlp/up/mul'.
    """
    if BLOCK not in op_name:
        return ""
    which = next(name for marker, name in PASSES.items() if marker in op_name)
    return f"{which} {op_name.rpartition(BLOCK)[2].rpartition('/')[0]}"
