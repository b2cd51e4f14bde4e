"""Toy training steps in a number format, for the tests of quantization."""

import math

from maxbench.sharding.mesh import make_mesh
from maxbench.step.train_step import Step
from tests.conftest import resolve

FAMILIES = {"llama": "llama31_405b", "nemotron": "nemotron4_340b", "grok": "grok1_314b"}


def build(workload: str, dtype: str = "fp8", overrides: dict | None = None, **flags) -> Step:
    """The step of a workload's tiny preset: 4 layers, 4 sequences of 64 tokens. No expert drops a
    token: each has a slot for all of them, as a token chooses 2 of 4 experts."""
    shards = math.prod(flags.get(axis, 1) for axis in ("dp", "fsdp", "ep"))
    flags = {"gbs": 4, "seq": 64, "layers": 4, "mbs": 4 // shards} | flags
    overrides = {"model.capacity_factor": 2.0, "precision.scaling": "auto"} | (overrides or {})
    if workload == "grok1_314b" and "optim.lr" in overrides:
        # The choice of experts is discrete, and rounding may change it. Training comparisons choose
        # all experts, so that the losses differ smoothly.
        overrides["model.top_k"] = 4
    run = resolve(workload, "tiny", overrides, dtype=dtype, **flags)
    return Step(run, make_mesh(run.layout))
