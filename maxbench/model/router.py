"""Routing of tokens to experts: scores, choice, weights, and what balances the choice.

Shape letters: j token of this GPU, b sequence, t position, d embed, e expert, k choice, g group of
experts, w window of positions, r round of groups in a window (balanced_choice()).
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxbench import quantization
from maxbench.config.channels import Experts
from maxbench.sharding import collectives


def route(
    m: Experts,
    logits_je: jax.Array,
    bias_e: jax.Array | None = None,
    forced_jk: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Top-k routing.

    Args:
      logits_je: fp32.
      bias_e: added to the scores for the choice only, never to the weights: the correction that
        update_bias() learns, or None.
      forced_jk: the choice, in place of the best scores.

    Returns:
      gate_jk, fp32: weights of the chosen experts. With model.router 'softmax_topk', their softmax
        over all experts; with 'topk_softmax' (Megatron's default), over the chosen ones; with
        'sigmoid' (arXiv:2412.19437), their sigmoids, divided by the sum of these. All of them times
        model.router_scale.
      expert_jk: chosen experts.
      probs_je, fp32: softmax over all experts; with 'sigmoid', sigmoids divided by their sum.
    """
    if m.router == "sigmoid":
        score_je = jax.nn.sigmoid(logits_je)
        probs_je = score_je / jnp.sum(score_je, -1, keepdims=True)
    else:
        probs_je = jax.nn.softmax(logits_je)
        score_je = probs_je if m.router == "softmax_topk" else logits_je
    if forced_jk is None:
        forced_jk = best_experts(m, jax.lax.stop_gradient(score_je), bias_e)
    expert_jk = save_routing(forced_jk)
    gate_jk = jnp.take_along_axis(score_je, expert_jk, 1)
    if m.router == "topk_softmax":
        gate_jk = jax.nn.softmax(gate_jk)
    if m.router == "sigmoid":
        gate_jk /= jnp.sum(gate_jk, -1, keepdims=True) + 1e-20
    gate_jk = gate_jk if m.router_scale == 1 else gate_jk * m.router_scale
    return gate_jk, expert_jk, probs_je


def best_experts(m: Experts, score_je: jax.Array, bias_e: jax.Array | None = None) -> jax.Array:
    """The model.top_k experts with the highest score + bias: expert_jk.

    With model.router_groups, among the experts of the router_groups_top best groups. A group's
    score is the sum of its two highest (DeepSeek-V3's group-limited routing).
    """
    score_je = score_je if bias_e is None else score_je + bias_e
    if m.router_groups_top < m.router_groups:
        score_jge = score_je.reshape(len(score_je), m.router_groups, -1)
        two = jax.lax.top_k(score_jge, min(2, score_jge.shape[-1]))[0]
        best_jg = jax.lax.top_k(jnp.sum(two, -1), m.router_groups_top)[1]
        is_best_jg = jnp.any(best_jg[:, None] == jnp.arange(m.router_groups)[:, None], -1)
        score_jge = jnp.where(is_best_jg[..., None], score_jge, -jnp.inf)
        score_je = score_jge.reshape(score_je.shape)
    return jax.lax.top_k(score_je, m.top_k)[1]


def balanced_choice(m: Experts, seq: int, layer: jax.Array | int = 0) -> jax.Array:
    """Random experts for each position (model.force_balance), all chosen equally often: expert_tk,
    for the positions 0 to seq - 1 of every sequence.

    For NVIDIA's benchmarks Megatron replaces the router's logits by random numbers
    (moe_router_force_load_balancing): each token gets a random set of experts, and loads are equal
    on average. Here a token gets such a set too, and loads are exactly equal: each window of
    model.balanced_window positions goes through the experts in a random order, balanced_uses times.
    So a fixed number of slots drops no token. With model.router_groups, router_groups /
    router_groups_top consecutive tokens share the groups out, and a token chooses equally many
    experts from each of its groups.

    The choice depends on the position in the sequence and on the layer only: it is the same on
    every mesh, in every step, and in a recomputation.
    """
    groups, top, window = m.router_groups, m.router_groups_top, m.balanced_window
    windows, rounds = -(-seq // window), window * top // groups  # a round has every group once
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), layer))
    shuffled = lambda key, *shape: jnp.argsort(jax.random.uniform(key, shape), -1)
    group_wtg = shuffled(keys[0], windows, rounds, groups).reshape(windows, window, top)
    expert_wgrk = shuffled(keys[1], windows, groups, m.experts // groups)
    if m.balanced_uses > 1:
        expert_wgrk = jnp.tile(expert_wgrk, m.balanced_uses)
    expert_wgrk = expert_wgrk.reshape(windows, groups, rounds, -1)
    w, t = jnp.arange(windows)[:, None, None], jnp.arange(window)[:, None]
    expert_wtgk = expert_wgrk[w, group_wtg, t * top // groups]
    expert_wtgk += group_wtg[..., None] * (m.experts // groups)
    return expert_wtgk.reshape(-1, m.top_k)[:seq]


def update_bias(bias_e: jax.Array, tokens_e: jax.Array, rate: float) -> jax.Array:
    """The bias of the choice after a step, fp32: raised by `rate` for experts with fewer tokens
    than the mean, lowered for those with more (arXiv:2412.19437, section 2.1.2).

    Args:
      bias_e: [..., experts].
      tokens_e: tokens of each expert in the step, over all microbatches and GPUs.
    """
    mean = jnp.mean(jnp.asarray(tokens_e, jnp.float32), -1, keepdims=True)
    return bias_e + rate * jnp.sign(mean - tokens_e)


def tokens_per_expert(m: Experts, expert_jk: jax.Array) -> jax.Array:
    """This GPU's tokens of each expert, fp32 [experts]."""
    return jnp.sum(jax.nn.one_hot(expert_jk.reshape(-1), m.experts), 0)


def save_routing(x: jax.Array) -> jax.Array:
    """In a pipeline, saves a routing decision for the backward pass, which must use the same slots:
    recomputed from an x that was rounded differently, a token could get another slot.

    Without a pipeline it is recomputed. Saved, XLA would move what only the loss needs into the
    next microbatch's iteration, and run both at once.
    """
    return checkpoint_name(x, quantization.SCALE) if collectives.axis_size("pp") > 1 else x


def expert_load(m: Experts, expert_jk: jax.Array, batch: int) -> jax.Array:
    """The fraction of each sequence's choices that each expert got, load_be, fp32: this GPU's
    sequences, summed over cp and tp, which split their tokens."""
    parts = collectives.axis_size("cp") * collectives.axis_size("tp")
    chosen = jax.nn.one_hot(expert_jk, m.experts).sum(1)
    load_be = jnp.mean(chosen.reshape(batch, -1, m.experts), 1) / (m.top_k * parts)
    return save_routing(collectives.psum(load_be, "cp", "tp"))


def balance_loss(m: Experts, probs_je: jax.Array, load_be: jax.Array) -> jax.Array:
    """Load-balancing loss, summed over this GPU's sequences: this GPU's part of it.

    Per sequence: aux_loss x experts x sum over e of load_e x mean probability of e, as in Switch
    Transformers (arXiv:2101.03961). Per sequence, because it then does not depend on how the batch
    is sharded (Megatron's seq_aux_loss). A psum over GPUs adds the parts.
    """
    parts = collectives.axis_size("cp") * collectives.axis_size("tp")
    probs_be = jnp.mean(probs_je.reshape(len(load_be), -1, m.experts), 1) / parts
    return m.aux_loss * m.experts * jnp.sum(load_be * probs_be)
