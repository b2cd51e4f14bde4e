"""Number formats of GEMMs: the Arithmetic protocol, and quantized arrays and weights.

Only the operands of GEMMs are quantized; all other arithmetic is in Format.compute (config/
number_formats.py). Weights are quantized once per step, from the master copy, and their all-gathers
over dp, fsdp and cp carry the quantized values; so do the all-gathers of activations over tp and
the all-to-alls of tokens over ep that feed a GEMM.

FP8's scales are powers of two. Dividing and multiplying by one is exact in bf16, so rounding to the
format is the only error, and a GEMM of dequantized operands gives the same numbers as an FP8 GEMM.
NVFP4's scales are not (nvfp4.py), but its dequantized blocks are exact too.
XLA's GPU compiler rewrites dequantize + dot into an FP8 GEMM; a CPU runs the dot as written.
"""

import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import layout

from maxbench.config.run import Run
from maxbench.sharding.rules import GemmDims, WeightSharding, gather_master

# Remat name of scales and routing decisions: saving a few bytes avoids a pass over a tensor.
SCALE = "scale"


class QuantizedArray(NamedTuple):
    """A quantized tensor: its value is q x scale.

    Per-tensor scaling: scale is fp32 without dims. Block scaling: scale has the shape of the tensor
    with the blocked dim divided by the elements of a block. MXFP8: e8m0 bits as uint8, because
    neither jax.checkpoint nor every collective supports the e8m0 dtype. NVFP4: e4m3; q is uint8
    with two elements in each, and the value is q x scale x tensor_scale, fp32 without dims.
    """

    q: jax.Array
    scale: jax.Array
    tensor_scale: jax.Array | None = None


@flax.struct.dataclass
class Weight:
    """A quantized weight, in the layouts that the dgrad and fprop GEMMs read.

    A pipeline stores dgrad_operand only and builds fprop_operand (Arithmetic.make_fprop_operand)
    at each chunk switch: both at once would take twice the memory.

    Attributes:
      dgrad_operand: [batch..., ins..., outs...]; block scales are [batch..., ins, outs] matrices.
      fprop_operand: the same values for the forward pass; as matrices [batch..., outs, ins] if
        arithmetic.fprop_transposed. None while a pipeline has not built it.
      arithmetic: the Arithmetic that quantized the weight and multiplies it.
      scales: of x and dy, fp32 [2], with delayed scaling; else None.
      gemm: which dims are batch and contracted dims, where make_fprop_operand needs them.
    """

    dgrad_operand: Any
    fprop_operand: Any
    arithmetic: Any = flax.struct.field(pytree_node=False)
    scales: jax.Array | None = None
    gemm: GemmDims | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def shape(self) -> tuple[int, ...]:
        *dims, last = jax.tree.leaves(self.dgrad_operand)[0].shape
        return *dims, last * self.arithmetic.packing


class Arithmetic(Protocol):
    """Quantization and GEMMs of one number format; each Weight carries its own. Hashable.

    Attributes:
      fprop_transposed: the forward pass reads weights as matrices [batch..., outs, ins], because
        Hopper's FP8 GEMMs contract the last dim of both operands ("TN" layout) only.
      gather_along_outputs: fprop_operand is all-gathered over fsdp along outs, whichever dim of the
        master weight fsdp splits.
      needs_2d: product() takes stacks of matrices only, and 'nt' or 'tn' instead of dimension
        numbers.
      fuses_addition: XLA fuses the addition of a product to an accumulator with the GEMM. Else it
        is a kernel of its own, which reads both: the GEMM's kernel takes no accumulator.
      packing: elements of the blocked dim in each number of QuantizedArray.q.
      slot_multiple: as Format.slot_multiple.
    """

    fprop_transposed: bool
    gather_along_outputs: bool
    needs_2d: bool
    fuses_addition: bool
    packing: int
    slot_multiple: int

    def scales(self, ws: list, lead: int, past: Any) -> tuple[Iterator, jax.Array | None]:
        """Computes what the scale of each weight depends on across GPUs, for all weights at once.

        Args:
          ws: this GPU's parts of the master weights, in the compute dtype.
          lead: stacked layer dims in front of each weight.
          past: maxima of the amax history, fp32 [layers, gemms, 3], or None.

        Returns:
          One scale argument of weight() for each of ws, and their amax [gemms, ...] or None.
        """

    def weight(self, w: Any, sharding: WeightSharding, lead: int, scale: Any) -> Any:
        """Quantizes this GPU's part of a master weight and all-gathers it: a Weight, or an array
        where the format does not quantize."""

    def make_fprop_operand(self, dgrad_operand: Any, gemm: GemmDims, lead: int = 0) -> Any:
        """fprop_operand from dgrad_operand; per-tensor formats only."""

    def quantize_operand(
        self, x: jax.Array, scales: Any, gradient: bool, axes: Any
    ) -> tuple[Any, Any, Any]:
        """Quantizes an activation, or an output gradient if `gradient`.

        Args:
          x: [rows..., columns...].
          scales: Weight.scales.
          axes: mesh axes over which the result is all-gathered, so that its scale must agree.

        Returns:
          The operand of GEMMs that contract columns, that of GEMMs that contract rows (wgrad), and
          its amax if the format has an amax history, else None.
        """

    def map_arrays(self, operand: Any, move: Any) -> Any:
        """Applies a collective or a reshape to each array of an operand that has the full shape."""

    def product(self, a: Any, b: Any, over: Any, dtype: Any, exact: bool = False) -> jax.Array:
        """A GEMM of two operands, with fp32 accumulation.

        Args:
          over: lax.dot_general's dimension numbers; if needs_2d, 'nt' for a b^T or 'tn' for a^T b
            of [..., left, right].
          dtype: of the result.
          exact: accumulates every partial sum in fp32 (TE's use_split_accumulator). Hopper's FP8
            tensor cores use fewer bits otherwise; NVIDIA's recipes set it for dgrad and wgrad.
        """


def arithmetic(run: Run) -> Arithmetic:
    """The arithmetic of a run's format, on the kernels of precision.backend."""
    module = importlib.import_module(f"{__name__}.{run.format.arithmetic}")
    return module.arithmetic(run)


def scales(
    arithmetic: Arithmetic, shardings: Any, masters: Any, stacked: bool, past: Any = None
) -> Any:
    """Computes what weights() needs from all GPUs' parts of each weight, in one collective.

    Args:
      shardings: tree of WeightSharding like masters.
      masters: this GPU's part of the master weights, in the compute dtype: one tree stacked
        [layers, ...], or a tuple of trees, one for each layer.
      stacked: which of the two.
      past: maxima of the amax history, fp32 [layers, gemms, 3] (fp8_per_tensor.py), or None.

    Returns:
      A list over the leaves of masters, None for weights that are not quantized; and the amax of
      the quantized ones, fp32 [layers, gemms], or None.
    """
    leaves, shardings = jax.tree.leaves(masters), jax.tree.leaves(shardings)
    gemm_weights = [w for w, sharding in zip(leaves, shardings, strict=True) if sharding.gemm]
    if not gemm_weights:  # of layers that are not quantized
        return [None] * len(leaves), None
    by_gemm, amax = arithmetic.scales(gemm_weights, int(stacked), past)
    amax = amax if amax is None else by_layer(amax, None if stacked else len(masters))
    return [next(by_gemm) if sharding.gemm else None for sharding in shardings], amax


def weights(
    arithmetic: Arithmetic, shardings: Any, masters: Any, scales: Any, stacked: bool
) -> Any:
    """The compute copy of layers' weights: quantized, and all-gathered from their master shards.

    Arguments are those of scales(), and the list that it returned. Returns a tree like masters,
    whose GEMM weights are what Arithmetic.weight returns; the same numbers on every mesh.
    """
    leaves, tree = jax.tree.flatten(masters)

    def compute_copy(w, sharding, scale):
        if not sharding.gemm:
            return gather_master(sharding, w)
        return arithmetic.weight(w, sharding, int(stacked), scale)

    copies = map(compute_copy, leaves, jax.tree.leaves(shardings), scales)
    return jax.tree.unflatten(tree, copies)


def by_layer(values: Any, layers: int | None) -> Any:
    """[layers x gemms, ...], or [gemms, layers, ...] if layers is None -> [layers, gemms, ...]."""
    if layers:
        return values.reshape(layers, -1, *values.shape[1:])
    return values.swapaxes(0, 1)


def row_major(x: jax.Array) -> jax.Array:
    """x, with a row-major layout in memory."""
    return layout.with_layout_constraint(x, layout.Layout(tuple(range(x.ndim))))


def checkpoint_fp8(q: Any, name: str) -> Any:
    """q under a name that remat policies know; '' leaves q unnamed.

    FP8 arrays are saved as uint8 bits: jax.checkpoint passes saved floats through
    lax.reduce_precision, which turns the upper half of e4m3fn's range into infinities.
    """
    if not name or q.dtype.itemsize > 1:
        return checkpoint_name(q, name) if name else q
    bits = checkpoint_name(jax.lax.bitcast_convert_type(q, jnp.uint8), name)
    return jax.lax.bitcast_convert_type(bits, q.dtype)
