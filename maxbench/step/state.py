"""Non-trainable state: arrays of each layer that have no gradient, and their update after a step.

    state['layer_state'] = {'layers': a tree like that of the weights, leaves [slots, ...]}

The step counts a statistic of each layer, over all microbatches and all GPUs, and an array's new
value follows from it: the amax history of delayed scaling from the amaxes of a step, the bias of a
router from the tokens of each expert. The amax history is that of a stack's GEMMs; the other arrays
are those that sublayers declare (config.sublayers.State).

A layer reads its arrays by grad_accumulation.layer_state(), and counts their statistics by
grad_accumulation.record(); both work in every program: a scan over layers, unrolled layers, and a
pipeline. quantization/ reads and counts the amax history.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxbench.config.run import AXES, Run
from maxbench.config.sublayers import KEYS, ROLES, Layer, State
from maxbench.model import layer_stack
from maxbench.model.grad_accumulation import LayerState
from maxbench.model.layer_stack import Stack, Stacks, part_of
from maxbench.quantization import fp8_per_tensor
from maxbench.sharding import collectives

KEY = "layer_state"
# The amax history of a stack's GEMMs (fp8_per_tensor.py), [gemms, 3, steps]: of both sublayers if
# the stack has both.
AMAX = "amax"


def _states(run: Run, layer: Layer, roles=ROLES) -> Iterator[tuple[str, State]]:
    """Key of the sublayer in the layer's tree, and array, of each array that a layer declares."""
    for role, sublayer in layer.parts():
        if role in roles:
            yield from ((KEYS[role], state) for state in sublayer.states(run))


def init(run: Run, table: Stacks, shardings: Any) -> Any:
    """The initial state of all layers, or None if no layer has any.

    Args:
      shardings: tree of WeightSharding of the stacked weights.
    """

    def of_stack(stack, shardings):
        tree: dict[str, Any] = {}
        gemms = sum(bool(s.gemm) for s in jax.tree.leaves(shardings))
        zeros = lambda *shape: jnp.zeros((len(stack.slots), *shape), jnp.float32)
        if gemms and (length := run.precision.amax_history_len):
            tree[AMAX] = zeros(gemms, 3, length)
        for key, state in _states(run, stack.layer, stack.roles):
            value = zeros(*state.shape)
            if state.is_layer:
                value += np.asarray(stack.slots, np.float32)[:, None]
            tree.setdefault(key, {})[state.name] = value
        return tree

    trees = map(of_stack, table, layer_stack.split(table, shardings))
    layers = layer_stack.join(table, list(trees))
    return {"layers": layers} if jax.tree.leaves(layers) else None


def read(tree: Any) -> Any:
    """The part of each array that the step reads."""
    newest = lambda path, value: jnp.max(value, -1) if path[-1].key == AMAX else value
    return jax.tree_util.tree_map_with_path(newest, tree)


def update(run: Run, table: Stacks, tree: Any, statistics: Any) -> Any:
    """The state after a step with these statistics, a tree like it."""

    def of_stack(stack, before, counted):
        after = {}
        if AMAX in before:
            after[AMAX] = fp8_per_tensor.update_amax_history(before[AMAX], counted[AMAX])
        for key, state in _states(run, stack.layer, stack.roles):
            value = state.update(before[key][state.name], counted[key][state.name])
            after.setdefault(key, {})[state.name] = value
        return after

    trees = (layer_stack.split(table, x["layers"]) for x in (tree, statistics))
    return {"layers": layer_stack.join(table, list(map(of_stack, table, *trees)))}


def metrics(run: Run, table: Stacks, statistics: Any) -> dict[str, jax.Array]:
    """The metrics of a step that its statistics have, fp32 scalars; inside shard_map."""
    found: dict[str, jax.Array] = {}
    trees = layer_stack.split(table, statistics["layers"])
    for stack, tree in zip(table, trees, strict=True):
        for key, state in _states(run, stack.layer, stack.roles):
            if name := state.metric:
                # pp splits the slots for layers.
                more = collectives.psum(jnp.sum(tree[key][state.name]), "pp")
                found[name] = found.get(name, jnp.zeros(())) + more
    return found


def for_layers(run: Run, layer: Layer, tree: Any) -> Any:
    """The arrays that layers read, as grad_accumulation.LayerState in their place among weights.

    Args:
      layer: the layer that has them.
      tree: of one layer or of stacked layers, as read() returns it.
    """
    found: dict[str, Any] = {}
    for key, state in _states(run, layer):
        if key in tree:
            value = LayerState(tree[key][state.name], state.reduce)
            found.setdefault(key, {})[state.name] = value
    return found


def permute(tree: Any, to: Stacks, source: Stacks, shardings: Any) -> Any:
    """layer_stack.permute() of the state of layers.

    Args:
      shardings: tree of WeightSharding like the weights in the stacks of `source`.
    """
    trees, shardings = (layer_stack.split(source, x) for x in (tree, shardings))
    layers = layer_stack.join(source, list(map(_split_amax, source, trees, shardings)))
    permuted = layer_stack.split(to, layer_stack.permute(layers, to, source))
    return layer_stack.join(to, list(map(_join_amax, to, permuted)))


def _split_amax(stack, tree, shardings):
    """The state of a stack, with the amax history of each sublayer under the sublayer's name."""
    if (history := tree.get(AMAX)) is None:
        return tree
    count = lambda role: sum(bool(s.gemm) for s in jax.tree.leaves(part_of(role, shardings)))
    ends = itertools.accumulate(map(count, stack.roles))
    parts = jnp.split(history, [*ends][:-1], 1)
    rest = {name: value for name, value in tree.items() if name != AMAX}
    return rest | {f"{KEYS[role]}_amax": x for role, x in zip(stack.roles, parts, strict=True)}


def _join_amax(stack, tree):
    names = [name for role in stack.roles if (name := f"{KEYS[role]}_amax") in tree]
    rest = {name: value for name, value in tree.items() if name not in names}
    return rest | ({AMAX: jnp.concatenate([tree[n] for n in names], 1)} if names else {})


def statistics(run: Run, stack: Stack, tree: Any, counted: Any, amax: Any) -> Any:
    """The statistics of a stack over all GPUs of a stage, a tree like its state; inside shard_map.

    Args:
      tree: the state of the stack, as read() returns it.
      counted: Statistics of the stack's layers, by path (grad_accumulation.statistics_of).
      amax: of its GEMMs over all GPUs, [slots, gemms, 3], or None.
    """
    result: dict[str, Any] = {AMAX: amax} if AMAX in tree else {}
    axes = [axis for axis in AXES if axis != "pp"]
    for key, state in _states(run, stack.layer, stack.roles):
        reduce = collectives.pmax if state.reduce == "max" else collectives.psum
        value = reduce(counted[key][state.name].value, *axes)
        result.setdefault(key, {})[state.name] = value
    return result
