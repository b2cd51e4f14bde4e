"""Number formats of matrix products, and the one product of the model: linear().

FP8 exists around a GEMM only: weights and activations elsewhere are bf16. The recipe is per-tensor
current scaling, as NVIDIA's Hopper recipes name it: a tensor's scale comes from its own largest
magnitude at the moment of use, so there is no state. Operands of the forward pass are e4m3,
gradients e5m2; all three GEMMs of a layer accumulate in fp32. Weights are quantized once per step,
and travel over dp, fsdp and cp as FP8; so do sequences over tp, on their way into a GEMM.

A scale is a power of two. Dividing by it and multiplying with it are then exact in bf16, rounding
to FP8 is the only error, and a product of dequantised operands is the same number whether it is
computed in FP8 or in bf16: XLA's GPU compiler turns it into an FP8 GEMM, a CPU does not.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name as keep

from maxbench import mesh

# GEMMs that dtype=fp8 means, dense or of experts, and how many dims of their weight they sum over.
# All others keep the dtype of their operands: the router (fp32), the logits and the products inside
# attention (bf16).
FP8_GEMMS = {"qkv": 1, "out": 2, "up": 1, "down": 1}
FORWARD, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2
SCALE = "scale"  # checkpoint name of scales: a few bytes that save a pass over a tensor


class Gemm(NamedTuple):
    """What is known of a product before its numbers.

    w is [batch..., ins..., outs...], x is [batch..., rows..., ins...]; the product [batch...,
    rows..., outs...].
    """

    ins: int
    batch: int = 0
    # Dim 1 of x is split over tp, and 'gather'ed first; or the sum over tp is 'scatter'ed along it.
    sequence: str = ""
    fsdp: int | None = None  # dim of w that is split over fsdp, and gathered first
    saved: str = ""  # name under which a remat policy may save what the backward pass needs of x


class Scaled(NamedTuple):
    """A tensor quantized to FP8: q x scale."""

    q: jax.Array
    scale: jax.Array


class Fp8Weight(NamedTuple):
    """A weight as FP8 GEMMs read it: Hopper's sum over the last dim of both operands only."""

    q: jax.Array  # [batch..., ins..., outs...], for the gradient of x
    qt: jax.Array  # [batch..., outs..., ins...], for the forward pass
    scale: jax.Array


def linear(x, w, sums, gemm: Gemm):
    """x @ w with the collectives that belong to it.

    Args:
      x: this GPU's part, the sequence split over tp where gemm.sequence is 'gather'.
      w: this GPU's part, split over fsdp where gemm.fsdp says so: an array in the dtype of x, or
        Fp8Weight, and x is then quantized too.
      sums: gradients of w so far, like w; its gradient is the sum with this product's. None: the
        gradient is that of w, which must be an array.

    Returns:
      The product in the dtype of x, split over tp where gemm.sequence is 'scatter'.
    """
    assert sums is not None or not isinstance(w, Fp8Weight)
    return _linear(x, w, sums, gemm)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _linear(x, w, sums, gemm):
    return _forward(x, w, sums, gemm)[0]


def _forward(x, w, sums, gemm):
    fp8 = isinstance(w, Fp8Weight)
    dtype = x.dtype
    x = _operand(x, FORWARD if fp8 else None, gemm.sequence == "gather", gemm.saved)
    ins = tuple(range(gemm.batch, gemm.batch + gemm.ins))
    if fp8:
        weight, dim = Scaled(w.qt, w.scale), _transposed(gemm, w.q.ndim)
        ins = tuple(range(w.q.ndim - gemm.ins, w.q.ndim))
    else:
        weight, dim = w, gemm.fsdp
    weight = weight if dim is None else _gather(weight, "fsdp", dim)
    whole = _gather(x, "tp", 1) if gemm.sequence == "gather" else x
    rows = _ndim(x) - gemm.ins
    y = _product(whole, weight, (tuple(range(rows, _ndim(x))), ins), gemm.batch, dtype)
    if gemm.sequence == "scatter":
        y = mesh.scatter(y, "tp", 1)
    return y, (x, w, sums)


def _backward(gemm, residuals, dy):
    x, w, sums = residuals
    fp8, dtype = isinstance(w, Fp8Weight), dy.dtype
    dy = _operand(dy, GRADIENT if fp8 else None, gemm.sequence == "scatter", "")
    dy = _gather(dy, "tp", 1) if gemm.sequence == "scatter" else dy
    weight = Scaled(w.q, w.scale) if fp8 else w
    weight = weight if gemm.fsdp is None else _gather(weight, "fsdp", gemm.fsdp)
    first, rows = gemm.batch + gemm.ins, _ndim(x) - gemm.ins
    outs = (tuple(range(rows, _ndim(dy))), tuple(range(first, _ndim(weight))))
    dx = _product(dy, weight, outs, gemm.batch, dtype, exact=True)
    if gemm.sequence == "gather":
        dx, x = mesh.scatter(dx, "tp", 1), _gather(x, "tp", 1)
    rows = tuple(range(gemm.batch, rows))
    # Of the sums' dtype, so that the product adds to them; of more bits where its operands have.
    wide = dtype if sums is None else jnp.promote_types(dtype, sums.dtype)
    dw = _product(x, dy, (rows, rows), gemm.batch, wide, exact=True)
    add = lambda dw: dw if sums is None else sums + dw.astype(sums.dtype)
    if gemm.fsdp is None:
        dw = add(dw)
    if gemm.sequence == "gather" and mesh.degree("tp") > 1:
        dx = mesh.beside(dx, dw)
    if gemm.fsdp is not None:
        dw = add(mesh.scatter(dw, "fsdp", gemm.fsdp))
    return (dx, dw, None) if sums is None else (dx, None, dw)


_linear.defvjp(_forward, _backward)


# Operands: an array, or Scaled.


def _operand(x, dtype, split: bool, saved: str):
    """x as a GEMM reads it. `split`: other GPUs of tp hold parts that it will be joined with."""
    if dtype is None:
        return keep(x, saved) if saved else x
    scale = keep(scale_of(x, dtype, ("tp",) if split else ()), SCALE)
    q = quantize(x, scale, dtype)
    return Scaled(_keep_bits(q, saved) if saved else q, scale)


def _ndim(x) -> int:
    return (x.q if isinstance(x, Scaled) else x).ndim


def _gather(x, axis, dim):
    if isinstance(x, Scaled):
        return x._replace(q=mesh.gather(x.q, axis, dim))
    return mesh.gather(x, axis, dim)


def _transposed(gemm: Gemm, ndim: int) -> int | None:
    """Where the dim of w that is split over fsdp stands in [batch..., outs..., ins...]."""
    if gemm.fsdp is None:
        return None
    outs = ndim - gemm.batch - gemm.ins
    return gemm.fsdp + (outs if gemm.fsdp < gemm.batch + gemm.ins else -gemm.ins)


def _product(a, b, contract, batch, dtype, exact=False):
    """A product of operands. `exact`: Hopper's FP8 units add up in fewer than 32 bits unless asked;
    gradients want all of them."""
    lead = tuple(range(batch))
    fp8 = isinstance(a, Scaled)
    if fp8:
        narrow = jnp.bfloat16
        a, b = (dequantize(x.q, x.scale, narrow) for x in (a, b))
    precision = jax.lax.Precision.HIGHEST if fp8 and exact else None
    dims = (contract, (lead, lead))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=dtype)


def scale_of(x, dtype, axes=()):
    """The smallest power of two that brings x, on all GPUs of mesh axes, into the range of an FP8
    dtype: fp32; 1 for zeros."""
    return _scale(mesh.largest(jnp.max(jnp.abs(x)).astype(jnp.float32), *axes), dtype)


def _scale(amax, dtype):
    bits = jax.lax.bitcast_convert_type(amax / float(jnp.finfo(dtype).max), jnp.int32)
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


# Weights, once per step.


def fp8_weights(places, masters, stacked: bool):
    """The compute copy of layers' weights for FP8 GEMMs, each gathered over the GPUs that split its
    master copy; other weights as they are, gathered.

    Args:
      places: tree of mesh.Place like masters.
      masters: this GPU's part of the master weights, in the compute dtype: one tree stacked
        [layers, ...], or a tuple of trees.
      stacked: which of the two.

    Returns:
      A tree like masters, Fp8Weight in the place of arrays. A scale is of the whole weight of a
      layer over all GPUs, so a weight is the same FP8 numbers on every mesh.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(masters)
    gemms = [_name(path) for path, _ in paths]
    lead = int(stacked)
    amax = [
        jnp.max(jnp.abs(w), tuple(range(lead, w.ndim))).astype(jnp.float32)
        for name, (_, w) in zip(gemms, paths, strict=True)
        if name
    ]
    amax = iter(mesh.largest(jnp.stack(amax), "dp", "fsdp", "ep", "cp", "tp"))  # one all-reduce

    def one(name, path, w, place):
        if not name:
            return mesh.gather_master(place, w)
        scale = _scale(next(amax), FORWARD)
        shaped = scale.reshape(scale.shape + (1,) * (w.ndim - lead))
        q = mesh.gather_master(place, quantize(w, shaped, FORWARD))
        outs = lead + _batch(path) + FP8_GEMMS[name]
        order = (*range(lead + _batch(path)), *range(outs, w.ndim))
        order += tuple(range(lead + _batch(path), outs))
        return Fp8Weight(q, q.transpose(order), scale)

    leaves = zip(gemms, paths, jax.tree.leaves(places), strict=True)
    return tree.unflatten([one(name, path, w, place) for name, (path, w), place in leaves])


def _keys(path) -> list[str]:
    return jax.tree_util.keystr(path, simple=True, separator="/").split("/")


def _name(path) -> str:
    """The FP8 GEMM that a weight belongs to, by its path; '' for the others."""
    return next((key for key in _keys(path) if key in FP8_GEMMS), "")


def _batch(path) -> int:
    """Experts' weights are arrays of their module, with experts first; Linear's are called w."""
    return int(_keys(path)[-1] != "w")


def shape_of(w) -> tuple[int, ...]:
    """The shape of a weight, an array or Fp8Weight."""
    return (w.q if isinstance(w, Fp8Weight) else w).shape
