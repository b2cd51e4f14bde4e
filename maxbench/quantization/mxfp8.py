"""MXFP8: 32 numbers share one power of two, along the dim that a product sums over.

A product over another dim reads another rounding, which is made from the unquantized tensor too.
Blackwell multiplies blocks as they are (cuDNN); everything else gets the same numbers from
dequantized operands, exactly. All operands are e4m3, as in NVIDIA's recipe.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp

from maxbench.config.run import Run
from maxbench.quantization import QuantizedArray, Weight, transformer_engine
from maxbench.sharding.rules import WeightSharding, gather_master

BLOCK, E4M3 = 32, jnp.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Through XLA."""

    fprop_transposed, gather_along_outputs, needs_2d = True, False, True

    def quantize(self, x) -> tuple[QuantizedArray, QuantizedArray]:
        """x [..., left, right] in blocks along right, and along left."""
        return quantize(x, E4M3, -1), quantize(x, E4M3, -2)

    def product(self, a, b, over, dtype, exact=False):
        return gemm(a, b, over, dtype)

    def scales(self, ws, lead, past):
        return itertools.repeat(None), None

    def weight(self, w, place: WeightSharding, lead: int, scale) -> Weight:
        """Where a GPU's part of the master has no whole blocks, the weight travels before it is
        quantized, and not as FP8."""
        first = lead + place.gemm.batch
        outs = first + place.gemm.ins
        lasts = w.ndim - 1, outs - 1
        split = all(w.shape[dim] % BLOCK == 0 for dim in lasts)
        gather = functools.partial(gather_master, place)
        w = w if split else gather(w)
        matrix = lambda x: x.reshape(*x.shape[:first], math.prod(x.shape[first:outs]), -1)
        made = []
        for dim, last in zip((-1, -2), lasts, strict=True):
            q, scale = quantize(matrix(w), E4M3, dim)
            q = q.reshape(w.shape)
            if split:
                shape = [n // BLOCK if i == last else n for i, n in enumerate(w.shape)]
                q, scale = gather(q), matrix(gather(scale.reshape(shape)))
            made.append(QuantizedArray(q, scale))
        row, col = made
        return Weight(row, turned(col._replace(q=matrix(col.q))), self)

    def quantize_operand(self, x, scales, gradient, axes):
        return *self.quantize(x), None

    def map_arrays(self, x, move):
        return QuantizedArray(move(x.q), move(x.scale))


class OnTe(Blocks):
    """On Transformer Engine's kernels."""

    def quantize(self, x):
        return transformer_engine.blocks(x, E4M3)

    def product(self, a, b, over, dtype, exact=False):
        return transformer_engine.gemm(a, b, over, dtype, exact, blocks=True)


def arithmetic(run: Run) -> Blocks:
    return OnTe() if run.precision.backend == "te" else Blocks()


def quantize(x, dtype, dim: int) -> QuantizedArray:
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
    return QuantizedArray(q.reshape(x.shape), exponent)


def turned(x: QuantizedArray) -> QuantizedArray:
    """The transpose of matrices [..., left, right] in blocks."""
    return QuantizedArray(jnp.swapaxes(x.q, -1, -2), jnp.swapaxes(x.scale, -1, -2))


def gemm(a: QuantizedArray, b: QuantizedArray, product: str, dtype=jnp.bfloat16):
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
