"""The embedding, and the LM head with its loss, in a pipeline: forward and backward. Multi-token
prediction (model/mtp.py) is part of the loss."""

from typing import Any

import jax
import jax.numpy as jnp

from maxbench.config.run import Run
from maxbench.model import transformer
from maxbench.sharding import collectives

WEIGHTS = "embed", "head", "mtp"


class EmbedAndLoss:
    """
    Args:
      w: compute weights of this GPU.
      batch: microbatch -> (tokens_bt, targets_bt), with multi-token prediction also the tokens
        after the targets.
      share: as in transformer.lm_loss().
    """

    def __init__(self, run: Run, w, batch, share: jax.Array | None):
        self.run, self.batch, self.share = run, batch, share
        self.w = {name: w[name] for name in WEIGHTS if name in w}

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
        for the last one, pp times as long. Padding makes the parts equal. With multi-token
        prediction, whose layer needs whole sequences, the part is one of pp microbatches.

        Args:
          ys: output activations of these microbatches, [microbatches, b, u, d].
          grads: gradients of the embedding and the head so far.
          head: the head's weight, if it is not that of w.

        Returns:
          This GPU's shares of the metrics of these microbatches: {'loss'}, or those of
          transformer.loss_fn. The gradients with those of these microbatches added, and the
          gradients of ys.
        """
        call, w = self._call(last, ys, head)
        _, vjp, metrics = jax.vjp(call, w, ys, has_aux=True)
        dw, dys = vjp(jnp.ones(()))
        return metrics, _add(grads, dw), dys

    def metrics(self, last: jax.Array | int, ys: Any, head: Any) -> dict[str, jax.Array]:
        """The metrics of loss() alone, without gradients."""
        call, w = self._call(last, ys, head)
        return call(w, ys)[1]

    def _call(self, last, ys, head):
        """(w, ys) -> loss, metrics; and w."""
        w = self.w if head is None else self.w | {"head": self.w["head"] | {"w": head}}
        losses = self._mtp_losses if self.run.model.mtp_layers else self._losses
        return losses(last, len(ys), ys.shape[2]), w

    def _losses(self, last, count, tokens):
        """(w, ys) -> loss, metrics: of this stage's part of the tokens."""
        pp, stage = self.run.layout.pp, collectives.axis_index("pp")
        none, more = (0, 0), (0, -tokens % pp)
        targets = jnp.concatenate([self.batch(last - i)[1] for i in reversed(range(count))])
        targets = targets.reshape(len(targets), -1, tokens)  # of all GPUs of tp
        targets = jnp.pad(targets, (none, none, more), constant_values=-1)
        targets = targets.reshape(*targets.shape[:2], pp, -1)[:, :, stage]

        def call(w, ys):
            y = jnp.where(stage == pp - 1, ys.reshape(-1, *ys.shape[2:]), 0)
            y = jnp.pad(y, (none, more, none))
            y = collectives.reduce_scatter(y, "pp", 1)
            padded, share = more != none, self.share
            loss = transformer.lm_loss(self.run, w, y, targets, padded=padded, share=share)
            return loss, {"loss": loss}

        return call

    def _mtp_losses(self, last, count, _):
        """(w, ys) -> loss, metrics: of this stage's microbatch of `count`, which is pp."""
        stage = collectives.axis_index("pp")
        _, *next_bt = self.batch(last - (count - 1) + stage)

        def call(w, ys):
            ys = jnp.where(stage == count - 1, ys, 0)
            x_bud = collectives.reduce_scatter(ys, "pp", 0)[0]
            return transformer.losses(self.run, w, x_bud, next_bt, 0.0, None, None)

        return call


def _add(grads, more):
    return jax.tree.map(lambda g, m: g + m.astype(g.dtype), grads, more)
