"""Checksums of arrays that are the same on every mesh.

Each element is hashed with its position, and the hashes are summed modulo 2**32: in whichever
order devices sum, the result is the same; a changed element, or two swapped ones, change it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

POSITION = 0x9E3779B1  # multiplier of the polynomial of an element's indices
# Finalizer of MurmurHash3 (public domain). A sum that is linear in the bits would not notice two
# flipped signs.
MURMUR = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))
UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def array_checksums(state: Any) -> dict[str, int]:
    """Checksum of each array of a pytree, by its path: 'params/embed'.

    numpy arrays are summed on the host, jax arrays on their devices.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    arrays = [x for _, x in leaves]
    on_host = all(isinstance(x, np.ndarray) for x in arrays)
    sums = map(_sum_on_host, arrays) if on_host else _sum_on_devices(arrays)
    return {name: int(x) for name, x in zip(names, sums, strict=True)}


def checksum(x: jax.Array) -> jax.Array:
    """Checksum of an array, uint32, in a program."""
    return _hash_sum(jax.lax.bitcast_convert_type(x, UNSIGNED[x.dtype.itemsize]), 0, jnp)


@jax.jit
def _sum_on_devices(arrays: list[jax.Array]) -> list[jax.Array]:
    return [*map(checksum, arrays)]


def _sum_on_host(x: np.ndarray, position: int = 0) -> int:
    """Row by row above two dims, which bounds the memory of the hashes."""
    if x.ndim > 2:
        rows = (_sum_on_host(row, (position + i) * POSITION) for i, row in enumerate(x))
        return sum(rows) % (1 << 32)
    return int(_hash_sum(np.atleast_1d(x).view(f"u{x.dtype.itemsize}"), position, np))


def _hash_sum(bits, position: int, xp):
    """Sum of the hashes of unsigned integers, each with its position.

    Args:
      position: of this array within a larger one.
      xp: numpy or jax.numpy.
    """
    positions = xp.full((1,) * bits.ndim, position % (1 << 32), xp.uint32)
    for axis, size in enumerate(bits.shape):
        shape = (size, *[1] * (bits.ndim - 1 - axis))
        index = xp.arange(size, dtype=xp.uint32).reshape(shape)
        positions = (positions + index) * xp.uint32(POSITION)
    x = bits.astype(xp.uint32) ^ positions
    for shift, factor in MURMUR:
        x = (x ^ x >> shift) * xp.uint32(factor)
    return xp.sum(x ^ x >> 16, dtype=xp.uint32)
