"""Layers as a loop (scan) or unrolled (Train.unrolled): two programs of one network.

As a loop, each weight is stacked [layers, ...] and XLA compiles one layer, but the weights,
gradients and saved activations of each layer are copied out of stacked arrays and back. Unrolled,
layers are a tuple of trees: compilation takes longer, and nothing is copied.

A model whose layers are all alike has one stack, whose tree is 'layers' itself. Others have a dict
of stacks, whose names and contents are those of a table, Stacks: without a pipeline one stack for
each position of the cycle of each layer group ('000', '001', ...), so that a group is one scan over
its cycles; in a pipeline those of pipeline/layer_order.py.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxbench.config.model import Model
from maxbench.config.run import LAYERS
from maxbench.config.sublayers import KEYS, ROLES, Layer

EMPTY = -1  # of Stack.slots


class Stack(NamedTuple):
    """Layers, or one sublayer of layers, whose weights are stacked: leaves [slots, ...].

    Attributes:
      name: its key in the tree of layers; '' if it is the only stack.
      layer: a layer in it, complete.
      slots: the layer in each slot; EMPTY in an empty one, whose weights are zeros.
      roles: of the sublayers in it.
    """

    name: str
    layer: Layer
    slots: tuple[int, ...]
    roles: tuple[str, ...] = ROLES


Stacks = tuple[Stack, ...]


@functools.cache
def stacks(m: Model) -> Stacks:
    """The stacks of a program without a pipeline, in the order of groups and their cycles."""
    if len(m.kinds) == 1:
        return (Stack("", m.per_layer[0], tuple(range(m.layers))),)
    table: list[Stack] = []
    start = 0
    for count, cycle in m.groups:
        end = start + count * len(cycle)
        for i, layer in enumerate(cycle, start):
            table.append(Stack(f"{len(table):03}", layer, tuple(range(i, end, len(cycle)))))
        start = end
    return tuple(table)


def stacks_to_json(table: Stacks) -> list[list]:
    """[name, roles, slots] of each stack."""
    return [[s.name, list(s.roles), list(s.slots)] for s in table]


def stacks_from_json(m: Model, stacks: Sequence) -> Stacks:
    """The inverse of stacks_to_json()."""
    return tuple(
        Stack(name, m.per_layer[max(slots)], tuple(slots), tuple(roles))
        for name, roles, slots in stacks
    )


def split(table: Stacks, layers: Any) -> list:
    """The stacks of a tree of weights, or of a tree like it, in the order of the table."""
    return [layers[s.name] if s.name else layers for s in table]


def join(table: Stacks, trees: Sequence) -> Any:
    """The inverse of split()."""
    return trees[0] if not table[0].name else {s.name: t for s, t in zip(table, trees, strict=True)}


def by_stack(table: Stacks, layers: Any) -> list:
    """The stacks of a tree, of layers that are stacked or unrolled: of unrolled ones the tuple of
    each stack's layers."""
    if not isinstance(layers, tuple):
        return split(table, layers)
    return [tuple(layers[i] for i in s.slots) for s in table]


def from_stacks(table: Stacks, trees: Sequence) -> Any:
    """The inverse of by_stack()."""
    if not isinstance(trees[0], tuple):
        return join(table, trees)
    layers = {
        i: layer
        for s, tree in zip(table, trees, strict=True)
        for i, layer in zip(s.slots, tree, strict=True)
    }
    return tuple(layers[i] for i in sorted(layers))


def part_of(role: str, layer: Any) -> Any:
    """The entries of a sublayer in a layer's weights, gradients or state."""
    return {name: part for name, part in layer.items() if name.startswith(KEYS[role])}


def unstack(m: Model, layers: Any) -> Any:
    """Stacked arrays -> a tuple of trees, one per layer."""
    layer = lambda stack, i: jax.tree.map(lambda x: x[i], stack)
    trees = {
        index: layer(stack, i)
        for s, stack in zip(stacks(m), split(stacks(m), layers), strict=True)
        for i, index in enumerate(s.slots)
    }
    return tuple(trees[i] for i in range(m.layers))


def stack(m: Model, layers: Any) -> Any:
    """A tuple of trees, one per layer -> stacked arrays."""
    stacked = lambda trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)
    return join(stacks(m), [stacked([layers[i] for i in s.slots]) for s in stacks(m)])


def repeat(m: Model, trees: Any) -> tuple:
    """One tree per stack -> a tuple of trees, one per layer, as unstack() returns."""
    of_layer = {
        i: tree for s, tree in zip(stacks(m), split(stacks(m), trees), strict=True) for i in s.slots
    }
    return tuple(of_layer[i] for i in range(m.layers))


def permute(layers: Any, to: Stacks, source: Stacks) -> Any:
    """The layers of one table of stacks in the slots of another. Empty slots are zeros.

    Args:
      layers: weights, or a tree like them: leaves [slots, ...].
    """
    if to == source:
        return zero_empty(layers, to)
    trees = list(zip(source, split(source, layers), strict=True))
    return zero_empty(join(to, [_collect(s, trees) for s in to]), to)


def _collect(to: Stack, trees: Sequence[tuple[Stack, Any]]) -> Any:
    """The tree of a stack from those of other stacks."""

    def take(used):
        layer_of = sum((s.slots for s, _ in used), ())
        slot_of = {layer: slot for slot, layer in enumerate(layer_of)}
        slots = np.array([slot_of.get(layer, 0) for layer in to.slots])
        one = lambda *xs: (jnp.concatenate(xs) if len(xs) > 1 else xs[0])[slots]
        return jax.tree.map(one, *(tree for _, tree in used))

    if len(trees) == 1 and not to.name:
        return take(trees)
    collected: dict[str, Any] = {}
    shared = [(s, tree) for s, tree in trees if {*s.slots} & {*to.slots} - {EMPTY}]
    for role in to.roles:
        if parts := [(s, part_of(role, tree)) for s, tree in shared if role in s.roles]:
            collected |= take(parts)
    return collected


def zero_empty(layers: Any, table: Stacks) -> Any:
    """Leaves [slots, ...] with zeros in empty slots."""
    zeroed = [_zero_empty(tree, s) for s, tree in zip(table, split(table, layers), strict=True)]
    return join(table, zeroed)


def _zero_empty(tree, s: Stack):
    has_layer = np.asarray(s.slots) >= 0
    if has_layer.all():
        return tree
    mask = lambda x: has_layer.reshape(-1, *[1] * (x.ndim - 1))
    return jax.tree.map(lambda x: jnp.where(mask(x), x, 0), tree)


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
      step: (layer, x, (w, sums)) -> (x, auxiliary loss), where the layer is complete.
      layers, sums: weights and gradient accumulators, both stacked or both unstacked; sums may be
        None.
      last: (n, step_n): the last n layers of a loop use step_n instead of step.

    Returns:
      x, and the sum of the auxiliary losses.
    """
    if isinstance(layers, tuple):
        total = jnp.zeros(())
        for kind, *args in zip(m.per_layer, layers, sums or [None] * len(layers), strict=True):
            x, aux = step(kind, x, args)
            total += aux
        return x, total
    count, last_step = last
    table, losses, start = stacks(m), [], 0
    sums = [None] * len(table) if sums is None else split(table, sums)
    trees = iter(zip(split(table, layers), sums, strict=True))
    for n, cycle in m.groups:
        of_cycle = tuple(next(trees) for _ in cycle)
        change = min(max(m.layers - count - start, 0), n * len(cycle))  # the first with last_step
        whole, rest = divmod(change, len(cycle))
        mixed = whole + bool(rest)
        # Cycles with step, the cycle in which it changes, and cycles with last_step.
        for first, end, same in ((0, whole, len(cycle)), (whole, mixed, rest), (mixed, n, 0)):
            if first < end:
                steps = [step] * same + [last_step] * (len(cycle) - same)
                body = functools.partial(_run_cycle, steps, cycle)
                xs = jax.tree.map(lambda x, part=slice(first, end): x[part], of_cycle)
                with jax.named_scope(LAYERS):  # cost_model/memory.py looks for it
                    x, aux = jax.lax.scan(body, x, xs)
                losses.append(jnp.sum(aux))
        start += n * len(cycle)
    return x, functools.reduce(jnp.add, losses)


def _run_cycle(steps, cycle, x, args):
    losses = []
    for step, kind, arg in zip(steps, cycle, args, strict=True):
        x, aux = step(kind, x, arg)
        losses.append(aux)
    return x, functools.reduce(jnp.add, losses)
