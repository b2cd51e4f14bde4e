"""Slots of experts: the order in which they are sent over ep, and how GEMMs read them.

Slots are sent as [r, e, d]: e are the experts of one destination GPU, and r is sorted by the
destination along ep. The all-to-all exchanges contiguous blocks of r, and its result is [r, e, d]
too, with r sorted by source. XLA's GEMMs take strided operands: the slots of one expert are every
e-th row, and no transpose is needed. In the order [e, r, d], each all-to-all needs one.

cuDNN's block-scaled GEMMs and Transformer Engine's take no strides (Arithmetic.needs_2d): their
operands are copied to [e, r, d] where they arrive, and their results to [r, e, d]. So are those
of all GEMMs with tp.

Shape letters as in experts.py; d is any last dim.
"""

from typing import Any

import jax
import jax.numpy as jnp

from maxbench.model import comm_order
from maxbench.quantization import Weight, row_major
from maxbench.sharding import collectives


def sending_order(slot_jk: jax.Array, token_ec: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Slots, and the tokens in them, in the order in which they are sent.

    Args:
      slot_jk: slot of each choice, e x (slots of an expert) + c; -1 if it has none.
      token_ec: token of each slot of all experts, -1 if empty.

    Returns:
      slot_jk, r x (experts of a GPU) + e, -1 likewise; and token_re.
    """
    experts, slots = token_ec.shape
    local = experts // collectives.axis_size("ep")
    token_re = token_ec.reshape(-1, local, slots).swapaxes(1, 2).reshape(-1, local)
    expert_jk, c_jk = slot_jk // slots, slot_jk % slots
    sent_jk = (expert_jk // local * slots + c_jk) * local + expert_jk % local
    return jnp.where(slot_jk < 0, -1, sent_jk), token_re


def as_matrix(x_red: jax.Array) -> jax.Array:
    """[r, e x d]: its rows and columns are quantized as those of each expert are."""
    return x_red.reshape(len(x_red), -1)


def dispatch(weight: Weight, t: jax.Array | None, x: Any) -> Any:
    """An operand of as_matrix(): this GPU's slots of all experts -> all GPUs' slots of its experts.

    Args:
      weight: of the GEMM.
      t: without tp, the result is used only after this token; with tp, ordering is that of its
        all-gather.

    Returns:
      [r, e x d], or [e, r, d] if is_copied(weight).
    """
    x = weight.arithmetic.map_arrays(x, lambda a: collectives.all_to_all(a, "ep"))
    if is_copied(weight):  # before it is saved and ordered
        x = _experts_first(weight, row_major, x)
    return comm_order.after(x, t) if collectives.axis_size("tp") == 1 else x


def is_copied(weight: Weight) -> bool:
    """Whether dispatch() copies what arrives to [e, r, d]. With tp too: XLA overlaps less of the
    all-gathers and reduce-scatters over tp otherwise (2 % of Grok-1's step on 16 H100)."""
    return weight.arithmetic.needs_2d or collectives.axis_size("tp") > 1


def by_expert(weight: Weight, x: Any) -> Any:
    """The result of dispatch() as [e, r, d], the operand of a batched GEMM."""
    return x if is_copied(weight) else _experts_first(weight, lambda a: a, x)


def _experts_first(weight: Weight, change, x):
    part = lambda a: change(a.reshape(len(a), weight.shape[0], -1).swapaxes(0, 1))
    return weight.arithmetic.map_arrays(x, part)


def rows_first(y_erd: jax.Array) -> jax.Array:
    """A result as send_back() takes it, [r, e, d]."""
    return y_erd.swapaxes(0, 1)


def send_back(y_red: jax.Array) -> jax.Array:
    """The reverse of dispatch(), of a result."""
    return collectives.all_to_all(y_red, "ep")
