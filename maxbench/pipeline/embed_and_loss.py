"""The embedding, and the LM head with its loss, in a pipeline: forward and backward."""

from typing import Any

import jax
import jax.numpy as jnp

from maxbench.config.run import Run
from maxbench.model import transformer
from maxbench.sharding import collectives

WEIGHTS = "embed", "head"


class EmbedAndLoss:
    """
    Args:
      w: compute weights of this GPU.
      batch: microbatch -> (tokens_bt, targets_bt).
    """

    def __init__(self, run: Run, w, batch):
        self.run, self.batch = run, batch
        self.w = {name: w[name] for name in WEIGHTS}

    def embed(self, first: jax.Array | int, count: int = 1, w: Any = None) -> Any:
        """The input activations of `count` microbatches from `first` on, [count x b, u, d].
        Microbatches after the last repeat it."""
        last = self.run.layout.microbatches - 1
        tokens = [self.batch(jnp.minimum(first + i, last))[0] for i in range(count)]
        return transformer.embed(self.run.model, w or self.w, jnp.concatenate(tokens))

    def embed_backward(self, first: jax.Array | int, dxs: Any, grads: Any) -> Any:
        """The gradients of the embedding with those of the microbatches from `first` on added.

        Args:
          dxs: gradients of their input activations, [microbatches, b, u, d]. Those of microbatches
            after the last do not count.
        """
        count, b = dxs.shape[:2]
        exists = first + jnp.repeat(jnp.arange(count), b) < self.run.layout.microbatches
        dx = jnp.where(exists[:, None, None], dxs.reshape(-1, *dxs.shape[2:]), 0)
        call = lambda w: self.embed(first, count, {"embed": w})
        return _add(grads, jax.vjp(call, self.w["embed"])[1](dx)[0])

    def loss(self, last: jax.Array | int, ys: Any, grads: Any, head: Any) -> Any:
        """The loss of the microbatches up to `last`, and the gradients.

        Each stage computes the head for its part of the tokens: otherwise all stages would wait
        for the last one, pp times as long. Padding makes the parts equal.

        Args:
          ys: output activations of these microbatches, [microbatches, b, u, d].
          grads: gradients of the embedding and the head so far.
          head: the head's weight, if it is not that of w.

        Returns:
          The loss, the gradients with those of these microbatches added, and the gradients of ys.
        """
        pp, stage, tokens = self.run.layout.pp, collectives.axis_index("pp"), ys.shape[2]
        none, more = (0, 0), (0, -tokens % pp)
        targets = jnp.concatenate([self.batch(last - i)[1] for i in reversed(range(len(ys)))])
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
