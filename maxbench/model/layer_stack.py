"""Layers as a loop (scan) or unrolled (lowering.layers_unrolled): two programs of one network.

As a loop, each weight is stacked [layers, ...] and XLA compiles one layer, but the weights,
gradients and saved activations of each layer are copied out of stacked arrays and back. Unrolled,
layers are a tuple of trees: compilation takes longer, and nothing is copied.

A model whose layers are all alike has one stack. A model with Model.layer_groups has a dict of
stacks, '000', '001', ..., one for each run of consecutive layers that are alike (Model.stacks).
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxbench.config import lowering
from maxbench.config.model import Model


def split(m: Model, layers: Any) -> list:
    """The stacks of a tree of weights, or of a tree like it, in the order of Model.stacks."""
    return [layers] if len(m.stacks) == 1 else [layers[name] for name in sorted(layers)]


def join(m: Model, stacks: Any) -> Any:
    """The inverse of split()."""
    return stacks[0] if len(m.stacks) == 1 else {f"{i:03}": s for i, s in enumerate(stacks)}


def unstack(m: Model, layers: Any) -> Any:
    """Stacked arrays -> a tuple of trees, one per layer."""
    indices = lambda stack: range(len(jax.tree.leaves(stack)[0]))
    layer = lambda stack, i: jax.tree.map(lambda x: x[i], stack)
    return tuple(layer(stack, i) for stack in split(m, layers) for i in indices(stack))


def stack(m: Model, layers: Any) -> Any:
    """A tuple of trees, one per layer -> stacked arrays."""
    trees = iter(layers)
    stacked = lambda n: jax.tree.map(lambda *x: jnp.stack(x), *itertools.islice(trees, n))
    return join(m, [stacked(n) for n in _counts(m, len(layers))])


def repeat(m: Model, trees: Any, layers: int) -> tuple:
    """One tree per stack -> a tuple of trees, one per layer, as unstack() returns."""
    counts = _counts(m, layers)
    return sum(((tree,) * n for n, tree in zip(counts, split(m, trees), strict=True)), ())


def _counts(m: Model, layers: int) -> list[int]:
    """Layers of each stack; a pipeline, whose layers are alike, may have empty slots besides."""
    return [n for n, _ in m.stacks] if m.layer_groups else [layers]


def run_layers(
    m: Model,
    step: Callable,
    x: jax.Array,
    layers: Any,
    sums: Any,
    last: tuple[int, Callable | None] = (0, None),
) -> Any:
    """Applies all layers to x, and sums their auxiliary losses.

    Args:
      step: (kind, x, (w, sums)) -> (x, auxiliary loss), where kind is the Model of that layer.
      layers, sums: weights and gradient accumulators, both stacked or both unstacked; sums may be
        None.
      last: (n, step_n): the last n layers of a loop use step_n instead of step.

    Returns:
      x, and the sum of the auxiliary losses.
    """
    if isinstance(layers, tuple):
        kinds = repeat(m, join(m, [kind for _, kind in m.stacks]), len(layers))
        total = jnp.zeros(())
        for kind, *args in zip(kinds, layers, sums or [None] * len(layers), strict=True):
            x, aux = step(kind, x, args)
            total += aux
        return x, total
    count, last_step = last
    sums, losses = [None] * len(m.stacks) if sums is None else split(m, sums), []
    for (n, kind), *args in zip(m.stacks, split(m, layers), sums, strict=True):
        for part, body in ((slice(0, n - count), step), (slice(n - count, n), last_step)):
            if part.start < part.stop:
                xs = jax.tree.map(lambda x, part=part: x[part], tuple(args))
                with jax.named_scope(lowering.LAYERS):  # cost_model/memory.py looks for it
                    x, aux = jax.lax.scan(functools.partial(body, kind), x, xs)
                losses.append(jnp.sum(aux))
    return x, functools.reduce(jnp.add, losses)
