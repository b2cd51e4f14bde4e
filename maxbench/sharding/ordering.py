"""Execution order inside one compiled program, as data dependences."""

import jax
import jax.numpy as jnp

from maxbench.sharding.collectives import all_gather, axis_index, axis_size, ppermute_shift


def token(made) -> jax.Array:
    """0, fp32, that is known when all arrays of a tree are made: what it is added to comes later in
    the program.

    An optimization barrier is gone before XLA's scheduler looks; a zero that it cannot know to be
    one is not.
    """

    def one(x):
        first = x[(0,) * x.ndim]
        first = first if jnp.issubdtype(x.dtype, jnp.floating) else first.astype(jnp.float32)
        return (0 * first).astype(jnp.float32)

    return sum(map(one, jax.tree.leaves(made)), jnp.zeros(()))


def after(sent, zero):
    """A tree that collectives bring, as it is, but needed only once `zero` is known (or None).

    XLA's scheduler then runs the collective beside the work that the zero is of. Left alone it puts
    off gradients of weights to the end, and waits for collectives.
    """
    return sent if zero is None else jax.tree.map(lambda x: x + zero.astype(x.dtype), sent)


def all_gather_after(x: jax.Array, axis: str, dim: int, zero) -> jax.Array:
    """gather(x, axis, dim), needed only once `zero` is known.

    This GPU's first number is written into its place again: adding the zero to all would be a pass
    over what a matrix product can read as it is. The barrier keeps that in place: a transpose that
    took what was gathered, and wrote the number by itself, would have XLA copy it for the product.
    """
    if zero is None or axis_size(axis) == 1:
        return all_gather(x, axis, dim)
    at = [0] * x.ndim
    at[dim] = axis_index(axis) * x.shape[dim]
    return jax.lax.optimization_barrier(_with_first(all_gather(x, axis, dim), x, zero, at))


def ppermute_after(x: jax.Array, axis: str, zero) -> jax.Array:
    """rotate(x, axis), sent only once `zero` is known; likewise."""
    return ppermute_shift(x if zero is None else _with_first(x, x, zero, [0] * x.ndim), axis)


def _with_first(to, x, zero, at):
    first = x[(slice(0, 1),) * x.ndim].astype(jnp.float32) + zero
    return jax.lax.dynamic_update_slice(to, first.astype(x.dtype), at)


def serialize_on_cpu(x, numbers):
    """A tree of numbers, on a CPU not known before x is there.

    XLA:CPU may run a conditional and a collective that do not depend on each other at once, each
    device in its own order, and then waits for ever.
    """
    held = lambda zero, numbers: jax.tree.map(lambda n: n + zero.astype(n.dtype), numbers)
    return jax.lax.platform_dependent(token(x), numbers, cpu=held, default=lambda zero, n: n)
