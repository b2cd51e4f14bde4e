"""AdamW and its learning rate."""

import jax
import jax.numpy as jnp
import optax

from maxbench.spec.run import DTYPES, Run


def learning_rate(run: Run):
    """step -> learning rate: linear warmup, a constant part, then cosine down to lr_min.

    Step i of a warmup of n has rate lr (i + 1) / (n + 1), as NeMo counts.
    """
    o, steps = run.optim, run.train.steps
    warmup = o.warmup * steps if 0 < o.warmup < 1 else o.warmup
    decay = max(1, steps - warmup - o.constant)

    def rate(step):
        rising = o.lr * (step + 1) / (warmup + 1)
        done = jnp.clip((step - warmup - o.constant) / decay, 0, 1)
        falling = o.lr_min + (o.lr - o.lr_min) * 0.5 * (1 + jnp.cos(jnp.pi * done))
        return jnp.where(step < warmup, rising, falling)

    return rate


def transform(run: Run) -> optax.GradientTransformation:
    """Clip by global norm, Adam, weight decay on all but norms, learning rate.

    Moments have the precision of the tree that init and update are given: precision.moments.
    """
    o = run.optim
    is_norm = lambda path: jax.tree_util.keystr(path[-1:], simple=True) in ("scale", "bias")
    decayed = lambda w: jax.tree_util.tree_map_with_path(lambda path, _: not is_norm(path), w)
    return optax.chain(
        optax.clip_by_global_norm(o.clip),
        optax.scale_by_adam(b1=o.b1, b2=o.b2, eps=o.eps),
        optax.add_decayed_weights(o.weight_decay, mask=decayed),
        optax.scale_by_learning_rate(learning_rate(run)),
    )


def cast(tree, precision: str):
    """All arrays of a tree as 'bf16' or 'fp32'."""
    return jax.tree.map(lambda x: x.astype(DTYPES[precision]), tree)
