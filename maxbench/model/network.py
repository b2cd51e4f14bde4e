"""The network as plain functions over a dict of weights; Linen ends at the block.

    {'embed': ..., 'layers': ..., 'head': ...}      every leaf of 'layers' is stacked [layers, ...]

One layout for every mesh, so initial weights, loss and checkpoints do not depend on it. Nothing
here maps over a block with vmap, because Transformer Engine's GEMM has no batching rule.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from maxbench.mesh import axes
from maxbench.model import formats, stack
from maxbench.model.experts import Moe
from maxbench.model.layers import Attention, Embed, Head, Mlp, Norm, rope_angles
from maxbench.model.loss import cross_entropy
from maxbench.model.sums import add_to
from maxbench.spec.model import Model
from maxbench.spec.run import Run


class Block(nn.Module):
    """One transformer layer. Families differ only in the Model that is passed in."""

    model: Model
    attention: str

    @nn.compact
    def __call__(self, x_bud, rope):
        m = self.model
        post = lambda name: Norm(m, name=name) if m.post_norm else lambda x: x
        attend = Attention(m, self.attention, name="attn")
        y_bud = attend(Norm(m, name="attn_norm")(x_bud), rope)
        x_bud += post("attn_post")(y_bud)
        mlp = (Moe if m.experts else Mlp)(m, name="mlp")
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


def layer(run: Run, w, sums, x_bud, rope):
    """One layer; saves for the backward pass what train.remat says.

    `sums` are those of w (sums.py), or None.
    """

    def apply(w, sums, x_bud):
        variables = {"params": w} if sums is None else {"params": w, "sums": sums}
        return Block(run.model, run.train.attention).apply(variables, x_bud, rope)

    policy = jax.checkpoint_policies.save_only_these_names(*run.train.saved, formats.SCALE)
    # Forward and backward pass in one computation: XLA would see the same work twice and keep its
    # result. In a loop or a pipeline they are apart; and where little is recomputed, let it.
    prevent_cse = stack.as_code(run) and run.layout.pp == 1 and run.train.remat != "none"
    return jax.checkpoint(apply, policy=policy, prevent_cse=prevent_cse)(w, sums, x_bud)


def embed(run: Run, w, tokens_bt):
    """Embedded tokens, x_bud. `w` holds at least 'embed'."""
    return Embed(run.model).apply({"params": w["embed"]}, tokens_bt, w["embed"]["w"].dtype)


def head(run: Run, w, x_bud):
    """The factors of the logits: x_btd @ w_dv x model.output_multiplier."""
    return Head(run.model).apply({"params": w["head"]}, x_bud, w["embed"]["w"])


def head_loss(run: Run, w, x_bud, targets_bt):
    """This GPU's share of the mean loss over the global batch."""
    x_btd, w_dv = head(run, w, x_bud)
    token_loss = cross_entropy(
        x_btd.reshape(-1, run.model.embed),
        w_dv,
        targets_bt.reshape(-1),
        run.train.loss_chunk,
        run.train.z_loss,
        run.model.output_multiplier,
    )
    return token_loss / (run.layout.gbs * run.train.seq)


def apply(run: Run, w, tokens_bt, sums=None):
    """All layers: tokens_bt -> x_bud before the head, and the sum of the auxiliary losses.

    w['layers'] is stacked or a tuple of layers (stack.py).
    """
    rope = rope_angles(run.model, axes.chunks(run.train.seq))
    x_bud = embed(run, w, tokens_bt)
    step = lambda x_bud, w: layer(run, *w, x_bud, rope)
    return stack.run_layers(step, x_bud, w["layers"], sums)


def objective(run: Run, w, tokens_bt, targets_bt, sums):
    """This GPU's share of the loss of its sequences, and the shares of what is reported.

    The sum of the shares over all GPUs (and microbatches) is the mean over the global batch: the
    gradient of the sum needs no further scaling.

    Args:
      w: compute weights of this GPU.
      tokens_bt, targets_bt: this GPU's sequences, its part of each over cp (axes.chunks order).
      sums: tree like w of gradients so far; to differentiate with respect to (sums.py).
    """
    w = w | {name: add_to(sums[name], w[name]) for name in ("embed", "head")}
    x_bud, aux = apply(run, w, tokens_bt, sums["layers"])
    out = {"loss": head_loss(run, w, x_bud, targets_bt), "aux": aux / run.layout.gbs}
    return out["loss"] + out["aux"], out
