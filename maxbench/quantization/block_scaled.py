"""GEMMs of operands whose elements share scales in blocks along the contracted dim."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxbench.quantization import QuantizedArray


def transpose(x: QuantizedArray) -> QuantizedArray:
    """Transposes matrices [..., left, right]; blocks along right become blocks along left."""
    return x._replace(q=jnp.swapaxes(x.q, -1, -2), scale=jnp.swapaxes(x.scale, -1, -2))


def gemm(
    a: QuantizedArray,
    b: QuantizedArray,
    over: str,
    dtype: Any,
    block_scaled: Callable[..., jax.Array],
    dequantize: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """GEMM of matrices [..., left, right] with equal leading dims, fp32 accumulation.

    Args:
      over: 'nt' is a b^T, of blocks along right; 'tn' is a^T b, of blocks along left.
      dtype: of the result.
      block_scaled: (a, b, a_scale, b_scale) -> a b^T of [batch, left, right], by a GPU's kernel.
      dequantize: (q, scale) -> fp32 values, which other devices multiply.
    """
    if over == "tn":
        a, b = transpose(a), transpose(b)
    batch = a.q.shape[:-2]
    flat = [x.reshape(-1, *x.shape[-2:]) for x in (a.q, b.q, a.scale, b.scale)]
    dequantized = functools.partial(_dequantized_gemm, dtype, dequantize)
    y = jax.lax.platform_dependent(*flat, cuda=block_scaled, default=dequantized)
    return y.reshape(*batch, *y.shape[-2:])


def _dequantized_gemm(dtype, dequantize, a, b, a_scale, b_scale):
    dims = ((2,), (2,)), ((0,), (0,))
    a, b = dequantize(a, a_scale), dequantize(b, b_scale)
    return jax.lax.dot_general(a, b, dims, precision="highest").astype(dtype)
