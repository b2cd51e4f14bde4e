"""Non-trainable state: arrays of each layer that have no gradient, and their update after a step.

    state['layer_state'] = {'layers': a tree like that of the weights, leaves [slots, ...]}

An entry of REGISTRY is one such array. The step counts a statistic of each layer, over all
microbatches and all GPUs, and the array's new value follows from it: the amax history of delayed
scaling from the amaxes of a step, the bias of a router from the tokens of each expert.

A layer reads an array with in_layer set by grad_accumulation.layer_state(), and counts its
statistic by grad_accumulation.record(); both work in every program: a scan over layers, unrolled
layers, and a pipeline. quantization/ reads and counts the others.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxbench.config.model import Model
from maxbench.config.run import AXES, Run
from maxbench.model import layer_stack, router
from maxbench.model.grad_accumulation import LayerState
from maxbench.model.layer_stack import Stack, Stacks, part_of
from maxbench.quantization import fp8_per_tensor
from maxbench.sharding import collectives

KEY = "layer_state"


class Entry(NamedTuple):
    """One array of each layer.

    Attributes:
      path: its keys in a layer's tree. The first begins with the name of a sublayer.
      shape: (run, Model of the layer, its WeightShardings) -> its shape; () if the layer has none.
        It is fp32.
      reduce: how the statistic is counted over microbatches and over GPUs: 'max' or 'sum'.
      update: (run, value, statistic) -> the next value. The statistic has the shape of what
        read() returns.
      read: what the step reads of the value.
      in_layer: the layer itself reads and counts it.
      first: its initial value in each slot of a stack, [slots, ...]; None is zeros.
      metric: the name of the sum of the statistic in the metrics of a step, or ''.
    """

    path: tuple[str, ...]
    shape: Callable[[Run, Model, Any], tuple[int, ...]]
    reduce: str
    update: Callable[[Run, jax.Array, jax.Array], jax.Array]
    read: Callable[[jax.Array], jax.Array] = lambda value: value
    in_layer: bool = True
    first: Callable[[Stack], Any] | None = None
    metric: str = ""


def _history_shape(run, _, shardings):
    gemms = sum(bool(s.gemm) for s in jax.tree.leaves(shardings))
    length = run.precision.amax_history_len
    return (gemms, 3, length) if gemms and length else ()


# The amax history of a stack's GEMMs (fp8_per_tensor.py), [gemms, 3, steps]: of both sublayers if
# the stack has both.
AMAX_HISTORY = Entry(
    path=("amax",),
    shape=_history_shape,
    reduce="max",
    update=lambda run, history, amax: fp8_per_tensor.update_amax_history(history, amax),
    read=lambda history: jnp.max(history, -1),
    in_layer=False,
)
# The bias of the choice of experts (model/router.py), [experts].
EXPERT_BIAS = Entry(
    path=("mlp", "expert_bias"),
    shape=lambda run, m, _: (m.experts,) if m.experts and m.expert_bias_rate else (),
    reduce="sum",
    update=lambda run, bias, tokens: router.update_bias(bias, tokens, run.model.expert_bias_rate),
)
# The index of the layer, from which its random experts follow with model.force_balance, [1].
LAYER = Entry(
    path=("mlp", "layer"),
    shape=lambda run, m, _: (1,) if m.experts and m.force_balance else (),
    reduce="sum",
    update=lambda run, layer, _: layer,
    first=lambda stack: np.asarray(stack.slots, np.float32)[:, None],
)
# Rows for which model.dispatch_factor was too small (model/token_dispatch.py), [1], over all steps.
LOST_ROWS = Entry(
    path=("mlp", "lost_rows"),
    shape=lambda run, m, _: (1,) if m.experts and run.model.bounds_rows(run.layout.ep) else (),
    reduce="sum",
    update=lambda run, before, rows: before + rows,
    metric="lost_rows",
)
REGISTRY: tuple[Entry, ...] = (AMAX_HISTORY, EXPERT_BIAS, LAYER, LOST_ROWS)


def init(run: Run, table: Stacks, shardings: Any) -> Any:
    """The initial state of all layers, or None if no layer has any.

    Args:
      shardings: tree of WeightSharding of the stacked weights.
    """

    def of_stack(stack, shardings):
        tree: dict[str, Any] = {}
        for entry in REGISTRY:
            if entry.in_layer and not entry.path[0].startswith(stack.sublayers):
                continue
            if shape := entry.shape(run, stack.kind, shardings):
                value = jnp.zeros((len(stack.slots), *shape), jnp.float32)
                value = value if entry.first is None else value + entry.first(stack)
                _set(tree, entry.path, value)
        return tree

    trees = map(of_stack, table, layer_stack.split(table, shardings))
    layers = layer_stack.join(table, list(trees))
    return {"layers": layers} if jax.tree.leaves(layers) else None


def read(tree: Any) -> Any:
    """The part of each array that the step reads."""
    return _map(lambda entry, value: entry.read(value), tree)


def update(run: Run, tree: Any, statistics: Any) -> Any:
    """The state after a step with these statistics, a tree like it."""
    return _map(lambda entry, *arrays: entry.update(run, *arrays), tree, statistics)


def metrics(statistics: Any) -> dict[str, jax.Array]:
    """The metrics of a step that its statistics have, fp32 scalars; inside shard_map."""
    found: dict[str, jax.Array] = {}
    by_name = {entry.path[-1]: entry.metric for entry in REGISTRY}
    for path, value in jax.tree_util.tree_leaves_with_path(statistics):
        if name := by_name[path[-1].key]:
            total = collectives.psum(jnp.sum(value), "pp")  # which splits the slots for layers
            found[name] = found.get(name, jnp.zeros(())) + total
    return found


def for_layers(tree: Any) -> Any:
    """The arrays that layers read, as grad_accumulation.LayerState in their place among weights.

    Args:
      tree: of one layer or of stacked layers, as read() returns it.
    """
    layers: dict[str, Any] = {}
    for entry in filter(lambda entry: entry.in_layer, REGISTRY):
        if (value := _get(tree, entry.path)) is not None:
            _set(layers, entry.path, LayerState(value, entry.reduce))
    return layers


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
    if (history := tree.get("amax")) is None:
        return tree
    count = lambda name: sum(bool(s.gemm) for s in jax.tree.leaves(part_of(name, shardings)))
    ends = itertools.accumulate(map(count, stack.sublayers))
    parts = jnp.split(history, [*ends][:-1], 1)
    rest = {name: value for name, value in tree.items() if name != "amax"}
    return rest | {f"{s}_amax": x for s, x in zip(stack.sublayers, parts, strict=True)}


def _join_amax(stack, tree):
    names = [f"{s}_amax" for s in stack.sublayers if f"{s}_amax" in tree]
    rest = {name: value for name, value in tree.items() if name not in names}
    return rest | ({"amax": jnp.concatenate([tree[n] for n in names], 1)} if names else {})


def statistics(tree: Any, counted: Any, amax: Any) -> Any:
    """The statistics of a stack over all GPUs of a stage, a tree like its state; inside shard_map.

    Args:
      tree: the state of the stack, as read() returns it.
      counted: Statistics of the stack's layers, by path (grad_accumulation.statistics_of).
      amax: of its GEMMs over all GPUs, [slots, gemms, 3], or None.
    """
    result: dict[str, Any] = {}
    axes = [axis for axis in AXES if axis != "pp"]
    for entry in REGISTRY:
        if _get(tree, entry.path) is None:
            continue
        if not entry.in_layer:
            _set(result, entry.path, amax)
            continue
        reduce = collectives.pmax if entry.reduce == "max" else collectives.psum
        _set(result, entry.path, reduce(_get(counted, entry.path).value, *axes))
    return result


def _map(change, tree, *others):
    by_name = {entry.path[-1]: entry for entry in REGISTRY}
    of_path = lambda path, *arrays: change(by_name[path[-1].key], *arrays)
    return jax.tree_util.tree_map_with_path(of_path, tree, *others)


def _get(tree, path):
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _set(tree, path, value):
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
