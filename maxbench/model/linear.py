"""linear(): x @ w with its collectives, forward and backward. Every GEMM with a weight is one.

How its three GEMMs (fprop, dgrad, wgrad) compute is up to the weight's arithmetic (quantization/).
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxbench.model.grad_accumulation import GradAccumulator
from maxbench.quantization import QuantizedArray, Weight, checkpoint_fp8, unquantized
from maxbench.sharding import collectives, ordering


class MatmulSpec(NamedTuple):
    """The static part of linear(): w is [batch..., ins..., outs...], x is [batch..., rows...,
    ins...], the result [batch..., rows..., outs...].

    Attributes:
      ins: dims that the GEMM contracts.
      batch: dims of experts.
      sequence: 'gather': the first dim of rows is sharded over tp, and is all-gathered first;
        'scatter': the partial results are reduce-scattered along it. Slots of experts are sent over
        ep to the GPUs of their experts before, or back after.
      fsdp: the dim of w that is sharded over fsdp, and is all-gathered first.
      saved: the name by which a remat policy may save the wgrad operand of x.
      dx_unordered: dx's reduce-scatter may overlap any GEMM; otherwise it overlaps the wgrad.
    """

    ins: int
    batch: int = 0
    sequence: str = ""
    fsdp: int | None = None
    saved: str = ""
    dx_unordered: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes over which rows are communicated."""
        return ("ep", "tp") if self.batch else ("tp",)


class CommOrder(NamedTuple):
    """Ordering tokens (sharding/ordering.py) of one GEMM: which GEMMs its tp collectives overlap.

    A backward pass can return values only as cotangents, and receive them only as cotangents of
    what the forward pass returned. So each token has two directions:

    Attributes:
      wait_for: fp32 [3]. Forward: the result of the tp collective is used only after wait_for[0].
        Its cotangent are tokens of the backward pass: of the dgrad; of the all-gather over tp (dy
        if forward reduce-scatters, x again if forward all-gathers; without one, of the dgrad); and
        of the wgrad.
      issued: fp32 scalar. Forward: linear() returns it plus a token: of the all-gathered x, or of
        the GEMM if forward reduce-scatters. The cotangent of that result is a token that dy's
        all-gather over tp waits for; the cotangent of `issued` is the token of the wgrad. Chained
        through the GEMMs that reduce-scatter, dy's all-gather overlaps the wgrad of the next one.
      dx_unordered: as in MatmulSpec.
    """

    wait_for: jax.Array | None = None
    issued: jax.Array | None = None
    dx_unordered: bool = False


UNORDERED = CommOrder()


def no_comm() -> bool:
    """Whether dense GEMMs need no collective: neither weights (fsdp) nor rows (tp) are sharded."""
    return collectives.axis_size("tp") == collectives.axis_size("fsdp") == 1


def linear(x: jax.Array, w: Any, grad: Any, spec: MatmulSpec, order: CommOrder = UNORDERED) -> Any:
    """x @ w with its collectives.

    Args:
      x: this GPU's part, the sequence sharded over tp if spec.sequence is 'gather'.
      w: this GPU's part, sharded over fsdp if spec.fsdp says so: an array, cast to the dtype of x,
        or a Weight, with which x is quantized.
      grad: the gradient of w so far (grad_accumulation.py); its own gradient is that plus this
        GEMM's. None: the gradient is that of w, which must be an array.
      order: tokens of its tp collectives, in a pipeline.

    Returns:
      The result in the dtype of x, sharded over tp if spec.sequence is 'scatter'; and the token
      order.issued, or None without one.
    """
    grad, amax = grad if isinstance(grad, GradAccumulator) else (grad, None)
    w = w if isinstance(w, Weight) else w.astype(x.dtype)
    spec, tokens = spec._replace(dx_unordered=order.dx_unordered), (order.wait_for, order.issued)
    if spec.batch and not isinstance(w, Weight):
        return _linear(x, w, grad, amax, tokens, spec)
    # As matrices: some kernels support only those, and XLA's layout of a gradient is that of the
    # GEMM which computes it.
    shape, first = w.shape, spec.batch + spec.ins
    k, n = math.prod(shape[spec.batch : first]), math.prod(shape[first:])
    flat = lambda a, *dims: a.reshape(*shape[: spec.batch], *dims)
    matrix = lambda a, *d: (
        a._replace(q=flat(a.q, *d)) if isinstance(a, QuantizedArray) else flat(a, *d)
    )
    if isinstance(w, Weight):
        packing = w.arithmetic.packing
        dims = (n, k // packing) if w.arithmetic.fprop_transposed else (k, n // packing)
        if w.arithmetic.gather_along_outputs and spec.fsdp is not None and spec.fsdp < first:
            dims = -1, k * collectives.axis_size("fsdp")
        w = dataclasses.replace(
            w,
            dgrad_operand=matrix(w.dgrad_operand, k, n // packing),
            fprop_operand=matrix(w.fprop_operand, *dims),
        )
    else:
        w = flat(w, k, n)
    grad = grad if grad is None else flat(grad, k, n)
    # fsdp shards embed, which is the only one of its side's dims.
    fsdp = None if spec.fsdp is None else spec.batch + (spec.fsdp >= first)
    rows = x.shape[: x.ndim - spec.ins]
    # Rows become one dim, too, where transformer.add or a kernel needs a matrix.
    flat_rows = not spec.batch and (no_comm() or _as_weight(w).arithmetic.needs_2d)
    x = x.reshape(*([math.prod(rows)] if flat_rows else rows), -1)
    y, issued = _linear(x, w, grad, amax, tokens, spec._replace(ins=1, fsdp=fsdp))
    rows = (-1, *rows[1:]) if flat_rows else y.shape[:-1]
    outs = shape[first:] if len(shape) > first + 1 else y.shape[-1:]  # fsdp may shard a single one
    return y.reshape(*rows, *outs), issued


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _linear(x, w, grad, amax, tokens, spec):
    return _forward(x, w, grad, amax, tokens, spec)[0]


def _forward(x, w, grad, amax, tokens, spec):
    wait_for, issued = tokens
    weight, dtype, rows = _as_weight(w), x.dtype, x.ndim - spec.ins
    how, first = weight.arithmetic, spec.batch + spec.ins
    gathers = spec.sequence == "gather"
    axes = spec.axes if gathers else ()
    fprop_x, wgrad_x, amax_x = how.quantize_operand(x, weight.scales, False, axes)
    if gathers:
        fprop_x, wgrad_x = _map_forms(lambda x: _dispatch_slots(how, x, spec), fprop_x, wgrad_x)
    saved = how.map_arrays(wgrad_x, lambda x: checkpoint_fp8(x, spec.saved))
    dims = list(range(len(weight.shape)))
    if how.fprop_transposed:
        dims = dims[: spec.batch] + dims[first:] + dims[spec.batch : first]
    dim = spec.fsdp
    if dim is not None and how.fprop_transposed:
        dim = spec.batch if how.gather_along_outputs else dims.index(dim)
    fprop_w = _all_gather(how, weight.fprop_operand, "fsdp", dim)
    t = None if wait_for is None else wait_for[0]
    fprop_x = _all_gather_after(how, fprop_x, t, spec) if gathers else fprop_x
    ins = tuple(dims.index(d) for d in range(spec.batch, first))
    y = _matmul(how, fprop_x, fprop_w, (tuple(range(rows, x.ndim)), ins), spec, dtype)
    token = None if issued is None else issued + ordering.token(fprop_x if gathers else y)
    if spec.sequence == "scatter":
        y = collectives.reduce_scatter(y, "tp", spec.batch)
        y = ordering.after(_return_slots(y, spec), t)
    has_tokens = tuple(None if t is None else () for t in tokens)  # known when traced
    return (y, token), (saved, amax_x, w, grad, amax, has_tokens)


def _backward(spec, residuals, cotangents):
    (wgrad_x, amax_x, w, grad, amax, has_tokens), (dy, token) = residuals, cotangents
    weight, dtype, first = _as_weight(w), dy.dtype, spec.batch + spec.ins
    how, outs = weight.arithmetic, tuple(range(first, len(weight.shape)))
    rows = dy.ndim - len(outs)
    columns = tuple(range(rows, dy.ndim))
    gathers, scatters = spec.sequence == "gather", spec.sequence == "scatter"
    wgrad_x = _all_gather(how, wgrad_x, "tp", spec.batch if gathers else None)
    regathers = gathers and collectives.axis_size("tp") > 1
    gathered = ordering.token(wgrad_x) if regathers else None
    # The all-gather of x overlaps the GEMM before: with the dgrad, dx's reduce-scatter is next.
    # dy of experts waits before it is quantized, or XLA takes another pass over it.
    if regathers and spec.batch:
        dy = ordering.after(dy, gathered)
    axes = spec.axes if scatters else ()
    dgrad_dy, wgrad_dy, amax_dy = how.quantize_operand(dy, weight.scales, True, axes)
    if regathers and not spec.batch:
        dgrad_dy, wgrad_dy = _map_forms(lambda dy: _after(dy, gathered), dgrad_dy, wgrad_dy)
    amax = jax.tree.map(lambda a, *now: jnp.maximum(a, jnp.stack(now)), amax, amax_x, amax_dy)
    if scatters:
        t = None if has_tokens[1] is None else token
        gather = lambda dy: _all_gather_after(how, _dispatch_slots(how, dy, spec), t, spec)
        dgrad_dy, wgrad_dy = _map_forms(gather, dgrad_dy, wgrad_dy)
        gathered = ordering.token(dgrad_dy)
    dgrad_w = _all_gather(how, weight.dgrad_operand, "fsdp", spec.fsdp)
    dx = _matmul(how, dgrad_dy, dgrad_w, (columns, outs), spec, dtype, exact=True)
    dgrad = ordering.token(dx)
    if gathers:
        dx = collectives.reduce_scatter(dx, "tp", spec.batch)
    summed = tuple(range(spec.batch, rows))
    # In the dtype of the accumulated gradient, so that the GEMM adds to it; or that of its operands
    # if it has more bits.
    wide = dtype if grad is None else jnp.promote_types(dtype, grad.dtype)
    # If fsdp shards columns, the gradient is computed transposed: its shards are then contiguous.
    transposed = spec.fsdp == 1 and len(weight.shape) == 2
    operands = (wgrad_dy, wgrad_x) if transposed else (wgrad_x, wgrad_dy)
    dw = _matmul(how, *operands, (summed, summed), spec, wide, exact=True)
    add = lambda dw: dw if grad is None else grad + dw.astype(grad.dtype)
    if spec.fsdp is None:
        dw = add(dw)
    wgrad = ordering.token(dw)
    if gathers:
        dx = ordering.after(dx, wgrad if regathers and not spec.dx_unordered else None)
        dx = _return_slots(dx, spec)
    if spec.fsdp is not None:
        dw = collectives.reduce_scatter(dw, "fsdp", 0 if transposed else spec.fsdp)
        dw = add(dw.T if transposed else dw)
    tokens = jnp.stack([dgrad, dgrad if gathered is None else gathered, wgrad]), wgrad
    tokens = tuple(None if none is None else t for none, t in zip(has_tokens, tokens, strict=True))
    return (dx, dw, None, None, tokens) if grad is None else (dx, None, dw, amax, tokens)


_linear.defvjp(_forward, _backward)


def _as_weight(w) -> Weight:
    """w, or an array as an unquantized Weight."""
    return w if isinstance(w, Weight) else Weight(w, w, unquantized.PLAIN)


def _all_gather(how, x, axis: str, dim: int | None):
    return x if dim is None else how.map_arrays(x, lambda a: collectives.all_gather(a, axis, dim))


def _all_gather_after(how, x, t, spec: MatmulSpec):
    """An operand, all-gathered over tp and used only after the token."""
    return how.map_arrays(x, lambda a: ordering.all_gather_after(a, "tp", spec.batch, t))


def _after(x, t):
    """An operand, used only after the token; of a quantized one the scale, which is small."""
    after = lambda x: ordering.after(x, t)
    return x._replace(scale=after(x.scale)) if isinstance(x, QuantizedArray) else after(x)


def _map_forms(move, dgrad_or_fprop, wgrad):
    """Both operands of an array, which may be one."""
    moved = move(dgrad_or_fprop)
    return moved, moved if wgrad is dgrad_or_fprop else move(wgrad)


def _dispatch_slots(how, x, spec: MatmulSpec):
    """This GPU's slots of all experts -> all GPUs' slots of this GPU's experts, over ep."""
    return how.map_arrays(x, lambda a: collectives.all_to_all(a, "ep", 0, 1)) if spec.batch else x


def _return_slots(y, spec: MatmulSpec):
    return collectives.all_to_all(y, "ep", 1, 0) if spec.batch else y


def _matmul(how, a, b, contract, spec: MatmulSpec, dtype, exact=False):
    """The product of two operands, contracting dims of a and of b; as matrices if needs_2d."""
    if not how.needs_2d:
        batch = tuple(range(spec.batch))
        if batch and len(contract[0]) > 1:  # else XLA transposes the experts' weights each time
            flat = lambda dims: lambda x: x.reshape(*x.shape[: dims[0]], -1)
            a, b = how.map_arrays(a, flat(contract[0])), how.map_arrays(b, flat(contract[1]))
            contract = contract[0][:1], contract[1][:1]
        return how.product(a, b, (contract, (batch, batch)), dtype, exact)
    rows, flat = a.q.shape[:-1], lambda x: x.reshape(*x.shape[: spec.batch], -1, x.shape[-1])
    a, b = how.map_arrays(a, flat), how.map_arrays(b, flat)
    if contract[0][0] == spec.batch:
        return how.product(a, b, "tn", dtype, exact)
    y = how.product(a, b, "nt", dtype, exact)
    return y.reshape(*rows, y.shape[-1])
