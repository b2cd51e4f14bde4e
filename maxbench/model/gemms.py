"""The three GEMMs of a weight on one GPU (fprop, dgrad, wgrad), in the weight's number format.

They take operands that Arithmetic.quantize_operand (quantization/) returned, and communicate
nothing. A weight is [batch..., ins..., outs...], with batch dims of experts.
"""

import dataclasses
import math
from typing import Any

import jax

from maxbench.quantization import QuantizedArray, Weight, unquantized
from maxbench.sharding.rules import GemmDims


def as_weight(w: Any) -> Weight:
    """w, or an array as an unquantized Weight."""
    return w if isinstance(w, Weight) else Weight(w, w, unquantized.PLAIN)


def as_matrices(w: Any, dims: GemmDims, fprop_k: int | None = None) -> Any:
    """A weight as matrices [batch..., k, n]: an array, or a Weight with all of its operands.

    Some kernels take only those, and XLA's layout of a gradient is that of the GEMM which computes
    it.

    Args:
      fprop_k: columns of fprop_operand, where they are not k.
    """
    first = dims.batch + dims.ins
    k, n = math.prod(w.shape[dims.batch : first]), math.prod(w.shape[first:])

    def flat(a, *matrix):
        if isinstance(a, QuantizedArray):
            return a._replace(q=flat(a.q, *matrix))
        return a.reshape(*w.shape[: dims.batch], *matrix)

    if not isinstance(w, Weight):
        return flat(w, k, n)
    how, packing = w.arithmetic, w.arithmetic.packing
    stored = (n, k // packing) if how.fprop_transposed else (k, n // packing)
    return dataclasses.replace(
        w,
        dgrad_operand=flat(w.dgrad_operand, k, n // packing),
        fprop_operand=flat(w.fprop_operand, *((-1, fprop_k) if fprop_k else stored)),
    )


def fprop_dims(weight: Weight, dims: GemmDims) -> list[int]:
    """The weight's dims in the order in which fprop_operand has them."""
    order, first = list(range(len(weight.shape))), dims.batch + dims.ins
    if not weight.arithmetic.fprop_transposed:
        return order
    return order[: dims.batch] + order[first:] + order[dims.batch : first]


def fprop(weight: Weight, x: Any, w: Any, dims: GemmDims, columns: range, dtype: Any) -> jax.Array:
    """x @ w: [batch..., rows..., outs...].

    Args:
      x, w: operands; w as Weight.fprop_operand.
      columns: dims of x that are contracted.
      dtype: of the result.
    """
    stored = fprop_dims(weight, dims)
    ins = tuple(stored.index(d) for d in range(dims.batch, dims.batch + dims.ins))
    return product(weight.arithmetic, x, w, (tuple(columns), ins), dims.batch, dtype)


def dgrad(weight: Weight, dy: Any, w: Any, dims: GemmDims, columns: range, dtype: Any) -> jax.Array:
    """dy @ w^T: [batch..., rows..., ins...]; arguments as in fprop(), w as Weight.dgrad_operand."""
    outs = tuple(range(dims.batch + dims.ins, len(weight.shape)))
    return product(weight.arithmetic, dy, w, (tuple(columns), outs), dims.batch, dtype, True)


def wgrad(weight: Weight, x: Any, dy: Any, dims: GemmDims, rows: range, dtype: Any) -> jax.Array:
    """x^T @ dy: [batch..., ins..., outs...], contracted over `rows` of both. With dy and x
    exchanged it is the transpose."""
    summed = tuple(rows)
    return product(weight.arithmetic, x, dy, (summed, summed), dims.batch, dtype, True)


def product(
    how: Any, a: Any, b: Any, contract: Any, batch: int, dtype: Any, exact: bool = False
) -> jax.Array:
    """The product of two operands, contracting dims of a and of b; as matrices if needs_2d."""
    if not how.needs_2d:
        dims = tuple(range(batch))
        if batch and len(contract[0]) > 1:  # else XLA transposes the experts' weights each time
            flat = lambda over: lambda x: x.reshape(*x.shape[: over[0]], -1)
            a, b = how.map_arrays(a, flat(contract[0])), how.map_arrays(b, flat(contract[1]))
            contract = contract[0][:1], contract[1][:1]
        return how.product(a, b, (contract, (dims, dims)), dtype, exact)
    rows, flat = a.q.shape[:-1], lambda x: x.reshape(*x.shape[:batch], -1, x.shape[-1])
    a, b = how.map_arrays(a, flat), how.map_arrays(b, flat)
    if contract[0][0] == batch:
        return how.product(a, b, "tn", dtype, exact)
    y = how.product(a, b, "nt", dtype, exact)
    return y.reshape(*rows, y.shape[-1])
