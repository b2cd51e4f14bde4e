"""Number formats of matrix products: one module for each kind of arithmetic.

Numbers are quantized around a GEMM only; elsewhere they are of Format.compute. Weights are so once
per step, from the master copy, and travel so over dp, fsdp and cp; sequences too, over tp, and
tokens to their experts, over ep, on their way into a GEMM. An arithmetic is a frozen object,
carried by each Weight, with

  fprop_transposed      the forward pass reads weights as matrices [batch..., outs, ins]
  gather_along_outputs  and over fsdp gathers them along their outs, whichever dim of the weight is split
  needs_2d              product() knows those only
  scales(ws, lead, past)   an iterator of what each weight's scale needs of all weights of a step,
             and their largest magnitudes [gemms, ...] or None; `lead`: dims of layers in front
  weight(w, place, lead, scale)   the Weight, gathered, of a part of the master copy
  col_of(row, gemm)   its other form, where weight() makes one
  operand(x, scales, gradient, axes)   x, or dy where `gradient`, as a factor of products over
             its last dims and over its rows, and its largest magnitude where the format remembers
             it, else None. `axes`: of the mesh, whose GPUs hold parts that it will be joined with
  move(x, move)   a factor, with all that travels of it moved: gathered or reshaped
  product(a, b, over, dtype, exact)   over: lax.dot_general's dimension numbers; of matrices [...,
             left, right] 'nt', a b^T, or 'tn', a^T b. `exact`: Hopper's FP8 units add up in fewer
             than 32 bits unless asked; gradients want all of them

A scale is a power of two. Dividing by it and multiplying with it are then exact in bf16, rounding
is the only error, and a product of dequantized operands is the same number whether it is computed
in FP8 or in bf16: XLA's GPU compiler turns it into an FP8 GEMM, a CPU does not.
"""

import importlib
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name as keep

from maxbench.config.run import Run
from maxbench.sharding.rules import GemmDims, gather_master

SCALE = "scale"  # checkpoint name of scales: a few bytes that save a pass over a tensor


class QuantizedArray(NamedTuple):
    """A quantized tensor: q x scale."""

    q: jax.Array
    # Of the tensor: fp32 without dims. Of blocks: like q, one dim 32 times smaller, the bits of
    # e8m0 as uint8 (remat and collectives may not know the type).
    scale: jax.Array


@flax.struct.dataclass
class Weight:
    """A weight as GEMMs of a format read it. In a pipeline both forms would be twice the memory:
    one stands there, and `col` is None until a chunk's turn begins."""

    dgrad_operand: (
        Any  # [batch..., ins..., outs...], for the gradient of x; blocks' scale: of matrices
    )
    fprop_operand: Any  # for the forward pass; if turned, matrices [batch..., outs, ins]
    arithmetic: Any = flax.struct.field(pytree_node=False)
    scales: jax.Array | None = None  # of x and of dy where they are known before, fp32 [2]
    gemm: GemmDims | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def shape(self) -> tuple[int, ...]:
        return jax.tree.leaves(self.dgrad_operand)[0].shape


def arithmetic(run: Run):
    """The arithmetic of a run's format, on the kernels of precision.backend."""
    module = importlib.import_module(f"{__name__}.{run.format.arithmetic}")
    return module.arithmetic(run)


def scales(arithmetic, places, masters, stacked: bool, past=None):
    """What weights() needs to know of all GPUs' parts of each weight of layers, at once.

    Args:
      places: tree of Place like masters.
      masters: this GPU's part of the master weights, in the compute dtype: one tree stacked
        [layers, ...], or a tuple of trees.
      stacked: which of the two.
      past: the format's state, if any: the largest of it, fp32 [layers, gemms, 3] (tensor.py).

    Returns:
      A list for the leaves of masters, and the largest magnitudes of factors of GEMMs, [layers,
      gemms] or None.
    """
    leaves, places = jax.tree.leaves(masters), jax.tree.leaves(places)
    factors = [w for w, place in zip(leaves, places, strict=True) if place.gemm]
    found, amax = arithmetic.scales(factors, int(stacked), past)
    amax = amax if amax is None else by_layer(amax, None if stacked else len(masters))
    return [next(found) if place.gemm else None for place in places], amax


def weights(arithmetic, places, masters, scales, stacked: bool):
    """The compute copy of layers' weights, each gathered over the GPUs that split its master copy.

    A tree like masters, factors of GEMMs as arithmetic.weight makes them: the same numbers on every
    mesh. Arguments as in scales(), whose list `scales` is.
    """
    leaves, tree = jax.tree.flatten(masters)

    def one(w, place, scale):
        if not place.gemm:
            return gather_master(place, w)
        return arithmetic.weight(w, place, int(stacked), scale)

    return tree.unflatten(map(one, leaves, jax.tree.leaves(places), scales))


def by_layer(found, layers: int | None):
    """[layers x gemms, ...], or of stacked layers [gemms, layers, ...] -> [layers, gemms, ...]."""
    return found.reshape(layers, -1, *found.shape[1:]) if layers else found.swapaxes(0, 1)


def checkpoint_fp8(q, saved: str):
    """q, named for remat policies, FP8 as bits: jax.checkpoint passes floats that it saves through
    lax.reduce_precision, which makes infinities of the upper half of e4m3fn's range."""
    if not saved or q.dtype.itemsize > 1:
        return keep(q, saved) if saved else q
    bits = keep(jax.lax.bitcast_convert_type(q, jnp.uint8), saved)
    return jax.lax.bitcast_convert_type(bits, q.dtype)
