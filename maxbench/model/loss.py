"""Cross entropy of a vocabulary split by tp, in chunks of tokens.

The gradient is made in the forward pass, chunk by chunk: logits of one chunk stand in memory at a
time, in fp32, and none is computed twice. It costs the three matrix products of the plain form.

Shape letters: j token, d embed, v this GPU's part of the vocabulary.
"""

import functools

import jax
import jax.numpy as jnp

from maxbench.sharding import collectives


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7, 8))
def cross_entropy(
    x_jd,
    w_dv,
    sums_dv,
    target_j,
    chunk: int,
    z_loss: float,
    multiplier: float,
    share: float = 1.0,
    padded: bool = False,
):
    """Sum over this GPU's tokens of -log p(target) + z_loss x logsumexp^2, by its share of tp.

    Args:
      x_jd: hidden states, the same on all GPUs of tp.
      w_dv: head, this GPU's part of the vocabulary.
      sums_dv: of w_dv so far (sums.py): its gradient is the sum with that of w_dv, which then has
        none; it is made for a result that is a term of what is differentiated. Or None.
      target_j: token numbers over the whole vocabulary.
      chunk: tokens at a time.
      multiplier: logits are multiplied with this.
      share: and the result with this.
      padded: some targets are -1: those tokens have no part in it.

    Returns:
      1/tp of the sum, so that the sum over all GPUs counts each token once.
    """
    how = chunk, z_loss, multiplier, share, padded
    return _forward(x_jd, w_dv, sums_dv, target_j, *how, grads=False)[0]


def _forward(x_jd, w_dv, sums_dv, target_j, chunk, z_loss, multiplier, share, padded, grads=True):
    tokens, d = x_jd.shape
    whole = tokens // chunk * chunk
    one = functools.partial(_chunk, w_dv, z_loss, multiplier, share, padded, grads)
    loss, dw = jnp.zeros(()), sums_dv if grads else None
    if grads and sums_dv is None:
        dw = jnp.zeros(w_dv.shape, jnp.float32)
    dx = []
    if whole > chunk:  # one chunk needs no loop
        split = lambda x: x[:whole].reshape(-1, chunk, *x.shape[1:])
        (loss, dw), dx_cjd = jax.lax.scan(one, (loss, dw), (split(x_jd), split(target_j)))
        dx.append(dx_cjd.reshape(-1, d) if grads else dx_cjd)
    elif whole:
        (loss, dw), part = one((loss, dw), (x_jd[:whole], target_j[:whole]))
        dx.append(part)
    if whole < tokens:
        (loss, dw), rest = one((loss, dw), (x_jd[whole:], target_j[whole:]))
        dx.append(rest)
    dx_jd = jnp.concatenate(dx) if grads else None
    return loss, (dx_jd, dw)


def _chunk(w_dv, z_loss, multiplier, share, padded, grads, carry, chunk):
    loss, dw = carry
    x_jd, target_j = chunk
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    logits_jv = dot("jd,dv->jv", x_jd, w_dv) * multiplier
    local_j = target_j - collectives.axis_index("tp") * w_dv.shape[1]
    here_j = (local_j >= 0) & (local_j < w_dv.shape[1])
    hit_j = jnp.take_along_axis(logits_jv, jnp.where(here_j, local_j, 0)[:, None], 1)[:, 0]
    top_j, sum_j = jax.lax.platform_dependent(logits_jv, cuda=_in_one_pass, default=_in_two)
    if collectives.axis_size("tp") > 1:
        own_j, top_j = top_j, jax.lax.pmax(top_j, "tp")
        sum_j *= jnp.exp(own_j - top_j)
    sum_j, hit_j = collectives.psum(jnp.stack([sum_j, jnp.where(here_j, hit_j, 0)]), "tp")
    lse_j = jnp.log(sum_j) + top_j
    counts = lambda x_j: jnp.where(target_j >= 0, x_j, 0) if padded else x_j
    loss_j = counts(lse_j - hit_j + z_loss * lse_j**2)
    loss += jnp.sum(loss_j) * (share / collectives.axis_size("tp"))
    if not grads:
        return (loss, dw), jnp.zeros(())
    p_jv = jnp.exp(logits_jv - lse_j[:, None]) * counts(1 + 2 * z_loss * lse_j)[:, None]
    target_jv = jax.lax.broadcasted_iota(jnp.int32, p_jv.shape, 1) == local_j[:, None]
    dlogits_jv = ((p_jv - target_jv) * (multiplier * share)).astype(x_jd.dtype)
    dx_jd = dot("jv,dv->jd", dlogits_jv, w_dv).astype(x_jd.dtype)
    # Transposed first: XLA:CPU has no bf16 product with the contracted axis in front.
    x_dj = jax.lax.optimization_barrier(x_jd.T)
    # Of the sums' dtype, so that the product adds to them; of more bits where its operands have.
    wide = jnp.promote_types(x_jd.dtype, dw.dtype)
    dw += dot("dj,jv->dv", x_dj, dlogits_jv, preferred_element_type=wide).astype(dw.dtype)
    return (loss, dw), dx_jd


def _in_two(logits_jv):
    """The largest of each row, and the sum of exp(its distance from that)."""
    top_j = jnp.max(logits_jv, -1)
    return top_j, jnp.sum(jnp.exp(logits_jv - top_j[:, None]), -1)


def _in_one_pass(logits_jv):
    """As _in_two. On a CPU, which has no vectors for such a sum, it takes eight times as long."""

    def join(a, b):
        top = jnp.maximum(a[0], b[0])
        return top, a[1] * jnp.exp(a[0] - top) + b[1] * jnp.exp(b[0] - top)

    least = jnp.finfo(logits_jv.dtype).min
    return jax.lax.reduce((logits_jv, jnp.ones_like(logits_jv)), (least, 0.0), join, (1,))


def _forward_rule(x_jd, w_dv, sums_dv, target_j, *how):
    loss, (dx_jd, dw) = _forward(x_jd, w_dv, sums_dv, target_j, *how)
    return loss, (dx_jd, dw.astype(w_dv.dtype), None) if sums_dv is None else (dx_jd, None, dw)


def _backward_rule(chunk, z_loss, multiplier, share, padded, grads, dloss):
    dx_jd, dw_dv, sums_dv = grads
    by = lambda g: None if g is None else g * dloss.astype(g.dtype)
    return by(dx_jd), by(dw_dv), sums_dv, None


cross_entropy.defvjp(_forward_rule, _backward_rule)
