"""AdamW and its learning rate."""

import jax
import jax.numpy as jnp
import optax

from maxbench.config.run import DTYPES, Run


def learning_rate(run: Run):
    """step -> learning rate: linear warmup, cosine down to lr_min, then constant.

    Rates are NeMo's where warmup_offset is 1, or there is a constant part and it is 0; MaxText's
    where it is 0.
    """
    o, steps = run.optim, run.train.steps
    warmup = int(o.warmup * steps) if 0 < o.warmup < 1 else o.warmup
    decay = max(1, steps - warmup - o.constant_steps)

    def rate(step):
        rising = o.lr * (step + o.warmup_offset) / max(1, warmup + o.warmup_offset)
        done = jnp.clip((step - warmup) / decay, 0, 1)
        falling = o.lr_min + (o.lr - o.lr_min) * 0.5 * (1 + jnp.cos(jnp.pi * done))
        return jnp.where(step < warmup, rising, falling)

    return rate


def transform(run: Run) -> optax.GradientTransformation:
    """Clip by global norm, Adam, weight decay, learning rate.

    Moments have the precision of the tree that init and update are given.
    """
    o = run.optim
    is_norm = lambda path: jax.tree_util.keystr(path[-1:], simple=True) in ("scale", "bias")
    decays = lambda path, _: o.decay_norms or not is_norm(path)
    decayed = lambda w: jax.tree_util.tree_map_with_path(decays, w)
    return optax.chain(
        optax.clip_by_global_norm(o.clip),
        optax.scale_by_adam(b1=o.b1, b2=o.b2, eps=o.eps),
        optax.add_decayed_weights(o.weight_decay, mask=decayed),
        optax.scale_by_learning_rate(learning_rate(run)),
    )


def cast(tree, precision: str):
    """All floats of a tree as 'bf16' or 'fp32'."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return jax.tree.map(lambda x: x.astype(DTYPES[precision]) if is_float(x) else x, tree)
