"""The network as functions of a dict of weights, and as one Linen module, Transformer.

    {'embed': ..., 'layers': ..., 'head': ...}      each leaf of 'layers' is stacked [layers, ...]
     with model.mtp_layers also 'mtp' (mtp.py)

A model with Model.layer_groups has a dict of stacks in 'layers' (layer_stack.py). Initial weights,
loss and checkpoints do not depend on the mesh: only the order of layers in stacks does, and
layer_stack.permute() changes it. No layer runs under vmap, because Transformer Engine's GEMM has no
batching rule.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from maxbench import quantization
from maxbench.config.model import Model
from maxbench.config.run import Run, saved_tensors
from maxbench.config.sublayers import KEYS, Context, Ends, Layer, imported
from maxbench.model import layer_stack, mtp, two_batches
from maxbench.model.grad_accumulation import accumulate_into
from maxbench.model.layer_stack import Stacks, part_of
from maxbench.model.layers import Embed, Head, Norm, rope_angles
from maxbench.model.linear import CommOrder, no_comm
from maxbench.model.loss import cross_entropy
from maxbench.sharding import mesh, ordering, rules


def add(x_bud: jax.Array, y_bud: jax.Array, name: str) -> jax.Array:
    """Adds the output of a sublayer to the residual stream.

    Without collectives, y is the output of a GEMM, which can add x (beta = 1). XLA fuses this only
    for matrices, and only if x stays unmodified, because a norm reads it too: the sum is then saved
    for the backward pass in place of y, under the remat name of y.
    """
    if not no_comm():
        return x_bud + y_bud
    matrix = lambda x: x.reshape(-1, x.shape[-1])
    return checkpoint_name((matrix(x_bud) + matrix(y_bud)).reshape(x_bud.shape), name)


class Block(nn.Module):
    """A layer: its mixer, its channel, or both.

    Attributes:
      layer: complete (sublayers.complete).
      separate_statistics: as layers.normalize(), of norms whose output is quantized.
      dx_unordered: linear.CommOrder.dx_unordered of the first GEMM.

    Args:
      wait_for: Ends of linear.CommOrder.wait_for, or None.
      issued: token of the last GEMM of the layer or sublayer before (linear.CommOrder), or None.

    Returns:
      x_bud, the Ends of the last sublayer's tokens, and the auxiliary loss.
    """

    model: Model
    layer: Layer
    separate_statistics: bool = False
    dx_unordered: bool = False

    @nn.compact
    def __call__(self, x_bud, context: Context, wait_for=None, issued=None):
        m, none, losses = self.model, jnp.zeros(()), []
        for role, sublayer in self.layer.parts():
            key = KEYS[role]
            zero = None if issued is None else jnp.zeros(())
            orders = Ends(
                first=CommOrder(wait_for and wait_for.first, zero, self.dx_unordered),
                last=CommOrder(wait_for and wait_for.last, issued),
            )
            y_bud = Norm(m, self.separate_statistics, name=f"{key}_norm")(x_bud)
            body = imported(sublayer.module)(sublayer, name=key)
            y_bud, tokens, aux = body(y_bud, context, orders)
            losses += [] if aux is None else [aux]
            issued = tokens.last
            post = m.post_norm and Norm(m, name=f"{key}_post")
            x_bud = x_bud + post(y_bud) if post else add(x_bud, y_bud, f"{key}_out")
        return x_bud, tokens, functools.reduce(jnp.add, losses) if losses else none


def init(m: Model, key: jax.Array, table: Stacks = ()) -> dict[str, Any]:
    """Initial weights, fp32; each leaf is boxed with its logical axes (layers.GemmParam).

    A layer's weights follow from its index alone, whatever the stacks.

    Args:
      table: the stacks; default: layer_stack.stacks(m). In an empty slot are the weights of a
        layer, which layer_stack.zero_empty() replaces.
    """
    table = table or layer_stack.stacks(m)
    tokens_bt, x_btd = jnp.zeros((1, 8), jnp.int32), jnp.zeros((1, 8, m.embed))
    context = Context(rope_angles(m, jnp.arange(8)))
    k_embed, k_layers, k_head = jax.random.split(key, 3)
    keys = jax.random.split(k_layers, m.layers)
    is_box = lambda x: isinstance(x, nn.Partitioned)
    with_layers_axis = lambda box: box.replace(names=("layers", *box.names))

    def init_stack(stack):
        stack_keys = keys[np.maximum(stack.slots, 0)]
        layer = lambda k: Block(m, stack.layer).init(k, x_btd, context)["params"]
        parts = lambda w: {k: v for role in stack.roles for k, v in part_of(role, w).items()}
        tree = parts(jax.vmap(layer)(stack_keys))
        return jax.tree.map(with_layers_axis, tree, is_leaf=is_box)

    embed = Embed(m).init(k_embed, tokens_bt, jnp.float32)["params"]
    weights = {
        "embed": embed,
        "layers": layer_stack.join(table, list(map(init_stack, table))),
        "head": Head(m).init(k_head, x_btd, nn.unbox(embed)["w"])["params"],
    }
    if m.mtp_layers:
        k_mtp = jax.random.fold_in(k_layers, m.layers)
        weights["mtp"] = mtp.init(m, k_mtp, Block, x_btd, context)
    return weights


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("dx_unordered", "policy"))
def layer(
    run: Run,
    kind: Layer,
    w: Any,
    sums: Any,
    x_bud: jax.Array,
    rope: Any,
    wait_for: Any = None,
    issued: Any = None,
    dx_unordered: bool = False,
    policy: tuple[str, tuple[str, ...]] | None = None,
    documents_bt: jax.Array | None = None,
) -> Any:
    """One layer, or one sublayer alone, under a remat policy.

    Jitted, so that it is traced and differentiated once, however many layers are unrolled.

    Args:
      kind: the layer, complete (Model.groups).
      w, sums: weights and their gradient accumulators; sums may be None.
      policy: its name and the names of offloaded tensors; default: those of the run.
      documents_bt: as in sublayers.Context.
    """

    # If one computation has both the forward and the backward pass, XLA's CSE would find that they
    # compute the same, and save the result instead of recomputing it. In a scan or a pipeline they
    # are separate computations; with remat=none nothing is recomputed.
    together = run.train.unrolled and not run.train.overlapped
    remat, offloaded = policy or (run.train.remat, run.train.offloaded)
    prevent_cse = together and remat != "none"

    def apply(w, sums, x_bud, wait_for, issued):
        if prevent_cse and no_comm():
            x_bud, tokens = ordering.grad_after_wgrads(x_bud)
            given = wait_for or Ends(None, None)
            wait_for = Ends(*(tokens if t is None else tokens + t for t in given))
        variables = {"params": w} if sums is None else {"params": w, "sums": sums}
        per_tensor_xla = run.format.amax_history and run.precision.backend == "xla"
        near = (kind,) if kind.channel else run.model.per_layer
        separate_statistics = per_tensor_xla and not any(layer.has_experts for layer in near)
        block = Block(run.model, kind, separate_statistics, dx_unordered)
        context = Context(rope, run.train.attention, documents_bt)
        return block.apply(variables, x_bud, context, wait_for, issued)

    saves = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[
            *run.saved_on_device(saved_tensors(remat), offloaded),
            quantization.SCALE,
        ],
        names_which_can_be_offloaded=[*offloaded],
        offload_src="device",
        offload_dst="pinned_host",
    )
    apply = jax.checkpoint(apply, policy=saves, prevent_cse=prevent_cse)
    return apply(w, sums, x_bud, wait_for, issued)


class Transformer(nn.Module):
    """The network as a Linen module, for use outside the benchmark: no mesh, no Run.

        logits_btv = Transformer(model).apply({"params": params}, tokens_bt)

    params is the tree of init() and of checkpoints. tokens_bt are whole sequences of any length.
    Computes in the dtype of the weights; logits are fp32.
    """

    model: Model
    attention: str = "xla"  # a name of attention.KERNELS

    @nn.compact
    def __call__(self, tokens_bt):
        m = self.model
        if self.is_initializing():
            params = jax.jit(lambda key: nn.unbox(init(m, key)))(self.make_rng("params"))
            for name, w in params.items():
                self.put_variable("params", name, w)
        w = self.variables["params"]
        x_btd = embed(m, w, tokens_bt)
        context = Context(rope_angles(m, jnp.arange(tokens_bt.shape[1])), self.attention)
        block = lambda layer, x_btd, w: Block(m, layer).apply({"params": w[0]}, x_btd, context)[::2]
        x_btd, _ = layer_stack.run_layers(m, block, x_btd, w["layers"], None)
        x_btd, w_dv, _ = head(m, w, x_btd)
        dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        return dot("btd,dv->btv", x_btd, w_dv) * m.output_multiplier


def embed(m: Model, w: Any, tokens_bt: jax.Array, stages_differ: bool = False) -> Any:
    """Embedding of tokens, x_bud. w has at least 'embed'; stages_differ as layers.Embed has it."""
    w_vd = w["embed"]["w"]
    # Its width tells whether pp splits it too (Layout.embedding_over_pp).
    over_pp = w_vd.shape[1] < rules.local_size("embed_sharded", m.embed) and not m.tied
    embed_axis = "embed_sharded_pp" if over_pp else "embed_sharded"
    module = Embed(m, embed_axis, stages_differ)
    return module.apply({"params": w["embed"]}, tokens_bt, w_vd.dtype)


def head(m: Model, w: Any, x_bud: jax.Array, sums: Any = None) -> Any:
    """Final norm: x_btd, w_dv, and w_dv's gradient accumulator or None. Logits are
    x_btd @ w_dv x model.output_multiplier.

    Args:
      w: weights, at least 'head' and 'embed'.
      sums: gradient accumulators of w['head'], or None.
    """
    variables = {"params": w["head"]} if sums is None else {"params": w["head"], "sums": sums}
    return Head(m).apply(variables, x_bud, w["embed"]["w"])


def lm_loss(
    run: Run,
    w: Any,
    x_bud: jax.Array,
    targets_bt: jax.Array,
    sums: Any = None,
    padded: bool = False,
    share: jax.Array | None = None,
) -> Any:
    """This GPU's part of the mean cross entropy over the global batch; a psum over GPUs, and the
    sum over microbatches, is the mean. `sums` as in head(), `padded` as in cross_entropy(), `share`
    is data.share()."""
    x_btd, w_dv, sums_dv = head(run.model, w, x_bud, sums)
    return cross_entropy(
        x_btd.reshape(-1, run.model.embed),
        w_dv,
        sums_dv,
        targets_bt.reshape(-1),
        run.train.loss_chunk,
        run.train.z_loss,
        run.model.output_multiplier,
        1 / (run.layout.gbs * run.train.seq) if share is None else 1.0,
        padded or run.train.document_end is not None,
        share,
    )


def forward(
    run: Run,
    w: Any,
    tokens_bt: jax.Array,
    sums: Any = None,
    documents_bt: jax.Array | None = None,
) -> Any:
    """Embedding and all layers: x_bud, and the sum of the auxiliary losses.

    w['layers'] is stacked or a tuple of layers (layer_stack.py); `sums` are its accumulators.
    documents_bt is data.documents() of the tokens.
    """
    m = run.model
    rope = rope_angles(m, mesh.token_positions(run.train.seq))
    x_bud = embed(m, w, tokens_bt)

    def step(policy, kind, x_bud, w):
        return layer(run, kind, *w, x_bud, rope, policy=policy, documents_bt=documents_bt)[::2]

    if run.train.two_batch_overlap:
        one = lambda kind, w, sums, x_bud, documents_bt, **tokens: layer(
            run, kind, w, sums, x_bud, rope, documents_bt=documents_bt, **tokens
        )
        return two_batches.run_layers(m, one, x_bud, w["layers"], sums, documents_bt)
    # train.remat applies to the first train.remat_layers layers. The others recompute no GEMM.
    save_gemms = functools.partial(step, ("save_gemms_recompute_act", ()))
    last = m.layers - run.train.remat_layers, save_gemms
    return layer_stack.run_layers(m, functools.partial(step, None), x_bud, w["layers"], sums, last)


def mtp_loss(
    run: Run,
    w: Any,
    x_bud: jax.Array,
    next_bt: Sequence[jax.Array],
    sums: Any,
) -> tuple[jax.Array, jax.Array]:
    """This GPU's part of the loss of multi-token prediction (mtp.py), and of its auxiliary loss.

    Args:
      w: weights, at least 'embed', 'head' and 'mtp'.
      x_bud: hidden states.
      next_bt: the next token of each position, the one after that, and so on: mtp_layers + 1.
      sums: gradient accumulators of w['mtp'], or None.
    """
    m, parts = run.model, w["mtp"]
    layer_sums = None
    if sums is not None:
        once = m.mtp_layers == 1  # wgrads of several uses cannot all add to one accumulator
        layer_sums = sums["layer"] if once else None
        added = ("input", "head_norm") if once else [*parts]
        parts = parts | {name: accumulate_into(sums[name], parts[name]) for name in added}
    w_head = w | {"head": w["head"] | {"norm": parts["head_norm"]}}
    found = []
    for token_bt, target_bt in itertools.pairwise(next_bt):
        # In a pipeline each stage has another microbatch.
        embedded_bud = embed(m, w, token_bt, stages_differ=True)
        into: Any = mtp.MtpInput(m).apply({"params": parts["input"]}, x_bud, embedded_bud)
        rope = rope_angles(m, mesh.token_positions(run.train.seq))
        x_bud, _, aux = layer(run, m.mtp_layer, parts["layer"], layer_sums, into, rope)
        found.append((lm_loss(run, w_head, x_bud, target_bt), aux))
    losses, auxes = (functools.reduce(jnp.add, terms) for terms in zip(*found, strict=True))
    return losses / m.mtp_layers if m.mtp_layers > 1 else losses, auxes


def loss_fn(
    run: Run,
    w: Any,
    tokens_bt: jax.Array,
    targets_bt: jax.Array,
    sums: Any,
    *after_bt: jax.Array,
    documents_bt: jax.Array | None = None,
    share: jax.Array | None = None,
) -> Any:
    """This GPU's part of the loss of one microbatch, and its terms {'loss', 'aux'}. Multi-token
    prediction adds a term 'mtp_loss', which counts model.mtp_loss times.

    The sum of the parts over GPUs and microbatches is the mean over the global batch, so gradients
    are summed and need no further scaling.

    Args:
      w: this GPU's compute weights.
      tokens_bt, targets_bt: this GPU's sequences at mesh.token_positions().
      sums: gradient accumulators like w, to differentiate with respect to (grad_accumulation.py).
      after_bt: the tokens after each target, for multi-token prediction.
      documents_bt: as in forward().
      share: as in lm_loss().
    """
    w, head_sums = w | {"embed": accumulate_into(sums["embed"], w["embed"])}, sums["head"]
    if run.model.mtp_layers:  # two losses read the head: they cannot both add to its accumulator
        w, head_sums = w | {"head": accumulate_into(head_sums, w["head"])}, None
    x_bud, aux = forward(run, w, tokens_bt, sums["layers"], documents_bt)
    next_bt = (targets_bt, *after_bt)
    return losses(run, w, x_bud, next_bt, aux, head_sums, sums.get("mtp"), share)


def losses(
    run: Run,
    w: Any,
    x_bud: jax.Array,
    next_bt: Sequence[jax.Array],
    aux: Any,
    head_sums: Any,
    mtp_sums: Any,
    share: jax.Array | None = None,
) -> Any:
    """loss_fn() from the hidden states x_bud on.

    Args:
      next_bt: as mtp_loss() has it.
      aux: the sum of the layers' auxiliary losses.
      head_sums, mtp_sums: gradient accumulators of w['head'] and w['mtp'], or None.
      share: as in lm_loss().
    """
    m = run.model
    loss = lm_loss(run, w, x_bud, next_bt[0], head_sums, share=share)
    if not m.mtp_layers:
        out = {"loss": loss, "aux": aux / run.layout.gbs}
        return out["loss"] + out["aux"], out
    extra, extra_aux = mtp_loss(run, w, x_bud, next_bt, mtp_sums)
    out = {"loss": loss, "aux": (aux + extra_aux) / run.layout.gbs, "mtp_loss": extra}
    return out["loss"] + out["aux"] + m.mtp_loss * extra, out
