"""Collectives by mesh axis, for code inside the step's shard_map.

The program has no others than these, those of whole weights in rules.py, and those of Muon, which
has a shard_map of its own. What is outside of both, the optimizer, is elementwise, so that XLA's
partitioner adds none.
Each is the identity on an axis of size 1 and outside shard_map.
"""

import math
from typing import Any

import jax

Axes = str | tuple[str, ...]  # a mesh axis, or several as one, the last one varying fastest


def axis_size(axes: Axes | None) -> int:
    """GPUs along mesh axes of the enclosing shard_map; 1 for None and outside shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(mesh.shape[axis] for axis in names if axis in mesh.manual_axes)


def axis_index(axis: str) -> jax.Array | int:
    """This GPU's position along a mesh axis."""
    return jax.lax.axis_index(axis) if axis_size(axis) > 1 else 0


def all_gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """All-gather, concatenated along dim. Its gradient is reduce-scattered."""
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axis_size(axes) > 1 else x


def reduce_scatter(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Sum over axes, split along dim. Its gradient is all-gathered."""
    if axis_size(axes) == 1:
        return x
    return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def psum(x: jax.Array, *axes: str) -> jax.Array:
    """Sum over mesh axes."""
    axes = tuple(a for a in axes if axis_size(a) > 1)
    return jax.lax.psum(x, axes) if axes else x


def pmax(x: jax.Array, *axes: str) -> jax.Array:
    """Maximum over mesh axes."""
    axes = tuple(a for a in axes if axis_size(a) > 1)
    return jax.lax.pmax(x, axes) if axes else x


def all_to_all(x: jax.Array, axes: Axes, split: int = 0, join: int = 0) -> jax.Array:
    """All-to-all: sends part i of dim `split` to GPU i, and concatenates what it receives along dim
    `join`, in the order of the senders."""
    return jax.lax.all_to_all(x, axes, split, join, tiled=True) if axis_size(axes) > 1 else x


def ppermute_shift(tree: Any, axis: str, by: int = 1) -> Any:
    """Sends each array of a tree to the GPU `by` positions further along the axis, cyclically."""
    n = axis_size(axis)
    if n == 1:
        return tree
    return jax.lax.ppermute(tree, axis, [(i, (i + by) % n) for i in range(n)])
