"""What a published run did otherwise than our program, as seconds of our predicted step.

A term is what the predicted step would be shorter by, read off its timeline; predicted as
published = predicted - all terms. They say how two programs differ, the same for every workload.
Published by NeMo (Megatron-LM and Transformer Engine):

  recomputation    what the backward pass computes again, ours less theirs (arithmetic)
  copies           kernels that compute nothing: ours put a pipeline's activations into a buffer of
                   slots and take them out again, and a loop over layers does so with all it touches
  exposed tp       waiting for tp's gathers and reduce-scatters, which run beside the products there
                   (tp_comm_overlap), and slow them down as any collective does. Of dense layers:
                   experts have no such overlap
  exposed pp       waiting for a pipeline's neighbours (overlap_p2p_comm)

Published by MaxText: the same compiler, loop and layout as ours, so recomputation, and in FP8

  weights to FP8   theirs are quantised where they are used, in the forward and in the backward pass
                   (flax's FP8 operations), ours once per step: two times, 2 bytes of each gathered
                   weight are read and one is written (arithmetic)

Without seconds, because they hide in others: bf16 Adam state and master weights (Nemotron4 in
BF16), FP8 scales from the step before.
"""

import collections

from maxbench.hardware.published import Published
from maxbench.plan import memory
from maxbench.plan.costs import Costs
from maxbench.plan.simulate import Timeline
from maxbench.spec.run import AXES, Run


def terms(run: Run, t: Timeline, row: Published) -> dict[str, float]:
    """Name -> seconds, negative where the published program does more; those of 0 are left out."""
    share, theirs = map(memory.recomputed, (run, memory.with_remat(run, row.remat)))
    passes = 3 + share  # forward, twice as much backward, and forward again in part
    products = t.compute["gemm"] + t.compute["attention"]
    beside = 1 + run.layout.gpu.physics.contention
    found = collections.Counter(recomputation=products * (share - theirs) / passes)
    if "nemo" in row.source:
        found["copies"] = t.compute["copy"]
        for x in t.traffic.values():
            if x.link.axes == "tp" and not run.model.experts:
                found["exposed tp"] += x.exposed_s / beside
            elif x.link.axes == "pp":
                found["exposed pp"] += x.exposed_s / beside
    elif run.format.quantized:
        weights, _ = memory.stage_weights(run)
        moved = 2 * (2 + run.format.bytes) * weights
        seconds = Costs(run.layout.gpu_type, dict.fromkeys(AXES, 1)).memory(moved)
        found["weights to FP8"] = -seconds * run.layout.microbatches
    return {name: seconds for name, seconds in found.items() if seconds}
