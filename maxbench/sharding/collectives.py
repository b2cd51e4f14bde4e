"""The collectives of the step: it is one shard_map over all mesh axes, so every collective in the
program is one of these; nothing is left for a partitioner to guess.

Each is the identity on an axis of degree 1 and outside shard_map.
"""

import jax


def axis_size(axis: str | None) -> int:
    """GPUs along a mesh axis (or none) of the enclosing shard_map; 1 outside of one."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if axis in mesh.manual_axes else 1


def axis_index(axis: str) -> jax.Array | int:
    """This GPU's position along a mesh axis."""
    return jax.lax.axis_index(axis) if axis_size(axis) > 1 else 0


def all_gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """All-gather along dim; the gradient is reduce-scattered."""
    return jax.lax.all_gather(x, axis, axis=dim, tiled=True) if axis_size(axis) > 1 else x


def reduce_scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Reduce-scatter along dim; the gradient is all-gathered."""
    if axis_size(axis) == 1:
        return x
    return jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def psum(x: jax.Array, *axes: str) -> jax.Array:
    """Sum over mesh axes."""
    axes = tuple(a for a in axes if axis_size(a) > 1)
    return jax.lax.psum(x, axes) if axes else x


def pmax(x: jax.Array, *axes: str) -> jax.Array:
    """Maximum over mesh axes."""
    axes = tuple(a for a in axes if axis_size(a) > 1)
    return jax.lax.pmax(x, axes) if axes else x


def all_to_all(x: jax.Array, axis: str, split: int = 0, join: int = 0) -> jax.Array:
    """All-to-all: part i of dim `split` goes to GPU i; part j of dim `join` comes from GPU j."""
    return jax.lax.all_to_all(x, axis, split, join, tiled=True) if axis_size(axis) > 1 else x


def ppermute_shift(tree, axis: str, by: int = 1):
    """Every array of the tree goes to the GPU `by` further along the axis, round its end."""
    n = axis_size(axis)
    if n == 1:
        return tree
    return jax.lax.ppermute(tree, axis, [(i, (i + by) % n) for i in range(n)])
