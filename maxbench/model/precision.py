"""Number formats of matrix products, and the one product of the model: linear().

FP8 exists around a GEMM only: weights and activations elsewhere are bf16. All three GEMMs of a
layer read FP8 and accumulate in fp32. Weights are quantized once per step, and travel over dp, fsdp
and cp as FP8; so do sequences over tp, on their way into a GEMM. Scaling is one of

  current   a tensor's scale comes from its own largest magnitude at the moment of use
  delayed   from the largest of past steps, a state that the step keeps (Sums, fp8_weights)
  mxfp8     32 numbers share a scale (mxfp8.py)

Operands of the forward pass are e4m3; gradients are e5m2, in blocks e4m3, as in NVIDIA's recipes.

A scale is a power of two. Dividing by it and multiplying with it are then exact in bf16, rounding
to FP8 is the only error, and a product of dequantised operands is the same number whether it is
computed in FP8 or in bf16: XLA's GPU compiler turns it into an FP8 GEMM, a CPU does not.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name as keep

from maxbench.mesh import collectives
from maxbench.mesh.places import gather_master
from maxbench.model import mxfp8, te
from maxbench.model.mxfp8 import Scaled
from maxbench.spec.run import Precision

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
    te: bool = False  # on Transformer Engine's kernels; linear() sets it


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("row", "col", "past"), meta_fields=("te",)
)
@dataclasses.dataclass(frozen=True)
class Fp8Weight:
    """A weight as FP8 GEMMs read it: Hopper's sum over the last dim of both operands only."""

    row: Scaled  # [batch..., ins..., outs...], for the gradient of x; blocks' scale: of matrices
    col: Scaled  # [batch..., outs..., ins...], for the forward pass; blocks: of matrices
    past: jax.Array | None = None  # delayed: the scales of x and of dy, fp32 [2]
    te: bool = False

    @property
    def blocks(self) -> bool:
        return self.row.scale.ndim > 0


class Sums(NamedTuple):
    """What microbatches leave of an FP8 GEMM with delayed scaling."""

    grad: jax.Array  # sum of the gradients of w, like it
    amax: jax.Array  # the largest magnitude of x and of dy, fp32 [2]


class Operand(NamedTuple):
    """A factor of products over its last dims (row) and over its rows (col)."""

    row: jax.Array | Scaled
    col: jax.Array | Scaled
    amax: jax.Array | None = None  # fp32, where scaling is delayed


def linear(x, w, sums, gemm: Gemm):
    """x @ w with the collectives that belong to it.

    Args:
      x: this GPU's part, the sequence split over tp where gemm.sequence is 'gather'.
      w: this GPU's part, split over fsdp where gemm.fsdp says so: an array in the dtype of x, or
        Fp8Weight, and x is then quantized too.
      sums: gradients of w so far, like w; its gradient is the sum with this product's. Sums where
        scaling is delayed. None: the gradient is that of w, which must be an array.

    Returns:
      The product in the dtype of x, split over tp where gemm.sequence is 'scatter'.
    """
    assert sums is not None or not isinstance(w, Fp8Weight)
    if isinstance(w, Fp8Weight) and (w.te or w.blocks):
        return _matrices(x, w, sums, gemm)
    return _linear(x, w, sums, gemm)


def _matrices(x, w, sums, gemm):
    """linear() for kernels that know matrices only."""
    shape, first = w.row.q.shape, gemm.batch + gemm.ins
    k, n = math.prod(shape[gemm.batch : first]), math.prod(shape[first:])
    flat = lambda a, *dims: a.reshape(*shape[: gemm.batch], *dims)
    row, col = w.row._replace(q=flat(w.row.q, k, n)), w.col._replace(q=flat(w.col.q, n, k))
    w = dataclasses.replace(w, row=row, col=col)
    delayed = isinstance(sums, Sums)
    sums = sums._replace(grad=flat(sums.grad, k, n)) if delayed else flat(sums, k, n)
    fsdp = None if gemm.fsdp is None else gemm.batch + (gemm.fsdp >= first)
    x = x.reshape(*x.shape[: x.ndim - gemm.ins], -1)
    y = _linear(x, w, sums, gemm._replace(ins=1, fsdp=fsdp, te=w.te))
    # What is split over fsdp, embed, is a dim by itself.
    return y if len(shape) - first == 1 else y.reshape(*y.shape[:-1], *shape[first:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _linear(x, w, sums, gemm):
    return _forward(x, w, sums, gemm)[0]


def _forward(x, w, sums, gemm):
    dtype, rows = x.dtype, x.ndim - gemm.ins
    x = _operand(x, w, gemm, 0)
    ins = tuple(range(gemm.batch, gemm.batch + gemm.ins))
    if isinstance(w, Fp8Weight):
        weight, dim = w.col, _transposed(gemm, w.row.q.ndim)
        ins = tuple(range(w.row.q.ndim - gemm.ins, w.row.q.ndim))
    else:
        weight, dim = w, gemm.fsdp
    weight = weight if dim is None else _gather(weight, "fsdp", dim)
    whole = _gather(x.row, "tp", 1) if gemm.sequence == "gather" else x.row
    y = _product(whole, weight, (tuple(range(rows, rows + gemm.ins)), ins), gemm, dtype)
    if gemm.sequence == "scatter":
        y = collectives.scatter(y, "tp", 1)
    return y, (x.col, x.amax, w, sums)


def _backward(gemm, residuals, dy):
    x, amax, w, sums = residuals
    dtype = dy.dtype
    dy = _operand(dy, w, gemm, 1)
    if amax is not None:
        amax = jnp.maximum(sums.amax, jnp.stack([amax, dy.amax]))
        sums = sums.grad
    whole = lambda dy: _gather(dy, "tp", 1) if gemm.sequence == "scatter" else dy
    row = whole(dy.row)
    col = row if dy.col is dy.row else whole(dy.col)
    weight = w.row if isinstance(w, Fp8Weight) else w
    weight = weight if gemm.fsdp is None else _gather(weight, "fsdp", gemm.fsdp)
    first, rows = gemm.batch + gemm.ins, _ndim(x) - gemm.ins
    outs = (tuple(range(rows, _ndim(row))), tuple(range(first, _ndim(weight))))
    dx = _product(row, weight, outs, gemm, dtype, exact=True)
    if gemm.sequence == "gather":
        dx, x = collectives.scatter(dx, "tp", 1), _gather(x, "tp", 1)
    rows = tuple(range(gemm.batch, rows))
    # Of the sums' dtype, so that the product adds to them; of more bits where its operands have.
    wide = dtype if sums is None else jnp.promote_types(dtype, sums.dtype)
    dw = _product(x, col, (rows, rows), gemm, wide, exact=True)
    add = lambda dw: dw if sums is None else sums + dw.astype(sums.dtype)
    if gemm.fsdp is None:
        dw = add(dw)
    if gemm.sequence == "gather" and collectives.degree("tp") > 1:
        dx = collectives.beside(dx, dw)
    if gemm.fsdp is not None:
        dw = add(collectives.scatter(dw, "fsdp", gemm.fsdp))
    if sums is None:
        return dx, dw, None
    return dx, None, dw if amax is None else Sums(dw, amax)


_linear.defvjp(_forward, _backward)


def _operand(x, w, gemm: Gemm, which: int) -> Operand:
    """x (which = 0) or dy (1) as GEMMs with w read it."""
    saved = "" if which else gemm.saved
    if not isinstance(w, Fp8Weight):
        x = keep(x, saved) if saved else x
        return Operand(x, x)
    if w.blocks:
        make = te.blocks if gemm.te else lambda *a: [mxfp8.quantize(*a, dim) for dim in (-1, -2)]
        row, col = make(x, FORWARD)
        if saved:
            col = Scaled(_keep_bits(col.q, saved), keep(col.scale, saved))
        return Operand(row, col)
    dtype, amax = (FORWARD, GRADIENT)[which], None
    if w.past is None:
        # Other GPUs of tp may hold parts that x will be joined with.
        split = gemm.sequence == ("gather", "scatter")[which]
        scale = keep(scale_of(x, dtype, ("tp",) if split else ()), SCALE)
    else:
        scale = w.past[which]
    if gemm.te:
        (q, _), amax = te.quantize(x, dtype, scale)
    elif w.past is not None:
        q, amax = quantize(x, scale, dtype, saturate=True), _largest(x)
    else:
        q = quantize(x, scale, dtype)
    amax = None if w.past is None else keep(amax, SCALE)
    q = Scaled(_keep_bits(q, saved), scale)
    return Operand(q, q, amax)


def _ndim(x) -> int:
    return (x.q if isinstance(x, Scaled) else x).ndim


def _gather(x, axis, dim):
    if isinstance(x, Scaled):
        scale = collectives.gather(x.scale, axis, dim) if x.scale.ndim else x.scale
        return Scaled(collectives.gather(x.q, axis, dim), scale)
    return collectives.gather(x, axis, dim)


def _transposed(gemm: Gemm, ndim: int) -> int | None:
    """Where the dim of w that is split over fsdp stands in [batch..., outs..., ins...]."""
    if gemm.fsdp is None:
        return None
    outs = ndim - gemm.batch - gemm.ins
    return gemm.fsdp + (outs if gemm.fsdp < gemm.batch + gemm.ins else -gemm.ins)


def _product(a, b, contract, gemm, dtype, exact=False):
    """A product of operands. `exact`: Hopper's FP8 units add up in fewer than 32 bits unless asked;
    gradients want all of them."""
    fp8 = isinstance(a, Scaled)
    if fp8 and (gemm.te or a.scale.ndim):
        over_rows = contract[0][0] == gemm.batch
        product = "tn" if over_rows else "nt"
        matrix = lambda x: x.reshape(*x.shape[: gemm.batch], -1, x.shape[-1]) if x.ndim else x
        a, b, rows = Scaled(*map(matrix, a)), Scaled(*map(matrix, b)), a.q.shape[:-1]
        call = functools.partial(te.gemm, exact=exact) if gemm.te else mxfp8.gemm
        y = call(a, b, product, dtype)
        return y if over_rows else y.reshape(*rows, y.shape[-1])
    if fp8:
        narrow = jnp.bfloat16
        a, b = (dequantize(x.q, x.scale, narrow) for x in (a, b))
    precision = jax.lax.Precision.HIGHEST if fp8 and exact else None
    lead = tuple(range(gemm.batch))
    dims = (contract, (lead, lead))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=dtype)


def scale_of(x, dtype, axes=()):
    """The smallest power of two that brings x, on all GPUs of mesh axes, into the range of an FP8
    dtype: fp32; 1 for zeros."""
    return _scale(collectives.largest(_largest(x), *axes), dtype)


def _largest(x, dims=None):
    return jnp.max(jnp.abs(x), dims).astype(jnp.float32)


def _scale(amax, dtype):
    bits = jax.lax.bitcast_convert_type(amax / float(jnp.finfo(dtype).max), jnp.int32)
    # Up to the next power of two: carry any mantissa into the exponent, then drop it.
    scale = jax.lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)
    return jnp.where(scale > 0, scale, 1)


def quantize(x, scale, dtype, saturate: bool = False):
    """x / scale, rounded to an FP8 dtype. `saturate`: the scale is not of x itself, which may be
    out of range."""
    x = x * (1 / scale).astype(x.dtype)
    top = float(jnp.finfo(dtype).max)
    return (jnp.clip(x, -top, top) if saturate else x).astype(dtype)


def dequantize(q, scale, dtype):
    """q x scale. XLA looks for this before a product: convert, multiply with a scalar."""
    return q.astype(dtype) * scale.astype(dtype)


def _keep_bits(q, saved):
    """q, named for remat policies as bits: jax.checkpoint passes floats that it saves through
    lax.reduce_precision, which makes infinities of the upper half of e4m3fn's range."""
    if not saved:
        return q
    bits = keep(jax.lax.bitcast_convert_type(q, jnp.uint8), saved)
    return jax.lax.bitcast_convert_type(bits, q.dtype)


# Weights, once per step.


def fp8_weights(places, masters, stacked: bool, how: Precision, past=None):
    """The compute copy of layers' weights for FP8 GEMMs, each gathered over the GPUs that split its
    master copy; other weights as they are, gathered.

    Args:
      places: tree of Place like masters.
      masters: this GPU's part of the master weights, in the compute dtype: one tree stacked
        [layers, ...], or a tuple of trees.
      stacked: which of the two.
      how: with backend and scaling settled.
      past: where scaling is delayed, the largest magnitudes of past steps, fp32 [layers, gemms, 3],
        of x, dy and w; gemms in the order of the weights in a layer's tree.

    Returns:
      A tree like masters, Fp8Weight in the place of arrays, and the weights' largest magnitudes
      [layers, gemms], None for mxfp8. A scale is of the whole weight of a layer over all GPUs, so a
      weight is the same FP8 numbers on every mesh.
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(masters)
    gemms = [_name(path) for path, _ in paths]
    lead, amax = int(stacked), None
    if how.scaling != "mxfp8":
        amax = [
            _largest(w, tuple(range(lead, w.ndim)))
            for name, (_, w) in zip(gemms, paths, strict=True)
            if name
        ]
        amax = collectives.largest(
            jnp.stack(amax), "dp", "fsdp", "ep", "cp", "tp"
        )  # one all-reduce
        scales = iter(amax)
    if past is not None:
        scales = iter(past.swapaxes(0, 1) if stacked else past.reshape(-1, 3))

    def one(name, path, w, place):
        if not name:
            return gather_master(place, w)
        first = lead + _batch(path)
        dims = tuple(range(w.ndim))
        outs = first + FP8_GEMMS[name]
        if how.scaling == "mxfp8":
            return Fp8Weight(*_in_blocks(w, place, first, outs), te=how.backend == "te")
        tops, old = next(scales), None
        if past is not None:
            old = jnp.stack([_scale(tops[..., 0], FORWARD), _scale(tops[..., 1], GRADIENT)], -1)
            tops = tops[..., 2]
        scale = _scale(tops, FORWARD)
        shaped = scale.reshape(scale.shape + (1,) * (w.ndim - lead))
        q = quantize(w, shaped, FORWARD, saturate=past is not None)
        q = gather_master(place, q)
        qt = q.transpose(dims[:first] + dims[outs:] + dims[first:outs])
        return Fp8Weight(Scaled(q, scale), Scaled(qt, scale), old, how.backend == "te")

    leaves = zip(gemms, paths, jax.tree.leaves(places), strict=True)
    made = tree.unflatten([one(name, path, w, place) for name, (path, w), place in leaves])
    return made, amax if amax is None else _by_layer(amax, None if stacked else len(masters))


def _in_blocks(w, place, first: int, outs: int) -> tuple[Scaled, Scaled]:
    """A weight [..., ins..., outs...] over outs, and turned over ins, gathered.

    `first` and `outs` are where ins and outs start. Where a GPU's part of the master has no whole
    blocks the weight travels before it is quantized, and not as FP8.
    """
    lasts = w.ndim - 1, outs - 1
    split = all(w.shape[dim] % mxfp8.BLOCK == 0 for dim in lasts)
    gather = functools.partial(gather_master, place)
    w = w if split else gather(w)
    sizes = lambda shape: (math.prod(shape[first:outs]), math.prod(shape[outs:]))
    made = []
    for dim, last in zip((-1, -2), lasts, strict=True):
        q, scale = mxfp8.quantize(w.reshape(*w.shape[:first], *sizes(w.shape)), FORWARD, dim)
        q = q.reshape(w.shape)
        if split:
            shape = [n // mxfp8.BLOCK if i == last else n for i, n in enumerate(w.shape)]
            q, scale = gather(q), gather(scale.reshape(shape))
            scale = scale.reshape(*scale.shape[:first], *sizes(scale.shape))
        made.append(Scaled(q, scale))
    row, col = made
    matrix = col.q.reshape(*col.q.shape[:first], *sizes(col.q.shape))
    return row, mxfp8.turned(col._replace(q=matrix))


def _by_layer(found, layers: int | None):
    """[layers x gemms, ...], or of stacked layers [gemms, layers, ...] -> [layers, gemms, ...]."""
    return found.reshape(layers, -1, *found.shape[1:]) if layers else found.swapaxes(0, 1)


def _keys(path) -> list[str]:
    return jax.tree_util.keystr(path, simple=True, separator="/").split("/")


def _name(path) -> str:
    """The FP8 GEMM that a weight belongs to, by its path; '' for the others."""
    return next((key for key in _keys(path) if key in FP8_GEMMS), "")


def _batch(path) -> int:
    """Experts' weights are arrays of their module, with experts first; Linear's are called w."""
    return int(_keys(path)[-1] != "w")


def zeros(w, dtype):
    """No sum of gradients yet of a weight, an array or Fp8Weight."""
    if not isinstance(w, Fp8Weight):
        return jnp.zeros(w.shape, dtype)
    none = jnp.zeros(w.row.q.shape, dtype)
    return none if w.past is None else Sums(none, jnp.zeros(w.past.shape, w.past.dtype))


def parted(sums, stacked: bool):
    """A tree of sums as gradients alone, and the largest magnitudes [layers, gemms, 2] or None."""
    is_sums = lambda x: isinstance(x, Sums)
    found = [x.amax for x in jax.tree.leaves(sums, is_leaf=is_sums) if is_sums(x)]
    grads = jax.tree.map(lambda x: x.grad if is_sums(x) else x, sums, is_leaf=is_sums)
    layers = None if stacked else len(sums["layers"])
    return grads, _by_layer(jnp.stack(found), layers) if found else None
