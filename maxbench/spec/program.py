"""Which program a run compiles: the one place that decides, without jax.

Layers are a loop or code (model/stack.py), and microbatches go one after the other, or forward
and backward pass of two at once (step/pipeline.py).
"""

from maxbench.spec.run import Run

PAIRED = 16  # layers of a chunk, at most, outside of a pipeline
MOST = 40  # layers that a GPU's program has as code, unless train.unroll says; a CPU's has none


def as_code(run: Run) -> bool:
    """Whether layers are code; train.unroll must be settled.

    Over fsdp never: XLA would gather the weights of many layers ahead of their use; nor where
    activations wait in the host's memory, which XLA keeps for a loop; nor in a pipeline, which
    takes the layers of a chunk from the stack when its turn begins.
    """
    a, t = run.layout, run.train
    return a.pp == a.fsdp == 1 and run.model.layers <= t.unroll and not t.offload


def paired(run: Run) -> bool:
    """Whether the forward pass of a microbatch is one piece of code with the backward pass of
    another, so that each communicates beside the other's products (step/pipeline.py).

    In a pipeline always. Elsewhere where layers are code, not too many to be compiled for three
    phases, and tp has something to hide. Not with experts: their exchanges stand in the way.
    """
    a, m = run.layout, run.model
    work = a.tp > 1 and a.microbatches > 1 and m.layers <= PAIRED and not m.experts and not m.kinds
    return a.pp > 1 or (work and as_code(run))
