"""Slot buffers and branches of the executor: updates of the scan's carry that XLA does in place.

XLA updates a buffer in place if it can prove that all reads of the old value come first.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def run_if(condition: Any, change: Callable, state: Any) -> Any:
    """change(state) if the condition holds, else the state.

    A loop that runs once or not at all updates its state in place; a conditional would copy it,
    even where it changes nothing. A condition that is True is no branch.
    """
    if condition is True:
        return change(state)
    body = lambda carried: (False, change(carried[1]))
    return lax.while_loop(lambda carried: carried[0], body, (condition, state))[1]


def write(buffer: Any, slot: jax.Array | int, value: Any) -> Any:
    """The buffer [slots, ...] with a value in a slot, or with values [n, ...] from the slot on."""
    return lax.dynamic_update_slice_in_dim(buffer, value.reshape(-1, *buffer.shape[1:]), slot, 0)


def read(buffer: Any, slot: jax.Array | int) -> Any:
    """The value in a slot of a buffer [slots, ...]."""
    return lax.dynamic_index_in_dim(buffer, slot, keepdims=False)


def read_chunk(stack: Any, chunk: Any, layers: int) -> Any:
    """The layers of a chunk, a tuple of trees, from a tree of arrays [chunks x layers, ...]."""
    layer = lambda i: jax.tree.map(lambda x: read(x, chunk * layers + i), stack)
    return tuple(map(layer, range(layers)))


def write_chunk(stack: Any, chunk: Any, layers: Any) -> Any:
    """The stack with the layers of a chunk replaced."""
    for i, layer in enumerate(layers):
        slot = chunk * len(layers) + i
        stack = jax.tree.map(lambda buffer, x, slot=slot: write(buffer, slot, x), stack, layer)
    return stack
