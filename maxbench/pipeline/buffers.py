"""Slot buffers and branches of the executor: updates of the scan's carry that XLA does in place.

XLA updates a buffer in place if it can prove that all reads of the old value come first.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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


def read_slots(stack: Any, slots: Sequence) -> tuple:
    """The layers in slots, a tuple of trees, from a tree of arrays [slots, ...]; a slot is a
    function that returns its index."""
    return tuple(jax.tree.map(lambda x, slot=slot: read(x, slot()), stack) for slot in slots)


def write_slots(stack: Any, slots: Sequence, layers: Any, valid: Sequence) -> Any:
    """The stack with the layers in slots replaced, those that are valid."""
    for slot, layer, write_it in zip(slots, layers, valid, strict=True):

        def one(buffer, x, slot, write_it=write_it):
            x = x if write_it is True else jnp.where(write_it, x, read(buffer, slot))
            return write(buffer, slot, x)

        stack = jax.tree.map(functools.partial(one, slot=slot()), stack, layer)
    return stack
