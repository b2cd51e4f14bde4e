"""Experts on several nodes: the first of two steps that dispatch a token (layout.ep_nodes).

A token is sent over the network to one GPU of each node, whichever of its experts are there: the
GPUs with the same local rank on all nodes all-gather their tokens. Each of them then dispatches all
these tokens to the experts of its own node, by an all-to-all over NVLink, and sums what returns. A
reduce-scatter over the nodes sums the results of the nodes. The backward pass is the transpose.

DeepEP does the same, but skips nodes that have no expert of a token: of 8 experts on 4 nodes, a
token misses a node once in 10. Sent from its own GPU to each of its experts' GPUs, a token would
cross the network top_k (n - 1) / n times for n nodes, instead of n - 1 times.

Shape letters: j token of this GPU, J of the GPUs with its local rank on all nodes (n x j), k
choice, e expert, c slot of an expert for a GPU's tokens, C for those of J (n x c).
"""

import jax
import jax.numpy as jnp

from maxbench.sharding import collectives

AXIS = "ep_nodes"


def gather(x_jd: jax.Array) -> jax.Array:
    """The tokens of the GPUs with this one's local rank on all nodes: x_Jd."""
    return collectives.all_gather(x_jd, AXIS, 0)


def sum_nodes(y_Jd: jax.Array) -> jax.Array:
    """The sum of all nodes' results for this GPU's tokens: y_jd."""
    return collectives.reduce_scatter(y_Jd, AXIS, 0)


def first_expert(experts: int) -> jax.Array | int:
    """The first of `experts` experts that is on this node."""
    return collectives.axis_index(AXIS) * (experts // collectives.axis_size(AXIS))


def gather_slots(slot_jk: jax.Array, token_ec: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Slots of this node's experts for the tokens of gather(), those of one GPU after another's.

    Args:
      slot_jk: slot of each choice, e x (slots of an expert) + c; -1 if it has none.
      token_ec: token of each slot of all experts, -1 if empty.

    Returns:
      slot_Jk, e x (slots of an expert x n) + C, -1 also if the expert is on another node; and
      token_eC. e are the experts of this node.
    """
    nodes, (experts, slots) = collectives.axis_size(AXIS), token_ec.shape
    if nodes == 1:
        return slot_jk, token_ec
    tokens = len(slot_jk)
    token_eC = collectives.all_to_all(token_ec, AXIS, 0, 1)
    source_C = jnp.arange(nodes * slots) // slots
    token_eC = jnp.where(token_eC < 0, -1, token_eC + source_C * tokens)
    slot_Jk = gather(slot_jk)
    expert_Jk = slot_Jk // slots - first_expert(experts)
    source_J1 = (jnp.arange(nodes * tokens) // tokens)[:, None]
    moved_Jk = (expert_Jk * nodes + source_J1) * slots + slot_Jk % slots
    is_here_Jk = (slot_Jk >= 0) & (expert_Jk >= 0) & (expert_Jk < experts // nodes)
    return jnp.where(is_here_Jk, moved_Jk, -1).astype(slot_jk.dtype), token_eC
