"""Mamba-2 (arXiv:2405.21060): a selective state-space model, computed in chunks of the sequence.

Each head has a state h_pn, fp32, and with its time step dt, a rate a < 0, and B and C of its group

    h_t = exp(dt_t a) h_(t-1) + dt_t x_t B_t^T        y_t = h_t C_t + skip x_t

The state-space duality makes GEMMs of it (section 6 and listing 1): inside a chunk y is a masked
product of C, B and x, as attention without a softmax; between chunks only the state at their ends
is passed on, by one product with the decays between all pairs of chunks.

Shape letters: b batch, t position (u: this GPU's 1/tp of them), d embed, g group of heads, r head
of its group, p ssm_head_dim, n ssm_state, i ssm_inner (r x p), w ssm_conv_width (x, B and C), k tap
of the convolution; c and z a chunk, t and s positions in one.
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxbench.config.mixers import Mamba2 as Mamba2Kind
from maxbench.config.sublayers import Ends
from maxbench.model.layers import normalize, out_std, param_value, projection, seq_major

# Of the initial weights, as in the paper's code: rates of decay, and time steps.
RATES = (1.0, 16.0)
TIME_STEPS = (1e-3, 0.1)


def init_a_log(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Logarithms of rates that are uniform in RATES."""
    return jnp.log(jax.random.uniform(key, shape, dtype, *RATES))


def init_dt_bias(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Inverse softplus of time steps whose logarithms are uniform in TIME_STEPS."""
    dt = jnp.exp(jax.random.uniform(key, shape, dtype, *map(math.log, TIME_STEPS)))
    return dt + jnp.log(-jnp.expm1(-dt))


class Mamba2(nn.Module):
    """The mixer. tp splits groups of heads; the norm before the last projection is per group."""

    model: Mamba2Kind

    @nn.compact
    def __call__(self, x_bud, context, orders):
        m = self.model
        first = projection(m, "in", m.init_std, sequence="gather")
        inputs, first_token = first(seq_major(x_bud), orders.first)
        inputs = checkpoint_name(seq_major(inputs), "query")
        parts = (m.ssm_inner, m.ssm_inner + m.ssm_conv_width)
        z_btgi, u_btgw, dt_btgr = jnp.split(inputs, parts, -1)
        weight = lambda name, std: param_value(self, name, m.weights[name].axes, std)
        u_btgw = convolve(u_btgw, weight("conv", init_conv), weight("conv_bias", None))
        x, b_btgn, c_btgn = jnp.split(u_btgw, (m.ssm_inner, m.ssm_inner + m.ssm_state), -1)
        x_btgrp = x.reshape(*x.shape[:-1], -1, m.ssm_head_dim)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        of_heads = lambda w: w.astype(wide).reshape(dt_btgr.shape[2:])
        dt_btgr = jax.nn.softplus(dt_btgr.astype(wide) + of_heads(weight("dt_bias", init_dt_bias)))
        a_gr = -jnp.exp(of_heads(weight("a_log", init_a_log)))
        y = state_space(x_btgrp, dt_btgr, a_gr, b_btgn, c_btgn, m.ssm_chunk)
        skip_gr = of_heads(param_value(self, "skip_scale", "ssm_heads", fill=1.0))
        y = (y + skip_gr[..., None] * x_btgrp).astype(x.dtype).reshape(x.shape)
        y_btgi = checkpoint_name(y, "context")
        scale_gi = param_value(self, "norm_scale", m.weights["norm_scale"].axes, fill=1.0)
        y_btgi = gated_norm(y_btgi, z_btgi, scale_gi.astype(wide), m.norm_eps)
        last = projection(m, "out", out_std(m), sequence="scatter")
        y_ubd, last_token = last(seq_major(y_btgi), orders.last)
        tokens = Ends(last=last_token, first=first_token)
        return checkpoint_name(seq_major(y_ubd), "attn_out"), tokens, None


def init_conv(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Uniform in +-1 / sqrt(taps), as torch initializes a depthwise convolution."""
    limit = shape[0] ** -0.5
    return jax.random.uniform(key, shape, dtype, -limit, limit)


def convolve(u_btgw: jax.Array, w_kgw: jax.Array, bias_gw: jax.Array) -> jax.Array:
    """Causal depthwise convolution along t, then SiLU; the last tap is of the position itself.
    Computed in fp32, returned in the dtype of u."""
    taps, seq = len(w_kgw), u_btgw.shape[1]
    wide = jnp.promote_types(u_btgw.dtype, jnp.float32)
    before = jnp.pad(u_btgw, ((0, 0), (taps - 1, 0), (0, 0), (0, 0)))
    at = lambda k: before[:, k : k + seq].astype(wide)
    y = sum((at(k) * w_kgw[k].astype(wide) for k in range(taps)), bias_gw.astype(wide))
    return jax.nn.silu(y).astype(u_btgw.dtype)


def gated_norm(y_btgi: jax.Array, z_btgi: jax.Array, scale_gi: jax.Array, eps: float) -> jax.Array:
    """RMSNorm of y silu(z) over each group, in the dtype of the scale; returned in that of y."""
    gated = y_btgi.astype(scale_gi.dtype) * jax.nn.silu(z_btgi.astype(scale_gi.dtype))
    unit = normalize(gated, jnp.ones(gated.shape[-1], gated.dtype), None, eps)
    return (unit * scale_gi).astype(y_btgi.dtype)


def state_space(
    x_btgrp: jax.Array,
    dt_btgr: jax.Array,
    a_gr: jax.Array,
    b_btgn: jax.Array,
    c_btgn: jax.Array,
    chunk: int,
) -> jax.Array:
    """y_btgrp = h_t C_t of the module's recurrence from h = 0, in the dtype of dt.

    Operands of GEMMs are in the dtype of x, decays and states in the dtype of dt, at least fp32.

    Args:
      dt_btgr: time steps, at least 0.
      chunk: tokens of a chunk. The sequence is padded to a multiple with time steps of 0, which
        leave the state as it is.
    """
    seq, dtype, wide = x_btgrp.shape[1], x_btgrp.dtype, dt_btgr.dtype
    chunk = min(chunk, seq)

    def chunks(v):
        v = jnp.pad(v, ((0, 0), (0, -seq % chunk), *[(0, 0)] * (v.ndim - 2)))
        return v.reshape(len(v), -1, chunk, *v.shape[2:])

    dot = functools.partial(product, wide)
    x, dt, b_bcsgn, c_bctgn = map(chunks, (x_btgrp, dt_btgr, b_btgn, c_btgn))
    since_start = jnp.cumsum(jnp.moveaxis(dt * a_gr, 2, -1), -1)  # log of the decay, bcgrt
    mixed = dot("bctgn,bcsgn->bcgts", c_bctgn, b_bcsgn)[:, :, :, None] * decays(since_start)
    mixed = (mixed * jnp.moveaxis(dt, 2, -1)[..., None, :]).astype(dtype)
    y = dot("bcgrts,bcsgrp->bctgrp", mixed, x)
    if y.shape[1] > 1:
        to_end = jnp.exp(since_start[..., -1:] - since_start)
        weighted = (x * (jnp.moveaxis(to_end, -1, 2) * dt)[..., None]).astype(dtype)
        h_bcgrpn = carry(dot("bcsgrp,bcsgn->bcgrpn", weighted, b_bcsgn), since_start[..., -1])
        y_before = dot("bctgn,bcgrpn->bctgrp", c_bctgn, h_bcgrpn.astype(dtype))
        y += y_before * jnp.moveaxis(jnp.exp(since_start), -1, 2)[..., None]
    return y.reshape(len(y), -1, *y.shape[3:])[:, :seq]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def product(wide: Any, axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """einsum() with a result of a wider dtype. In the backward pass its gradient is rounded to the
    dtype of the operands, as that of every GEMM: JAX would multiply in the wider one."""
    return jnp.einsum(axes, x, y, preferred_element_type=wide)


def _product_backward(wide, axes, operands, dz):
    return jax.vjp(functools.partial(jnp.einsum, axes), *operands)[1](dz.astype(operands[0].dtype))


product.defvjp(lambda *args: (product(*args), args[2:]), _product_backward)


def decays(log_bcgrt: jax.Array) -> jax.Array:
    """exp(log_t - log_s) for s <= t, else 0: [..., t, s]."""
    t = jnp.arange(log_bcgrt.shape[-1])
    difference = log_bcgrt[..., :, None] - log_bcgrt[..., None, :]
    return jnp.exp(jnp.where(t[:, None] >= t, difference, -jnp.inf))


def carry(h_bcgrpn: jax.Array, log_bcgr: jax.Array) -> jax.Array:
    """The state before each chunk.

    Args:
      h_bcgrpn: what each chunk adds to the state at its end.
      log_bcgr: log of the decay over each chunk.
    """
    passed = jnp.cumsum(jnp.moveaxis(log_bcgr, 1, -1), -1)  # up to the end of each chunk
    # Decay from the end of chunk c to the start of chunk z, for c < z.
    decay_bgrzc = jnp.pad(decays(passed)[..., :-1, :], [(0, 0)] * 3 + [(1, 0), (0, 0)])
    exact = jax.lax.Precision.HIGHEST  # no TF32
    return jnp.einsum("bgrzc,bcgrpn->bzgrpn", decay_bgrzc, h_bcgrpn, precision=exact)
