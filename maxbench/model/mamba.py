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
        filters = weight("conv", init_conv), weight("conv_bias", None)
        parts = (m.ssm_inner, m.ssm_inner + m.ssm_state)
        split = [jnp.split(v, parts, -1) for v in (u_btgw, *filters)]
        x, b, c = (chunks(convolve(*v), m.ssm_chunk) for v in zip(*split, strict=True))
        x = jnp.swapaxes(x, -1, -2)
        x_cbgrpt = x.reshape(*x.shape[:3], -1, m.ssm_head_dim, x.shape[-1])
        wide = jnp.promote_types(x.dtype, jnp.float32)
        of_heads = lambda w: w.astype(wide).reshape(dt_btgr.shape[2:])
        dt_btgr = jax.nn.softplus(dt_btgr.astype(wide) + of_heads(weight("dt_bias", init_dt_bias)))
        a_gr = -jnp.exp(of_heads(weight("a_log", init_a_log)))
        dt_cbgrt = jnp.swapaxes(chunks(dt_btgr, m.ssm_chunk), -1, -2)
        y = state_space(x_cbgrpt, dt_cbgrt, a_gr, b, c)
        skip_gr = of_heads(param_value(self, "skip_scale", "ssm_heads", fill=1.0))
        y = (y + skip_gr[..., None, None] * x_cbgrpt).astype(x.dtype).reshape(x.shape)
        # Else XLA transposes the fp32 product of the norm instead of y.
        y_btgi = jax.lax.optimization_barrier(positions(jnp.swapaxes(y, -1, -2), z_btgi.shape[1]))
        y_btgi = checkpoint_name(y_btgi, "context")
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


@jax.custom_vjp
def convolve(u_btgw: jax.Array, w_kgw: jax.Array, bias_gw: jax.Array) -> jax.Array:
    """Causal depthwise convolution along t, then SiLU; the last tap is of the position itself.

    Computed in fp32, returned in the dtype of u. The backward pass stores the gradient before SiLU
    in the dtype of u too; autodiff stores it in fp32.
    """
    return jax.nn.silu(_filtered(u_btgw, w_kgw, bias_gw)).astype(u_btgw.dtype)


def _filtered(u, w, bias):
    wide = jnp.promote_types(u.dtype, jnp.float32)
    taps = zip(_shifted(u, len(w)), w, strict=True)
    return sum((x.astype(wide) * w_gw.astype(wide) for x, w_gw in taps), bias.astype(wide))


def _shifted(u, taps):
    """u of the positions that each tap reads, zeros before the first."""
    before = jnp.pad(u, ((0, 0), (taps - 1, 0), (0, 0), (0, 0)))
    return [before[:, k : k + u.shape[1]] for k in range(taps)]


def _convolve_backward(saved, dy):
    u, w, bias = saved
    w = jax.lax.optimization_barrier(w)  # else XLA keeps the fp32 sums of the forward pass
    wide = jnp.promote_types(u.dtype, jnp.float32)
    _, silu_vjp = jax.vjp(jax.nn.silu, _filtered(u, w, bias))
    d_btgw = jax.lax.optimization_barrier(silu_vjp(dy.astype(wide))[0].astype(u.dtype))
    after = jnp.pad(d_btgw, ((0, 0), (0, len(w) - 1), (0, 0), (0, 0))).astype(wide)
    at = lambda k: after[:, len(w) - 1 - k : after.shape[1] - k]
    du = sum(at(k) * w[k].astype(wide) for k in range(len(w))).astype(u.dtype)
    d = d_btgw.astype(wide)
    sums = [jnp.sum(d * x.astype(wide), (0, 1)) for x in _shifted(u, len(w))]
    return du, jnp.stack(sums).astype(w.dtype), jnp.sum(d, (0, 1)).astype(bias.dtype)


convolve.defvjp(lambda *args: (convolve(*args), args), _convolve_backward)


def gated_norm(y_btgi: jax.Array, z_btgi: jax.Array, scale_gi: jax.Array, eps: float) -> jax.Array:
    """RMSNorm of y silu(z) over each group, in the dtype of the scale; returned in that of y."""
    gated = y_btgi.astype(scale_gi.dtype) * jax.nn.silu(z_btgi.astype(scale_gi.dtype))
    unit = normalize(gated, jnp.ones(gated.shape[-1], gated.dtype), None, eps)
    return (unit * scale_gi).astype(y_btgi.dtype)


def chunks(v_btgw: jax.Array, chunk: int) -> jax.Array:
    """v_cbgtw, t in a chunk; zeros after the end of the sequence.

    Chunks are outermost, over which carry() sums: no operand of its GEMM is transposed then.
    """
    seq = v_btgw.shape[1]
    chunk = min(chunk, seq)
    v_btgw = jnp.pad(v_btgw, ((0, 0), (0, -seq % chunk), (0, 0), (0, 0)))
    return jnp.moveaxis(v_btgw.reshape(len(v_btgw), -1, chunk, *v_btgw.shape[2:]), (1, 3), (0, 2))


def positions(v_cbgtw: jax.Array, seq: int) -> jax.Array:
    """v_btgw, the inverse of chunks()."""
    v_bctgw = jnp.moveaxis(v_cbgtw, (0, 2), (1, 3))
    return v_bctgw.reshape(len(v_bctgw), -1, *v_bctgw.shape[3:])[:, :seq]


def state_space(
    x_cbgrpt: jax.Array,
    dt_cbgrt: jax.Array,
    a_gr: jax.Array,
    b_cbgtn: jax.Array,
    c_cbgtn: jax.Array,
) -> jax.Array:
    """y_cbgrpt = h_t C_t of the module's recurrence from h = 0, in the dtype of dt.

    Operands of GEMMs are in the dtype of x, decays and states in the dtype of dt, at least fp32.

    Args:
      x_cbgrpt: of chunks(); positions are last, as GEMMs with and without a batch dim of heads can
        read that without a transpose.
      dt_cbgrt: time steps, at least 0; one of 0 leaves the state as it is.
    """
    dtype = x_cbgrpt.dtype
    dot = functools.partial(product, dt_cbgrt.dtype)
    since_start = jnp.cumsum(dt_cbgrt * a_gr[..., None], -1)  # log of the decay, cbgrt
    scores_cbgts = dot("cbgtn,cbgsn->cbgts", c_cbgtn, b_cbgtn)
    y_cbgrpt = within_chunks(scores_cbgts, x_cbgrpt, dt_cbgrt, since_start)
    if len(x_cbgrpt) == 1:
        return y_cbgrpt
    to_end = jnp.exp(since_start[..., -1:] - since_start) * dt_cbgrt
    weighted = (x_cbgrpt * to_end[..., None, :]).astype(dtype)
    h_cbgrpn = carry(dot("cbgrps,cbgsn->cbgrpn", weighted, b_cbgtn), since_start[..., -1])
    y_before = dot("cbgrpn,cbgtn->cbgrpt", h_cbgrpn.astype(dtype), c_cbgtn)
    return y_cbgrpt + y_before * jnp.exp(since_start)[..., None, :]


@jax.custom_vjp
def within_chunks(
    scores_cbgts: jax.Array, x_cbgrps: jax.Array, dt_cbgrs: jax.Array, log_cbgrt: jax.Array
) -> jax.Array:
    """y_cbgrpt, the sum of scores_ts exp(log_t - log_s) dt_s x_s over s <= t in a chunk.

    The backward pass computes the factors [..., t, s] of each head again from the arguments;
    autodiff stores them.
    """
    mixed = _mixed(scores_cbgts, dt_cbgrs, log_cbgrt).astype(x_cbgrps.dtype)
    return product(dt_cbgrs.dtype, "cbgrps,cbgrts->cbgrpt", x_cbgrps, mixed)


def _mixed(scores, dt, log):
    """The factors of x, cbgrts."""
    return scores[:, :, :, None] * decays(log) * dt[..., None, :]


def _within_chunks_backward(saved, dy):
    scores, x, dt, log = saved
    log = jax.lax.optimization_barrier(log)  # else XLA keeps products of the forward pass
    dy, wide = dy.astype(x.dtype), dt.dtype
    dx = jnp.einsum("cbgrpt,cbgrts->cbgrps", dy, _mixed(scores, dt, log).astype(x.dtype))
    dmixed = jnp.einsum("cbgrpt,cbgrps->cbgrts", dy, x)
    decayed = dmixed.astype(wide) * decays(log)
    dscores = jnp.sum(decayed * dt[..., None, :], 3)
    of_pairs = decayed * scores[:, :, :, None]
    ddt = jnp.sum(of_pairs, -2)
    dlog = jnp.sum(of_pairs * dt[..., None, :], -1) - ddt * dt
    return dscores, dx, ddt, dlog


within_chunks.defvjp(lambda *args: (within_chunks(*args), args), _within_chunks_backward)


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


def carry(h_cbgrpn: jax.Array, log_cbgr: jax.Array) -> jax.Array:
    """The state before each chunk.

    Args:
      h_cbgrpn: what each chunk adds to the state at its end.
      log_cbgr: log of the decay over each chunk.
    """
    passed = jnp.cumsum(jnp.moveaxis(log_cbgr, 0, -1), -1)  # up to the end of each chunk
    # Decay from the end of chunk c to the start of chunk z, for c < z.
    decay_bgrzc = jnp.pad(decays(passed)[..., :-1, :], [(0, 0)] * 3 + [(1, 0), (0, 0)])
    # As matrices, with q for b, g and r, and e for p and n: einsum() would exchange the operands.
    heads = math.prod(log_cbgr.shape[1:])
    h_cqe = h_cbgrpn.reshape(len(h_cbgrpn), heads, -1)
    decay_qzc = decay_bgrzc.reshape(heads, *decay_bgrzc.shape[-2:])
    exact = jax.lax.Precision.HIGHEST  # no TF32
    sums_qze = jax.lax.dot_general(decay_qzc, h_cqe, (((2,), (0,)), ((0,), (1,))), precision=exact)
    return sums_qze.swapaxes(0, 1).reshape(h_cbgrpn.shape)
