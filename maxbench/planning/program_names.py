"""Meaning of the names in the step's program, for the cost model."""

import re

from maxbench.config import loop_lengths
from maxbench.config.run import LAYERS, Run
from maxbench.cost_model import hlo
from maxbench.cost_model.meaning import Frequencies, Meaning
from maxbench.pipeline import schedule
from maxbench.planning import op_names

BLOCK = "Block/"  # in the op_name of an op of a layer (model/transformer.py)
ARGUMENTS = {
    re.compile(r"^\w+\W+params\b"): "weights",
    re.compile(r"^\w+\W+opt\b"): "optimizer",
}
AMAX = re.compile(f"{BLOCK}.*reduce_max$")
# Writes to the activation stash: in the forward scan over layers, and in a pipeline.
SCAN_STASH = re.compile(rf"/jvp\({LAYERS}\)/while/body/(?:jit\(\w+\)/)?dynamic_update_slice$")
PIPELINE_STASH = re.compile(rf"/{schedule.STASH}/(?:\w+/)*dynamic_update_slice$")

# Frames of generic code: an op is explained by the frame that calls it.
GENERIC_FILES = (
    "model/linear.py",
    "model/gemms.py",
    "model/comm_order.py",
    "model/grad_accumulation.py",
    "pipeline/buffers.py",
    "sharding/",
)
GENERIC_FUNCTIONS = ("matmul", "Linear.__call__", "param", "param_value", "take")
EVENTS = {  # named scope of the executor -> event of a tick
    schedule.STASH: "stash",
    schedule.FORWARD_CHUNK_SWITCH: "forward chunk switch",
    schedule.BACKWARD_CHUNK_SWITCH: "backward chunk switch",
    schedule.SEND_X: "send activation",
    schedule.SEND_DX: "send gradient",
    schedule.EMBED_BACKWARD: "embedding backward",
    schedule.EMBED: "embedding",
    schedule.LOSS: "loss",
    schedule.END_OF_TICK: "branch at the end of a tick",
    schedule.FORWARD_KIND: "layer of the chunk's kind, forward",
    schedule.FREQUENT_KIND: "layer of the most frequent kind, backward",
    schedule.OTHER_KIND: "layer of another kind, backward",
}


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
    """Pass, sublayer and GEMM of an op in a layer, 'backward mlp/up'; '' outside layers.

    `op_name` as JAX writes it: '.../transpose(jvp(jit(layer)))/checkpoint/Block/mlp/up/mul'.
    """
    if BLOCK not in op_name:
        return ""
    path = "/".join(op_names.scopes(op_name.rpartition(BLOCK)[2]))
    return f"{op_names.pass_of(op_name) or 'forward'} {path}".strip()


class RunNames(op_names.OpNames):
    """Names of the ops of a run's step."""

    OUTSIDE = "outside layers"

    def __init__(self, program: hlo.Program):
        pass  # its scopes are known

    def module(self, op_name: str) -> str:
        return module_of(op_name) or self.event(op_name)

    def part(self, op_name: str) -> tuple[str, str]:
        which, _, path = module_of(op_name).partition(" ")
        if which:
            return which, path.split("/")[0] or "residual stream"
        return self.OUTSIDE, self.event(op_name)

    def event(self, op_name: str) -> str:
        found = [part for part in op_name.split("/") if part in EVENTS]
        return EVENTS[found[-1]] if found else ""

    def is_generic(self, frame: hlo.Frame) -> bool:
        of_package = frame.file.rpartition("/maxbench/")[2]
        return of_package.startswith(GENERIC_FILES) or frame.function in GENERIC_FUNCTIONS
