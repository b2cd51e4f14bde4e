"""Mixture of experts: router, dispatch and combine, experts over ep.

With capacity_factor c > 0 each expert has slots for c x k x tokens / experts of a GPU's tokens in a
microbatch, those to which the router gave it the largest weight (drop 'probs', as Megatron does by
default) or the first in their order ('position'); others are dropped. Slots move with one
all-to-all there and one back.

With c = 0 no token is dropped, and none is padded to what an expert might get: each GPU of ep and
tp sees the tokens of all, sorts the choices of its own experts into blocks of one expert each, and
multiplies as many blocks as are filled (blocks.py). A token travels once, however many experts
it chose, and the sum over ep and tp takes it back.

Shapes are static either way. Dispatch and combine are gathers, backward too.

Shape letters: j token of this GPU (b x u), d embed, e expert, c slot of an expert, k choice,
n mlp_inputs, f mlp.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name as keep

from maxbench import quantization
from maxbench.config.model import Model
from maxbench.model import grouped_matmul
from maxbench.model.grouped_matmul import take
from maxbench.model.layers import Linear, activate, matmul, out_std, param_value
from maxbench.sharding import collectives, ordering, rules


class Moe(nn.Module):
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
        through = self.with_capacity if m.capacity_factor else self.dropless
        share_be = expert_load(m, expert_jk, len(x_bud)) if m.aux_loss else None
        y_jd, tokens = through(x_jd, gate_jk, expert_jk, orders, share_be)
        aux = balance_loss(m, probs_je, share_be) if m.aux_loss else jnp.zeros(())
        return y_jd.reshape(x_bud.shape), tokens, aux

    def with_capacity(self, x_jd, gate_jk, expert_jk, orders, share_be):
        slot_jk, token_ec = map(save_routing, assign_slots(self.model, gate_jk, expert_jk))
        y_ecd, tokens = self.experts(dispatch(x_jd, slot_jk, token_ec), orders, share_be)
        return combine(
            keep(y_ecd, "mlp_down"), gate_jk.astype(x_jd.dtype), slot_jk, token_ec
        ), tokens

    def experts(self, x_ecd, orders, share_be):
        m = self.model
        dot = functools.partial(matmul, self, batch=1)
        up, down = "experts embed -> mlp_inputs mlp", "experts mlp -> embed"
        x_ecd, sums = grad_after_wgrad(x_ecd, self.get_variable("sums", "down"))
        up_ecnf, up_token = dot(
            x_ecd, "up", up, m.init_std, order=orders["up"], sequence="gather", saved="slots"
        )
        # Summed beside 'up': XLA does it behind dx on its way, or where decided() says.
        summed = ordering.token(share_be if collectives.axis_size("pp") > 1 else None)
        up_ecnf = ordering.after(keep(up_ecnf, "mlp_up"), jax.lax.stop_gradient(summed))
        h_ecf = activate(m, up_ecnf, 2)
        how = {"sequence": "scatter", "saved": "mlp_act", "sums": sums}
        y_ecd, down_token = dot(h_ecf, "down", down, out_std(m), order=orders["down"], **how)
        return y_ecd, {"up": up_token, "down": down_token}

    def dropless(self, x_jd, gate_jk, expert_jk, orders, _):
        m = self.model
        gather = lambda x: collectives.all_gather(collectives.all_gather(x, "tp", 0), "ep", 0)
        x_jd, expert_jk = gather(x_jd), gather(expert_jk)
        gate_jk = gather(gate_jk.astype(x_jd.dtype))
        held = rules.local_size("experts", m.experts)
        plan = grouped_matmul.assign_blocks(expert_jk - collectives.axis_index("ep") * held, held)
        w_edx = self.whole("up", "experts embed mlp_inputs mlp", m.init_std, x_jd.dtype)
        x_ncd = grouped_matmul.dispatch(x_jd, plan)
        up_ncx = grouped_matmul.grouped_matmul(x_ncd, w_edx.reshape(*w_edx.shape[:2], -1), plan)
        up_ncgf = keep(up_ncx, "mlp_up").reshape(*up_ncx.shape[:2], *w_edx.shape[2:])
        # Weighted here, where rows are narrow, so that what comes back is a plain sum.
        h_ncf = activate(m, up_ncgf, 2) * grouped_matmul.block_gates(gate_jk, plan)[..., None]
        w_efd = self.whole("down", "experts mlp embed", out_std(m), x_jd.dtype)
        y_jd = grouped_matmul.combine(
            grouped_matmul.grouped_matmul(keep(h_ncf, "mlp_act"), w_efd, plan), plan
        )
        y_jd = collectives.reduce_scatter(collectives.reduce_scatter(y_jd, "ep", 0), "tp", 0)
        return keep(y_jd, "mlp_down"), {name: order.issued for name, order in orders.items()}

    def whole(self, name, axes, std, dtype):
        """A weight of this GPU's experts, gathered over fsdp."""
        w = jnp.asarray(param_value(self, name, axes, std), dtype)
        return collectives.all_gather(w, "fsdp", axes.split().index("embed"))


@jax.custom_vjp
def grad_after_wgrad(x_ecd, sums):
    """Both as they are. The gradient of x_ecd comes back from ep beside the product for that of
    `sums`, which XLA would put last. Of one expert alone: of more, XLA would add to the sums in a
    pass of its own."""
    return x_ecd, sums


def _grad_after_wgrad_backward(_, gradients):
    dx_ecd, sums = gradients
    if sums is not None and collectives.axis_size("ep") == len(dx_ecd):
        dx_ecd = ordering.after(dx_ecd, ordering.token(sums))
    return dx_ecd, sums


grad_after_wgrad.defvjp(lambda *args: (grad_after_wgrad(*args), None), _grad_after_wgrad_backward)


def route(m: Model, logits_je):
    """Weights and numbers of each token's experts, and the router's probabilities, all fp32."""
    probs_je = jax.nn.softmax(logits_je)
    whole = m.router == "softmax_topk"
    each_je = probs_je if whole else logits_je
    expert_jk = save_routing(jax.lax.top_k(jax.lax.stop_gradient(each_je), m.top_k)[1])
    top_jk = jnp.take_along_axis(each_je, expert_jk, 1)
    return top_jk if whole else jax.nn.softmax(top_jk), expert_jk, probs_je


def save_routing(x):
    """What was decided, as the backward pass has it, in a pipeline: made again there, of an x that
    was rounded otherwise, another slot could be a token's than where it went.

    Without a pipeline it is made again: XLA moves what the loss alone needs into the next
    microbatch's iteration, and then runs the two beside each other.
    """
    return keep(x, quantization.SCALE) if collectives.axis_size("pp") > 1 else x


def assign_slots(m: Model, gate_jk, expert_jk):
    """A slot for each choice and the token of each slot.

    Returns slot_jk, numbered e x capacity + c or -1 when dropped, and token_ec, -1 when empty.
    """
    j, e, c = len(expert_jk), m.experts, m.capacity(len(expert_jk))
    token_j1 = jnp.arange(j, dtype=jnp.int32)[:, None]
    # Of equals, top_k takes the first: by position all choices are equal.
    rank_jk = (
        jax.lax.stop_gradient(gate_jk) if m.drop_policy == "probs" else jnp.zeros_like(gate_jk)
    )
    rank_ej = jnp.full((e, j), -1.0).at[expert_jk, token_j1].set(rank_jk)
    rank_ec, token_ec = jax.lax.top_k(rank_ej, c)
    token_ec = jnp.where(rank_ec < 0, -1, token_ec)
    slot_ec = jnp.arange(e * c, dtype=jnp.int32).reshape(e, c)
    where_ec = jnp.where(rank_ec < 0, j, token_ec)
    expert_e1 = jnp.arange(e)[:, None]
    slot_ej = jnp.full((e, j), -1, jnp.int32).at[expert_e1, where_ec].set(slot_ec, mode="drop")
    return slot_ej[expert_jk, token_j1], token_ec


@jax.custom_vjp
def dispatch(x_jd, slot_jk, token_ec):
    """Tokens into the slots of their experts: x_ecd."""
    return take(x_jd, token_ec)


def _dispatch_backward(slot_jk, dy_ecd):
    return jnp.sum(take(dy_ecd.reshape(-1, dy_ecd.shape[-1]), slot_jk), 1), None, None


dispatch.defvjp(lambda *args: (dispatch(*args), args[1]), _dispatch_backward)


@jax.custom_vjp
def combine(y_ecd, gate_jk, slot_jk, token_ec):
    """The experts' results, weighted, back at their tokens: y_jd."""
    picked_jkd = take(y_ecd.reshape(-1, y_ecd.shape[-1]), slot_jk)
    return jnp.einsum("jkd,jk->jd", picked_jkd, gate_jk)


def _combine_backward(saved, dy_jd):
    y_ecd, gate_jk, slot_jk, token_ec = saved
    picked_jkd = take(y_ecd.reshape(-1, y_ecd.shape[-1]), slot_jk)
    dgate_jk = jnp.einsum("jkd,jd->jk", picked_jkd, dy_jd)
    # The gate that filled each slot: of its token, the choice whose slot this is.
    e, c = token_ec.shape
    number_ec = jnp.arange(e * c, dtype=slot_jk.dtype).reshape(e, c)
    own = jnp.maximum(token_ec, 0)
    gate_ec = jnp.sum(jnp.where(slot_jk[own] == number_ec[..., None], gate_jk[own], 0), -1)
    return take(dy_jd, token_ec) * gate_ec[..., None], dgate_jk, None, None


combine.defvjp(lambda *args: (combine(*args), args), _combine_backward)


def expert_load(m: Model, expert_jk, batch: int):
    """Of each sequence, the share of its choices that each expert got: share_be, over all GPUs."""
    parts = collectives.axis_size("cp") * collectives.axis_size("tp")
    chosen = jax.nn.one_hot(expert_jk, m.experts).sum(1)
    share_be = jnp.mean(chosen.reshape(batch, -1, m.experts), 1) / (m.top_k * parts)
    return save_routing(collectives.psum(share_be, "cp", "tp"))


def balance_loss(m: Model, probs_je, share_be):
    """This GPU's share of the load-balancing loss, summed over its sequences.

    For each sequence: experts x sum over e of (share of choices that e got) x (its mean
    probability), as in Switch Transformers (arXiv:2101.03961). Taken per sequence, it does not
    depend on how a batch is split. The sum over GPUs makes the means, and the gradient.
    """
    parts = collectives.axis_size("cp") * collectives.axis_size("tp")
    probs_be = jnp.mean(probs_je.reshape(len(share_be), -1, m.experts), 1) / parts
    return m.aux_loss * m.experts * jnp.sum(share_be * probs_be)
