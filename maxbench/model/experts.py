"""Mixture of experts: router, token dispatch and combine, experts sharded over ep.

With a capacity (model.capacity_factor c > 0), each expert has slots for c x top_k x tokens /
experts of a GPU's tokens in a microbatch. model.drop_policy selects the tokens that get a slot:
'probs' those with the largest router weight (Megatron's default), 'position' the first ones; the
others are dropped. One all-to-all over ep dispatches the slots, and one returns them.

Dropless (capacity_factor = 0), each GPU all-gathers the tokens of ep and tp, sorts those that chose
its experts into blocks of one expert each, and multiplies as many blocks as are filled
(grouped_matmul.py). Each token is sent once, however many experts it chose; a reduce-scatter over
ep and tp sums the results.

Shapes are static either way. Dispatch and combine are gathers, also in the backward pass.

Shape letters: j token of this GPU (b x u), d embed, e expert, c slot of an expert, k choice,
n mlp_inputs, f mlp; in dropless() those of grouped_matmul.py, with g mlp_inputs.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxbench import quantization
from maxbench.config.model import Model
from maxbench.model import grouped_matmul
from maxbench.model.grouped_matmul import take
from maxbench.model.layers import Linear, activate, matmul, out_std, param_value
from maxbench.sharding import collectives, ordering, rules


class Moe(nn.Module):
    """The MoE layer in place of an MLP: y_bud, the issued tokens of its GEMMs by name, and the
    auxiliary loss."""

    model: Model

    @nn.compact
    def __call__(self, x_bud, orders):
        m = self.model
        x_jd = x_bud.reshape(-1, m.embed)
        router = Linear(
            m, "embed_replicated -> experts_replicated", m.init_std, plain=True, name="router"
        )
        logits_je, _ = router(x_jd.astype(jnp.float32))
        gate_jk, expert_jk, probs_je = route(m, logits_je)
        forward = self.with_capacity if m.capacity_factor else self.dropless
        load_be = expert_load(m, expert_jk, len(x_bud)) if m.aux_loss else None
        y_jd, tokens = forward(x_jd, gate_jk, expert_jk, orders, load_be)
        aux = balance_loss(m, probs_je, load_be) if m.aux_loss else jnp.zeros(())
        return y_jd.reshape(x_bud.shape), tokens, aux

    def with_capacity(
        self,
        x_jd: jax.Array,
        gate_jk: jax.Array,
        expert_jk: jax.Array,
        orders: Any,
        load_be: jax.Array,
    ) -> tuple[jax.Array, Any]:
        slot_jk, token_ec = map(save_routing, assign_slots(self.model, gate_jk, expert_jk))
        y_ecd, tokens = self.experts(dispatch(x_jd, slot_jk, token_ec), orders, load_be)
        y_ecd, gate_jk = checkpoint_name(y_ecd, "mlp_down"), gate_jk.astype(x_jd.dtype)
        return combine(y_ecd, gate_jk, slot_jk, token_ec), tokens

    def experts(self, x_ecd: jax.Array, orders: Any, load_be: jax.Array) -> tuple[jax.Array, Any]:
        m = self.model
        dot = functools.partial(matmul, self, batch=1)
        up, down = "experts embed -> mlp_inputs mlp", "experts mlp -> embed"
        x_ecd, sums = grad_after_wgrad(x_ecd, self.get_variable("sums", "down"))
        up_ecnf, up_token = dot(
            x_ecd, "up", up, m.init_std, order=orders["up"], sequence="gather", saved="slots"
        )
        # Orders the all-reduce of the load before the end of 'up'. XLA would run it in the backward
        # pass, after dx's communication, or wherever save_routing() has it recomputed.
        summed = ordering.token(load_be if collectives.axis_size("pp") > 1 else None)
        up_ecnf = ordering.after(checkpoint_name(up_ecnf, "mlp_up"), jax.lax.stop_gradient(summed))
        h_ecf = activate(m, up_ecnf, 2)
        how = {"sequence": "scatter", "saved": "mlp_act", "sums": sums}
        y_ecd, down_token = dot(h_ecf, "down", down, out_std(m), order=orders["down"], **how)
        return y_ecd, {"up": up_token, "down": down_token}

    def dropless(
        self, x_jd: jax.Array, gate_jk: jax.Array, expert_jk: jax.Array, orders: Any, _: Any
    ) -> tuple[jax.Array, Any]:
        m = self.model
        gather = lambda x: collectives.all_gather(collectives.all_gather(x, "tp", 0), "ep", 0)
        x_jd, expert_jk = gather(x_jd), gather(expert_jk)
        gate_jk = gather(gate_jk.astype(x_jd.dtype))
        local = rules.local_size("experts", m.experts)
        first = collectives.axis_index("ep") * local
        blocks = grouped_matmul.assign_blocks(expert_jk - first, local)
        w_edgf = self.whole("up", "experts embed mlp_inputs mlp", m.init_std, x_jd.dtype)
        x_ncd = grouped_matmul.dispatch(x_jd, blocks)
        up_ncf = grouped_matmul.grouped_matmul(x_ncd, w_edgf.reshape(*w_edgf.shape[:2], -1), blocks)
        up_ncgf = checkpoint_name(up_ncf, "mlp_up").reshape(*up_ncf.shape[:2], *w_edgf.shape[2:])
        # The router's weights are applied here, where rows are narrow: combine is a plain sum.
        h_ncf = activate(m, up_ncgf, 2) * grouped_matmul.block_gates(gate_jk, blocks)[..., None]
        w_efd = self.whole("down", "experts mlp embed", out_std(m), x_jd.dtype)
        y_ncd = grouped_matmul.grouped_matmul(checkpoint_name(h_ncf, "mlp_act"), w_efd, blocks)
        y_jd = grouped_matmul.combine(y_ncd, blocks)
        y_jd = collectives.reduce_scatter(collectives.reduce_scatter(y_jd, "ep", 0), "tp", 0)
        tokens = {name: order.issued for name, order in orders.items()}
        return checkpoint_name(y_jd, "mlp_down"), tokens

    def whole(self, name: str, axes: Any, std: float, dtype: Any) -> jax.Array:
        """A weight of this GPU's experts, all-gathered over fsdp."""
        w = jnp.asarray(param_value(self, name, axes, std), dtype)
        return collectives.all_gather(w, "fsdp", axes.split().index("embed"))


@jax.custom_vjp
def grad_after_wgrad(x_ecd: jax.Array, sums: Any) -> tuple[jax.Array, Any]:
    """The identity, whose backward pass orders dx_ecd's all-to-all over ep after the wgrad that
    `sums` accumulates, so that they overlap; XLA would run the wgrad last. With one expert per GPU
    only: with more, the token would unfuse the addition to the accumulator from the wgrad GEMM."""
    return x_ecd, sums


def _grad_after_wgrad_backward(_, gradients):
    dx_ecd, sums = gradients
    if sums is not None and collectives.axis_size("ep") == len(dx_ecd):
        dx_ecd = ordering.after(dx_ecd, ordering.token(sums))
    return dx_ecd, sums


grad_after_wgrad.defvjp(lambda *args: (grad_after_wgrad(*args), None), _grad_after_wgrad_backward)


def route(m: Model, logits_je: jax.Array) -> Any:
    """Top-k routing.

    Returns:
      gate_jk, fp32: weights of the chosen experts. With model.router 'softmax_topk', their softmax
        over all experts; with 'topk_softmax' (Megatron's default), over the chosen ones.
      expert_jk: chosen experts.
      probs_je, fp32: softmax over all experts.
    """
    probs_je = jax.nn.softmax(logits_je)
    softmax_first = m.router == "softmax_topk"
    score_je = probs_je if softmax_first else logits_je
    expert_jk = save_routing(jax.lax.top_k(jax.lax.stop_gradient(score_je), m.top_k)[1])
    top_jk = jnp.take_along_axis(score_je, expert_jk, 1)
    return top_jk if softmax_first else jax.nn.softmax(top_jk), expert_jk, probs_je


def save_routing(x: jax.Array) -> Any:
    """In a pipeline, saves a routing decision for the backward pass, which must use the same slots:
    recomputed from an x that was rounded differently, a token could get another slot.

    Without a pipeline it is recomputed. Saved, XLA would move what only the loss needs into the
    next microbatch's iteration, and run both at once.
    """
    return checkpoint_name(x, quantization.SCALE) if collectives.axis_size("pp") > 1 else x


def assign_slots(m: Model, gate_jk: jax.Array, expert_jk: jax.Array) -> Any:
    """Assigns tokens to slots of the experts that they chose, by model.drop_policy.

    Returns:
      slot_jk: slot of each choice, e x capacity + c, or -1 if dropped.
      token_ec: token of each slot, or -1 if empty.
    """
    j, e, c = len(expert_jk), m.experts, m.capacity(len(expert_jk))
    token_j1 = jnp.arange(j, dtype=jnp.int32)[:, None]
    # top_k returns the first of equal values: with equal ranks, tokens are taken by position.
    rank_jk = (
        jax.lax.stop_gradient(gate_jk) if m.drop_policy == "probs" else jnp.zeros_like(gate_jk)
    )
    rank_ej = jnp.full((e, j), -1.0).at[expert_jk, token_j1].set(rank_jk)
    rank_ec, token_ec = jax.lax.top_k(rank_ej, c)
    token_ec = jnp.where(rank_ec < 0, -1, token_ec)
    slot_ec = jnp.arange(e * c, dtype=jnp.int32).reshape(e, c)
    column_ec = jnp.where(rank_ec < 0, j, token_ec)  # j is out of range, and not written
    expert_e1 = jnp.arange(e)[:, None]
    slot_ej = jnp.full((e, j), -1, jnp.int32).at[expert_e1, column_ec].set(slot_ec, mode="drop")
    return slot_ej[expert_jk, token_j1], token_ec


@jax.custom_vjp
def dispatch(x_jd: jax.Array, slot_jk: jax.Array, token_ec: jax.Array) -> jax.Array:
    """Copies tokens to their slots: x_ecd, zeros in empty slots."""
    return take(x_jd, token_ec)


def _dispatch_backward(slot_jk, dy_ecd):
    return jnp.sum(take(dy_ecd.reshape(-1, dy_ecd.shape[-1]), slot_jk), 1), None, None


dispatch.defvjp(lambda *args: (dispatch(*args), args[1]), _dispatch_backward)


@jax.custom_vjp
def combine(
    y_ecd: jax.Array, gate_jk: jax.Array, slot_jk: jax.Array, token_ec: jax.Array
) -> jax.Array:
    """Sums the experts' outputs of each token, weighted by gate_jk: y_jd."""
    picked_jkd = take(y_ecd.reshape(-1, y_ecd.shape[-1]), slot_jk)
    return jnp.einsum("jkd,jk->jd", picked_jkd, gate_jk)


def _combine_backward(saved, dy_jd):
    y_ecd, gate_jk, slot_jk, token_ec = saved
    picked_jkd = take(y_ecd.reshape(-1, y_ecd.shape[-1]), slot_jk)
    dgate_jk = jnp.einsum("jkd,jd->jk", picked_jkd, dy_jd)
    # The weight of each slot: that of its token's choice whose slot it is.
    e, c = token_ec.shape
    slot_ec = jnp.arange(e * c, dtype=slot_jk.dtype).reshape(e, c)
    j_ec = jnp.maximum(token_ec, 0)
    gate_ec = jnp.sum(jnp.where(slot_jk[j_ec] == slot_ec[..., None], gate_jk[j_ec], 0), -1)
    return take(dy_jd, token_ec) * gate_ec[..., None], dgate_jk, None, None


combine.defvjp(lambda *args: (combine(*args), args), _combine_backward)


def expert_load(m: Model, expert_jk: jax.Array, batch: int) -> jax.Array:
    """The fraction of each sequence's choices that each expert got, load_be, fp32: this GPU's
    sequences, summed over cp and tp, which split their tokens."""
    parts = collectives.axis_size("cp") * collectives.axis_size("tp")
    chosen = jax.nn.one_hot(expert_jk, m.experts).sum(1)
    load_be = jnp.mean(chosen.reshape(batch, -1, m.experts), 1) / (m.top_k * parts)
    return save_routing(collectives.psum(load_be, "cp", "tp"))


def balance_loss(m: Model, probs_je: jax.Array, load_be: jax.Array) -> jax.Array:
    """Load-balancing loss, summed over this GPU's sequences: this GPU's part of it.

    Per sequence: aux_loss x experts x sum over e of load_e x mean probability of e, as in Switch
    Transformers (arXiv:2101.03961). Per sequence, because it then does not depend on how the batch
    is sharded (Megatron's seq_aux_loss). A psum over GPUs adds the parts.
    """
    parts = collectives.axis_size("cp") * collectives.axis_size("tp")
    probs_be = jnp.mean(probs_je.reshape(len(load_be), -1, m.experts), 1) / parts
    return m.aux_loss * m.experts * jnp.sum(load_be * probs_be)
