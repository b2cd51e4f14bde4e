"""MXFP8 through XLA: 32 numbers share one power of two, along the dim that a product sums over.

A product over another dim reads another rounding, which is made from the unquantized tensor too.
Blackwell multiplies blocks as they are (cuDNN); everything else gets the same numbers from
dequantized operands, exactly.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 32


class Scaled(NamedTuple):
    """A tensor quantized to FP8: q x scale."""

    q: jax.Array
    # Of the tensor: fp32 without dims. Of blocks: like q, one dim 32 times smaller, the bits of
    # e8m0 as uint8 (remat and collectives may not know the type).
    scale: jax.Array


def quantize(x, dtype, dim: int) -> Scaled:
    """x in blocks of 32 along a dim, which divides by that.

    A block's scale is the smallest power of two that brings it into the range of dtype; 2^-127,
    the smallest there is, for zeros.
    """
    dim %= x.ndim
    blocks = x.reshape(*x.shape[:dim], -1, BLOCK, *x.shape[dim + 1 :]).astype(jnp.float32)
    need = jnp.max(jnp.abs(blocks), dim + 1) / float(jnp.finfo(dtype).max)
    bits = jax.lax.bitcast_convert_type(need, jnp.int32)
    # e8m0 is the exponent of fp32 alone: any mantissa carries into it.
    exponent = ((bits + 0x7FFFFF) >> 23).astype(jnp.uint8)
    inverse = jax.lax.bitcast_convert_type((254 - exponent.astype(jnp.int32)) << 23, jnp.float32)
    q = (blocks * jnp.expand_dims(inverse, dim + 1)).astype(dtype)
    return Scaled(q.reshape(x.shape), exponent)


def turned(x: Scaled) -> Scaled:
    """The transpose of matrices [..., left, right] in blocks."""
    return Scaled(jnp.swapaxes(x.q, -1, -2), jnp.swapaxes(x.scale, -1, -2))


def gemm(a: Scaled, b: Scaled, product: str, dtype=jnp.bfloat16):
    """A product of matrices [..., left, right] with the same leading dims: 'nt' is a b^T, over
    right, and 'tn' a^T b, over left. Sums are fp32, the result is of `dtype`."""
    if product == "tn":
        a, b = turned(a), turned(b)
    batch = a.q.shape[:-2]
    flat = [x.reshape(-1, *x.shape[-2:]) for x in (a.q, b.q, a.scale, b.scale)]
    flat[2:] = [jax.lax.bitcast_convert_type(x, jnp.float8_e8m0fnu) for x in flat[2:]]
    block_scaled = lambda *x: jax.nn.scaled_matmul(*x, preferred_element_type=dtype)
    y = jax.lax.platform_dependent(*flat, cuda=block_scaled, default=lambda *x: _plain(dtype, *x))
    return y.reshape(*batch, *y.shape[-2:])


def _plain(dtype, a, b, a_scale, b_scale):
    def whole(q, scale):
        blocks = q.reshape(*scale.shape, BLOCK).astype(jnp.float32)
        return (blocks * scale.astype(jnp.float32)[..., None]).reshape(q.shape)

    dims = ((2,), (2,)), ((0,), (0,))
    y = jax.lax.dot_general(whole(a, a_scale), whole(b, b_scale), dims, precision="highest")
    return y.astype(dtype)
