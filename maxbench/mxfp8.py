"""MXFP8 through XLA: 32 numbers share one power of two, along the dim that a product sums over.

A tensor is a matrix here, [..., left, right]. A product over `right` reads its row form, one over
`left` its column form; in MXFP8 these are two roundings, each made from the unquantized tensor.
Blackwell multiplies blocks as they are (cuDNN); everything else gets the same numbers from
dequantized operands, exactly.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 32


class Form(NamedTuple):
    """FP8 data and its scale: data x scale is the tensor."""

    data: jax.Array
    scale: jax.Array  # of the tensor: fp32, no dims. Of blocks: e8m0, one for each 32 of data


class Quantized(NamedTuple):
    """A tensor [..., left, right] for products over right (row), over left (col), or both."""

    row: Form | None
    col: Form | None  # of data [..., right, left], except where the backend says otherwise
    amax: jax.Array | None = None  # largest magnitude before rounding, fp32; where asked for


def quantize(x, dtype, forms=("row", "col")) -> Quantized:
    """x [..., left, right] in the forms asked for; what these sum over divides by 32.

    A block's scale is the smallest power of two that brings it into the range of dtype; 2^-127,
    the smallest there is, for zeros.
    """
    row = _blocks(x, dtype) if "row" in forms else None
    col = _blocks(jnp.swapaxes(x, -1, -2), dtype) if "col" in forms else None
    return Quantized(row, col)


def _blocks(x, dtype) -> Form:
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK).astype(jnp.float32)
    need = jnp.max(jnp.abs(blocks), -1) / float(jnp.finfo(dtype).max)
    bits = jax.lax.bitcast_convert_type(need, jnp.int32)
    # e8m0 is the exponent of fp32 alone: any mantissa carries into it.
    exponent = ((bits + 0x7FFFFF) >> 23).astype(jnp.uint8)
    inverse = jax.lax.bitcast_convert_type((254 - exponent.astype(jnp.int32)) << 23, jnp.float32)
    data = (blocks * inverse[..., None]).astype(dtype).reshape(x.shape)
    return Form(data, jax.lax.bitcast_convert_type(exponent, jnp.float8_e8m0fnu))


def operands(a: Quantized, b: Quantized, product: str) -> tuple[Form, Form]:
    """The forms that a product of matrices reads: 'nn' is a b, 'nt' is a b^T, 'tn' is a^T b."""
    return a.row if product[0] == "n" else a.col, b.row if product[1] == "t" else b.col


def gemm(a: Quantized, b: Quantized, product: str, dtype=jnp.bfloat16):
    """'nn', 'nt' or 'tn' (forward, input's and weight's gradient) of [..., left, right] matrices.

    Leading dims, of experts, are the same in both. Sums are fp32, the result is of `dtype`.
    """
    a, b = operands(a, b, product)
    batch = a.data.shape[:-2]
    flat = [x.reshape(-1, *x.shape[-2:]) for x in (a.data, b.data, a.scale, b.scale)]
    block_scaled = lambda *x: jax.nn.scaled_matmul(*x, preferred_element_type=dtype)
    y = jax.lax.platform_dependent(*flat, cuda=block_scaled, default=lambda *x: _plain(dtype, *x))
    return y.reshape(*batch, *y.shape[-2:])


def _plain(dtype, a, b, a_scale, b_scale):
    def whole(data, scale):
        blocks = data.reshape(*scale.shape, BLOCK).astype(jnp.float32)
        return (blocks * scale.astype(jnp.float32)[..., None]).reshape(data.shape)

    dims = ((2,), (2,)), ((0,), (0,))
    y = jax.lax.dot_general(whole(a, a_scale), whole(b, b_scale), dims, precision="highest")
    return y.astype(dtype)
