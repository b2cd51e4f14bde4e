"""The network as plain functions over a dict of weights; Linen ends at the block.

    {'embed': ..., 'layers': ..., 'head': ...}      every leaf of 'layers' is stacked [layers, ...]

One layout for every mesh, so initial weights, loss and checkpoints do not depend on it. Nothing
here maps over a block with vmap, because Transformer Engine's GEMM has no batching rule.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from maxbench import mesh, precision
from maxbench.config import Model, Run
from maxbench.layers import Attention, Embed, Head, Mlp, Norm, rope_angles
from maxbench.loss import cross_entropy
from maxbench.moe import Moe


class Block(nn.Module):
    """One transformer layer. Families differ only in the Model that is passed in."""

    model: Model
    attention: str
    dtype: str = "bf16"

    @nn.compact
    def __call__(self, x_bud, rope):
        m = self.model
        post = lambda name: Norm(m, name=name) if m.post_norm else lambda x: x
        attend = Attention(m, self.attention, self.dtype, name="attn")
        y_bud = attend(Norm(m, name="attn_norm")(x_bud), rope)
        x_bud += post("attn_post")(y_bud)
        mlp = (Moe if m.experts else Mlp)(m, self.dtype, name="mlp")
        y_bud, aux = mlp(Norm(m, name="mlp_norm")(x_bud))
        return x_bud + post("mlp_post")(y_bud), aux


def init(m: Model, key: jax.Array, order: np.ndarray | None = None):
    """Weights, fp32; every leaf is boxed with its logical axes (flax.linen.Partitioned).

    `order` is the layer in each slot of the stacked weights, -1 for a slot of zeros
    (schedule.layer_order); by default there is one slot for each layer.
    """
    order = np.arange(m.layers) if order is None else order
    tokens_bt, x_btd = jnp.zeros((1, 8), jnp.int32), jnp.zeros((1, 8, m.embed))
    rope = rope_angles(m, jnp.arange(8))
    k_embed, k_layers, k_head = jax.random.split(key, 3)
    keys = jax.random.split(k_layers, m.layers)[np.maximum(order, 0)]
    layers = jax.vmap(lambda k: Block(m, "xla").init(k, x_btd, rope)["params"])(keys)
    is_box = lambda x: isinstance(x, nn.Partitioned)

    def stacked(box):
        w = box.value
        if (order < 0).any():
            w = jnp.where((order >= 0).reshape(-1, *[1] * (w.ndim - 1)), w, 0)
        return box.replace(value=w, names=("layers", *box.names))

    embed = Embed(m).init(k_embed, tokens_bt, jnp.float32)["params"]
    return {
        "embed": embed,
        "layers": jax.tree.map(stacked, layers, is_leaf=is_box),
        "head": Head(m).init(k_head, x_btd, nn.unbox(embed)["w"])["params"],
    }


def gather_fsdp(places, w):
    """All-gathers over fsdp the weights of one layer, or of embed or head."""

    def one(place, w):
        split = "fsdp" in place.compute
        return mesh.gather(w, "fsdp", place.compute.index("fsdp")) if split else w

    return jax.tree.map(one, places, w)


@jax.custom_vjp
def add_to(sums, w):
    """The weights w. The gradient with respect to `sums` is sums + the gradient of w.

    So a layer's part of a sum over microbatches is added where the layer's gradient is made,
    without a pass over all gradients of its own.
    """
    return w


add_to.defvjp(
    lambda sums, w: (w, sums),
    lambda sums, dw: (jax.tree.map(lambda s, d: s + d.astype(s.dtype), sums, dw), None),
)


def layer(run: Run, places, w, x_bud, rope, sums=None):
    """One layer, fsdp's gather included; saves for the backward pass what train.remat says.

    `sums` are gradients to add this layer's to (add_to), or None.
    """

    def apply(w, sums, x_bud):
        w = w if sums is None else add_to(sums, w)
        block = Block(run.model, run.train.attention, run.precision.dtype)
        return block.apply({"params": gather_fsdp(places, w)}, x_bud, rope)

    policy = jax.checkpoint_policies.save_only_these_names(*run.train.saved, precision.SCALE)
    return jax.checkpoint(apply, policy=policy, prevent_cse=False)(w, sums, x_bud)


def embed(run: Run, w, tokens_bt):
    """Embedded tokens, x_bud. `w` holds at least 'embed'."""
    return Embed(run.model).apply({"params": w["embed"]}, tokens_bt, w["embed"]["w"].dtype)


def head(run: Run, places, w, x_bud):
    """The factors of the logits: x_btd @ w_dv x model.output_multiplier."""
    w_head = gather_fsdp(places["head"], w["head"])
    tied = gather_fsdp(places["embed"], w["embed"])["w"] if run.model.tied else None
    return Head(run.model).apply({"params": w_head}, x_bud, tied)


def head_loss(run: Run, places, w, x_bud, targets_bt):
    """This GPU's share of the mean loss over the global batch."""
    x_btd, w_dv = head(run, places, w, x_bud)
    token_loss = cross_entropy(
        x_btd.reshape(-1, run.model.embed),
        w_dv,
        targets_bt.reshape(-1),
        run.train.loss_chunk,
        run.train.z_loss,
        run.model.output_multiplier,
    )
    return token_loss / (run.layout.gbs * run.train.seq)


def apply(run: Run, places, w, tokens_bt, sums=None):
    """All layers: tokens_bt -> x_bud before the head, and the sum of the auxiliary losses.

    w['layers'] is stacked, and the program a loop over layers; or a tuple of layers, and the program
    repeats their code: longer to compile, but no layer's weights, gradients and activations are
    copied out of a stack and back into one.
    """
    rope = rope_angles(run.model, mesh.chunks(run.train.seq))
    x_bud = embed(run, w, tokens_bt)
    step = lambda x_bud, w: layer(run, places["layers"], w[0], x_bud, rope, w[1])
    if not isinstance(w["layers"], tuple):
        x_bud, aux = jax.lax.scan(step, x_bud, (w["layers"], sums))
        return x_bud, jnp.sum(aux)
    total = jnp.zeros(())
    for one in zip(w["layers"], sums or [None] * len(w["layers"]), strict=True):
        x_bud, aux = step(x_bud, one)
        total += aux
    return x_bud, total


def objective(run: Run, places, w, tokens_bt, targets_bt, sums=None):
    """This GPU's share of the loss of its sequences, and the shares of what is reported.

    The sum of the shares over all GPUs (and microbatches) is the mean over the global batch: the
    gradient of the sum needs no further scaling.

    Args:
      places: mesh.Place of each weight, of one layer for 'layers'.
      w: compute weights of this GPU.
      tokens_bt, targets_bt: this GPU's sequences, its part of each over cp (mesh.chunks order).
      sums: tree like w of gradients so far. Given, the gradient with respect to it is the sum
        with this batch's.
    """
    sum_layers = None
    if sums is not None:
        sum_layers = sums["layers"]
        w = w | {name: add_to(sums[name], w[name]) for name in ("embed", "head")}
    x_bud, aux = apply(run, places, w, tokens_bt, sum_layers)
    out = {"loss": head_loss(run, places, w, x_bud, targets_bt), "aux": aux / run.layout.gbs}
    return out["loss"] + out["aux"], out
