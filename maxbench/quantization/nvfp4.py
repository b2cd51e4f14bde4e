"""NVFP4: e2m1 elements, an e4m3 scale for 16 of them, and one fp32 scale for the tensor.

The training recipe is that of arXiv:2509.25149 and Transformer Engine's NVFP4BlockScaling:

  activations, gradients   blocks of 16 along the contracted dim
  weights                  blocks of 16 x 16, so that fprop and dgrad read the same values
  gradients                rounded stochastically; all else to nearest even
  operands of the wgrad    multiplied by a random Hadamard matrix in groups of 16 rows, which
                           spreads outliers and cancels in the product

With the tensor scale t = amax / (6 x 448), the scale of a block is s = e4m3(block amax / 6 / t),
and an element is e2m1(x / (s t)). Blackwell multiplies blocks directly (cuDNN); other devices
compute the same products from dequantized operands, which are exact in fp32. The product of the
two tensor scales multiplies the result of a GEMM.

Elements are stored as uint8, two consecutive ones of the blocked dim in a byte, the first in the
lower four bits: neither collectives nor jax.checkpoint support e2m1. On a GPU the bytes are the
GEMM's operand without a copy.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from maxbench.config.number_formats import FORMATS
from maxbench.config.run import AXES, Run
from maxbench.quantization import SCALE, QuantizedArray, Weight, block_scaled, row_major
from maxbench.quantization.fp8_per_tensor import amax_of
from maxbench.sharding import collectives
from maxbench.sharding.rules import WeightSharding, gather_master

BLOCK, PACKING = 16, 2  # elements that share a scale; that share a byte
E4M3, E2M1 = jnp.float8_e4m3fn, jnp.float4_e2m1fn
TOP, SCALE_TOP = 6.0, 448.0  # largest e2m1 and e4m3 value
# XLA multiplies by the reciprocal of a constant divisor, rounded: written out, so that the results
# do not depend on the compiler.
BLOCK_FACTOR, TENSOR_FACTOR = np.float32(1 / TOP), np.float32(1 / (TOP * SCALE_TOP))
LARGEST = np.finfo(np.float32).max
ONE = (127 << 1) - 2  # exponent and first bit of the mantissa of 1, in fp32 less in e2m1
# Signs of the random Hadamard matrix: fixed, and Transformer Engine's.
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)


@dataclasses.dataclass(frozen=True)
class Nvfp4:
    """The Arithmetic on XLA's kernels."""

    fprop_transposed, gather_along_outputs, needs_2d, packing = True, False, True, PACKING
    fuses_addition = False
    slot_multiple = FORMATS["nvfp4"].slot_multiple

    def scales(self, ws: Any, lead: int, past: Any) -> Any:
        """Iterates over the amax of each weight over all its parts, [layers]."""
        amaxes = [amax_of(w, tuple(range(lead, w.ndim))) for w in ws]
        return iter(collectives.pmax(jnp.stack(amaxes), *AXES[1:])), None

    def weight(self, w: Any, sharding: WeightSharding, lead: int, scale: Any) -> Weight:
        """One all-gather serves both operands, which have the same values.

        If this GPU's part of the master weight has no whole blocks, the weight is all-gathered in
        the compute dtype and quantized afterwards.
        """
        first, outs = sharding.matrix_dims(lead)
        matrix = lambda x: x.reshape(*x.shape[:first], math.prod(x.shape[first:outs]), -1)

        def divided(ins: int, out: int) -> list[int]:  # the shape of w with smaller blocked dims
            shape = list(w.shape)
            shape[outs - 1] //= ins
            shape[-1] //= out
            return shape

        whole_blocks = all(n % BLOCK == 0 for n in (w.shape[outs - 1], w.shape[-1]))
        gather = functools.partial(gather_master, sharding) if whole_blocks else lambda x: x
        w = w if whole_blocks else gather_master(sharding, w)
        q, tiles = quantize_tiles(matrix(w), scale.reshape(*scale.shape, *[1] * (first - lead)))
        q = gather(q.reshape(divided(1, PACKING)))
        tiles = matrix(gather(tiles.reshape(divided(BLOCK, BLOCK)))) if whole_blocks else tiles
        transposed, tensor = jnp.swapaxes(tiles, -1, -2), tensor_scale(scale)
        dgrad = QuantizedArray(q, _repeat_rows(tiles), tensor)
        fprop = QuantizedArray(transpose_packed(matrix(q)), _repeat_rows(transposed), tensor)
        return Weight(dgrad, fprop, self)

    def quantize_operand(self, x: jax.Array, scales: Any, gradient: bool, axes: Any) -> Any:
        # Otherwise XLA would write x in fp32 for the kernels that read it.
        x = jax.lax.optimization_barrier(x)
        rotated = hadamard(x)
        return quantize(x, -1, gradient, axes), quantize(rotated, -2, gradient, axes), None

    def map_arrays(self, operand: Any, move: Any) -> Any:
        return operand._replace(q=move(operand.q), scale=move(operand.scale))

    def product(self, a: Any, b: Any, over: Any, dtype: Any, exact: bool = False) -> jax.Array:
        return gemm(a, b, over, dtype)


def arithmetic(run: Run) -> Nvfp4:
    return Nvfp4()


def tensor_scale(amax: jax.Array) -> jax.Array:
    """amax / (6 x 448), fp32; 1 for a tensor of zeros."""
    scale = amax * TENSOR_FACTOR
    return jnp.where(scale == 0, 1, scale)


def _block_scale(block_amax, tensor):
    """e4m3 scales of blocks, and the factor that brings their elements into e2m1's range.

    XLA's conversion to e4m3 does not saturate: without the minimum, rounding in the two products
    could exceed 448, the scale of the block that has the tensor's amax.
    """
    encode = jnp.minimum(1 / tensor, LARGEST)
    scale = jnp.minimum(block_amax * (encode * BLOCK_FACTOR), SCALE_TOP).astype(E4M3)
    decode = scale.astype(jnp.float32) * tensor
    return scale, jnp.where(decode > 0, jnp.minimum(1 / decode, LARGEST), 0)


def _codes(y, random=None):
    """y, saturated to 6 and rounded, as the four bits of e2m1 in uint32.

    From 1 on, e2m1 has fp32's exponent and the first bit of its mantissa, 22 bits further up, and
    below 1 multiples of 0.5. Integers alone round exactly.

    Args:
      random: 16 random bits, of stochastic rounding; None rounds to nearest even.
    """
    magnitude = jnp.minimum(jnp.abs(y), TOP)
    bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint32)
    if random is None:
        normal = bits(magnitude) + (bits(magnitude) >> 22 & 1) + jnp.uint32(0x1FFFFF)
        subnormal = bits(magnitude + np.float32(2**22)) & 3  # 2^22 has multiples of 0.5 after it
    else:
        normal = bits(magnitude) + (random << 6)
        subnormal = (magnitude * np.float32(2**17)).astype(jnp.uint32) + random >> 16
    code = jnp.where(magnitude < 1, subnormal, (normal >> 22) - ONE)
    return code | bits(y) >> 28 & 8


def _pack(y, dim: int, random=(None, None)):
    """e2m1 elements of y, two consecutive ones of a negative dim in a byte."""
    after = y.shape[y.ndim + dim + 1 :]
    pairs = y.reshape(*y.shape[:dim], y.shape[dim] // PACKING, PACKING, *after)
    low, high = (
        _codes(jax.lax.index_in_dim(pairs, i, pairs.ndim + dim, keepdims=False), random[i])
        for i in range(PACKING)
    )
    # Otherwise XLA would transpose y for a GEMM that reads the bytes transposed.
    return row_major((low | high << 4).astype(jnp.uint8))


def random_bits(seed: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Two independent random numbers of 16 bits for each element of a shape, uint32.

    A hash of the element's index and the seed (the finalizer of MurmurHash3): a few integer
    operations in the kernel that reads it, no memory.
    """
    index, stride = jnp.uint32(0), 1
    for dim in reversed(range(len(shape))):
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride % 2**32)
        stride *= shape[dim]
    x = _mix(index ^ _mix(seed))
    return x & 0xFFFF, x >> 16


def _mix(x):
    x = (x ^ x >> 16) * jnp.uint32(0x85EBCA6B)
    x = (x ^ x >> 13) * jnp.uint32(0xC2B2AE35)
    return x ^ x >> 16


def _seed(amax, dim: int, axes):
    """The seed of a tensor's stochastic rounding: its amax, and this GPU's position among those
    that share it.

    The amax differs between steps, microbatches, layers and GEMMs, and a repeated step has the same
    one. So the noise is a function of the step alone, and no counter is passed to every GEMM.
    """
    seed = jax.lax.bitcast_convert_type(amax, jnp.uint32) + jnp.uint32(-dim)
    for axis in axes:
        seed = seed * jnp.uint32(0x9E3779B1) + jnp.asarray(collectives.axis_index(axis), jnp.uint32)
    return seed


def quantize(x: jax.Array, dim: int, stochastic: bool = False, axes: Any = ()) -> QuantizedArray:
    """x in blocks of 16 along one of the last two dims, whose size is a multiple of 16.

    Args:
      dim: -1 or -2.
      stochastic: rounds up with the probability of the distance from the value below.
      axes: mesh axes whose GPUs agree on the tensor scale.
    """
    grouped = x.reshape(*x.shape[:dim], -1, BLOCK, *x.shape[x.ndim + dim + 1 :])
    # Otherwise XLA would read x again for the amax of the tensor.
    block_amax = jax.lax.optimization_barrier(jnp.max(jnp.abs(grouped), grouped.ndim + dim))
    block_amax = block_amax.astype(jnp.float32)
    amax = checkpoint_name(collectives.pmax(jnp.max(block_amax), *axes), SCALE)
    tensor = tensor_scale(amax)
    scale, factor = _block_scale(block_amax, tensor)
    y = (grouped.astype(jnp.float32) * jnp.expand_dims(factor, dim)).reshape(x.shape)
    if not stochastic:
        return QuantizedArray(_pack(y, dim), scale, tensor)
    shape = list(x.shape)
    shape[dim] //= PACKING
    random = random_bits(_seed(amax, dim, axes), tuple(shape))
    return QuantizedArray(_pack(y, dim, random), scale, tensor)


def quantize_tiles(w: jax.Array, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Matrices w [..., ins, outs] in blocks of 16 x 16, from the amax of each matrix [...].

    Returns:
      The elements, two consecutive ones of outs in a byte; the scales [..., ins / 16, outs / 16].
    """
    *batch, ins, outs = w.shape
    tiles = w.reshape(*batch, ins // BLOCK, BLOCK, outs // BLOCK, BLOCK)
    tensor = tensor_scale(amax)[..., None, None]
    scale, factor = _block_scale(amax_of(tiles, (-3, -1)), tensor)
    y = tiles.astype(jnp.float32) * factor[..., :, None, :, None]
    return _pack(y.reshape(w.shape), -1), scale


def _repeat_rows(tiles):
    """Each scale of blocks of 16 x 16 [..., n, m] for all rows of its block [..., 16 n, m]."""
    *batch, rows, columns = tiles.shape
    repeated = jnp.broadcast_to(tiles[..., None, :], (*batch, rows, BLOCK, columns))
    return repeated.reshape(*batch, rows * BLOCK, columns)


def hadamard(x: jax.Array) -> jax.Array:
    """x [..., left, right], whose groups of 16 along left are multiplied by the random Hadamard
    matrix; in the dtype of x. Orthogonal: the products of two such arrays over left are those of
    the arrays."""
    *batch, left, right = x.shape
    groups = x.reshape(*batch, left // BLOCK, 1, BLOCK, right)
    # A sum, because XLA would call a GEMM of 16 rows for a dot. The products are exact.
    products = groups * hadamard_matrix()[..., None].astype(x.dtype)
    rotated = jnp.sum(products, -2, dtype=jnp.float32)
    return jax.lax.optimization_barrier(rotated.reshape(x.shape).astype(x.dtype))


def hadamard_matrix() -> np.ndarray:
    """The random Hadamard matrix [16, 16], fp32: Sylvester's, normalized, with random signs."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < BLOCK:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix * SIGNS / np.sqrt(np.float32(BLOCK))


def transpose_packed(q: jax.Array) -> jax.Array:
    """Transposes matrices of packed elements [..., ins, outs / 2] to [..., outs, ins / 2]."""
    above, below = q[..., 0::2, :], q[..., 1::2, :]
    columns = above & 0xF | below << 4, above >> 4 | below & 0xF0
    return jnp.swapaxes(jnp.stack(columns, -1).reshape(*above.shape[:-1], -1), -1, -2)


def unpack(q: jax.Array) -> jax.Array:
    """The fp32 values of packed elements [..., n / 2] -> [..., n]."""
    codes = jnp.stack((q & 0xF, q >> 4), -1).reshape(*q.shape[:-1], -1)
    steps = (codes & 7).astype(jnp.float32)
    magnitude = jnp.where(steps < 4, steps / 2, jnp.where(steps < 6, steps - 2, 2 * steps - 8))
    return jnp.where(codes > 7, -magnitude, magnitude)


def gemm(a: QuantizedArray, b: QuantizedArray, over: str, dtype: Any = jnp.bfloat16) -> jax.Array:
    """As block_scaled.gemm."""
    assert a.tensor_scale is not None
    assert b.tensor_scale is not None

    def kernel(a, b, *scales):
        elements = lambda q: jax.lax.bitcast_convert_type(q, E2M1).reshape(*q.shape[:-1], -1)
        a, b = elements(a), elements(b)
        return jax.nn.scaled_matmul(a, b, *scales, preferred_element_type=dtype)

    y = block_scaled.gemm(a, b, over, dtype, kernel, _dequantize)
    # After rounding to the dtype of the result, so that the kernel which reads y multiplies.
    return (y.astype(jnp.float32) * (a.tensor_scale * b.tensor_scale)).astype(dtype)


def _dequantize(q, scale):
    blocks = unpack(q).reshape(*scale.shape, BLOCK)
    values = blocks * scale.astype(jnp.float32)[..., None]
    return values.reshape(*q.shape[:-1], -1)
