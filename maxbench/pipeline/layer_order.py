"""The order of layers in the slots of the stacked weights.

A stage has vp chunks of layers (virtual stages); chunk c of stage p is the (c x pp + p)-th part of
the network. Slots are ordered by stage, chunk and layer of the chunk, so that sharding them over pp
gives each stage its chunks. If layers divide into the parts except for two, one slot of the first
part, which also embeds, and one of the last, which also computes the loss, are empty (Llama 3.1
405B: 126 + 2 = 8 x 8 x 2). Empty slots contain zeros: a layer of zeros adds nothing to its input,
and its gradients are zeros, so it is no special case.
"""

import numpy as np

from maxbench.config.run import Run
from maxbench.model import layer_stack
from maxbench.model.layer_stack import EMPTY, Stack, Stacks


def stacks(run: Run) -> Stacks:
    """The stacks of a run's weights, and the layer in each of their slots."""
    m, a = run.network, run.layout
    if a.pp == 1:
        return layer_stack.stacks(m)
    return (Stack("", m, tuple(layer_order(m.layers, a.pp, a.vp).tolist())),)


def layer_order(layers: int, pp: int, vp: int) -> np.ndarray:
    """The layer in each slot, [slots]; EMPTY in an empty one."""
    even = layers % (pp * vp) == 0
    ids = np.arange(layers) if even else np.concatenate([[EMPTY], np.arange(layers), [EMPTY]])
    return ids.reshape(vp, pp, -1).swapaxes(0, 1).reshape(-1)


def occupied(order: np.ndarray, pp: int, vp: int) -> np.ndarray:
    """Whether each slot has a layer, bool [stage, chunk, layer of the chunk]."""
    return (np.asarray(order) >= 0).reshape(pp, vp, -1)
