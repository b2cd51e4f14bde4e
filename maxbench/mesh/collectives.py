"""The collectives of the step: it is one shard_map over all mesh axes, so every collective in the
program is one of these; nothing is left for a partitioner to guess.

Each is the identity on an axis of degree 1 and outside shard_map.
"""

import jax


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
    permute = lambda tree: jax.lax.ppermute(tree, axis, [(i, (i + by) % n) for i in range(n)])
    if axis == "pp" or degree("pp") == 1:
        return permute(tree)
    # XLA:CPU's permute waits for all GPUs of the mesh, those of idle pipeline stages included.
    pick = lambda x: jax.lax.all_gather(x, axis)[(jax.lax.axis_index(axis) - by) % n]
    gathered = lambda tree: jax.tree.map(pick, tree)
    return jax.lax.platform_dependent(tree, cpu=gathered, default=permute)


def beside(sent, made):
    """What collectives bring, as it is, but needed only once `made` is there.

    XLA's scheduler then runs the collective beside the work that makes `made`. Left alone it puts
    off gradients of weights to the end, and waits for collectives. An optimization barrier is gone
    before it looks; a zero that it cannot know to be one is not.
    """
    zero = 0 * made[(0,) * made.ndim]
    return jax.tree.map(lambda x: x + zero.astype(x.dtype), sent)


def after(x, tree):
    """The tree, on a CPU not before x is there.

    XLA:CPU may run a conditional and a collective that do not depend on each other at once, each
    device in its own order, and then waits for ever.
    """
    held = lambda x, tree: jax.lax.optimization_barrier((x, tree))[1]
    return jax.lax.platform_dependent(x, tree, cpu=held, default=lambda x, tree: tree)
