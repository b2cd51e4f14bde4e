"""The optimizer, AdamW or Muon (step/muon.py), and its learning rate schedule."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxbench.config.run import AXES, DTYPES, Run
from maxbench.sharding import collectives
from maxbench.step.muon import Muon


def learning_rate(run: Run) -> Callable[[Any], jax.Array]:
    """step -> learning rate: linear warm-up, cosine decay to lr_min, then constant_steps at lr_min.

    Equals NeMo's CosineAnnealing with warmup_offset=1, or with constant_steps > 0 and
    warmup_offset=0; equals MaxText's with warmup_offset=0.
    """
    o, steps = run.optim, run.train.steps
    warmup = int(o.warmup * steps) if 0 < o.warmup < 1 else o.warmup
    decay = max(1, steps - warmup - o.constant_steps)

    def rate(step):
        rising = o.lr * (step + o.warmup_offset) / max(1, warmup + o.warmup_offset)
        fraction = jnp.clip((step - warmup) / decay, 0, 1)
        falling = o.lr_min + (o.lr - o.lr_min) * 0.5 * (1 + jnp.cos(jnp.pi * fraction))
        return jnp.where(step < warmup, rising, falling)

    return rate


def global_norm(shardings: Any, grads: Any) -> jax.Array:
    """Norm of the gradients of all weights, from each GPU's shards of their sum; inside shard_map.

    One all-reduce: a shard that several GPUs have counts as a part on each of them.
    """

    def squares(sharding, g):
        copies = math.prod(map(collectives.axis_size, sharding.psum_axes))
        return jnp.sum(jnp.square(g.astype(jnp.float32))) / copies

    total: Any = sum(jax.tree.leaves(jax.tree.map(squares, shardings, grads)))
    return jnp.sqrt(collectives.psum(total, *AXES))


def clip(limit: float) -> optax.GradientTransformationExtraArgs:
    """optax.clip_by_global_norm() of a norm that the caller computed: `norm` of update()."""

    def update(grads, state, params=None, *, norm, **_):
        clipped = lambda g: jax.lax.select(norm < limit, g, g / norm.astype(g.dtype) * limit)
        return jax.tree.map(clipped, grads), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def transform(run: Run, muon: Muon | None = None) -> optax.GradientTransformationExtraArgs:
    """Clipping by global norm, Adam, for the weights that `muon` has Muon instead, decoupled weight
    decay, learning rate. update() takes the `norm` of all gradients, so that each weight is updated
    where it is.

    Moments have the dtypes of the tree that is passed to init and update. Weight decay skips norms,
    biases, sinks, and the rates and skips of Mamba-2's heads unless optim.decay_norms.
    """
    o = run.optim
    name = lambda path: jax.tree_util.keystr(path[-1:], simple=True)
    plain = ("scale", "bias", "sinks", "a_log")
    decays = lambda path, _: o.decay_norms or not name(path).endswith(plain)
    decayed = lambda w: jax.tree_util.tree_map_with_path(decays, w)
    scale: Any = optax.scale_by_adam(b1=o.b1, b2=o.b2, eps=o.eps)
    if muon:
        label = lambda path, _: "muon" if muon.has(path) else "adam"
        labels = lambda w: jax.tree_util.tree_map_with_path(label, w)
        scale = optax.partition({"adam": scale, "muon": muon.transform()}, labels)
    return optax.chain(
        clip(o.clip),
        scale,
        optax.add_decayed_weights(o.weight_decay, mask=decayed),
        optax.scale_by_learning_rate(learning_rate(run)),
    )


def cast(tree: Any, precision: str) -> Any:
    """Casts the floating-point leaves of a tree to 'bf16' or 'fp32'."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return jax.tree.map(lambda x: x.astype(DTYPES[precision]) if is_float(x) else x, tree)
