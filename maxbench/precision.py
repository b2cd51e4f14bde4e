"""Number formats of matrix products: one dot for bf16, fp32 and fp8.

FP8 exists around a GEMM only: weights and activations elsewhere are bf16. The recipe is per-tensor
current scaling, as NVIDIA's Hopper recipes name it: a tensor's scale comes from its own largest
magnitude at the moment of use, so there is no state. Operands of the forward pass are e4m3,
gradients e5m2; all three GEMMs of a layer accumulate in fp32 and return bf16.

A scale is a power of two. Dividing by it and multiplying with it are then exact in bf16, rounding
to FP8 is the only error, and a product of dequantised operands is the same number whether it is
computed in FP8 or in bf16: XLA's GPU compiler turns it into an FP8 GEMM, a CPU does not.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name as keep

# Names of the GEMMs that dtype=fp8 means, dense or of experts. All others keep the dtype of their
# operands: the router (fp32), the logits and the products inside attention (bf16).
FP8_GEMMS = frozenset({"qkv", "out", "up", "down"})
FORWARD, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2
SCALE = "scale"  # checkpoint name of scales: a few bytes that save a pass over a tensor


def dot(x, w, ins: int, batch: int = 0, *, gemm: str, dtype: str, saved: str = ""):
    """x @ w over `ins` dims, [batch..., rows..., ins...] @ [batch..., ins..., outs...].

    Args:
      x, w: of one dtype; for FP8, bf16.
      gemm: the name of the product; those in FP8_GEMMS are FP8 where `dtype` is 'fp8'.
      dtype: of the run, config.Precision.dtype.
      saved: name under which a remat policy may save what the backward pass needs of x: x, or in
        FP8 its quantized form alone.

    Returns:
      The product [batch..., rows..., outs...] in the dtype of x. In FP8 each GPU scales by what it
      holds: parts of one tensor on different GPUs have scales of their own.
    """
    if dtype == "fp8" and gemm in FP8_GEMMS:
        return _fp8_dot(x, w, ins, batch, saved)
    return _product(keep(x, saved) if saved else x, w, ins, batch)


def _product(x, w, ins, batch):
    lead, rows = tuple(range(batch)), x.ndim - ins
    dims = (tuple(range(rows, x.ndim)), tuple(range(batch, batch + ins)))
    return jax.lax.dot_general(x, w, (dims, (lead, lead)))


def scale_of(x, dtype):
    """The smallest power of two that brings x into the range of an FP8 dtype, fp32; 1 for zeros."""
    need = jnp.max(jnp.abs(x)).astype(jnp.float32) / float(jnp.finfo(dtype).max)
    bits = jax.lax.bitcast_convert_type(need, jnp.int32)
    # Up to the next power of two: carry any mantissa into the exponent, then drop it.
    scale = jax.lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)
    return jnp.where(scale > 0, scale, 1)


def quantize(x, scale, dtype):
    """x / scale, rounded to an FP8 dtype."""
    return (x * (1 / scale).astype(x.dtype)).astype(dtype)


def dequantize(q, scale, dtype):
    """q x scale. XLA looks for this before a product: convert, multiply with a scalar."""
    return q.astype(dtype) * scale.astype(dtype)


def _keep_bits(q, saved):
    """q, named for remat policies as bits: jax.checkpoint passes floats that it saves through
    lax.reduce_precision, which makes infinities of the upper half of e4m3fn's range."""
    bits = keep(jax.lax.bitcast_convert_type(q, jnp.uint8), saved)
    return jax.lax.bitcast_convert_type(bits, q.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _fp8_dot(x, w, ins, batch, saved):
    return _forward(x, w, ins, batch, saved)[0]


def _forward(x, w, ins, batch, saved):
    x_scale, w_scale = (keep(scale_of(a, FORWARD), SCALE) for a in (x, w))
    x_fp8 = quantize(x, x_scale, FORWARD)
    x_fp8 = _keep_bits(x_fp8, saved) if saved else x_fp8
    w_fp8 = quantize(w, w_scale, FORWARD)
    operands = dequantize(x_fp8, x_scale, x.dtype), dequantize(w_fp8, w_scale, w.dtype)
    # The backward pass is given the weight itself, not its FP8 form: the weight is there anyway,
    # the other would be one more copy for each microbatch in flight.
    return _product(*operands, ins, batch), (x_fp8, x_scale, w, w_scale)


def _backward(ins, batch, saved, residuals, dy):
    x_fp8, x_scale, w, w_scale = residuals
    x = dequantize(x_fp8, x_scale, w.dtype)
    w = dequantize(quantize(w, w_scale, FORWARD), w_scale, w.dtype)
    dy_scale = scale_of(dy, GRADIENT)
    dy = dequantize(quantize(dy, dy_scale, GRADIENT), dy_scale, dy.dtype)
    # Hopper's FP8 units add up in fewer than 32 bits unless asked; gradients want all of them.
    dot = functools.partial(jax.lax.dot_general, precision=jax.lax.Precision.HIGHEST)
    lead, rows = tuple(range(batch)), x.ndim - ins
    outs = (tuple(range(rows, dy.ndim)), tuple(range(batch + ins, w.ndim)))
    dx = dot(dy, w, (outs, (lead, lead)))
    rows = tuple(range(batch, rows))
    dw = dot(x, dy, ((rows, rows), (lead, lead)))  # in the order of w: nothing to transpose
    return dx, dw


_fp8_dot.defvjp(_forward, _backward)
