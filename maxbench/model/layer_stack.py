"""Layers as a loop or as code (spec.program): two programs of one network.

As a loop, every weight is stacked [layers, ...] and XLA compiles one layer; but what belongs to a
layer, weights, gradients and activations, is copied out of a stack and back into one. As code,
layers are a tuple of trees and the program repeats itself: longer to compile, nothing is copied.
"""

import functools
import itertools

import jax
import jax.numpy as jnp

from maxbench.config import lowering
from maxbench.config.model import Model

# A model of one kind of layers has one stack; of several (Model.layer_groups) a dict of them, one for each
# run of equal neighbours: '000', '001', ...


def split(m: Model, layers) -> list:
    """The stacks of weights, or of trees like them, in the order of Model.stacks."""
    return [layers] if len(m.stacks) == 1 else [layers[name] for name in sorted(layers)]


def join(m: Model, stacks):
    """What split() takes apart."""
    return stacks[0] if len(m.stacks) == 1 else {f"{i:03}": s for i, s in enumerate(stacks)}


def unstack(m: Model, layers):
    """Stacked arrays -> a tuple of trees, one for each layer."""
    rows = lambda x: range(len(jax.tree.leaves(x)[0]))
    layer = lambda one, i: jax.tree.map(lambda x: x[i], one)
    return tuple(layer(one, i) for one in split(m, layers) for i in rows(one))


def stack(m: Model, layers):
    """A tuple of trees, one for each layer -> stacked arrays."""
    # A pipeline has empty slots too, and one kind of layers.
    counts, rest = [n for n, _ in m.stacks] if m.layer_groups else [len(layers)], iter(layers)
    stacked = lambda n: jax.tree.map(lambda *x: jnp.stack(x), *itertools.islice(rest, n))
    return join(m, [stacked(n) for n in counts])


def repeat(m: Model, trees, layers: int) -> tuple:
    """What is told of each stack, told of each layer: a tuple like that of unstack()."""
    counts = [n for n, _ in m.stacks] if m.layer_groups else [layers]
    return sum(((one,) * n for n, one in zip(counts, split(m, trees), strict=True)), ())


def run_layers(m: Model, step, x, layers, sums, then=(0, None)):
    """x through all layers, and the sum of what else step gives.

    Args:
      step: (kind, x, (w, sums)) -> (x, aux), for the Model that a layer is of.
      layers, sums: stacked or unstacked; sums may be None.
      then: how many layers, the last of a loop, have another step, and which.
    """
    if isinstance(layers, tuple):
        kinds = repeat(m, join(m, [kind for _, kind in m.stacks]), len(layers))
        total = jnp.zeros(())
        for kind, *one in zip(kinds, layers, sums or [None] * len(layers), strict=True):
            x, aux = step(kind, x, one)
            total += aux
        return x, total
    sums, losses = [None] * len(m.stacks) if sums is None else split(m, sums), []
    for (n, kind), *one in zip(m.stacks, split(m, layers), sums, strict=True):
        for part, how in ((slice(0, n - then[0]), step), (slice(n - then[0], n), then[1])):
            if part.start < part.stop:
                mine = jax.tree.map(lambda x, part=part: x[part], tuple(one))
                with jax.named_scope(lowering.LAYERS):  # cost_model/memory.py looks for it
                    x, aux = jax.lax.scan(functools.partial(how, kind), x, mine)
                losses.append(jnp.sum(aux))
    return x, functools.reduce(jnp.add, losses)
