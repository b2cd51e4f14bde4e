"""linear(): x @ w with its collectives, forward and backward. Every GEMM with a weight is one.

gemms.py         the GEMMs on one GPU, in the weight's number format
this file        their all-gathers, reduce-scatters and all-to-alls
expert_slots.py  the layout of experts' slots in the all-to-alls
comm_order.py    which GEMMs these collectives overlap
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxbench.model import expert_slots, gemms
from maxbench.model.comm_order import UNORDERED, BackwardTokens, CommOrder
from maxbench.model.grad_accumulation import GradAccumulator
from maxbench.quantization import Weight, checkpoint_fp8, row_major
from maxbench.sharding import collectives, ordering
from maxbench.sharding.rules import GemmDims


class MatmulSpec(NamedTuple):
    """The static part of linear(): w is [batch..., ins..., outs...], x is [batch..., rows...,
    ins...], the result [batch..., rows..., outs...]; slots of experts that are sent are [rows,
    batch, ...] (expert_slots.py).

    Attributes:
      ins: dims that the GEMM contracts.
      batch: dims of experts.
      sequence: 'gather': the first dim of rows is sharded over tp, and is all-gathered first;
        'scatter': the partial results are reduce-scattered along it. Slots of experts are sent over
        ep to the GPUs of their experts before, or back after.
      fsdp: the dim of w that is sharded over fsdp_axes, and is all-gathered first.
      saved: the name by which a remat policy may save the wgrad operand of x.
      dx_unordered: dx's reduce-scatter may overlap any GEMM; otherwise it overlaps the wgrad.
    """

    ins: int
    batch: int = 0
    sequence: str = ""
    fsdp: int | None = None
    fsdp_axes: tuple[str, ...] = ()
    saved: str = ""
    dx_unordered: bool = False

    @property
    def dims(self) -> GemmDims:
        return GemmDims(self.batch, self.ins)

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes over which rows are communicated."""
        return ("ep", "tp") if self.batch else ("tp",)


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
    shape, first = w.shape, spec.batch + spec.ins
    fprop_k, shards_ins = None, spec.fsdp is not None and spec.fsdp < first
    if shards_ins and isinstance(w, Weight) and w.arithmetic.gather_along_outputs:
        # fprop_operand has a part of the outputs, and all of k.
        fprop_k = math.prod(shape[spec.batch : first]) * collectives.axis_size(spec.fsdp_axes)
    w = gemms.as_matrices(w, spec.dims, fprop_k)
    grad = grad if grad is None else grad.reshape(w.shape)
    # fsdp shards embed, which is the only one of its side's dims.
    fsdp = None if spec.fsdp is None else spec.batch + (spec.fsdp >= first)
    rows = x.shape[: x.ndim - spec.ins]
    # Rows become one dim, too, where transformer.add or a kernel needs a matrix.
    needs_2d = gemms.as_weight(w).arithmetic.needs_2d
    flat_rows = not spec.batch and (no_comm() or needs_2d)
    x = x.reshape(*([math.prod(rows)] if flat_rows else rows), -1)
    y, issued = _linear(x, w, grad, amax, tokens, spec._replace(ins=1, fsdp=fsdp))
    rows = (-1, *rows[1:]) if flat_rows else y.shape[:-1]
    outs = shape[first:] if len(shape) > first + 1 else y.shape[-1:]  # fsdp may shard a single one
    return y.reshape(*rows, *outs), issued


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _linear(x, w, grad, amax, tokens, spec):
    return _forward(x, w, grad, amax, tokens, spec)[0]


def _forward(x, w, grad, amax, tokens, spec):
    order, weight, dtype, rows = CommOrder(*tokens), gemms.as_weight(w), x.dtype, x.ndim - spec.ins
    how, gathers, used_after = weight.arithmetic, spec.sequence == "gather", order.used_after
    fprop_x, wgrad_x, amax_x = how.quantize_operand(
        _of_slots(spec, expert_slots.as_matrix, x) if gathers else x,
        weight.scales,
        False,
        spec.axes if gathers else (),
    )
    if gathers:
        dispatch = functools.partial(_of_slots, spec, expert_slots.dispatch, weight, used_after)
        fprop_x, wgrad_x = _map_forms(dispatch, fprop_x, wgrad_x)
    saved = how.map_arrays(wgrad_x, lambda x: checkpoint_fp8(x, spec.saved))
    fprop_w = _all_gather(how, weight.fprop_operand, spec.fsdp_axes, _fprop_fsdp_dim(weight, spec))
    if gathers:
        fprop_x = _all_gather_after(how, fprop_x, used_after, spec)
        fprop_x = _of_slots(spec, expert_slots.by_expert, weight, fprop_x)
    y = gemms.fprop(weight, fprop_x, fprop_w, spec.dims, range(rows, x.ndim), dtype)
    y = _of_slots(spec, expert_slots.rows_first, y) if spec.sequence == "scatter" else y
    token = order.issue(fprop_x if gathers else y)
    if spec.sequence == "scatter":
        y = collectives.reduce_scatter(y, "tp", 0)
        y = ordering.after(_of_slots(spec, expert_slots.send_back, y), used_after)
    has_tokens = tuple(None if t is None else () for t in tokens)  # known when traced
    return (y, token), (saved, amax_x, w, grad, amax, has_tokens)


def _backward(spec, residuals, cotangents):
    (wgrad_x, amax_x, w, grad, amax, has_tokens), (dy, token) = residuals, cotangents
    weight, dtype = gemms.as_weight(w), dy.dtype
    how, rows = weight.arithmetic, dy.ndim - (len(weight.shape) - spec.batch - spec.ins)
    gathers, scatters = spec.sequence == "gather", spec.sequence == "scatter"
    tokens = BackwardTokens(*(t is not None for t in has_tokens), token)
    wgrad_x = _all_gather(how, wgrad_x, "tp", spec.batch if gathers else None)
    if gathers and collectives.axis_size("tp") > 1:
        tokens.x_is_gathered(wgrad_x)
    # dy of experts waits before it is quantized, or XLA takes another pass over it.
    dy = tokens.after_x(dy) if spec.batch else dy
    dgrad_dy, wgrad_dy, amax_dy = how.quantize_operand(
        _of_slots(spec, expert_slots.as_matrix, dy) if scatters else dy,
        weight.scales,
        True,
        spec.axes if scatters else (),
    )
    if not spec.batch:
        dgrad_dy, wgrad_dy = _map_forms(tokens.after_x, dgrad_dy, wgrad_dy)
    amax = jax.tree.map(lambda a, *now: jnp.maximum(a, jnp.stack(now)), amax, amax_x, amax_dy)
    if scatters:
        used_after = tokens.dy_used_after
        dispatch = functools.partial(_of_slots, spec, expert_slots.dispatch, weight, used_after)
        gather = lambda dy: _all_gather_after(how, dispatch(dy), used_after, spec)
        dgrad_dy, wgrad_dy = _map_forms(gather, dgrad_dy, wgrad_dy)
        tokens.dy_is_gathered(dgrad_dy)
        by_expert = functools.partial(_of_slots, spec, expert_slots.by_expert, weight)
        dgrad_dy, wgrad_dy = _map_forms(by_expert, dgrad_dy, wgrad_dy)
    dgrad_w = _all_gather(how, weight.dgrad_operand, spec.fsdp_axes, spec.fsdp)
    dx = gemms.dgrad(weight, dgrad_dy, dgrad_w, spec.dims, range(rows, dy.ndim), dtype)
    dx = _of_slots(spec, expert_slots.rows_first, dx) if gathers else dx
    tokens.dgrad = ordering.token(dx)
    if gathers:
        wgrad_x = _of_slots(spec, expert_slots.by_expert, weight, wgrad_x)
        dx = collectives.reduce_scatter(dx, "tp", 0)
    # In the dtype of the accumulated gradient, so that the GEMM adds to it; or that of its operands
    # if it has more bits.
    wide = dtype if grad is None else jnp.promote_types(dtype, grad.dtype)
    # If fsdp shards columns, the gradient is computed transposed: its shards are then contiguous.
    transposed = spec.fsdp == 1 and len(weight.shape) == 2
    operands = (wgrad_dy, wgrad_x) if transposed else (wgrad_x, wgrad_dy)
    dw = gemms.wgrad(weight, *operands, spec.dims, range(spec.batch, rows), wide)
    add = lambda dw: dw if grad is None else grad + dw.astype(grad.dtype)
    if spec.fsdp is None:
        # Of experts, XLA would give the accumulator the layout of slots, and copy it for others.
        dw = row_major(add(dw)) if spec.batch else add(dw)
    tokens.wgrad = ordering.token(dw)
    if gathers:
        dx = dx if spec.dx_unordered else tokens.after_wgrad(dx)
        dx = _of_slots(spec, expert_slots.send_back, dx)
    if spec.fsdp is not None:
        dw = collectives.reduce_scatter(dw, spec.fsdp_axes, 0 if transposed else spec.fsdp)
        dw = add(dw.T if transposed else dw)
    dtokens = tokens.gradients()
    return (dx, dw, None, None, dtokens) if grad is None else (dx, None, dw, amax, dtokens)


_linear.defvjp(_forward, _backward)


def _fprop_fsdp_dim(weight: Weight, spec: MatmulSpec) -> int | None:
    """The dim of fprop_operand that is sharded over fsdp."""
    if spec.fsdp is None or not weight.arithmetic.fprop_transposed:
        return spec.fsdp
    if weight.arithmetic.gather_along_outputs:
        return spec.batch
    return gemms.fprop_dims(weight, spec.dims).index(spec.fsdp)


def _all_gather(how, x, axes: collectives.Axes, dim: int | None):
    return x if dim is None else how.map_arrays(x, lambda a: collectives.all_gather(a, axes, dim))


def _all_gather_after(how, x, t, spec: MatmulSpec):
    """An operand, all-gathered over tp and used only after the token."""
    return how.map_arrays(x, lambda a: ordering.all_gather_after(a, "tp", spec.batch, t))


def _map_forms(move, dgrad_or_fprop, wgrad):
    """Both operands of an array, which may be one."""
    moved = move(dgrad_or_fprop)
    return moved, moved if wgrad is dgrad_or_fprop else move(wgrad)


def _of_slots(spec: MatmulSpec, change, *args):
    """A function of expert_slots.py, called for experts alone; the last argument otherwise."""
    return change(*args) if spec.batch else args[-1]
