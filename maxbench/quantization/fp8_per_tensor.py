"""FP8 with one scale per tensor: current and delayed scaling.

  current   the scale of a tensor is computed from its own amax, when it is quantized
  delayed   the scale is computed from the largest amax of past steps: the amax history, which is
            non-trainable state of the step (step/state.py, update_amax_history)

Operands of the forward pass are e4m3, gradients are e5m2 (arXiv:2209.05433), as in Transformer
Engine's Float8CurrentScaling and DelayedScaling recipes with Format.HYBRID. Scales are rounded up
to powers of two, which makes scaling exact (TE: power_2_scale).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxbench.config.number_formats import FORMATS
from maxbench.config.run import AXES, Run
from maxbench.quantization import SCALE, QuantizedArray, Weight, transformer_engine
from maxbench.sharding import collectives
from maxbench.sharding.rules import WeightSharding, gather_master

FORWARD, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2


@dataclasses.dataclass(frozen=True)
class PerTensor:
    """The Arithmetic on XLA's kernels: XLA rewrites a dot of dequantized operands into an FP8 GEMM.

    gather_along_outputs is False in a pipeline: zero_overlap.py slices a weight along either dim,
    and a stage stores one layout of it.
    """

    delayed: bool
    gather_along_outputs: bool = True
    fprop_transposed, needs_2d, fuses_addition, packing = True, False, True, 1
    slot_multiple = FORMATS["current"].slot_multiple

    def quantize(self, x: jax.Array, dtype: Any, scale: Any) -> Any:
        """x in an FP8 dtype, and its amax if scaling is delayed, else None."""
        q = quantize(x, scale, dtype, saturate=self.delayed)
        return q, amax_of(x) if self.delayed else None

    def product(self, a: Any, b: Any, over: Any, dtype: Any, exact: bool = False) -> jax.Array:
        a, b = (dequantize(x.q, x.scale, jnp.bfloat16) for x in (a, b))
        precision = jax.lax.Precision.HIGHEST if exact else None
        return jax.lax.dot_general(a, b, over, precision, dtype)

    def scales(self, ws: Any, lead: int, past: Any) -> Any:
        """Current: iterates over scales [layers]; delayed: over scales of x, dy, w [layers, 3]."""
        amaxes = [amax_of(w, tuple(range(lead, w.ndim))) for w in ws]
        amax = collectives.pmax(jnp.stack(amaxes), *AXES[1:])  # one all-reduce for all weights
        if past is None:
            return iter(_scale(amax, _top(FORWARD))), amax
        # All at once: one by one they would be hundreds of kernels over a few numbers each.
        scales = _scale(past, jnp.array([_top(FORWARD), _top(GRADIENT), _top(FORWARD)]))
        return iter(scales.swapaxes(0, 1) if lead else scales.reshape(-1, 3)), amax

    def weight(self, w: Any, sharding: WeightSharding, lead: int, scale: Any) -> Weight:
        xdy_scales, scale = (scale[..., :2], scale[..., 2]) if self.delayed else (None, scale)
        per_layer = scale.reshape(scale.shape + (1,) * (w.ndim - lead))
        q = gather_master(sharding, quantize(w, per_layer, FORWARD, saturate=self.delayed))
        dgrad, gemm = QuantizedArray(q, scale), sharding.gemm
        if not self.gather_along_outputs:
            return Weight(dgrad, None, self, xdy_scales, gemm)
        fprop = self.make_fprop_operand(dgrad, gemm, lead)
        first, outs = sharding.matrix_dims(lead)
        # fsdp splits ins: split outs instead, once per step and not in each layer.
        for axes in sharding.compute_axes[first:outs]:
            if "fsdp" in axes:
                fprop = fprop._replace(q=collectives.all_to_all(fprop.q, axes, first, first + 1))
        return Weight(dgrad, fprop, self, xdy_scales, gemm)

    def make_fprop_operand(self, dgrad_operand: Any, gemm: Any, lead: int = 0) -> Any:
        first, shape = lead + gemm.batch, dgrad_operand.q.shape
        matrices = *shape[:first], math.prod(shape[first : first + gemm.ins]), -1
        return dgrad_operand._replace(q=jnp.swapaxes(dgrad_operand.q.reshape(matrices), -1, -2))

    def quantize_operand(self, x: jax.Array, scales: Any, gradient: bool, axes: Any) -> Any:
        dtype = GRADIENT if gradient else FORWARD
        if self.delayed:
            scale = scales[int(gradient)]
        else:
            scale = checkpoint_name(scale_of(x, dtype, axes), SCALE)
        (q, amax), barrier = self.quantize(x, dtype, scale), jax.lax.optimization_barrier
        # In a pipeline XLA would delay the amax, and read x a second time for it.
        q, amax = (barrier(q), amax) if self.gather_along_outputs else barrier((q, amax))
        amax = checkpoint_name(amax, SCALE) if self.delayed else None
        operand = QuantizedArray(q, scale)
        return operand, operand, amax

    def map_arrays(self, operand: Any, move: Any) -> Any:
        return QuantizedArray(move(operand.q), operand.scale)


class TePerTensor(PerTensor):
    """The Arithmetic on Transformer Engine's kernels."""

    needs_2d, fuses_addition = True, False

    def quantize(self, x: jax.Array, dtype: Any, scale: Any) -> Any:
        return transformer_engine.quantize_per_tensor(x, dtype, scale)

    def product(self, a: Any, b: Any, over: Any, dtype: Any, exact: bool = False) -> jax.Array:
        return transformer_engine.gemm(a, b, over, dtype, exact)


def arithmetic(run: Run) -> PerTensor:
    kind = TePerTensor if run.precision.backend == "te" else PerTensor
    return kind(run.format.amax_history, gather_along_outputs=run.layout.pp == 1)


def scale_of(x: jax.Array, dtype: Any, axes: Any = ()) -> jax.Array:
    """The smallest power of two s such that x / s fits an FP8 dtype, over all GPUs of mesh axes;
    fp32, 1 if x is all zeros."""
    return _scale(collectives.pmax(amax_of(x), *axes), _top(dtype))


def amax_of(x: jax.Array, dims: Any = None) -> jax.Array:
    """max |x| over dims (default: all), fp32."""
    return jnp.max(jnp.abs(x.astype(jnp.float32)), dims)


def _top(dtype) -> float:
    return float(jnp.finfo(dtype).max)


def _scale(amax, top):
    bits = jax.lax.bitcast_convert_type(amax / top, jnp.int32)
    # Round up to a power of two: carry any mantissa into the exponent, then clear the mantissa.
    scale = jax.lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)
    return jnp.where(scale > 0, scale, 1)


def quantize(x: jax.Array, scale: Any, dtype: Any, saturate: bool = False) -> Any:
    """x / scale, rounded to an FP8 dtype. `saturate` clips to its range first: with delayed scaling
    the scale follows from past tensors, and x / scale may exceed the range."""
    x = x * (1 / scale).astype(x.dtype)
    top = _top(dtype)
    return (jnp.clip(x, -top, top) if saturate else x).astype(dtype)


def dequantize(q: Any, scale: Any, dtype: Any) -> jax.Array:
    """q x scale. XLA's GEMM rewriter matches this pattern before a dot: convert, multiply by a
    broadcast scalar."""
    return q.astype(dtype) * scale.astype(dtype)


def update_amax_history(history: Any, amax: Any) -> jax.Array:
    """Replaces the oldest step of the history by this step's amax [slots, gemms, 3].

    Delayed scaling's state is the amax of x, dy and w of each GEMM in past steps, oldest first:
    fp32 [slots, gemms, 3, steps], zeros at first; gemms in the order of the weights in a layer's
    tree.
    """
    return jnp.concatenate([history[..., 1:], amax[..., None]], -1)
