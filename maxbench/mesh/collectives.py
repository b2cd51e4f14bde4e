"""The collectives of the step: it is one shard_map over all mesh axes, so every collective in the
program is one of these; nothing is left for a partitioner to guess.

Each is the identity on an axis of degree 1 and outside shard_map.
"""

import jax
import jax.numpy as jnp


def degree(axis: str | None) -> int:
    """GPUs along a mesh axis (or none) of the enclosing shard_map; 1 outside of one."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if axis in mesh.manual_axes else 1


def index(axis: str) -> jax.Array | int:
    """This GPU's position along a mesh axis."""
    return jax.lax.axis_index(axis) if degree(axis) > 1 else 0


def gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """All-gather along dim; the gradient is reduce-scattered."""
    return jax.lax.all_gather(x, axis, axis=dim, tiled=True) if degree(axis) > 1 else x


def scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Reduce-scatter along dim; the gradient is all-gathered."""
    if degree(axis) == 1:
        return x
    return jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def total(x: jax.Array, *axes: str) -> jax.Array:
    """Sum over mesh axes."""
    axes = tuple(a for a in axes if degree(a) > 1)
    return jax.lax.psum(x, axes) if axes else x


def largest(x: jax.Array, *axes: str) -> jax.Array:
    """Maximum over mesh axes."""
    axes = tuple(a for a in axes if degree(a) > 1)
    return jax.lax.pmax(x, axes) if axes else x


def exchange(x: jax.Array, axis: str, split: int = 0, join: int = 0) -> jax.Array:
    """All-to-all: part i of dim `split` goes to GPU i; part j of dim `join` comes from GPU j."""
    return jax.lax.all_to_all(x, axis, split, join, tiled=True) if degree(axis) > 1 else x


def rotate(tree, axis: str, by: int = 1):
    """Every array of the tree goes to the GPU `by` further along the axis, round its end."""
    n = degree(axis)
    if n == 1:
        return tree
    return jax.lax.ppermute(tree, axis, [(i, (i + by) % n) for i in range(n)])


def zero(made) -> jax.Array:
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


def beside(sent, zero):
    """A tree that collectives bring, as it is, but needed only once `zero` is known (or None).

    XLA's scheduler then runs the collective beside the work that the zero is of. Left alone it puts
    off gradients of weights to the end, and waits for collectives.
    """
    return sent if zero is None else jax.tree.map(lambda x: x + zero.astype(x.dtype), sent)


def gather_beside(x: jax.Array, axis: str, dim: int, zero) -> jax.Array:
    """gather(x, axis, dim), needed only once `zero` is known.

    This GPU's first number is written into its place again: adding the zero to all would be a pass
    over what a matrix product can read as it is. The barrier keeps that in place: a transpose that
    took what was gathered, and wrote the number by itself, would have XLA copy it for the product.
    """
    if zero is None or degree(axis) == 1:
        return gather(x, axis, dim)
    at = [0] * x.ndim
    at[dim] = index(axis) * x.shape[dim]
    return jax.lax.optimization_barrier(_with_first(gather(x, axis, dim), x, zero, at))


def send_beside(x: jax.Array, axis: str, zero) -> jax.Array:
    """rotate(x, axis), sent only once `zero` is known; likewise."""
    return rotate(x if zero is None else _with_first(x, x, zero, [0] * x.ndim), axis)


def _with_first(to, x, zero, at):
    first = x[(slice(0, 1),) * x.ndim].astype(jnp.float32) + zero
    return jax.lax.dynamic_update_slice(to, first.astype(x.dtype), at)


def after(x, numbers):
    """A tree of numbers, on a CPU not known before x is there.

    XLA:CPU may run a conditional and a collective that do not depend on each other at once, each
    device in its own order, and then waits for ever.
    """
    held = lambda zero, numbers: jax.tree.map(lambda n: n + zero.astype(n.dtype), numbers)
    return jax.lax.platform_dependent(zero(x), numbers, cpu=held, default=lambda zero, n: n)
