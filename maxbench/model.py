"""The network as plain functions over a dict of weights; Linen ends at the block.

    {'embed': ..., 'layers': ..., 'head': ...}      every leaf of 'layers' is stacked [layers, ...]

One layout for every mesh, so initial weights, loss and checkpoints do not depend on it. Nothing
here maps over a block with vmap, because Transformer Engine's GEMM has no batching rule.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from maxbench import mesh
from maxbench.config import Model, Run
from maxbench.layers import Attention, Embed, Head, Mlp, Norm, rope_angles
from maxbench.loss import cross_entropy
from maxbench.moe import Moe


class Block(nn.Module):
    """One transformer layer. Families differ only in the Model that is passed in."""

    model: Model
    attention: str

    @nn.compact
    def __call__(self, x_bud, rope):
        m = self.model
        post = lambda name: Norm(m, name=name) if m.post_norm else lambda x: x
        y_bud = Attention(m, self.attention, name="attn")(Norm(m, name="attn_norm")(x_bud), rope)
        x_bud += post("attn_post")(y_bud)
        mlp = Moe(m, name="mlp") if m.experts else Mlp(m, name="mlp")
        y_bud, aux = mlp(Norm(m, name="mlp_norm")(x_bud))
        return x_bud + post("mlp_post")(y_bud), aux


def init(m: Model, key: jax.Array):
    """Weights, fp32; every leaf is boxed with its logical axes (flax.linen.Partitioned)."""
    tokens_bt, x_btd = jnp.zeros((1, 8), jnp.int32), jnp.zeros((1, 8, m.embed))
    rope = rope_angles(m, jnp.arange(8))
    k_embed, k_layers, k_head = jax.random.split(key, 3)
    layer = lambda k: Block(m, "xla").init(k, x_btd, rope)["params"]
    layers = jax.vmap(layer)(jax.random.split(k_layers, m.layers))
    is_box = lambda x: isinstance(x, nn.Partitioned)
    stacked = lambda box: box.replace(names=("layers", *box.names))
    embed = Embed(m).init(k_embed, tokens_bt, jnp.float32)["params"]
    return {
        "embed": embed,
        "layers": jax.tree.map(stacked, layers, is_leaf=is_box),
        "head": Head(m).init(k_head, x_btd, nn.unbox(embed)["w"])["params"],
    }


def gather_layer(places, w, drop: int = 1):
    """All-gathers over fsdp the weights of one layer (drop=1) or of embed and head (drop=0)."""

    def one(place, w):
        axes = place.compute[drop:]
        return mesh.gather(w, "fsdp", axes.index("fsdp")) if "fsdp" in axes else w

    return jax.tree.map(one, places, w)


def scan_layers(run: Run, places, w_layers, x_bud, rope):
    """x_bud through all layers; returns it and the sum of the layers' auxiliary losses."""

    def layer(x_bud, w):
        block = Block(run.model, run.train.attention)
        return block.apply({"params": gather_layer(places, w)}, x_bud, rope)

    policy = jax.checkpoint_policies.save_only_these_names(*run.train.saved)
    layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    x_bud, aux = jax.lax.scan(layer, x_bud, w_layers)
    return x_bud, jnp.sum(aux)


def apply(run: Run, places, w, tokens_bt):
    """The network up to its logits, of which it returns the factors.

    Returns:
      x_btd, w_dv: logits_btv = x_btd @ w_dv x model.output_multiplier.
      aux: this GPU's share of the layers' auxiliary losses, summed over its sequences.
    """
    m, dtype = run.model, w["embed"]["w"].dtype
    w_embed = gather_layer(places["embed"], w["embed"], drop=0)
    w_head = gather_layer(places["head"], w["head"], drop=0)
    rope = rope_angles(m, mesh.chunks(run.train.seq))
    x_bud = Embed(m).apply({"params": w_embed}, tokens_bt, dtype)
    x_bud, aux = scan_layers(run, places["layers"], w["layers"], x_bud, rope)
    return *Head(m).apply({"params": w_head}, x_bud, w_embed["w"]), aux


def objective(run: Run, places, w, tokens_bt, targets_bt):
    """This GPU's share of the loss of its sequences, and the shares of what is reported.

    The sum of the shares over all GPUs (and microbatches) is the mean over the global batch: the
    gradient of the sum needs no further scaling.

    Args:
      places: tree like w of mesh.Place.
      w: compute weights of this GPU.
      tokens_bt, targets_bt: this GPU's sequences, its part of each over cp (mesh.chunks order).
    """
    m = run.model
    x_btd, w_dv, aux = apply(run, places, w, tokens_bt)
    token_loss = cross_entropy(
        x_btd.reshape(-1, m.embed),
        w_dv,
        targets_bt.reshape(-1),
        run.train.loss_chunk,
        run.train.z_loss,
        m.output_multiplier,
    )
    loss, aux = token_loss / (run.layout.gbs * run.train.seq), aux / run.layout.gbs
    return loss + aux, {"loss": loss, "aux": aux}
