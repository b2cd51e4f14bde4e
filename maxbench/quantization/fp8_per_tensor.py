"""FP8 with one scale for a tensor.

  current   from its own largest magnitude at the moment of use
  delayed   from the largest of past steps, a state that the step keeps (start, remember)

Operands of the forward pass are e4m3, gradients e5m2, as in NVIDIA's recipes.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name as keep

from maxbench.config.run import AXES, Run
from maxbench.quantization import SCALE, QuantizedArray, Weight, transformer_engine
from maxbench.sharding import collectives
from maxbench.sharding.rules import WeightSharding, gather_master

FORWARD, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2


@dataclasses.dataclass(frozen=True)
class PerTensor:
    """Through XLA, which makes an FP8 GEMM of a product of dequantized operands."""

    delayed: bool
    gather_along_outputs: bool = (
        True  # not in a pipeline: pieces.py cuts either dim, and one form is kept
    )
    fprop_transposed, needs_2d = True, False  # Hopper sums over the last dim of both operands only

    def quantize(self, x, dtype, scale):
        """x in an FP8 dtype, and where scaling is delayed its largest magnitude."""
        q = quantize(x, scale, dtype, saturate=self.delayed)
        return q, amax_of(x) if self.delayed else None

    def product(self, a, b, over, dtype, exact=False):
        a, b = (dequantize(x.q, x.scale, jnp.bfloat16) for x in (a, b))
        precision = jax.lax.Precision.HIGHEST if exact else None
        return jax.lax.dot_general(a, b, over, precision, dtype)

    def scales(self, ws, lead, past):
        amax = [amax_of(w, tuple(range(lead, w.ndim))) for w in ws]
        amax = collectives.pmax(jnp.stack(amax), *AXES[1:])  # one all-reduce
        if past is None:
            return iter(_scale(amax, _top(FORWARD))), amax
        # All at once: one by one they would be hundreds of kernels for a handful of numbers.
        scales = _scale(past, jnp.array([_top(FORWARD), _top(GRADIENT), _top(FORWARD)]))
        return iter(scales.swapaxes(0, 1) if lead else scales.reshape(-1, 3)), amax

    def weight(self, w, place: WeightSharding, lead: int, scale) -> Weight:
        old, scale = (scale[..., :2], scale[..., 2]) if self.delayed else (None, scale)
        shaped = scale.reshape(scale.shape + (1,) * (w.ndim - lead))
        q = gather_master(place, quantize(w, shaped, FORWARD, saturate=self.delayed))
        row, gemm, first = QuantizedArray(q, scale), place.gemm, lead + place.gemm.batch
        col = self.make_fprop_operand(row, gemm, lead) if self.gather_along_outputs else None
        # Once a step, not in each layer.
        if self.gather_along_outputs and ("fsdp",) in place.compute_axes[first : first + gemm.ins]:
            col = col._replace(q=collectives.all_to_all(col.q, "fsdp", first, first + 1))
        return Weight(row, col, self, old, gemm)

    def make_fprop_operand(self, row, gemm, lead=0):
        first, shape = lead + gemm.batch, row.q.shape
        matrices = *shape[:first], math.prod(shape[first : first + gemm.ins]), -1
        return row._replace(q=jnp.swapaxes(row.q.reshape(matrices), -1, -2))

    def quantize_operand(self, x, scales, gradient, axes):
        dtype = GRADIENT if gradient else FORWARD
        scale = scales[int(gradient)] if self.delayed else keep(scale_of(x, dtype, axes), SCALE)
        (q, amax), held = self.quantize(x, dtype, scale), jax.lax.optimization_barrier
        # In a pipeline XLA would put the maximum off, and read x once more for it.
        q, amax = (held(q), amax) if self.gather_along_outputs else held((q, amax))
        amax = keep(amax, SCALE) if self.delayed else None
        q = QuantizedArray(q, scale)
        return q, q, amax

    def map_arrays(self, x, move):
        return QuantizedArray(move(x.q), x.scale)


class OnTe(PerTensor):
    """On Transformer Engine's kernels."""

    needs_2d = True

    def quantize(self, x, dtype, scale):
        return transformer_engine.quantize(x, dtype, scale)

    def product(self, a, b, over, dtype, exact=False):
        return transformer_engine.gemm(a, b, over, dtype, exact)


def arithmetic(run: Run) -> PerTensor:
    kind = OnTe if run.precision.backend == "te" else PerTensor
    return kind(run.format.amax_history, gather_along_outputs=run.layout.pp == 1)


def scale_of(x, dtype, axes=()):
    """The smallest power of two that brings x, on all GPUs of mesh axes, into the range of an FP8
    dtype: fp32; 1 for zeros."""
    return _scale(collectives.pmax(amax_of(x), *axes), _top(dtype))


def amax_of(x, dims=None):
    return jnp.max(jnp.abs(x.astype(jnp.float32)), dims)


def _top(dtype) -> float:
    return float(jnp.finfo(dtype).max)


def _scale(amax, top):
    bits = jax.lax.bitcast_convert_type(amax / top, jnp.int32)
    # Up to the next power of two: carry any mantissa into the exponent, then drop it.
    scale = jax.lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)
    return jnp.where(scale > 0, scale, 1)


def quantize(x, scale, dtype, saturate: bool = False):
    """x / scale, rounded to an FP8 dtype. `saturate`: the scale is not of x itself, which may be
    out of range."""
    x = x * (1 / scale).astype(x.dtype)
    top = _top(dtype)
    return (jnp.clip(x, -top, top) if saturate else x).astype(dtype)


def dequantize(q, scale, dtype):
    """q x scale. XLA looks for this before a product: convert, multiply with a scalar."""
    return q.astype(dtype) * scale.astype(dtype)


def init_amax_history(slots: int, gemms: int, steps: int):
    """Delayed scaling's state: the largest magnitudes of x, dy and w of each GEMM, oldest first.

    fp32 [slots, gemms, 3, steps]; gemms in the order of the weights in a layer's tree.
    """
    return jnp.zeros((slots, gemms, 3, steps), jnp.float32)


def update_amax_history(past, amax):
    """The state with this step's magnitudes [slots, gemms, 3] in the place of the oldest."""
    return jnp.concatenate([past[..., 1:], amax[..., None]], -1)
