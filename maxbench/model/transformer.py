"""The network as plain functions over a dict of weights, and as one Linen module, Transformer.

    {'embed': ..., 'layers': ..., 'head': ...}      every leaf of 'layers' is stacked [layers, ...]

Where layers differ by kind (Model.layer_groups), 'layers' is a dict of such stacks, '000', '001', ..., one
for each run of equal neighbours.

One layout for every mesh, so initial weights, loss and checkpoints do not depend on it. Nothing
here maps over a block with vmap, because Transformer Engine's GEMM has no batching rule.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from maxbench import quantization
from maxbench.config import lowering
from maxbench.config.model import Model
from maxbench.config.run import Run
from maxbench.model import layer_stack
from maxbench.model.experts import Moe
from maxbench.model.grad_accumulation import accumulate_into
from maxbench.model.layers import Attention, Embed, Head, Mlp, Norm, rope_angles
from maxbench.model.linear import CommOrder, no_comm
from maxbench.model.loss import cross_entropy
from maxbench.sharding import mesh, ordering, rules

# The sublayers of a layer, and their GEMMs with tp collectives. Names of a sublayer's weights
# begin with its own.
SUBLAYERS = {"attn": ("qkv", "out"), "mlp": ("up", "down")}


def add(x_bud, y_bud, name: str):
    """The residual stream with what a half of a layer adds.

    Where that comes from a product as it is, the product adds: XLA sees that of matrices, and that
    it may not write over x, which a norm reads too. The sum is then kept in place of y.
    """
    if not no_comm():
        return x_bud + y_bud
    flat = lambda x: x.reshape(-1, x.shape[-1])
    return checkpoint_name((flat(x_bud) + flat(y_bud)).reshape(x_bud.shape), name)


class Block(nn.Module):
    """One transformer layer, or one of its SUBLAYERS. Families differ only in the Model that is passed
    in.

    `wait_for` and `issued` are ordering tokens (linear.CommOrder), per GEMM and of the layer before;
    `dx_unordered` is that of the first GEMM, `apart` that of layers.normalize for norms whose output
    is quantized. Returns x, the token of each GEMM by name, and the auxiliary loss.
    """

    model: Model
    attention: str
    sublayer: str = ""
    apart: bool = False
    dx_unordered: bool = False

    @nn.compact
    def __call__(self, x_bud, rope, wait_for=None, issued=None):
        m, aux = self.model, jnp.zeros(())
        for sublayer in (self.sublayer,) if self.sublayer else SUBLAYERS:
            first, last = SUBLAYERS[sublayer]
            zero = None if issued is None else jnp.zeros(())
            orders = {
                first: CommOrder(wait_for and wait_for[first], zero, self.dx_unordered),
                last: CommOrder(wait_for and wait_for[last], issued),
            }
            y_bud = Norm(m, self.apart, name=f"{sublayer}_norm")(x_bud)
            if sublayer == "attn":
                attend = Attention(m, self.attention, name="attn")
                y_bud, tokens = attend(y_bud, rope, orders)
            else:
                mlp = (Moe if m.experts else Mlp)(m, name="mlp")
                y_bud, tokens, aux = mlp(y_bud, orders)
            issued = tokens[last]
            post = m.post_norm and Norm(m, name=f"{sublayer}_post")
            x_bud = x_bud + post(y_bud) if post else add(x_bud, y_bud, f"{sublayer}_out")
        return x_bud, tokens, aux


def init(m: Model, key: jax.Array, layers: np.ndarray | None = None):
    """Weights, fp32; every leaf is boxed with its logical axes (flax.linen.Partitioned).

    `layers` are those to make, by number, in the order in which they are stacked; default: all,
    which a model of several kinds needs.
    """
    numbers = np.arange(m.layers) if layers is None else layers
    tokens_bt, x_btd = jnp.zeros((1, 8), jnp.int32), jnp.zeros((1, 8, m.embed))
    rope = rope_angles(m, jnp.arange(8))
    k_embed, k_layers, k_head = jax.random.split(key, 3)
    keys = jax.random.split(k_layers, m.layers)[numbers]
    is_box = lambda x: isinstance(x, nn.Partitioned)
    named = lambda box: box.replace(names=("layers", *box.names))

    def stacked(kind, keys):
        made = jax.vmap(lambda k: Block(kind, "xla").init(k, x_btd, rope)["params"])(keys)
        return jax.tree.map(named, made, is_leaf=is_box)

    first = np.cumsum([0, *(n for n, _ in m.stacks[:-1])])
    parts = [keys[a:b] for a, b in zip(first, [*first[1:], None], strict=True)]
    made = [stacked(kind, part) for (_, kind), part in zip(m.stacks, parts, strict=True)]
    embed = Embed(m).init(k_embed, tokens_bt, jnp.float32)["params"]
    return {
        "embed": embed,
        "layers": layer_stack.join(m, made),
        "head": Head(m).init(k_head, x_btd, nn.unbox(embed)["w"])["params"],
    }


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("sublayer", "dx_unordered"))
def layer(
    run: Run, kind: Model, w, sums, x_bud, rope, wait_for=None, issued=None, sublayer="",
    dx_unordered=False,
):  # fmt: skip
    """One layer of a kind, or a half of it; saves for the backward pass what train.remat says,
    where train.offload says.

    `sums` are those of w (sums.py), or None. Jitted, so that it is traced and differentiated once,
    however many layers are code.
    """

    # Forward and backward pass in one computation: XLA would see the same work twice and keep its
    # result. In a loop or a pipeline they are apart; and with 'none', let it.
    together = lowering.layers_unrolled(run) and not lowering.overlaps_fwd_bwd(run)
    prevent_cse = together and run.train.remat != "none"

    def apply(w, sums, x_bud, wait_for, issued):
        if prevent_cse and no_comm():
            x_bud, tokens = ordering.grad_after_wgrads(x_bud)
            wait_for = dict.fromkeys(sum(SUBLAYERS.values(), ()), tokens)
        variables = {"params": w} if sums is None else {"params": w, "sums": sums}
        apart = run.format.amax_history and run.precision.backend == "xla" and not kind.experts
        block = Block(kind, run.train.attention, sublayer, apart, dx_unordered)
        return block.apply(variables, x_bud, rope, wait_for, issued)

    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[
            *lowering.saved_on_device(run, run.train.saved),
            quantization.SCALE,
        ],
        names_which_can_be_offloaded=[*run.train.offloaded],
        offload_src="device",
        offload_dst="pinned_host",
    )
    apply = jax.checkpoint(apply, policy=policy, prevent_cse=prevent_cse)
    return apply(w, sums, x_bud, wait_for, issued)


class Transformer(nn.Module):
    """The network for any use of JAX: no mesh, no Run. The tree of init() and of checkpoints:

        logits_btv = Transformer(model).apply({"params": params}, tokens_bt)

    Its numbers are computed in the dtype of the weights; logits are fp32. It is the whole sequence
    that goes in, of any length. Whole GPUs of a cluster, and training, are maxbench.step's.
    """

    model: Model
    attention: str = "xla"  # a name of attention.KERNELS

    @nn.compact
    def __call__(self, tokens_bt):
        m = self.model
        if self.is_initializing():
            made = jax.jit(lambda key: nn.unbox(init(m, key)))(self.make_rng("params"))
            for name, w in made.items():
                self.put_variable("params", name, w)
        w = self.variables["params"]
        rope = rope_angles(m, jnp.arange(tokens_bt.shape[1]))
        x_btd = embed(m, w, tokens_bt)
        block = lambda kind, x_btd, w: Block(kind, self.attention).apply(
            {"params": w[0]}, x_btd, rope
        )[::2]
        x_btd, _ = layer_stack.run_layers(m, block, x_btd, w["layers"], None)
        x_btd, w_dv, _ = head(m, w, x_btd)
        dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        return dot("btd,dv->btv", x_btd, w_dv) * m.output_multiplier


def embed(m: Model, w, tokens_bt):
    """Embedded tokens, x_bud. `w` holds at least 'embed'."""
    w_vd = w["embed"]["w"]
    # Whose columns it has, its width says (program.columns_over_pp).
    fewer = w_vd.shape[1] < rules.local_size("embed_sharded", m.embed) and not m.tied
    embed_axis = "embed_sharded_pp" if fewer else "embed_sharded"
    return Embed(m, embed_axis).apply({"params": w["embed"]}, tokens_bt, w_vd.dtype)


def head(m: Model, w, x_bud, sums=None):
    """The factors of the logits, x_btd @ w_dv x model.output_multiplier, and the sums of w_dv.

    `sums` are those of w['head'] (sums.py), or None.
    """
    variables = {"params": w["head"]} if sums is None else {"params": w["head"], "sums": sums}
    return Head(m).apply(variables, x_bud, w["embed"]["w"])


def lm_loss(run: Run, w, x_bud, targets_bt, sums=None, padded=False):
    """This GPU's share of the mean loss over the global batch; `sums` are those of head(), `padded`
    is that of cross_entropy()."""
    x_btd, w_dv, sums_dv = head(run.model, w, x_bud, sums)
    return cross_entropy(
        x_btd.reshape(-1, run.model.embed),
        w_dv,
        sums_dv,
        targets_bt.reshape(-1),
        run.train.loss_chunk,
        run.train.z_loss,
        run.model.output_multiplier,
        1 / (run.layout.gbs * run.train.seq),
        padded,
    )


def forward(run: Run, w, tokens_bt, sums=None):
    """All layers: tokens_bt -> x_bud before the head, and the sum of the auxiliary losses.

    w['layers'] is stacked or a tuple of layers (stack.py).
    """
    m = run.model
    rope = rope_angles(m, mesh.token_positions(run.train.seq))
    x_bud = embed(m, w, tokens_bt)
    step = lambda run, kind, x_bud, w: layer(run, kind, *w, x_bud, rope)[::2]
    train = dataclasses.replace(
        run.train, remat="save_gemms_recompute_act", offload="", remat_layers=0
    )
    more = functools.partial(step, dataclasses.replace(run, train=train))
    last = m.layers - lowering.remat_layer_count(run), more
    return layer_stack.run_layers(m, functools.partial(step, run), x_bud, w["layers"], sums, last)


def loss_fn(run: Run, w, tokens_bt, targets_bt, sums):
    """This GPU's share of the loss of its sequences, and the shares of what is reported.

    The sum of the shares over all GPUs (and microbatches) is the mean over the global batch: the
    gradient of the sum needs no further scaling.

    Args:
      w: compute weights of this GPU.
      tokens_bt, targets_bt: this GPU's sequences, its part of each over cp (axes.chunks order).
      sums: tree like w of gradients so far; to differentiate with respect to (sums.py).
    """
    w = w | {"embed": accumulate_into(sums["embed"], w["embed"])}
    x_bud, aux = forward(run, w, tokens_bt, sums["layers"])
    loss = lm_loss(run, w, x_bud, targets_bt, sums["head"])
    out = {"loss": loss, "aux": aux / run.layout.gbs}
    return out["loss"] + out["aux"], out
