"""The one product of the model: linear(), x @ w with its collectives, forward and backward.

How its three GEMMs compute is asked of the arithmetic that the weight carries (formats).
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxbench.model.grad_accumulation import GradAccumulator
from maxbench.quantization import QuantizedArray, Weight, checkpoint_fp8, unquantized
from maxbench.sharding import collectives, ordering


class MatmulSpec(NamedTuple):
    """What is known of a product before its numbers.

    w is [batch..., ins..., outs...], x is [batch..., rows..., ins...]; the product [batch...,
    rows..., outs...].
    """

    ins: int
    batch: int = 0  # dims of experts
    # The first dim of rows is split over tp, and 'gather'ed first; or the sum over tp is
    # 'scatter'ed along it. Slots of experts go to the GPUs of ep that have these before, or come
    # back after.
    sequence: str = ""
    fsdp: int | None = None  # dim of w that is split over fsdp, and gathered first
    saved: str = ""  # name under which a remat policy may save what the backward pass needs of x

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes over which rows travel."""
        return ("ep", "tp") if self.batch else ("tp",)


class CommOrder(NamedTuple):
    """Zeros (collectives.zero) that say what communication of tp runs beside what product. Known:

    held: [3], the first before what the forward pass gathers or scatters here is needed. Gradients:
      when the product for dx is made, when what is gathered for it or beside it is there (dy, or
      where the forward pass gathers, x again), and when the product for the weight is made.
    made: what linear() makes of it: when the product is, or what it gathers. Its gradient: when the
      product for the weight is. Where the forward pass scatters, it is given to the next such
      product of the network: dy is gathered beside the weight of that one.
    free: (), and dx is not scattered beside the product for the weight, but beside any.
    """

    wait_for: jax.Array | None = None
    issued: jax.Array | None = None
    unordered: tuple | None = None


UNORDERED = CommOrder()  # nothing is held


def no_comm() -> bool:
    """Whether nothing of a dense product travels: neither its weight nor its rows are split."""
    return collectives.axis_size("tp") == collectives.axis_size("fsdp") == 1


@jax.custom_vjp
def grad_after_wgrads(x):
    """x, and zeros for products' turns (Turn.held): x's gradient then comes behind the products for
    their weights, which XLA puts off, and with them the end of what they read."""
    return x, jnp.zeros(3)


grad_after_wgrads.defvjp(
    lambda x: (grad_after_wgrads(x), None), lambda _, d: (ordering.after(d[0], d[1][2]),)
)


def linear(x, w, sums, gemm: MatmulSpec, turn: CommOrder = UNORDERED):
    """x @ w with the collectives that belong to it.

    Args:
      x: this GPU's part, the sequence split over tp where gemm.sequence is 'gather'.
      w: this GPU's part, split over fsdp where gemm.fsdp says so: an array, taken in the dtype of
        x, or a Weight, and x is then quantized too.
      sums: of w so far (sums.py): its gradient is the sum with this product's. None: the gradient
        is that of w, which must be an array.
      turn: what tp's communication waits for, in a pipeline.

    Returns:
      The product in the dtype of x, split over tp where gemm.sequence is 'scatter'; and the `made`
      of the next product's turn, None where this one's is.
    """
    grad, amax = sums if isinstance(sums, GradAccumulator) else (sums, None)
    w = w if isinstance(w, Weight) else w.astype(x.dtype)
    if gemm.batch and not isinstance(w, Weight):
        return _linear(x, w, grad, amax, turn, gemm)
    # As matrices: some kernels know only those, and XLA lays sums out as products make them.
    shape, first = w.shape, gemm.batch + gemm.ins
    k, n = math.prod(shape[gemm.batch : first]), math.prod(shape[first:])
    flat = lambda a, *dims: a.reshape(*shape[: gemm.batch], *dims)
    matrix = lambda a, *d: (
        a._replace(q=flat(a.q, *d)) if isinstance(a, QuantizedArray) else flat(a, *d)
    )
    if isinstance(w, Weight):
        turned = (n, k) if w.arithmetic.fprop_transposed else (k, n)
        if w.arithmetic.gather_along_outputs and gemm.fsdp is not None and gemm.fsdp < first:
            turned = -1, k * collectives.axis_size("fsdp")
        w = w.replace(
            dgrad_operand=matrix(w.dgrad_operand, k, n),
            fprop_operand=matrix(w.fprop_operand, *turned),
        )
    else:
        w = flat(w, k, n)
    grad = grad if grad is None else flat(grad, k, n)
    # What is split over fsdp, embed, is a dim by itself.
    fsdp = None if gemm.fsdp is None else gemm.batch + (gemm.fsdp >= first)
    rows = x.shape[: x.ndim - gemm.ins]
    # Rows are a matrix too, where network.add or a format wants one.
    one = not gemm.batch and (no_comm() or _as_weight(w).arithmetic.needs_2d)
    x = x.reshape(*([math.prod(rows)] if one else rows), -1)
    y, made = _linear(x, w, grad, amax, turn, gemm._replace(ins=1, fsdp=fsdp))
    rows = (-1, *rows[1:]) if one else y.shape[:-1]
    outs = shape[first:] if len(shape) > first + 1 else y.shape[-1:]  # one may be split over fsdp
    return y.reshape(*rows, *outs), made


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _linear(x, w, grad, amax, turn, gemm):
    return _forward(x, w, grad, amax, turn, gemm)[0]


def _forward(x, w, grad, amax, turn, gemm):
    weight, dtype, rows = _as_weight(w), x.dtype, x.ndim - gemm.ins
    how, first = weight.arithmetic, gemm.batch + gemm.ins
    joined = gemm.sequence == "gather"
    row, col, amax_x = how.quantize_operand(x, weight.scales, False, gemm.axes if joined else ())
    if joined:
        row, col = _map_forms(lambda x: _dispatch_slots(how, x, gemm), row, col)
    saved = how.map_arrays(col, lambda x: checkpoint_fp8(x, gemm.saved))
    dims = list(range(len(weight.shape)))
    if how.fprop_transposed:
        dims = dims[: gemm.batch] + dims[first:] + dims[gemm.batch : first]
    dim = gemm.fsdp
    if dim is not None and how.fprop_transposed:
        dim = gemm.batch if how.gather_along_outputs else dims.index(dim)
    col = _all_gather(how, weight.fprop_operand, "fsdp", dim)
    held = None if turn.wait_for is None else turn.wait_for[0]
    row = _all_gather_ordered(how, row, held, gemm) if joined else row
    ins = tuple(dims.index(d) for d in range(gemm.batch, first))
    y = _matmul(how, row, col, (tuple(range(rows, x.ndim)), ins), gemm, dtype)
    made = None if turn.issued is None else turn.issued + ordering.token(row if joined else y)
    if gemm.sequence == "scatter":
        y = ordering.after(
            _return_slots(collectives.reduce_scatter(y, "tp", gemm.batch), gemm), held
        )
    given = CommOrder(*(None if zero is None else () for zero in turn))
    return (y, made), (saved, amax_x, w, grad, amax, given)


def _backward(gemm, residuals, gradients):
    (x, amax_x, w, sums, amax, turn), (dy, later) = residuals, gradients
    later = None if turn.issued is None else later
    weight, dtype, first = _as_weight(w), dy.dtype, gemm.batch + gemm.ins
    how, outs = weight.arithmetic, tuple(range(first, len(weight.shape)))
    rows, joined = dy.ndim - len(outs), gemm.sequence == "scatter"
    columns = tuple(range(rows, dy.ndim))
    gathered = gemm.sequence == "gather"
    x = _all_gather(how, x, "tp", gemm.batch if gathered else None)
    apart = gathered and collectives.axis_size("tp") > 1
    came = ordering.token(x) if apart else None
    # x comes beside the product before: beside this one it would be dx's turn. Experts' dy is held
    # before it is quantized, or XLA takes one more pass to make it.
    if apart and gemm.batch:
        dy = ordering.after(dy, came)
    row, col, amax_dy = how.quantize_operand(dy, weight.scales, True, gemm.axes if joined else ())
    if apart and not gemm.batch:
        row, col = _map_forms(lambda dy: _after(dy, came), row, col)
    amax = jax.tree.map(lambda a, *now: jnp.maximum(a, jnp.stack(now)), amax, amax_x, amax_dy)
    if joined:
        row, col = _map_forms(
            lambda dy: _all_gather_ordered(how, _dispatch_slots(how, dy, gemm), later, gemm),
            row,
            col,
        )
        came = ordering.token(row)
    whole = _all_gather(how, weight.dgrad_operand, "fsdp", gemm.fsdp)
    dx = _matmul(how, row, whole, (columns, outs), gemm, dtype, exact=True)
    made = ordering.token(dx)
    if gathered:
        dx = collectives.reduce_scatter(dx, "tp", gemm.batch)
    over = tuple(range(gemm.batch, rows))
    # Of the sums' dtype, so that the product adds to them; of more bits where its operands have.
    wide = dtype if sums is None else jnp.promote_types(dtype, sums.dtype)
    # Where columns are split over fsdp, the gradient is made turned: parts then lie in one piece.
    turned = gemm.fsdp == 1 and len(weight.shape) == 2
    dw = _matmul(how, *((col, x) if turned else (x, col)), (over, over), gemm, wide, exact=True)
    add = lambda dw: dw if sums is None else sums + dw.astype(sums.dtype)
    if gemm.fsdp is None:
        dw = add(dw)
    last = ordering.token(dw)
    if gathered:
        held = last if apart and turn.unordered is None else None
        dx = _return_slots(ordering.after(dx, held), gemm)
    if gemm.fsdp is not None:
        dw = collectives.reduce_scatter(dw, "fsdp", 0 if turned else gemm.fsdp)
        dw = add(dw.T if turned else dw)
    zeros = jnp.stack([made, made if came is None else came, last]), last, ()
    turn = CommOrder(*(None if t is None else z for t, z in zip(turn, zeros, strict=True)))
    return (dx, dw, None, None, turn) if sums is None else (dx, None, dw, amax, turn)


_linear.defvjp(_forward, _backward)


def _as_weight(w) -> Weight:
    """w, or an array as a weight that is multiplied as it is."""
    return w if isinstance(w, Weight) else Weight(w, w, unquantized.PLAIN)


def _all_gather(how, x, axis: str, dim: int | None):
    return x if dim is None else how.map_arrays(x, lambda a: collectives.all_gather(a, axis, dim))


def _all_gather_ordered(how, x, zero, gemm: MatmulSpec):
    """Gathered over tp, needed only once `zero` is known."""
    return how.map_arrays(x, lambda a: ordering.all_gather_after(a, "tp", gemm.batch, zero))


def _after(x, zero):
    """A factor, read only once `zero` is known; of a quantized one the scale is, which is small."""
    held = lambda x: ordering.after(x, zero)
    return x._replace(scale=held(x.scale)) if isinstance(x, QuantizedArray) else held(x)


def _map_forms(move, row, col):
    """Both forms of an operand, which may be one."""
    moved = move(row)
    return moved, moved if col is row else move(col)


def _dispatch_slots(how, x, gemm: MatmulSpec):
    """All experts' slots of this GPU -> this GPU's experts' slots of all GPUs of ep."""
    return how.map_arrays(x, lambda a: collectives.all_to_all(a, "ep", 0, 1)) if gemm.batch else x


def _return_slots(y, gemm: MatmulSpec):
    return collectives.all_to_all(y, "ep", 1, 0) if gemm.batch else y


def _matmul(how, a, b, contract, gemm: MatmulSpec, dtype, exact=False):
    """A product of operands over dims of a and of b; of matrices if a kernel knows only those."""
    if not how.needs_2d:
        lead = tuple(range(gemm.batch))
        if lead and len(contract[0]) > 1:  # XLA would turn experts' weights round each time
            flat = lambda dims: lambda x: x.reshape(*x.shape[: dims[0]], -1)
            a, b = how.map_arrays(a, flat(contract[0])), how.map_arrays(b, flat(contract[1]))
            contract = contract[0][:1], contract[1][:1]
        return how.product(a, b, (contract, (lead, lead)), dtype, exact)
    rows, flat = a.q.shape[:-1], lambda x: x.reshape(*x.shape[: gemm.batch], -1, x.shape[-1])
    a, b = how.map_arrays(a, flat), how.map_arrays(b, flat)
    if contract[0][0] == gemm.batch:
        return how.product(a, b, "tn", dtype, exact)
    y = how.product(a, b, "nt", dtype, exact)
    return y.reshape(*rows, y.shape[-1])
