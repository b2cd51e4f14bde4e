"""MXFP8: 32 consecutive elements along the contracted dim share one power-of-two scale (e8m0).

The OCP Microscaling format (MX v1.0), with e4m3 elements for activations, weights and gradients, as
in Transformer Engine's MXFP8BlockScaling recipe. GEMMs that contract different dims of a tensor
need different roundings of it, so each tensor is quantized twice, from the unquantized values.
Blackwell multiplies blocks directly (cuDNN); other devices get the same numbers, exactly, from
dequantized operands.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from maxbench.config.number_formats import FORMATS
from maxbench.config.run import Run
from maxbench.quantization import QuantizedArray, Weight, block_scaled, transformer_engine
from maxbench.sharding.rules import WeightSharding, gather_master

BLOCK, E4M3 = 32, jnp.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Mxfp8:
    """The Arithmetic on XLA's kernels."""

    fprop_transposed, gather_along_outputs, needs_2d, packing = True, False, True, 1
    fuses_addition = False
    slot_multiple = FORMATS["mxfp8"].slot_multiple

    def quantize(self, x: jax.Array) -> tuple[QuantizedArray, QuantizedArray]:
        """x [..., left, right] in blocks along right, and in blocks along left."""
        return quantize(x, E4M3, -1), quantize(x, E4M3, -2)

    def product(self, a: Any, b: Any, over: Any, dtype: Any, exact: bool = False) -> jax.Array:
        return gemm(a, b, over, dtype)

    def scales(self, ws: Any, lead: int, past: Any) -> Any:
        return itertools.repeat(None), None

    def weight(self, w: Any, sharding: WeightSharding, lead: int, scale: Any) -> Weight:
        """If this GPU's part of the master weight has no whole blocks, the weight is all-gathered
        in the compute dtype and quantized afterwards."""
        first, outs = sharding.matrix_dims(lead)
        blocked_dims = w.ndim - 1, outs - 1
        quantize_first = all(w.shape[dim] % BLOCK == 0 for dim in blocked_dims)
        gather = functools.partial(gather_master, sharding)
        w = w if quantize_first else gather(w)
        matrix = lambda x: x.reshape(*x.shape[:first], math.prod(x.shape[first:outs]), -1)
        operands = []
        for dim, blocked in zip((-1, -2), blocked_dims, strict=True):
            quantized = quantize(matrix(w), E4M3, dim)
            q, scale = quantized.q.reshape(w.shape), quantized.scale
            if quantize_first:
                shape = [n // BLOCK if i == blocked else n for i, n in enumerate(w.shape)]
                q, scale = gather(q), matrix(gather(scale.reshape(shape)))
            operands.append(QuantizedArray(q, scale))
        dgrad, fprop = operands
        return Weight(dgrad, block_scaled.transpose(fprop._replace(q=matrix(fprop.q))), self)

    def quantize_operand(self, x: jax.Array, scales: Any, gradient: bool, axes: Any) -> Any:
        return *self.quantize(x), None

    def map_arrays(self, operand: Any, move: Any) -> Any:
        return QuantizedArray(move(operand.q), move(operand.scale))


class TeMxfp8(Mxfp8):
    """The Arithmetic on Transformer Engine's kernels."""

    def quantize(self, x: jax.Array) -> Any:
        return transformer_engine.quantize_mxfp8(x, E4M3)

    def product(self, a: Any, b: Any, over: Any, dtype: Any, exact: bool = False) -> jax.Array:
        return transformer_engine.gemm(a, b, over, dtype, exact, blocks=True)


def arithmetic(run: Run) -> Mxfp8:
    return TeMxfp8() if run.precision.backend == "te" else Mxfp8()


def quantize(x: jax.Array, dtype: Any, dim: int) -> QuantizedArray:
    """x in blocks of 32 along a dim whose size is a multiple of 32.

    The scale of a block is the smallest power of two that brings its amax into the range of dtype;
    2^-127, e8m0's minimum, for a block of zeros.
    """
    dim %= x.ndim
    blocks = x.reshape(*x.shape[:dim], -1, BLOCK, *x.shape[dim + 1 :]).astype(jnp.float32)
    scale = jnp.max(jnp.abs(blocks), dim + 1) / float(jnp.finfo(dtype).max)
    bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
    # e8m0 is fp32's exponent without its mantissa: round up, by a carry from any mantissa.
    exponent = ((bits + 0x7FFFFF) >> 23).astype(jnp.uint8)
    inverse = jax.lax.bitcast_convert_type((254 - exponent.astype(jnp.int32)) << 23, jnp.float32)
    q = (blocks * jnp.expand_dims(inverse, dim + 1)).astype(dtype)
    return QuantizedArray(q.reshape(x.shape), exponent)


def gemm(a: QuantizedArray, b: QuantizedArray, over: str, dtype: Any = jnp.bfloat16) -> jax.Array:
    """As block_scaled.gemm."""

    def kernel(a, b, *scales):
        scales = (jax.lax.bitcast_convert_type(x, jnp.float8_e8m0fnu) for x in scales)
        return jax.nn.scaled_matmul(a, b, *scales, preferred_element_type=dtype)

    return block_scaled.gemm(a, b, over, dtype, kernel, _dequantize)


def _dequantize(q, scale):
    scale = jax.lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu)
    blocks = q.reshape(*scale.shape, BLOCK).astype(jnp.float32)
    return (blocks * scale.astype(jnp.float32)[..., None]).reshape(q.shape)
