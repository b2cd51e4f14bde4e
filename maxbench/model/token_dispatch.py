"""Tokens of dropless experts over ep: a token is sent once to each GPU that has experts it chose.

Each pair of GPUs has a buffer of a fixed number of rows, because shapes are static: `factor` times
the number of tokens that one GPU sends to another when all experts are chosen equally often. Tokens
that find it full are counted, and model/experts.py ends the run (step/state.py).

NVIDIA's programs (DeepEP, HybridEP) send each token once per GPU too, or once per host, and then to
its GPUs; their kernels read the number of rows from GPU memory. XLA's counterpart,
jax.lax.ragged_all_to_all, copies it to the host first over NCCL, which then waits for the GPU in
every layer, and does not exist on a CPU.

Shape letters: j token, k choice, p GPU of ep, c row of a pair's buffer, r row that a GPU receives,
p x c of them.
"""

import math

import jax
import jax.numpy as jnp

from maxbench.model import grouped_matmul
from maxbench.model.grouped_matmul import BlockAssignment, take
from maxbench.sharding import collectives


def buffer_rows(tokens: int, experts: int, top_k: int, gpus: int, factor: float) -> int:
    """Rows of a pair's buffer: `factor` x tokens x the probability that a token that chooses top_k
    of all experts, each equally often, chooses one of a GPU. At most all tokens."""
    others = experts - experts // gpus
    none = math.prod(max(others - i, 0) / (experts - i) for i in range(top_k))
    return min(tokens, math.ceil(factor * tokens * (1 - none)))


def assign(expert_jk: jax.Array, experts: int, rows: int) -> tuple[BlockAssignment, jax.Array]:
    """Assigns tokens to rows of the buffers, in the order of tokens.

    Args:
      expert_jk: experts that each token chose; those outside 0 .. p x experts - 1 are on other
        nodes.
      experts: of one GPU.
      rows: of a buffer.

    Returns:
      The rows as grouped_matmul.dispatch() and combine() read them, a block for each GPU: a token
      that chose several experts of a GPU has a row for the first of these choices, and -1 for the
      others. And the number of rows that did not fit.
    """
    gpus, (j, k) = collectives.axis_size("ep"), expert_jk.shape
    gpu_jk = expert_jk // experts
    goes_jp = jnp.any(gpu_jk[..., None] == jnp.arange(gpus), 1)
    row_jp = jnp.cumsum(goes_jp, 0, dtype=jnp.int32) - 1
    lost = jnp.sum(jnp.maximum(row_jp[-1] + 1 - rows, 0))
    j1, earlier = jnp.arange(j, dtype=jnp.int32)[:, None], jnp.tri(k, k=-1, dtype=bool)
    repeated_jk = jnp.any((gpu_jk[:, :, None] == gpu_jk[:, None]) & earlier, -1)
    row_jk = row_jp[j1, jnp.clip(gpu_jk, 0, gpus - 1)]
    elsewhere_jk = (gpu_jk < 0) | (gpu_jk >= gpus)
    no_row_jk = elsewhere_jk | repeated_jk | (row_jk >= rows)
    slot_jk = jnp.where(no_row_jk, -1, gpu_jk * rows + row_jk)
    index = jnp.where(slot_jk < 0, gpus * rows, slot_jk)
    choice = jnp.full(gpus * rows, -1, jnp.int32).at[index].set(j1 * k, mode="drop")
    return BlockAssignment(slot_jk, choice.reshape(gpus, rows), jnp.arange(gpus), None), lost


def send(x_jd: jax.Array, pairs: BlockAssignment) -> jax.Array:
    """All GPUs' tokens that chose experts of this one: x_rd, zeros in empty rows."""
    x_pcd = grouped_matmul.dispatch(x_jd, pairs)
    return collectives.all_to_all(x_pcd, "ep").reshape(-1, x_jd.shape[-1])


def send_indices(x_jk: jax.Array, pairs: BlockAssignment) -> jax.Array:
    """send() of integers, which have no gradient; -1 in empty rows."""
    token_pc = jnp.where(pairs.choice_nc < 0, -1, pairs.choice_nc // x_jk.shape[1])
    x_pck = take(x_jk + 1, token_pc) - 1
    return collectives.all_to_all(x_pck, "ep").reshape(-1, x_jk.shape[1])


def send_back(y_rd: jax.Array, pairs: BlockAssignment) -> jax.Array:
    """The sum of what all GPUs computed for each of this GPU's tokens: y_jd."""
    y_pcd = y_rd.reshape(*pairs.choice_nc.shape, -1)
    return grouped_matmul.combine(collectives.all_to_all(y_pcd, "ep"), pairs)
