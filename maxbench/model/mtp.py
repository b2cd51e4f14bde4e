"""Multi-token prediction: one more layer, which predicts the token after the next one.

As in DeepSeek-V3 (arXiv:2412.19437, section 2.2) and Megatron. The hidden state of position i,
before the LM head's norm, and the embedding of token i + 1 are normalized and projected together
onto the width of the model. Model.mtp_layer follows, a norm, and the LM head. Embedding and LM head
are those of the network. Megatron takes hidden states after that norm, which is the same as long as
its weights are 1.

With model.mtp_layers > 1 the same weights are used as often (Megatron's mtp_use_repeated_layer, as
in Nemotron 3; other weights for each use, as DeepSeek-V3 would have, are not implemented): the k-th
use takes the hidden state of the one before, before the norm, and the embedding of token i + k, and
predicts token i + k + 1. The loss is the mean over the uses. The weights:

    w['mtp'] = {'input': MtpInput's, 'layer': a layer's, 'head_norm': a norm's}

GEMMs of this layer are not quantized.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from maxbench.config.model import Model
from maxbench.model.layers import Linear, Norm


class MtpInput(nn.Module):
    """The input of the MTP layer: x_bud."""

    model: Model

    @nn.compact
    def __call__(self, x_bud, embedded_bud):
        """Args: x_bud, hidden states; embedded_bud, embeddings of the next tokens."""
        m = self.model
        parts = Norm(m, name="embed_norm")(embedded_bud), Norm(m, name="hidden_norm")(x_bud)
        axes = m.mtp_weights["mtp/input/projection/w"].axes
        projection = Linear(m, axes, m.init_std, plain=True, name="projection")
        return projection(jnp.stack(parts, 2))[0]


def init(m: Model, key: jax.Array, block: Any, x_btd: jax.Array, context: Any) -> dict[str, Any]:
    """Initial weights, boxed as those of transformer.init().

    Args:
      block: transformer.Block.
      x_btd: an activation of any length, and `context` its sublayers.Context.
    """
    keys = jax.random.split(key, 3)
    return {
        "input": MtpInput(m).init(keys[0], x_btd, x_btd)["params"],
        "layer": block(m, m.mtp_layer).init(keys[1], x_btd, context)["params"],
        "head_norm": Norm(m).init(keys[2], x_btd)["params"],
    }
