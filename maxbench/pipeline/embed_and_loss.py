"""The ends of the network in a step: tokens to x, y to the loss, and their gradients."""

import jax
import jax.numpy as jnp

from maxbench.config.run import Run
from maxbench.model import transformer
from maxbench.sharding import collectives

WEIGHTS = "embed", "head"  # of their weights


class EmbedAndLoss:
    """
    Args:
      w: compute weights of this GPU.
      batch: microbatch -> (tokens_bt, targets_bt).
    """

    def __init__(self, run: Run, w, batch):
        self.run, self.batch = run, batch
        self.w = {name: w[name] for name in WEIGHTS}

    def embed(self, micro, count=1, w=None):
        """x of `count` microbatches from `micro` on; of some beyond the last for nothing."""
        last = self.run.layout.microbatches - 1
        tokens = [self.batch(jnp.minimum(micro + i, last))[0] for i in range(count)]
        return transformer.embed(self.run.model, w or self.w, jnp.concatenate(tokens))

    def embed_backward(self, micro, dxs, grads):
        """The embedding's gradients with those of the microbatches from `micro` on that dxs
        [microbatches, b, u, d] are of, but for some beyond the last."""
        count, b = dxs.shape[:2]
        real = micro + jnp.repeat(jnp.arange(count), b) < self.run.layout.microbatches
        dx = jnp.where(real[:, None, None], dxs.reshape(-1, *dxs.shape[2:]), 0)
        call = lambda w: self.embed(micro, count, {"embed": w})
        return _add(grads, jax.vjp(call, self.w["embed"])[1](dx)[0])

    def loss(self, micro, ys, grads, head):
        """The loss of the microbatches up to `micro` that ys [microbatches, b, u, d] are of, the
        gradients of the ends with theirs, and those of ys. `head` is its weight, if not w's.

        Each stage of a pipeline has the head's products of its part of the tokens: the last one
        alone would have all others wait, pp times as long. Padding makes the parts equal.
        """
        pp, stage, tokens = self.run.layout.pp, collectives.axis_index("pp"), ys.shape[2]
        none, more = (0, 0), (0, -tokens % pp)
        targets = jnp.concatenate([self.batch(micro - i)[1] for i in reversed(range(len(ys)))])
        targets = targets.reshape(len(targets), -1, tokens)  # of all GPUs of tp
        targets = jnp.pad(targets, (none, none, more), constant_values=-1)
        targets = targets.reshape(*targets.shape[:2], pp, -1)[:, :, stage]

        def call(w, ys):
            y = jnp.where(stage == pp - 1, ys.reshape(-1, *ys.shape[2:]), 0)
            y = jnp.pad(y, (none, more, none))
            y = collectives.reduce_scatter(y, "pp", 1)
            return transformer.lm_loss(self.run, w, y, targets, padded=more != none)

        w = self.w if head is None else self.w | {"head": self.w["head"] | {"w": head}}
        loss, vjp = jax.vjp(call, w, ys)
        dw, dys = vjp(jnp.ones(()))
        return loss, _add(grads, dw), dys


def _add(grads, more):
    return jax.tree.map(lambda g, m: g + m.astype(g.dtype), grads, more)
