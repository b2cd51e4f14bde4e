"""The parts of one block, written for one GPU's share.

A part sees local arrays: the tp-th part of heads, mlp and vocabulary.
Between parts the sequence is split over tp too (sequence parallelism): a part's first product
gathers it, its last scatters the sum of the partial results.

Shape letters: b batch, t position (u: this GPU's tp-th of them), d embed, h heads, g KV heads,
k head_dim, q heads per group in the fused projection, w their width together, n mlp_inputs, f mlp,
v vocab. A name ends in its
letters: x_btd.
"""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name as keep

from maxbench.config.model import Model
from maxbench.model import linear
from maxbench.model.attention import attend
from maxbench.model.grad_accumulation import accumulate_into
from maxbench.sharding import collectives, rules

ACTS: dict[str, Callable] = {
    "swiglu": jax.nn.silu,
    "geglu": jax.nn.gelu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


class GemmParam(nn.Partitioned):
    """A weight, its logical axes, and whether it is a factor of a GEMM in the run's format."""

    gemm: rules.GemmDims | None = flax.struct.field(default=None, pytree_node=False)


def param(module: nn.Module, name: str, axes: str, std=None, fill=0.0, gemm=None):
    """Declares a weight by its axes alone: sizes come from Model, its place from places.RULES.

    It starts as normal(0, std), or as `fill` where std is None; `gemm` is that of Declared.

    Returns:
      This GPU's part of the weight, and its sums (sums.py) or None.
    """
    names = tuple(axes.split())
    shape = tuple(rules.local_size(a, getattr(module.model, a)) for a in names)
    init = nn.initializers.constant(fill) if std is None else nn.initializers.normal(std)
    declared = lambda *args: GemmParam(init(*args), names, gemm=gemm)
    return module.param(name, declared, shape, jnp.float32), module.get_variable("sums", name)


def param_value(
    module: nn.Module, name: str, axes: str, std: float | None = None, fill: float = 0.0
):
    """A weight that is no factor of linear(); see declare."""
    w, sums = param(module, name, axes, std, fill)
    return w if sums is None else accumulate_into(sums, w)


def matmul(
    module,
    x,
    name,
    axes: str,
    std: float,
    batch=0,
    plain=False,
    sums=None,
    order=linear.UNORDERED,
    **how,
):
    """linear.linear of x and a weight declared 'in -> out', behind `batch` axes of both.

    In the run's number format; `plain`: in the dtype of x whatever that is. `sums`: instead of the
    weight's own. `order`, and what it returns, are those of linear.linear.
    """
    ins, outs = axes.split("->")
    names = f"{ins} {outs}".split()
    factor = rules.GemmDims(batch, len(ins.split()) - batch)
    w, own = param(module, name, " ".join(names), std, gemm=None if plain else factor)
    split = "embed" in names and collectives.axis_size("fsdp") > 1
    fsdp = names.index("embed") if split else None
    gemm = linear.MatmulSpec(factor.ins, batch, fsdp=fsdp, **how)
    return linear.linear(x, w, own if sums is None else sums, gemm, order)


class Linear(nn.Module):
    """x @ w, the axes of w written 'in -> out': Linear(model, 'heads head_dim -> embed', std).

    `sequence` and `saved` are those of linear.Gemm, `plain` that of product().
    """

    model: Model
    axes: str
    std: float
    sequence: str = ""
    saved: str = ""
    plain: bool = False

    @nn.compact
    def __call__(self, x, order=linear.UNORDERED):
        how = {"sequence": self.sequence, "saved": self.saved, "plain": self.plain}
        return matmul(self, x, "w", self.axes, self.std, order=order, **how)


class Norm(nn.Module):
    """RMSNorm, or LayerNorm with its weight stored minus one (layernorm1p). Computed in fp32."""

    model: Model
    apart: bool = False  # as in normalize

    @nn.compact
    def __call__(self, x_btd):
        m, center = self.model, self.model.norm == "layernorm1p"
        scale_d = param_value(
            self, "scale", "embed_replicated", fill=0.0 if center else 1.0
        ).astype(jnp.float32)
        bias_d = (
            param_value(self, "bias", "embed_replicated").astype(jnp.float32) if center else None
        )
        scale_d = scale_d + 1 if center else scale_d
        return normalize(x_btd, scale_d, bias_d, m.norm_eps, self.apart)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def normalize(x_btd, scale_d, bias_d, eps: float, apart: bool = False):
    """x / rms(x) x scale; with a bias, (x - mean(x)) / std(x) x scale + bias. In the dtype of x.

    All is computed in fp32, and backward by hand: of the plain form's gradient XLA makes a tensor
    in fp32 that it writes, and reads twice. `apart`: rms(x) is a kernel's own, as where y is
    quantized: XLA would make one kernel of both, whose y in fp32 is then read twice, too.
    """
    x, inverse = _centered(x_btd, bias_d is not None, eps)
    inverse = jax.lax.optimization_barrier(inverse) if apart else inverse
    y_btd = x * inverse * scale_d
    return (y_btd if bias_d is None else y_btd + bias_d).astype(x_btd.dtype)


def _centered(x_btd, center: bool, eps: float):
    """x, its mean taken off if `center`, and what it is multiplied with then; fp32."""
    x = x_btd.astype(jnp.float32)
    if center:
        x -= jnp.mean(x, -1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)
    return x, inverse


def _normalize_backward(eps, apart, saved, dy_btd):
    x_btd, scale_d, bias_d = saved
    center = bias_d is not None
    x, inverse = _centered(x_btd, center, eps)
    unit_btd = x * inverse
    dy = dy_btd.astype(jnp.float32)
    dunit = dy * scale_d
    mean = lambda x: jnp.mean(dunit * x, -1, keepdims=True)
    # Of x, so that one pass takes this and the mean of squares. Where products travel, x is wanted
    # again before dy has come, and does not wait for it.
    dx = dunit - unit_btd * (inverse * mean(x) if linear.no_comm() else mean(unit_btd))
    if center:
        dx -= jnp.mean(dunit, -1, keepdims=True)
    dx_btd = (dx * inverse).astype(x_btd.dtype)
    return dx_btd, _columns(dy * unit_btd), _columns(dy) if center else None


def _columns(x_btd):
    """Sums over positions, of parts of them first: for one sum alone, of few columns, XLA would
    write x down."""
    d = x_btd.shape[-1]
    parts_pd = jnp.sum(x_btd.reshape(math.gcd(x_btd.size // d, 8), -1, d), 1)
    return jnp.sum(jax.lax.optimization_barrier(parts_pd), 0)


normalize.defvjp(lambda *args: (normalize(*args), args[:3]), _normalize_backward)


def rope_angles(m: Model, position_t) -> tuple[jax.Array, jax.Array]:
    """cos and sin of the rotation at each position, [t, rotated dims / 2], fp32.

    Llama 3.1's scaling: wavelengths longer than rope_context / rope_low are stretched by
    rope_factor, those shorter than rope_context / rope_high stay, between them a linear mix.
    """
    dims = int(m.head_dim * m.rope_fraction)
    freq = m.rope_base ** (-np.arange(0, dims, 2) / dims)
    if m.rope_factor != 1:
        turns = m.rope_context * freq / (2 * np.pi)
        mix = np.clip((turns - m.rope_low) / (m.rope_high - m.rope_low), 0, 1)
        freq *= mix + (1 - mix) / m.rope_factor
    angle_tk = jnp.asarray(position_t, jnp.float32)[:, None] * jnp.asarray(freq, jnp.float32)
    return jnp.cos(angle_tk), jnp.sin(angle_tk)


def rotate(x_bthk, cos_tk, sin_tk):
    """Rotates pairs (i, i + n/2) of the first n = 2 x cos_tk.shape[1] dims of head_dim."""
    n = cos_tk.shape[1]
    x = x_bthk.astype(jnp.float32)
    a, b, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    cos, sin = cos_tk[:, None], sin_tk[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1).astype(x_bthk.dtype)


def seq_major(x):
    """[b, t, ...] as [t, b, ...], and back, where tp splits t: what travels lies in one piece."""
    return x.swapaxes(0, 1) if collectives.axis_size("tp") > 1 else x


class Attention(nn.Module):
    """Grouped-query attention; its one fused projection is grouped by KV head for tp to split.

    A group is its queries, then a key, then a value.
    """

    model: Model
    kind: str

    @nn.compact
    def __call__(self, x_bud, rope, orders):
        m = self.model
        equal = m.value_width == m.head_dim
        axes = "embed -> kv_heads " + ("qkv head_dim" if equal else "group_width")
        qkv, qkv_token = Linear(m, axes, m.init_std, "gather", name="qkv")(
            seq_major(x_bud), orders["qkv"]
        )
        q_btgrk, k_btgk, v_btgk = split_qkv(m, seq_major(qkv))
        q_bthk = q_btgrk.reshape(*q_btgrk.shape[:2], -1, m.head_dim)
        q_bthk = keep(rotate(q_bthk, *rope), "query")
        k_btgk = keep(rotate(k_btgk, *rope), "key")
        o_bthk = attend(q_bthk, k_btgk, keep(v_btgk, "value"), kind=self.kind, softcap=m.softcap)
        out = Linear(m, "heads value_width -> embed", out_std(m), "scatter", name="out")
        y_ubd, out_token = out(seq_major(o_bthk), orders["out"])
        return keep(seq_major(y_ubd), "attn_out"), {"qkv": qkv_token, "out": out_token}


def split_qkv(m: Model, qkv):
    """Queries, key and value of each group, btgqk; or btgw where the value has its own width."""
    if qkv.ndim == 5:
        return qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
    key, value = m.group_width - m.value_width - m.head_dim, m.group_width - m.value_width
    q, k, v = jnp.split(qkv, (key, value), -1)
    return q.reshape(*q.shape[:-1], -1, m.head_dim), k, v


def out_std(m: Model) -> float:
    """Initial std of projections that add to the residual stream, as in Megatron."""
    return m.init_std / (2 * m.layers) ** 0.5


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def activate(m: Model, up_nf, axis: int):
    """The nonlinearity: gates along `axis`, the first of them activated. Computed in fp32."""
    gate, *linear = jnp.split(up_nf.astype(jnp.float32), m.mlp_inputs, axis)
    h = ACTS[m.act](gate)
    return jnp.squeeze(h * linear[0] if linear else h, axis).astype(up_nf.dtype)


def _activate_backward(m, axis, up_nf, dh):
    """Each element by itself, from its own gate and the other: of parts that are put together XLA
    makes a kernel that does no more, and what is quantized next would be written and read first."""
    up, dh = (x.astype(jnp.float32) for x in (up_nf, jnp.expand_dims(dh, axis)))
    if m.mlp_inputs == 1:
        return (jax.vjp(ACTS[m.act], up)[1](dh)[0].astype(up_nf.dtype),)
    other = jnp.flip(up, axis)
    first = jax.lax.broadcasted_iota(jnp.int32, up.shape, axis) == 0
    h, back = jax.vjp(ACTS[m.act], jnp.where(first, up, other))
    return (jnp.where(first, *back(dh * other), dh * h).astype(up_nf.dtype),)


activate.defvjp(lambda m, up_nf, axis: (activate(m, up_nf, axis), up_nf), _activate_backward)


class Mlp(nn.Module):
    model: Model

    @nn.compact
    def __call__(self, x_bud, orders):
        m = self.model
        up = Linear(m, "embed -> mlp_inputs mlp", m.init_std, "gather", name="up")
        down = Linear(m, "mlp -> embed", out_std(m), "scatter", "mlp_act", name="down")
        up_tbgf, up_token = up(seq_major(x_bud), orders["up"])
        y_ubd, down_token = down(activate(m, keep(up_tbgf, "mlp_up"), 2), orders["down"])
        return (
            keep(seq_major(y_ubd), "mlp_down"),
            {"up": up_token, "down": down_token},
            jnp.zeros(()),
        )


class Embed(nn.Module):
    """Token embedding. Activations are exchanged, never the table: each GPU of fsdp and tp looks
    all tokens up in its columns, and an all-to-all returns its part of the sequence. A tied table
    is sharded by vocabulary over tp, and a reduce-scatter over tp leaves the sequence sharded.

    Attributes:
      embed_axis: logical axis of an untied table's columns (sharding.rules.RULES).
    """

    model: Model
    embed_axis: str = "embed_sharded"

    @nn.compact
    def __call__(self, tokens_bt, dtype):
        m = self.model
        w_vd = param_value(
            self,
            "w",
            "vocab embed" if m.tied else f"vocab_replicated {self.embed_axis}",
            m.init_std,
        )
        w_vd, tokens_bt = w_vd.astype(dtype), collectives.all_gather(tokens_bt, "fsdp", 0)
        if m.tied:
            local_bt = tokens_bt - collectives.axis_index("tp") * w_vd.shape[0]
            here_bt = (local_bt >= 0) & (local_bt < w_vd.shape[0])
            x_btd = jnp.where(here_bt[..., None], w_vd[jnp.where(here_bt, local_bt, 0)], 0)
            x_bud = collectives.reduce_scatter(collectives.all_to_all(x_btd, "fsdp", 0, 2), "tp", 1)
        else:
            x_btd, over_pp = w_vd[tokens_bt], "pp" in rules.RULES[self.embed_axis]
            x_btd = collectives.all_gather(x_btd, "pp", 2) if over_pp else x_btd
            x_btd = collectives.all_to_all(x_btd, "fsdp", 0, 2)
            x_bud = collectives.all_to_all(x_btd, "tp", 1, 2)
        return x_bud * jnp.asarray(m.embed_multiplier, dtype)


class Head(nn.Module):
    """Final norm; returns what the loss needs: x_btd, w_dv and its sums (sums.py) or None."""

    model: Model

    @nn.compact
    def __call__(self, x_bud, embed_vd=None):
        m, sums = self.model, None
        x_btd = collectives.all_gather(Norm(m, name="norm")(x_bud), "tp", 1)
        if m.tied:
            w_dv = embed_vd.T
        else:
            w_dv, sums = param(self, "w", "embed vocab", m.init_std)
        if sums is not None and collectives.axis_size("fsdp") > 1:  # they are of this GPU's part
            w_dv, sums = accumulate_into(sums, w_dv), None
        return x_btd, collectives.all_gather(w_dv, "fsdp", 0), sums
