"""Mixture of experts: router, token dispatch and combine, experts sharded over ep.

With a capacity (model.capacity_factor c > 0), each expert has slots for c x top_k x tokens /
experts of a GPU's tokens in a microbatch. model.drop_policy selects the tokens that get a slot:
'probs' those with the largest router weight (Megatron's default), 'position' the first ones; the
others are dropped. One all-to-all over ep dispatches the slots, and one returns them, in an order
that GEMMs read (expert_slots.py).

With model.force_balance the choice is random and exactly balanced (router.balanced_choice): there
are as many slots as choices, and no token is dropped, whatever the capacity_factor. The GEMMs are
then batched, without padding and in every number format. The gradient of a router's weight is
computed where the experts are (gate_gradient): the backward pass needs no output of an expert.

Dropless (capacity_factor = 0), each GPU all-gathers the tokens of ep and tp, sorts those that chose
its experts into blocks of one expert each, and multiplies as many blocks as are filled
(grouped_matmul.py). Each token is sent once, however many experts it chose; a reduce-scatter over
ep and tp sums the results. With model.dispatch_factor, a token is sent to the GPUs of its experts
only (token_dispatch.py).

With layout.ep_nodes > 1, tokens go to the nodes of ep first, once to each (dispatch_nodes.py); the
all-to-alls above are then among the GPUs of a node, and e is an expert of this node.

Shapes are static either way. Dispatch and combine are gathers, also in the backward pass.

With model.expert_latent, d below is the width of that latent: a token is projected before it is
sent, and its experts' sum after it has returned. The router reads the token itself.

Shape letters: j token of this GPU (b x u), d embed, e expert, c slot of an expert, k choice, n
mlp_inputs, f mlp, r e slots that are sent, one of each expert of a GPU; in dropless() those of
grouped_matmul.py, with g mlp_inputs.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxbench.config import loop_lengths
from maxbench.config.channels import Experts
from maxbench.config.sublayers import Context, Ends
from maxbench.model import (
    dispatch_nodes,
    expert_slots,
    grouped_matmul,
    linear,
    router,
    token_dispatch,
)
from maxbench.model.grad_accumulation import layer_state, record
from maxbench.model.grouped_matmul import take
from maxbench.model.layers import (
    Linear,
    Mlp,
    activate,
    activate_backward,
    add_bias,
    matmul,
    out_std,
    param_value,
    projection,
)
from maxbench.quantization import Weight, unquantized
from maxbench.sharding import collectives, mesh, ordering, rules


class Moe(nn.Module):
    """The experts of a layer, their router, and the shared expert."""

    model: Experts

    @nn.compact
    def __call__(self, x_bud, context, orders):
        m = self.model
        x_jd = x_bud.reshape(-1, m.embed)
        logits_je = self.logits(x_jd)
        if m.expert_latent:
            x_jd, _ = projection(m, "into", m.init_std)(x_jd)
        forced_jk = None
        if m.force_balance:
            layer = layer_state(self, "layer")
            layer = 0 if layer is None else layer[0].astype(jnp.int32)
            forced_jk, place_jk = balanced_tokens(m, *x_bud.shape[:2], layer)
            if orders.first.wait_for is not None and collectives.axis_size("pp") == 1:
                # Else both halves of a microbatch have the same indices, and XLA fuses the kernels
                # that read them: neither half is sent before both are known.
                forced_jk = ordering.index_after(forced_jk, x_jd)
                place_jk = ordering.index_after(place_jk, x_jd)
        bias_e = layer_state(self, "expert_bias")
        gate_jk, expert_jk, probs_je = router.route(m, logits_je, bias_e, forced_jk)
        if bias_e is not None:
            counted_e = router.tokens_per_expert(m, expert_jk)
            gate_jk = record(self, "expert_bias", gate_jk, counted_e)
        load_be = router.expert_load(m, expert_jk, len(x_bud)) if m.aux_loss else None
        if m.force_balance:
            axes = collectives.axis_size("tp"), collectives.axis_size("cp")
            slots = m.balanced_slots(*x_bud.shape[:2], *axes, self.arithmetic().slot_multiple)
            assigned = assign_balanced_slots(m, slots, expert_jk, place_jk)
        elif m.has_slots:
            assigned = map(router.save_routing, assign_slots(m, gate_jk, expert_jk))
        if m.has_slots:
            slot_jk, token_ec = assigned
            y_jd, tokens = self.with_slots(x_jd, gate_jk, slot_jk, token_ec, orders, load_be)
            if m.mlp_bias:  # a dropped token has no expert, and no bias of one
                gate_jk = jnp.where(slot_jk >= 0, gate_jk, 0)
        else:
            y_jd, tokens = self.dropless(x_jd, gate_jk, expert_jk, orders)
        if m.mlp_bias:
            bias_ed = param_value(self, "down_bias", m.weights["down_bias"].axes)
            operands = gate_jk.astype(x_jd.dtype), expert_jk, bias_ed.astype(x_jd.dtype)
            y_jd = add_bias(y_jd, expert_biases(*operands))
        if m.expert_latent:
            y_jd, _ = projection(m, "out_of", out_std(m))(checkpoint_name(y_jd, "mlp_down"))
        aux = router.balance_loss(m, probs_je, load_be) if m.aux_loss else jnp.zeros(())
        y_bud = y_jd.reshape(x_bud.shape)
        return y_bud + self.shared(x_bud, context) if m.shared else y_bud, tokens, aux

    def logits(self, x_jd: jax.Array) -> jax.Array:
        """The router's projection, fp32: logits_je."""
        m = self.model
        projection = Linear(m, m.weights["router/w"].axes, m.init_std, plain=True, name="router")
        logits_je, _ = projection(x_jd.astype(jnp.float32))
        if m.router_bias:
            logits_je += param_value(self, "router_bias", m.weights["router_bias"].axes)
        return logits_je

    def shared(self, x_bud: jax.Array, context: Context) -> jax.Array:
        """The shared expert: y_bud. It neither reads nor changes what the all-to-alls of the others
        carry, so they can overlap its GEMMs."""
        unordered = Ends(linear.UNORDERED, linear.UNORDERED)
        assert self.model.shared
        return Mlp(self.model.shared, name="shared_expert")(x_bud, context, unordered)[0]

    def with_slots(
        self,
        x_jd: jax.Array,
        gate_jk: jax.Array,
        slot_jk: jax.Array,
        token_ec: jax.Array,
        orders: Ends,
        load_be: jax.Array | None,
    ) -> tuple[jax.Array, Any]:
        gate_jk, m = gate_jk.astype(x_jd.dtype), self.model
        x_jd, gate_jk = dispatch_nodes.gather(x_jd), dispatch_nodes.gather(gate_jk)
        slot_jk, token_re = expert_slots.sending_order(
            *dispatch_nodes.gather_slots(slot_jk, token_ec)
        )
        # Not with a capacity: for Grok-1, XLA then schedules both microbatches of a loop iteration
        # without an offset, and their all-to-alls are exposed (6 % of the step on 64 GPUs).
        rows_re = gate_gradient(token_re.shape, gate_jk, slot_jk) if m.force_balance else None
        x_red = dispatch(x_jd, slot_jk, token_re)
        y_red, tokens = self.experts(x_red, rows_re, orders, load_be)
        y_red = checkpoint_name(y_red, "mlp_down")
        y_jd = combine(rows_re is None, y_red, gate_jk, slot_jk, token_re)
        return dispatch_nodes.sum_nodes(y_jd), tokens

    def experts(
        self, x_red: jax.Array, rows_re: Any, orders: Ends, load_be: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        m = self.model
        dot = functools.partial(matmul, self)
        up, down = (m.weights[name].axes for name in ("up", "down"))
        names = ["down", "up"] if self.adds_apart() else ["down"]
        sums: Any = {name: self.get_variable("sums", name) for name in names}
        x_red, sums = grad_after_wgrads(len(names) > 1, x_red, sums)
        how = {"sequence": "gather", "saved": "slots", "sums": sums.get("up")}
        up_ecnf, first_token = dot(x_red, "up", up, m.init_std, order=orders.first, **how)
        # Orders the all-reduce of the load before the end of 'up'. XLA would run it in the backward
        # pass, after dx's communication, or wherever save_routing() has it recomputed.
        summed = ordering.token(load_be if collectives.axis_size("pp") > 1 else None)
        if m.mlp_bias:
            bias_enf = param_value(self, "up_bias", m.weights["up_bias"].axes)
            up_ecnf = add_bias(up_ecnf, bias_enf[:, None])
        up_ecnf = ordering.after(checkpoint_name(up_ecnf, "mlp_up"), jax.lax.stop_gradient(summed))
        h_ecf = activate(m, up_ecnf, 2) if rows_re is None else activate_rows(m, up_ecnf, rows_re)
        how = {"sequence": "scatter", "saved": "mlp_act", "sums": sums["down"]}
        y_red, last_token = dot(h_ecf, "down", down, out_std(m), order=orders.last, **how)
        return y_red, Ends(last=last_token, first=first_token)

    def adds_apart(self) -> bool:
        """Whether wgrads are added to their accumulators by kernels of their own. False in a
        pipeline, which orders them itself."""
        return not self.arithmetic().fuses_addition and collectives.axis_size("pp") == 1

    def arithmetic(self) -> Any:
        """The Arithmetic of the experts' GEMMs."""
        w: Any = self.get_variable("params", "up")
        return w.arithmetic if isinstance(w, Weight) else unquantized.Plain()

    def dropless(
        self, x_jd: jax.Array, gate_jk: jax.Array, expert_jk: jax.Array, orders: Ends
    ) -> tuple[jax.Array, Any]:
        m, tp = self.model, collectives.axis_size("tp")
        local = rules.local_size("experts", m.experts)
        ep = m.experts // local
        mean_rows = loop_lengths.mean_rows(len(x_jd), m.experts, m.top_k, ep * tp)
        over_tp = lambda x: collectives.all_gather(x, "tp", 0)
        first, pairs = collectives.axis_index("ep") * local, None
        first_of_node = dispatch_nodes.first_expert(m.experts)
        if m.dispatch_factor and ep > 1:
            x_jd, gate_jk = dispatch_nodes.gather(x_jd), dispatch_nodes.gather(gate_jk)
            expert_jk = dispatch_nodes.gather(expert_jk) - first_of_node
            rows = token_dispatch.buffer_rows(len(x_jd), m.experts, m.top_k, ep, m.dispatch_factor)
            pairs, lost_rows = token_dispatch.assign(expert_jk, local, rows)
            local_jk = over_tp(token_dispatch.send_indices(expert_jk, pairs)) - first
            blocks, lost = grouped_matmul.assign_blocks(
                local_jk, local, mean_rows, m.dispatch_factor
            )
            lost = lost_rows if lost is None else lost_rows + lost
            x_jd = record(self, "lost_rows", x_jd, lost[None])
            gather = lambda x: over_tp(token_dispatch.send(x, pairs))
            x_jd, gate_jk = gather(x_jd), gather(gate_jk.astype(x_jd.dtype))
        else:
            gather = lambda x: dispatch_nodes.gather(collectives.all_gather(over_tp(x), "ep", 0))
            x_jd, expert_jk = gather(x_jd), gather(expert_jk) - first_of_node
            gate_jk = gather(gate_jk.astype(x_jd.dtype))
            blocks, _ = grouped_matmul.assign_blocks(expert_jk - first, local, mean_rows)
        w_edgf = self.whole("up", m.init_std, x_jd.dtype)
        x_ncd = grouped_matmul.dispatch(x_jd, blocks)
        up_ncf = grouped_matmul.grouped_matmul(x_ncd, w_edgf.reshape(*w_edgf.shape[:2], -1), blocks)
        if m.mlp_bias:
            bias_egf = param_value(self, "up_bias", m.weights["up_bias"].axes)
            bias_ef = bias_egf.reshape(len(bias_egf), -1)
            up_ncf = add_bias(up_ncf, bias_ef[blocks.expert_n][:, None])
        up_ncgf = checkpoint_name(up_ncf, "mlp_up").reshape(*up_ncf.shape[:2], *w_edgf.shape[2:])
        # The router's weights are applied here, where rows are narrow: combine is a plain sum.
        h_ncf = activate(m, up_ncgf, 2) * grouped_matmul.block_gates(gate_jk, blocks)[..., None]
        w_efd = self.whole("down", out_std(m), x_jd.dtype)
        y_ncd = grouped_matmul.grouped_matmul(checkpoint_name(h_ncf, "mlp_act"), w_efd, blocks)
        y_jd = grouped_matmul.combine(y_ncd, blocks)
        if pairs:
            y_jd = token_dispatch.send_back(collectives.reduce_scatter(y_jd, "tp", 0), pairs)
            y_jd = dispatch_nodes.sum_nodes(y_jd)
        else:
            y_jd = collectives.reduce_scatter(dispatch_nodes.sum_nodes(y_jd), "ep", 0)
            y_jd = collectives.reduce_scatter(y_jd, "tp", 0)
        issued = Ends(*(order.issued for order in orders))
        return checkpoint_name(y_jd, "mlp_down"), issued

    def whole(self, name: str, std: float, dtype: Any) -> jax.Array:
        """A weight of this GPU's experts, all-gathered over fsdp."""
        declared = self.model.weights[name]
        w = jnp.asarray(param_value(self, name, declared.axes, std), dtype)
        return collectives.all_gather(w, "fsdp", declared.names.index(self.model.outer))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def grad_after_wgrads(always: bool, x_red: jax.Array, sums: Any) -> tuple[jax.Array, Any]:
    """The identity. In the backward pass, the result of dx_red's all-to-all over ep is used only
    after the wgrads that `sums` accumulates, which the all-to-all then overlaps. XLA would run
    these wgrads at the end of the backward pass.

    Args:
      always: with any number of experts per GPU. Otherwise only with one: with more, reading the
        token of a sum keeps XLA from fusing the addition to the sum with the wgrad GEMM. That costs
        nothing where the addition is a kernel of its own (adds_apart).
    """
    return x_red, sums


def _grad_after_wgrads_backward(always, _, gradients):
    dx_red, sums = gradients
    experts = dx_red.shape[1]
    if jax.tree.leaves(sums) and collectives.axis_size("ep") > 1 and (always or experts == 1):
        dx_red = ordering.after(dx_red, ordering.token(sums))
    return dx_red, sums


grad_after_wgrads.defvjp(
    lambda *args: (grad_after_wgrads(*args), None), _grad_after_wgrads_backward
)


def assign_slots(m: Experts, gate_jk: jax.Array, expert_jk: jax.Array) -> Any:
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


def balanced_tokens(
    m: Experts, batch: int, tokens: int, layer: jax.Array | int = 0
) -> tuple[jax.Array, jax.Array]:
    """router.balanced_choice() of this GPU's tokens, expert_jk, and the place of each choice among
    the slots of its expert, place_jk: that of the token's window among those of this GPU. If a
    window chooses an expert once, all choices of a token have one place, place_j1.

    Args:
      batch, tokens: this GPU's sequences, and its tokens of each.
    """
    tp, cp = collectives.axis_size("tp"), collectives.axis_size("cp")
    seq = tokens * tp * cp
    position_t = jnp.asarray(mesh.token_positions(seq))
    position_u = jax.lax.dynamic_slice_in_dim(
        position_t, collectives.axis_index("tp") * tokens, tokens
    )
    window_u = position_u // m.balanced_window
    number_u = jnp.cumsum(jnp.diff(window_u, prepend=window_u[:1]) != 0)
    first_b1 = jnp.arange(batch)[:, None] * m.balanced_windows(tokens, tp, cp)
    expert_uk = router.balanced_choice(m, seq, layer)[position_u]
    place_jk = (first_b1 + number_u).reshape(-1)[:, None]
    if m.balanced_uses > 1:
        choice_uk = (position_u % m.balanced_window)[:, None] * m.top_k + jnp.arange(m.top_k)
        place_jk = place_jk * m.balanced_uses + jnp.tile(choice_uk // m.experts, (batch, 1))
    return jnp.tile(expert_uk, (batch, 1)), place_jk


def assign_balanced_slots(m: Experts, slots: int, expert_jk: jax.Array, place_jk: jax.Array) -> Any:
    """assign_slots() of balanced_tokens()."""
    slot_jk = expert_jk * slots + place_jk
    token_j1 = jnp.arange(len(expert_jk), dtype=jnp.int32)[:, None]
    token_s = jnp.full(m.experts * slots, -1, jnp.int32)
    token_s = token_s.at[slot_jk].set(token_j1, unique_indices=True)
    return slot_jk, token_s.reshape(m.experts, slots)


def expert_biases(gate_jk: jax.Array, expert_jk: jax.Array, bias_ed: jax.Array) -> jax.Array:
    """The biases of each token's experts, weighted by gate_jk and summed: y_jd, fp32.

    One small GEMM with the biases of all experts, added where the token is: nothing more is sent.
    """
    chosen_jke = jax.nn.one_hot(expert_jk, len(bias_ed), dtype=gate_jk.dtype)
    gate_je = jnp.sum(chosen_jke * gate_jk[..., None], 1)  # XLA fuses it, and writes gate_je alone
    return jnp.einsum("je,ed->jd", gate_je, bias_ed, preferred_element_type=jnp.float32)


@jax.custom_vjp
def dispatch(x_jd: jax.Array, slot_jk: jax.Array, token_re: jax.Array) -> jax.Array:
    """Copies tokens to their slots: x_red, zeros in empty slots."""
    return take(x_jd, token_re)


def _dispatch_backward(slot_jk, dy_red):
    return jnp.sum(take(dy_red.reshape(-1, dy_red.shape[-1]), slot_jk), 1), None, None


dispatch.defvjp(lambda *args: (dispatch(*args), args[1]), _dispatch_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine(
    with_gates: bool,
    y_red: jax.Array,
    gate_jk: jax.Array,
    slot_jk: jax.Array,
    token_re: jax.Array,
) -> jax.Array:
    """Sums the experts' outputs of each token, weighted by gate_jk: y_jd.

    Args:
      with_gates: the backward pass computes the gradient of gate_jk; else gate_gradient() does.
    """
    picked_jkd = take(y_red.reshape(-1, y_red.shape[-1]), slot_jk)
    return jnp.einsum("jkd,jk->jd", picked_jkd, gate_jk)


def _combine_forward(with_gates, y_red, *routing):
    return combine(with_gates, y_red, *routing), (y_red if with_gates else None, *routing)


def _combine_backward(with_gates, saved, dy_jd):
    y_red, gate_jk, slot_jk, token_re = saved
    dgate_jk = None
    if with_gates:
        picked_jkd = take(y_red.reshape(-1, y_red.shape[-1]), slot_jk)
        dgate_jk = jnp.einsum("jkd,jd->jk", picked_jkd, dy_jd)
    # The weight of each slot: that of its token's choice whose slot it is.
    r, e = token_re.shape
    slot_re = jnp.arange(r * e, dtype=slot_jk.dtype).reshape(r, e)
    j_re = jnp.maximum(token_re, 0)
    gate_re = jnp.sum(jnp.where(slot_jk[j_re] == slot_re[..., None], gate_jk[j_re], 0), -1)
    return take(dy_jd, token_re) * gate_re[..., None], dgate_jk, None, None


combine.defvjp(_combine_forward, _combine_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gate_gradient(slots: tuple[int, int], gate_jk: jax.Array, slot_jk: jax.Array) -> jax.Array:
    """Zeros, fp32 [r, e], with which activate_rows() returns the gradient of gate_jk.

    A token's output is the sum of gate_k y_k with y_k = h_k w, so that the gradient of gate_k is
    y_k dy = (h_k dh_k) / gate_k, where dh_k = gate_k dy w^T is what the backward pass computes. So
    a number for each slot returns from the experts' GPUs, and the outputs y need not be saved.
    """
    return jnp.zeros(slots, jnp.float32)


def _gate_gradient_backward(slots, saved, hdh_re):
    gate_jk, slot_jk = saved
    hdh_jk = take(hdh_re.reshape(-1, 1), slot_jk)[..., 0]
    dgate_jk = jnp.where(gate_jk == 0, 0, hdh_jk / gate_jk.astype(jnp.float32))
    return dgate_jk.astype(gate_jk.dtype), None


gate_gradient.defvjp(lambda *args: (gate_gradient(*args), args[1:]), _gate_gradient_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def activate_rows(m: Experts, up_ecnf: jax.Array, rows_re: jax.Array) -> jax.Array:
    """activate(); the gradient of rows_re is the product of each row with its gradient, for the
    slots of this GPU's tokens."""
    return activate(m, up_ecnf, 2)


def _activate_rows_backward(m, up_ecnf, dh_ecf):
    (dup_ecnf,) = activate_backward(m, 2, up_ecnf, dh_ecf)
    hdh_ec = jnp.sum(activate(m, up_ecnf, 2).astype(jnp.float32) * dh_ecf, -1)
    hdh_re = collectives.reduce_scatter(hdh_ec.swapaxes(0, 1), "tp", 0)  # which shards f
    hdh_re = collectives.all_to_all(hdh_re, "ep")
    # XLA would wait for it last, and overlap no other collective until then.
    return ordering.after(dup_ecnf, ordering.token(hdh_re)), hdh_re


activate_rows.defvjp(lambda *args: (activate_rows(*args), args[1]), _activate_rows_backward)
