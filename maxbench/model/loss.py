"""Cross entropy over a vocabulary that tp splits, in chunks of tokens.

The forward pass also computes the gradients, chunk by chunk: only one chunk's fp32 logits are in
memory at a time, and no logits are recomputed. It has three GEMMs, as many as the unchunked loss
with its backward pass.

Shape letters: j token, d embed, v this GPU's part of the vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from maxbench.sharding import collectives


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7, 8))
def cross_entropy(
    x_jd: jax.Array,
    w_dv: jax.Array,
    sums_dv: jax.Array,
    target_j: jax.Array,
    chunk: int,
    z_loss: float,
    multiplier: float,
    share: float = 1.0,
    padded: bool = False,
    scale: jax.Array | None = None,
) -> Any:
    """Sum over tokens of -log p(target) + z_loss x logsumexp(logits)^2, this GPU's part of it.

    The z-loss is that of PaLM (arXiv:2204.02311).

    Args:
      x_jd: hidden states, the same on all GPUs of tp.
      w_dv: LM head, this GPU's part of the vocabulary.
      sums_dv: gradient accumulator of w_dv (grad_accumulation.py), or None. With an accumulator,
        w_dv has no gradient, and the accumulator's gradient does not scale with the cotangent of
        the loss: the loss must be a term, with factor 1, of what is differentiated.
      target_j: token ids over the whole vocabulary.
      chunk: tokens per chunk.
      multiplier: factor of the logits.
      share: factor of the result.
      padded: tokens with target -1 are padding and do not count.
      scale: a further factor of the result, of which no gradient is computed, or None.

    Returns:
      share x the sum / tp, so that a psum over all GPUs counts each token once. fp32.
    """
    options = chunk, z_loss, multiplier, share, padded, scale
    return _forward(x_jd, w_dv, sums_dv, target_j, *options, grads=False)[0]


def _forward(
    x_jd, w_dv, sums_dv, target_j, chunk, z_loss, multiplier, share, padded, scale, grads=True
):
    """(loss, (dx_jd, dw_dv)); without `grads`, the loss alone and placeholders."""
    share = share if scale is None else share * scale
    tokens, d = x_jd.shape
    full = tokens // chunk * chunk  # tokens in full chunks
    step = functools.partial(_chunk, w_dv, z_loss, multiplier, share, padded, grads)
    loss, dw = jnp.zeros(()), sums_dv if grads else None
    if grads and sums_dv is None:
        dw = jnp.zeros(w_dv.shape, jnp.float32)
    dx = []
    if full > chunk:  # one chunk needs no loop
        split = lambda x: x[:full].reshape(-1, chunk, *x.shape[1:])
        (loss, dw), dx_cjd = jax.lax.scan(step, (loss, dw), (split(x_jd), split(target_j)))
        dx.append(dx_cjd.reshape(-1, d) if grads else dx_cjd)
    elif full:
        (loss, dw), dx_first = step((loss, dw), (x_jd[:full], target_j[:full]))
        dx.append(dx_first)
    if full < tokens:
        (loss, dw), dx_last = step((loss, dw), (x_jd[full:], target_j[full:]))
        dx.append(dx_last)
    dx_jd = jnp.concatenate(dx) if grads else None
    return loss, (dx_jd, dw)


def _chunk(w_dv, z_loss, multiplier, share, padded, grads, carry, chunk):
    """Adds a chunk (x_jd, target_j) to (loss, dw_dv); the body of a scan, whose output is dx_jd."""
    loss, dw = carry
    x_jd, target_j = chunk
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    logits_jv = dot("jd,dv->jv", x_jd, w_dv) * multiplier
    local_j = target_j - collectives.axis_index("tp") * w_dv.shape[1]
    is_local_j = (local_j >= 0) & (local_j < w_dv.shape[1])
    at_target_j = jnp.take_along_axis(logits_jv, jnp.where(is_local_j, local_j, 0)[:, None], 1)
    at_target_j = at_target_j[:, 0]
    max_j, sum_j = jax.lax.platform_dependent(
        logits_jv, cuda=_max_and_sum_in_one_pass, default=_max_and_sum
    )
    if collectives.axis_size("tp") > 1:
        local_max_j, max_j = max_j, collectives.pmax(max_j, "tp")
        sum_j *= jnp.exp(local_max_j - max_j)
    terms = jnp.stack([sum_j, jnp.where(is_local_j, at_target_j, 0)])
    sum_j, at_target_j = collectives.psum(terms, "tp")
    lse_j = jnp.log(sum_j) + max_j
    mask = lambda x_j: jnp.where(target_j >= 0, x_j, 0) if padded else x_j
    loss_j = mask(lse_j - at_target_j + z_loss * lse_j**2)
    loss += jnp.sum(loss_j) * (share / collectives.axis_size("tp"))
    if not grads:
        return (loss, dw), jnp.zeros(())
    p_jv = jnp.exp(logits_jv - lse_j[:, None]) * mask(1 + 2 * z_loss * lse_j)[:, None]
    target_jv = jax.lax.broadcasted_iota(jnp.int32, p_jv.shape, 1) == local_j[:, None]
    dlogits_jv = ((p_jv - target_jv) * (multiplier * share)).astype(x_jd.dtype)
    dx_jd = dot("jv,dv->jd", dlogits_jv, w_dv).astype(x_jd.dtype)
    # The barrier keeps the transpose apart: XLA:CPU has no bf16 GEMM that contracts dim 0 of both.
    x_dj = jax.lax.optimization_barrier(x_jd.T)
    # In the accumulator's dtype, so that XLA fuses the addition into the GEMM (beta = 1), unless
    # the dtype of the operands has more bits.
    dtype = jnp.promote_types(x_jd.dtype, dw.dtype)
    dw += dot("dj,jv->dv", x_dj, dlogits_jv, preferred_element_type=dtype).astype(dw.dtype)
    return (loss, dw), dx_jd


def _max_and_sum(logits_jv):
    """max over v, and the sum over v of exp(logits - max)."""
    max_j = jnp.max(logits_jv, -1)
    return max_j, jnp.sum(jnp.exp(logits_jv - max_j[:, None]), -1)


def _max_and_sum_in_one_pass(logits_jv):
    """As _max_and_sum, by online softmax: one read of the logits. XLA:CPU does not vectorize this
    reduction, which takes eight times as long there."""

    def combine(a, b):
        (max_a, sum_a), (max_b, sum_b) = a, b
        larger = jnp.maximum(max_a, max_b)
        return larger, sum_a * jnp.exp(max_a - larger) + sum_b * jnp.exp(max_b - larger)

    lowest = jnp.finfo(logits_jv.dtype).min
    operands = (logits_jv, jnp.ones_like(logits_jv))
    return jax.lax.reduce(operands, (lowest, 0.0), combine, (1,))


def _forward_rule(x_jd, w_dv, sums_dv, target_j, *options):
    loss, (dx_jd, dw) = _forward(x_jd, w_dv, sums_dv, target_j, *options)
    return loss, (dx_jd, dw.astype(w_dv.dtype), None) if sums_dv is None else (dx_jd, None, dw)


def _backward_rule(chunk, z_loss, multiplier, share, padded, grads, dloss):
    dx_jd, dw_dv, sums_dv = grads
    scaled = lambda g: None if g is None else g * dloss.astype(g.dtype)
    return scaled(dx_jd), scaled(dw_dv), sums_dv, None, None


cross_entropy.defvjp(_forward_rule, _backward_rule)
