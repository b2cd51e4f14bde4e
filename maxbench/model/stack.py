"""Layers as a loop or as code: two programs of one network, and the one place that decides.

As a loop, every weight is stacked [layers, ...] and XLA compiles one layer; but what belongs to a
layer, weights, gradients and activations, is copied out of a stack and back into one. As code,
layers are a tuple of trees and the program repeats itself: longer to compile, nothing is copied.
"""

import jax
import jax.numpy as jnp

from maxbench.spec.run import Run

MOST = 40  # layers that a GPU's program has as code, unless train.unroll says; a CPU's has none


def as_code(run: Run) -> bool:
    """Whether layers are code; train.unroll must be settled.

    In a pipeline always: its chunks name their own weights. Over fsdp never: XLA would gather the
    weights of many layers ahead of their use.
    """
    a = run.layout
    return a.pp > 1 or (a.fsdp == 1 and run.model.layers <= run.train.unroll)


def unstack(layers):
    """A tree of stacked arrays -> a tuple of trees, one for each layer."""
    leaves, tree = jax.tree.flatten(layers)
    return tuple(tree.unflatten([leaf[i] for leaf in leaves]) for i in range(len(leaves[0])))


def stack(layers):
    """A tuple of trees, one for each layer -> a tree of stacked arrays."""
    return jax.tree.map(lambda *layers: jnp.stack(layers), *layers)


def run_layers(step, x, layers, sums):
    """x through all layers, and the sum of what else step(x, (w, sums)) -> (x, aux) gives."""
    if not isinstance(layers, tuple):
        x, aux = jax.lax.scan(step, x, (layers, sums))
        return x, jnp.sum(aux)
    total = jnp.zeros(())
    for one in zip(layers, sums or [None] * len(layers), strict=True):
        x, aux = step(x, one)
        total += aux
    return x, total
