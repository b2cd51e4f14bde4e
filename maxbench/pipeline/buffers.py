"""Boxes of slots, and loops that run once: how the executor changes what it carries.

XLA writes in place where it can see that all that stood there has been read.
"""

import jax.numpy as jnp
from jax import lax

from maxbench.sharding import ordering


def run_if(condition, change, state):
    """change(state) or state: a loop that runs once or not at all writes in place, a conditional
    would copy, even where it changes nothing."""
    if condition is True:
        return change(state)
    body = lambda carried: (False, change(carried[1]))
    return lax.while_loop(lambda carried: carried[0], body, (condition, state))[1]


def token_index(made):  # collectives.zero, to add to the number of a slot or a chunk
    return ordering.token(made).astype(jnp.int32)


def write(box, slot, value):
    """box with a value in a slot, or values from it on."""
    return lax.dynamic_update_slice_in_dim(box, value.reshape(-1, *box.shape[1:]), slot, 0)


def read(box, slot):
    return lax.dynamic_index_in_dim(box, slot, keepdims=False)
