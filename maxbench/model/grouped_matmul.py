"""Grouped GEMMs of dropless experts: rows are sorted by expert, and no expert's rows are padded to
a capacity. Shapes are static (as MegaBlocks, arXiv:2211.15841).

Rows of one expert fill whole blocks, the last one perhaps partly, and a loop multiplies each block
by the weight of its expert. jax.lax.ragged_dot does the same in one call, but has no kernel on a
CPU or an H100 as of jax 0.10: XLA writes the rows once per expert, masked, and multiplies all of
them. For 16 experts that is 16 times the memory and the FLOPs, as compiled for both.

Shape letters: j token, k choice, n block, c row of a block, e expert of this GPU, d in, f out.
"""

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from maxbench.config import loop_lengths
from maxbench.sharding import collectives


@flax.struct.dataclass
class BlockAssignment:
    """The block and row of each choice of an expert by a token.

    Attributes:
      slot_jk: row of each choice, n x (rows per block) + c; -1 if another GPU has the expert.
      choice_nc: choice of each row, j x (choices per token) + k; -1 if the row is empty.
      expert_n: expert of each block; blocks of one expert are consecutive.
      used: number of blocks with rows, or None if almost all have (no ep): at most one per expert
        is empty.
    """

    slot_jk: jax.Array
    choice_nc: jax.Array
    expert_n: jax.Array
    used: jax.Array | None


def assign_blocks(
    expert_jk: jax.Array, experts: int, mean_rows: int, factor: float = 0.0
) -> tuple[BlockAssignment, jax.Array | None]:
    """Sorts choices by expert, stably, into blocks of one expert each.

    The rows of a block are loop_lengths.block_rows().

    Args:
      expert_jk: experts that each token chose, int; experts outside 0 .. experts - 1 are on other
        GPUs of ep.
      experts: number of experts on this GPU.
      mean_rows: rows of an expert if all experts are chosen equally often.
      factor: there are blocks for `factor` times as many rows; 0 = for any choices.

    Returns:
      The blocks, and the number of choices that did not fit; None if all do.
    """
    j, k = expert_jk.shape
    size = loop_lengths.block_rows(mean_rows)
    # The most blocks for any choices: a token chooses an expert once at most, and each expert has
    # one block at most that is partly filled.
    count = min(j * min(k, experts) // size + experts, experts * -(-j // size))
    worst, most = count, math.ceil(factor * mean_rows * experts / size) + experts
    count = min(worst, most) if factor else worst
    flat = expert_jk.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < experts), flat, experts)
    order = jnp.argsort(flat, stable=True)
    rows_e = jnp.zeros(experts + 1, jnp.int32).at[flat].add(1)
    exclusive_cumsum = lambda x: jnp.cumsum(x) - x
    blocks_e = -(-rows_e // size)
    expert = flat[order]
    row = jnp.arange(j * k, dtype=jnp.int32) - exclusive_cumsum(rows_e)[expert]
    slot = jnp.where(expert < experts, exclusive_cumsum(blocks_e)[expert] * size + row, -1)
    lost = None
    if count < worst:
        fits = slot < count * size
        lost, slot = jnp.sum(~fits), jnp.where(fits, slot, -1)
    choice = jnp.full(count * size, -1, jnp.int32)
    choice = choice.at[jnp.where(slot < 0, count * size, slot)].set(order, mode="drop")
    ends_e = jnp.cumsum(blocks_e[:experts])
    expert_n = jnp.sum(jnp.arange(count)[:, None] >= ends_e, 1)
    slot_jk = jnp.zeros(j * k, jnp.int32).at[order].set(slot).reshape(j, k)
    expert_n = jnp.minimum(expert_n, experts - 1)
    is_sharded = any(collectives.axis_size(axis) > 1 for axis in ("ep_nodes", "ep"))
    used = ends_e[-1] if is_sharded else None
    used = used if lost is None else jnp.minimum(ends_e[-1], count)
    return BlockAssignment(slot_jk, choice.reshape(count, size), expert_n, used), lost


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index] along dim 0; zeros where index is negative."""
    return jnp.where((index >= 0)[..., None], x[jnp.maximum(index, 0)], 0)


def _scatter_tokens(x_jd, blocks: BlockAssignment):
    k = blocks.slot_jk.shape[1]
    return take(x_jd, jnp.where(blocks.choice_nc < 0, -1, blocks.choice_nc // k))


def _sum_choices(y_ncd, blocks: BlockAssignment):
    y = y_ncd.reshape(-1, y_ncd.shape[-1])
    total: Any = 0.0
    for slot_j in blocks.slot_jk.T:  # one choice at a time: [j, k, d] is never in memory
        total += take(y, slot_j).astype(jnp.float32)
    return total.astype(y.dtype)


@jax.custom_vjp
def dispatch(x_jd: jax.Array, blocks: BlockAssignment) -> jax.Array:
    """Copies each token to the rows of its choices: x_ncd, zeros in empty rows."""
    return _scatter_tokens(x_jd, blocks)


dispatch.defvjp(
    lambda x_jd, blocks: (_scatter_tokens(x_jd, blocks), blocks),
    lambda blocks, dy_ncd: (_sum_choices(dy_ncd, blocks), None),
)


@jax.custom_vjp
def combine(y_ncd: jax.Array, blocks: BlockAssignment) -> jax.Array:
    """Sums each token's rows on this GPU: y_jd. Accumulates in fp32."""
    return _sum_choices(y_ncd, blocks)


combine.defvjp(
    lambda y_ncd, blocks: (_sum_choices(y_ncd, blocks), blocks),
    lambda blocks, dy_jd: (_scatter_tokens(dy_jd, blocks), None),
)


def block_gates(gate_jk: jax.Array, blocks: BlockAssignment) -> jax.Array:
    """The router's weight of each row, gate_nc; 0 in empty rows."""
    return take(gate_jk.reshape(-1, 1), blocks.choice_nc)[..., 0]


@jax.custom_vjp
def grouped_matmul(x_ncd: jax.Array, w_edf: jax.Array, blocks: BlockAssignment) -> jax.Array:
    """Each block times the weight of its expert: y_ncf, zeros in unused blocks.

    Accumulates in fp32; the result and the gradients have the dtype of x and of w.
    """
    return _forward(x_ncd, w_edf, blocks)[0]


def _forward(x_ncd, w_edf, blocks):
    def multiply(n, y_ncf):
        y_cf = _dot(x_ncd[n], w_edf[blocks.expert_n[n]], 1, 0)
        return y_ncf.at[n].set(y_cf.astype(y_ncf.dtype))

    y_ncf = jnp.zeros((*x_ncd.shape[:2], w_edf.shape[2]), x_ncd.dtype)
    return _for_blocks(blocks, len(w_edf), multiply, y_ncf), (x_ncd, w_edf, blocks)


def _backward(saved, dy_ncf):
    x_ncd, w_edf, blocks = saved

    def multiply(n, grads):
        dx_ncd, dw_edf, sum_df = grads
        e, dy_cf = blocks.expert_n[n], dy_ncf[n]
        dx_cd = _dot(dy_cf, w_edf[e], 1, 1).astype(dx_ncd.dtype)
        # sum_df accumulates the blocks of one expert in fp32; its last block writes the total.
        same_expert = e == blocks.expert_n[jnp.maximum(n - 1, 0)]
        sum_df = jnp.where(same_expert, sum_df, 0) + _dot(x_ncd[n], dy_cf, 0, 0)
        return dx_ncd.at[n].set(dx_cd), dw_edf.at[e].set(sum_df.astype(dw_edf.dtype)), sum_df

    zeros = jnp.zeros_like(x_ncd), jnp.zeros_like(w_edf), jnp.zeros(w_edf.shape[1:], jnp.float32)
    return *_for_blocks(blocks, len(w_edf), multiply, zeros)[:2], None


def _for_blocks(blocks: BlockAssignment, experts: int, body, carry):
    """A loop over blocks; with ep, where most may be empty, over the used ones."""
    if blocks.used is None:
        return jax.lax.fori_loop(0, len(blocks.expert_n), body, carry)
    with jax.named_scope(loop_lengths.blocks_scope(experts)):  # its mean trips: trip_counts()
        return jax.lax.fori_loop(0, blocks.used, body, carry)


def _dot(a, b, a_dim: int, b_dim: int):
    """a and b contracted over one dim of each; fp32."""
    dims = ((a_dim,), (b_dim,)), ((), ())
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


grouped_matmul.defvjp(_forward, _backward)
