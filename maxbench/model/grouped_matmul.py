"""Products of rows with the weight of the expert that each was sorted to: no row is padded to the
number that an expert might get, and shapes are static.

Rows of one expert fill whole blocks, its last one perhaps in part; a loop multiplies the blocks
that are filled. jax.lax.ragged_dot would be the same in one call, but XLA (of jax 0.10) has no
kernel for it, neither on a CPU nor for an H100: it writes the rows once per expert, zeros but for
its own, and multiplies them all. For 16 experts that is 16 times the memory and 16 times the work,
as compiled for both.

Shape letters: j token, k choice, n block, c row of a block, e expert held here, d in, f out.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxbench.sharding import collectives


class BlockAssignment(NamedTuple):
    """Which row is where. -1 is nowhere, or nothing."""

    slot_jk: jax.Array  # the row of each choice, numbered n x rows of a block + c
    choice_nc: jax.Array  # and the choice in each row, numbered j x k's size + k
    expert_n: jax.Array  # of each block; blocks of one expert follow each other
    used: jax.Array | None  # blocks that have a row; None: all, but for one of each expert


def assign_blocks(expert_jk, experts: int) -> BlockAssignment:
    """Sorts choices by their expert.

    Args:
      expert_jk: numbers of experts; those outside of 0 .. experts - 1 are held elsewhere.
      experts: held here, on each GPU of ep as many.
    """
    j, k = expert_jk.shape
    size = 1 << max(3, (_mean(expert_jk, experts) // 4).bit_length() - 1)
    # However tokens choose: each takes an expert once, and each expert leaves one block unfilled.
    count = min(j * min(k, experts) // size + experts, experts * -(-j // size))
    flat = expert_jk.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < experts), flat, experts)
    order = jnp.argsort(flat, stable=True)
    rows_e = jnp.zeros(experts + 1, jnp.int32).at[flat].add(1)
    before = lambda x: jnp.cumsum(x) - x
    blocks_e = -(-rows_e // size)
    expert = flat[order]
    within = jnp.arange(j * k, dtype=jnp.int32) - before(rows_e)[expert]
    slot = jnp.where(expert < experts, before(blocks_e)[expert] * size + within, -1)
    choice = jnp.full(count * size, -1, jnp.int32)
    choice = choice.at[jnp.where(slot < 0, count * size, slot)].set(order, mode="drop")
    ends_e = jnp.cumsum(blocks_e[:experts])
    expert_n = jnp.sum(jnp.arange(count)[:, None] >= ends_e, 1)
    slot_jk = jnp.zeros(j * k, jnp.int32).at[order].set(slot).reshape(j, k)
    expert_n = jnp.minimum(expert_n, experts - 1)
    used = ends_e[-1] if collectives.axis_size("ep") > 1 else None
    return BlockAssignment(slot_jk, choice.reshape(count, size), expert_n, used)


def _mean(choices, experts: int) -> int:
    """Rows of an expert, were all chosen alike."""
    return choices.size // (experts * collectives.axis_size("ep"))


def take(x, index):
    """Rows of x; zeros where index is negative."""
    return jnp.where((index >= 0)[..., None], x[jnp.maximum(index, 0)], 0)


def _spread(x_jd, plan: BlockAssignment):
    k = plan.slot_jk.shape[1]
    return take(x_jd, jnp.where(plan.choice_nc < 0, -1, plan.choice_nc // k))


def _collect(y_ncd, plan: BlockAssignment):
    y, total = y_ncd.reshape(-1, y_ncd.shape[-1]), 0.0
    for slot_j in plan.slot_jk.T:  # one after another: [j, k, d] would stand in memory
        total += take(y, slot_j).astype(jnp.float32)
    return total.astype(y.dtype)


@jax.custom_vjp
def dispatch(x_jd, plan: BlockAssignment):
    """Tokens in the rows of their choices: x_ncd."""
    return _spread(x_jd, plan)


dispatch.defvjp(
    lambda x_jd, plan: (_spread(x_jd, plan), plan),
    lambda plan, dy_ncd: (_collect(dy_ncd, plan), None),
)


@jax.custom_vjp
def combine(y_ncd, plan: BlockAssignment):
    """Back at their tokens, the sum of each token's rows here: y_jd."""
    return _collect(y_ncd, plan)


combine.defvjp(
    lambda y_ncd, plan: (_collect(y_ncd, plan), plan),
    lambda plan, dy_jd: (_spread(dy_jd, plan), None),
)


def block_gates(gate_jk, plan: BlockAssignment):
    """The weight of each row."""
    return take(gate_jk.reshape(-1, 1), plan.choice_nc)[..., 0]


@jax.custom_vjp
def grouped_matmul(x_ncd, w_edf, plan: BlockAssignment):
    """Each block times the weight of its expert, y_ncf; zeros in blocks that are not filled.

    Sums in fp32; the result, and the gradients, have the dtype of x.
    """
    return _forward(x_ncd, w_edf, plan)[0]


def _forward(x_ncd, w_edf, plan):
    def block(n, y_ncf):
        y_cf = _dot(x_ncd[n], w_edf[plan.expert_n[n]], 1, 0)
        return y_ncf.at[n].set(y_cf.astype(y_ncf.dtype))

    y_ncf = jnp.zeros((*x_ncd.shape[:2], w_edf.shape[2]), x_ncd.dtype)
    return _for_blocks(plan, len(w_edf), block, y_ncf), (x_ncd, w_edf, plan)


def _backward(saved, dy_ncf):
    x_ncd, w_edf, plan = saved

    def block(n, grads):
        dx_ncd, dw_edf, sum_df = grads
        e, dy_cf = plan.expert_n[n], dy_ncf[n]
        dx_cd = _dot(dy_cf, w_edf[e], 1, 1).astype(dx_ncd.dtype)
        # One expert's blocks add up in fp32; its last one leaves the sum of all.
        same = e == plan.expert_n[jnp.maximum(n - 1, 0)]
        sum_df = jnp.where(same, sum_df, 0) + _dot(x_ncd[n], dy_cf, 0, 0)
        return dx_ncd.at[n].set(dx_cd), dw_edf.at[e].set(sum_df.astype(dw_edf.dtype)), sum_df

    zeros = jnp.zeros_like(x_ncd), jnp.zeros_like(w_edf), jnp.zeros(w_edf.shape[1:], jnp.float32)
    return *_for_blocks(plan, len(w_edf), block, zeros)[:2], None


def _for_blocks(plan: BlockAssignment, experts: int, body, start):
    """A loop over blocks; over ep, where most may be empty, as long as there are rows."""
    if plan.used is None:
        return jax.lax.fori_loop(0, len(plan.expert_n), body, start)
    even = experts * -(-_mean(plan.slot_jk, experts) // plan.choice_nc.shape[1])
    with jax.named_scope(f"about_{even}_trips"):  # for who reads the program without data
        return jax.lax.fori_loop(0, plan.used, body, start)


def _dot(a, b, over_a: int, over_b: int):
    dims = ((over_a,), (over_b,)), ((), ())
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


grouped_matmul.defvjp(_forward, _backward)
