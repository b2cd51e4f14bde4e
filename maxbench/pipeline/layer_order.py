"""The order of layers in the slots of the stacked weights: known here and nowhere else.

A pipeline's stage holds vp chunks of layers, chunk c of stage p being the (c x pp + p)-th part of
the network. Slots are ordered (stage, chunk, layer of the chunk), so that splitting them over pp
gives each stage its chunks. Where layers divide into all parts but for two, a slot of the first
part, which also embeds, and one of the last, which also has the loss, stay empty (Llama 3.1 405B:
126 + 2 = 8 x 8 x 2). They hold zeros: a layer of these adds nothing to x, and its gradients are
zeros, so it needs no exception.
"""

import jax
import jax.numpy as jnp
import numpy as np

from maxbench.config.model import Model
from maxbench.model import transformer

EMPTY = -1


def layer_order(layers: int, pp: int, vp: int) -> np.ndarray:
    """The layer in each slot, [slots]; -1 in an empty one."""
    even = layers % (pp * vp) == 0
    ids = np.arange(layers) if even else np.concatenate([[EMPTY], np.arange(layers), [EMPTY]])
    return ids.reshape(vp, pp, -1).swapaxes(0, 1).reshape(-1)


def occupied(order: np.ndarray, pp: int, vp: int) -> np.ndarray:
    """Whether each slot has a layer, bool [stage, chunk, layer of the chunk]."""
    return (np.asarray(order) >= 0).reshape(pp, vp, -1)


def init(m: Model, key: jax.Array, order: np.ndarray):
    """network.init with its layers in the order of slots, made in place."""
    w = transformer.init(m, key, np.maximum(order, 0))
    return w | {"layers": zero_empty(w["layers"], order)}


def permute(layers, to, source=None):
    """Leaves [slots, ...] in the order `source`, by default that of the layers themselves, to the
    order `to`. Empty slots are zeros."""
    to = np.asarray(to)
    source = range(max(to) + 1) if source is None else source
    if np.array_equal(source, to):
        return zero_empty(layers, to)
    slot = {layer: i for i, layer in enumerate(source)}
    take = np.array([slot.get(layer, 0) for layer in to])
    return zero_empty(jax.tree.map(lambda x: x[take], layers), to)


def zero_empty(layers, order: np.ndarray):
    """Leaves [slots, ...] with zeros in empty slots."""
    real = np.asarray(order) >= 0
    if real.all():
        return layers
    shaped = lambda x: real.reshape(-1, *[1] * (x.ndim - 1))
    return jax.tree.map(lambda x: jnp.where(shaped(x), x, 0), layers)
