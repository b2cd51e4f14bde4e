"""What a published run did otherwise than our program, as seconds of our predicted step.

A term is what the predicted step would be shorter by, read off its timeline; predicted as
published = predicted - all terms. They say how two programs differ, the same for every workload.
Published by NeMo (Megatron-LM and Transformer Engine):

  recomputation    what the backward pass computes again, ours less theirs (arithmetic)
  copies           kernels that compute nothing: our loops take weights out of their stack, and put
                   gradients and activations into theirs; one buffer per layer needs no copy
  gradient sums    gradients added to those of the microbatches before by a kernel of its own;
                   theirs is part of the product (gradient_accumulation_fusion)
  weights again    kernels but copies that give the same in every microbatch, as the quantisation of
                   weights to FP8; theirs runs once a step (fp8_params)
  exposed tp       waiting for tp's gathers and reduce-scatters, which run beside the products there
                   (tp_comm_overlap), and slow them down as any collective does. Of dense layers:
                   experts have no such overlap
  exposed pp       waiting for a pipeline's neighbours (overlap_p2p_comm)

Published by MaxText: the same compiler, loop and layout as ours, so recomputation alone. Without
seconds, because they hide in others: bf16 Adam state and master weights (Nemotron4 in BF16), FP8
weight gathers, FP8 scales from the step before.
"""

import collections
import functools
import math

from maxbench import hlo, memory
from maxbench.artifact import Compiled
from maxbench.config import Run
from maxbench.hardware import PHYSICS
from maxbench.published import Published
from maxbench.simulate import Timeline


def terms(
    run: Run, compiled: Compiled, program: hlo.Program, t: Timeline, row: Published
) -> dict[str, float]:
    """Name -> seconds, negative where the published program does more; those of 0 are left out."""
    share, theirs = (memory.recomputed(run, remat) for remat in (run.train.remat, row.remat))
    passes = 3 + share  # forward, twice as much backward, and forward again in part
    products = t.compute["gemm"] + t.compute["attention"]
    beside = 1 + PHYSICS[run.layout.gpu_type].contention
    found = collections.Counter(recomputation=products * (share - theirs) / passes)
    if "nemo" in row.source:
        found["copies"] = t.compute["copy"]
        again = 1 - 1 / run.layout.microbatches
        same = _same_in_every_microbatch(run, program)
        stacks = {math.prod(dims) for dims in compiled.layer_shapes}
        inside = {op for c in program.computations.values() if c != program.entry for op in c.ops}
        for (kind, op), seconds in t.kernels.items():
            if kind != "memory" or op not in inside:
                continue
            if op in same:
                found["weights again"] += seconds * again
            elif {s.elements for s in hlo.leaves(op.shape)} & stacks:
                found["gradient sums"] += seconds * again
        for x in t.traffic.values():
            if x.link.axes == "tp" and not run.model.experts:
                found["exposed tp"] += x.exposed_s / beside
            elif x.link.axes == "pp":
                found["exposed pp"] += x.exposed_s / beside
    return {name: seconds for name, seconds in found.items() if seconds}


@functools.lru_cache(maxsize=1)
def _same_in_every_microbatch(run: Run, program: hlo.Program) -> set[hlo.Op]:
    """Ops whose result does not depend on the microbatch; none where there is only one."""
    found: set[hlo.Op] = set()
    for loop in program.entry.ops if run.layout.microbatches > 1 else ():
        inside = loop.opcode == "while" and program.called(loop, "body").opcodes
        if inside and inside & {"while", "conditional"}:  # over microbatches: layers are inside
            found |= hlo.unchanging(program, program.entry, loop)
    return found
