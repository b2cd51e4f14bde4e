"""Execution order inside one compiled program, expressed as data dependences.

XLA's latency-hiding scheduler may move any instruction that does not depend on another, and XLA
drops optimization barriers before it schedules. Where an order matters, an instruction depends on
a token of another one: an fp32 zero that is computed from the other's result, infinities and NaN
included, and that XLA cannot fold. Adding it changes no value (-0 becomes 0). All functions of this
module do nothing under enabled(False), which train.order=off sets.

The train step steers XLA's scheduler by this module alone. Optimization barriers elsewhere keep two
kernels from being fused; they do not order.
"""

import contextlib
import contextvars
import functools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from maxbench.sharding.collectives import all_gather, axis_index, axis_size, ppermute_shift

Token = jax.Array  # fp32 scalar, 0

_enabled = contextvars.ContextVar("maxbench_ordering", default=True)


@contextlib.contextmanager
def enabled(on: bool) -> Iterator[None]:
    """Whether what is traced inside is ordered."""
    before = _enabled.set(on)
    try:
        yield
    finally:
        _enabled.reset(before)


def token(tree: Any) -> Token:
    """A token that is known once all arrays of the tree are computed."""
    if not _enabled.get():
        return jnp.zeros(())

    def one(x):
        first = x[(0,) * x.ndim]
        if x.dtype.itemsize == 1 or not jnp.issubdtype(x.dtype, jnp.floating):
            first = first.astype(jnp.float32)  # of 8 bits, a format may have no infinity
        # False for infinities and NaN too, of which 0 * x would be NaN; XLA does not know that.
        return (first < -jnp.inf).astype(jnp.float32)

    return sum(map(one, jax.tree.leaves(tree)), jnp.zeros(()))


def after(tree: Any, t: Token | None) -> Any:
    """The tree, used by its readers only after the token; None is no token.

    Costs a pass over each array, unless XLA fuses the addition. On the result of a collective, it
    makes XLA run the collective concurrently with the work of the token: unordered, XLA delays
    wgrads to the end and waits for collectives.
    """
    if t is None or not _enabled.get():
        return tree
    return jax.tree.map(lambda x: x + t.astype(x.dtype), tree)


def all_gather_after(x: jax.Array, axis: str, dim: int, t: Token | None) -> jax.Array:
    """all_gather(x, axis, dim), used only after the token.

    Rewrites one element of this GPU's part: adding the token to all would be a pass over the
    operand of a GEMM. The barrier keeps the write in place: if a transpose of the gathered array
    were fused with it, XLA would copy the array for the GEMM.
    """
    if t is None or axis_size(axis) == 1 or not _enabled.get():
        return all_gather(x, axis, dim)
    start: list[jax.Array | int] = [0] * x.ndim
    start[dim] = axis_index(axis) * x.shape[dim]
    return lax.optimization_barrier(_write_first(all_gather(x, axis, dim), x, t, start))


def write_after(x: jax.Array, t: Token | None) -> jax.Array:
    """A result of a collective, used only after the token. Rewrites one element, likewise: what
    reads it otherwise must read the array that this returns, or XLA copies it."""
    if t is None or not _enabled.get():
        return x
    return lax.optimization_barrier(_write_first(x, x, t, [0] * x.ndim))


def ppermute_after(x: jax.Array, axis: str, t: Token | None) -> jax.Array:
    """ppermute_shift(x, axis), started only after the token. Rewrites one element, likewise."""
    ordered = t is not None and _enabled.get()
    return ppermute_shift(_write_first(x, x, t, [0] * x.ndim) if ordered else x, axis)


def _write_first(into, x, t, start):
    first = x[(slice(0, 1),) * x.ndim].astype(jnp.float32) + t
    return lax.dynamic_update_slice(into, first.astype(x.dtype), start)


def index_after(index: jax.Array | int, *trees: Any) -> Any:
    """An int32 index, of a slot or of a chunk, that is known only after all arrays of the trees.

    It orders the write of a buffer after the reads of what it replaces, so that XLA writes in
    place, and a branch after the start of a collective.
    """
    for tree in trees:
        index = index + token(tree).astype(jnp.int32)
    return index


def index_token(tree: Any) -> jax.Array:
    """An int32 zero, known after all arrays of the tree, computed once for all of its readers."""
    return lax.optimization_barrier(token(tree).astype(jnp.int32))


@jax.custom_vjp
def grad_after_wgrads(x: jax.Array) -> Any:
    """x, and tokens [3] for GEMMs (CommOrder.wait_for of model/comm_order.py): the gradient of x
    waits for their wgrads.

    XLA would delay the wgrads, and with them the release of their operands.
    """
    return x, jnp.zeros(3)


grad_after_wgrads.defvjp(
    lambda x: (grad_after_wgrads(x), None),
    lambda _, cotangents: (after(cotangents[0], cotangents[1][2]),),
)


@jax.custom_vjp
def signal(x: jax.Array) -> tuple[jax.Array, Token]:
    """x, and a token for wait().

    What waits runs after x in the forward pass. In the backward pass the gradient of x is used
    after that of the array which waited: in the reverse order.
    """
    return x, token(x)


signal.defvjp(lambda x: (signal(x), None), lambda _, grads: (after(*grads),))


@jax.custom_vjp
def wait(x: jax.Array, t: Token) -> jax.Array:
    """x, used after the array whose signal() t is."""
    return after(x, t)


wait.defvjp(lambda x, t: (wait(x, t), None), lambda _, dx: (dx, token(dx)))


class Tokens:
    """Tokens of the events of one tick, by name, and the table of which event waits for which.

    Names are '<pass>.<GEMM>.<operation>', as in pipeline/tick_order.py.

    Args:
      order: event -> the events that it waits for.
    """

    def __init__(self, order: Mapping[str, tuple[str, ...]]):
        self.order = order
        self.tokens: dict[str, jax.Array] = {}

    def emit(self, event: str, t: Token) -> None:
        """Stores the token of an event; it replaces that of the layer before."""
        self.tokens[event] = t

    def of(self, event: str) -> list[Token]:
        """Tokens of the events that this event waits for, as far as they have happened."""
        return [self.tokens[name] for name in self.order.get(event, ()) if name in self.tokens]

    def wanted_by(self, event: str) -> Token | None:
        """One token for of(event); None if there is nothing to wait for."""
        found = self.of(event)
        return functools.reduce(operator.add, found) if found else None
