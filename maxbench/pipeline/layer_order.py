"""The order of layers in the slots of the stacked weights.

A stage has vp chunks of layers (virtual stages); chunk c of stage p is the (c x pp + p)-th part of
the network. Slots are ordered by stage, chunk and layer of the chunk, so that sharding them over pp
gives each stage its chunks. If layers divide into the parts except for two, one slot of the first
part, which also embeds, and one of the last, which also computes the loss, are empty (Llama 3.1
405B: 126 + 2 = 8 x 8 x 2). Empty slots contain zeros: a layer of zeros adds nothing to its input,
and its gradients are zeros, so it is no special case.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxbench.config.model import Model
from maxbench.model import transformer

EMPTY = -1


def layer_order(layers: int, pp: int, vp: int) -> np.ndarray:
    """The layer in each slot, [slots]; EMPTY in an empty one."""
    even = layers % (pp * vp) == 0
    ids = np.arange(layers) if even else np.concatenate([[EMPTY], np.arange(layers), [EMPTY]])
    return ids.reshape(vp, pp, -1).swapaxes(0, 1).reshape(-1)


def occupied(order: np.ndarray, pp: int, vp: int) -> np.ndarray:
    """Whether each slot has a layer, bool [stage, chunk, layer of the chunk]."""
    return (np.asarray(order) >= 0).reshape(pp, vp, -1)


def init(m: Model, key: jax.Array, order: np.ndarray) -> Any:
    """transformer.init with its layers in the order of slots, in place."""
    w = transformer.init(m, key, np.maximum(order, 0))
    return w | {"layers": zero_empty(w["layers"], order)}


def permute(layers: Any, to: Any, source: Any = None) -> Any:
    """Leaves [slots, ...] in the order `source` (default: that of the layers) -> in the order `to`.
    Empty slots are zeros."""
    to = np.asarray(to)
    source = range(max(to) + 1) if source is None else source
    if np.array_equal(source, to):
        return zero_empty(layers, to)
    slot_of = {layer: slot for slot, layer in enumerate(source)}
    slots = np.array([slot_of.get(layer, 0) for layer in to])
    return zero_empty(jax.tree.map(lambda x: x[slots], layers), to)


def zero_empty(layers: Any, order: np.ndarray) -> Any:
    """Leaves [slots, ...] with zeros in empty slots."""
    has_layer = np.asarray(order) >= 0
    if has_layer.all():
        return layers
    mask = lambda x: has_layer.reshape(-1, *[1] * (x.ndim - 1))
    return jax.tree.map(lambda x: jnp.where(mask(x), x, 0), layers)
