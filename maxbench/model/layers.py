"""The parts of a transformer layer, on one GPU inside shard_map.

Arrays are local: tp splits heads, the MLP's hidden dim and the vocabulary (Megatron tensor
parallelism). Between the GEMMs of a sublayer and the next, tp splits the sequence instead
(sequence parallelism, arXiv:2205.05198): the first GEMM all-gathers it, and the last one
reduce-scatters its partial sums.

Shape letters, at the end of a name: b batch, t position (u: this GPU's 1/tp of them), d embed,
h heads, g KV heads, k head_dim, f mlp, v vocab, n mlp_inputs; in the fused QKV projection q is the
heads of a group (its queries, its key and its value), and w their total width.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from maxbench.config.channels import Experts
from maxbench.config.channels import Mlp as MlpKind
from maxbench.config.mixers import Attention as AttentionKind
from maxbench.config.mixers import LatentAttention as LatentKind
from maxbench.config.model import Model
from maxbench.config.sublayers import Context, Ends, Sublayer, axes_of
from maxbench.model import linear
from maxbench.model.attention import attend
from maxbench.model.grad_accumulation import accumulate_into
from maxbench.quantization import Weight
from maxbench.sharding import collectives, ordering, rules


class Activation(NamedTuple):
    """An activation of config/activations.py, which says whether it is gated.

    Attributes:
      function: of the input; of a gated one, of the gate.
      up: of the other input of a gated one; None is the identity.
    """

    function: Callable[[jax.Array], jax.Array]
    up: Callable[[jax.Array], jax.Array] | None = None


ACTS: dict[str, Activation] = {
    "swiglu": Activation(jax.nn.silu),
    "geglu": Activation(jax.nn.gelu),
    "relu2": Activation(lambda x: jnp.square(jax.nn.relu(x))),
    "swiglu_clamped": Activation(
        lambda x: jnp.minimum(x, 7) * jax.nn.sigmoid(1.702 * jnp.minimum(x, 7)),
        up=lambda x: jnp.clip(x, -7, 7) + 1,
    ),
}


class GemmParam(nn.Partitioned):
    """A weight with its logical axes; `gemm` if GEMMs read it in the run's number format."""

    gemm: rules.GemmDims | None = flax.struct.field(default=None, pytree_node=False)


def param(
    module: nn.Module, name: str, axes: str, std: Any = None, fill: float = 0.0, gemm: Any = None
) -> Any:
    """Declares a weight by its logical axes: the module's `model` has their sizes, sharding.rules
    their sharding.

    Args:
      axes: as in config.sublayers.Weight.
      std: of the normal initialization, or an initializer; None initializes with `fill`.
      gemm: as GemmParam.gemm.

    Returns:
      This GPU's shard, and its gradient accumulator (grad_accumulation.py) or None.
    """
    names = sum(axes_of(axes), ())
    shape = tuple(rules.local_size(a, getattr(module.model, a)) for a in names)
    normal = std if callable(std) else nn.initializers.normal(std)
    init = nn.initializers.constant(fill) if std is None else normal
    boxed = lambda *args: GemmParam(init(*args), names, gemm=gemm)
    w: Any = module.get_variable("params", name)
    if not isinstance(w, Weight):  # flax compares `shape` with that of q, which may be packed
        w = module.param(name, boxed, shape, jnp.float32)
    return w, module.get_variable("sums", name)


def param_value(module: nn.Module, name: str, axes: str, std: Any = None, fill: float = 0.0) -> Any:
    """param() of a weight that linear() does not read; its gradient is accumulated."""
    w, sums = param(module, name, axes, std, fill)
    return w if sums is None else accumulate_into(sums, w)


def matmul(
    module: Any,
    x: jax.Array,
    name: str,
    axes: str,
    std: float,
    plain: bool = False,
    sums: Any = None,
    order: Any = linear.UNORDERED,
    **how: Any,
) -> Any:
    """linear.linear() of x and a weight that this declares.

    Args:
      axes: logical axes of the weight, as in config.sublayers.Weight.
      plain: multiplies in the dtype of x, not in the run's number format, as all GEMMs do in a
        layer that is not quantized.
      sums: replaces the weight's own gradient accumulator.
      order: as in linear.linear, which defines the result too.
      how: further fields of linear.MatmulSpec.
    """
    batch, ins, outs = axes_of(axes)
    names = (*batch, *ins, *outs)
    dims = rules.GemmDims(len(batch), len(ins))
    plain = plain or not module.model.quantized
    w, own = param(module, name, " ".join(names), std, gemm=None if plain else dims)
    axes_of_dims = map(rules.local_axes, names)
    split = ((i, by) for i, by in enumerate(axes_of_dims) if "fsdp" in by)
    fsdp, fsdp_axes = next(split, (None, ()))
    gemm = linear.MatmulSpec(dims.ins, dims.batch, fsdp=fsdp, fsdp_axes=fsdp_axes, **how)
    # A weight of a Linear is called w: the module names the GEMM.
    with contextlib.nullcontext() if name == "w" else jax.named_scope(name):
        return linear.linear(x, w, own if sums is None else sums, gemm, order)


class Linear(nn.Module):
    """x @ w; the logical axes of w are 'ins -> outs': Linear(m, 'heads head_dim -> embed', std).
    `model` has their sizes.

    `sequence` and `saved` are those of linear.MatmulSpec, `plain` is that of matmul(). `bias` names
    the axes of a bias: all dims of the result but its rows.
    """

    model: Model | Sublayer
    axes: str
    std: float
    sequence: str = ""
    saved: str = ""
    plain: bool = False
    bias: str = ""

    @nn.compact
    def __call__(self, x, order=linear.UNORDERED):
        how = {"sequence": self.sequence, "saved": self.saved, "plain": self.plain}
        y, token = matmul(self, x, "w", self.axes, self.std, order=order, **how)
        return add_bias(y, param_value(self, "bias", self.bias)) if self.bias else y, token


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x + bias, added in fp32: the sum over rows in the gradient of the bias is then fp32 too."""
    return (x.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


class Norm(nn.Module):
    """RMSNorm, or LayerNorm whose weight is stored minus one (layernorm1p), as Model.norm says."""

    model: Model
    separate_statistics: bool = False  # as in normalize()

    @nn.compact
    def __call__(self, x_btd):
        m, center = self.model, self.model.norm == "layernorm1p"
        fp32 = lambda x: x.astype(jnp.float32)
        scale_d = fp32(param_value(self, "scale", "embed_replicated", fill=0.0 if center else 1.0))
        bias_d = fp32(param_value(self, "bias", "embed_replicated")) if center else None
        scale_d = scale_d + 1 if center else scale_d
        return normalize(x_btd, scale_d, bias_d, m.norm_eps, self.separate_statistics)


class RmsNorm(nn.Module):
    """RMSNorm over a last dim that is not embed; `axis` is its logical axis."""

    model: Sublayer
    axis: str

    @nn.compact
    def __call__(self, x):
        scale = param_value(self, "scale", self.axis, fill=1.0).astype(jnp.float32)
        return normalize(x, scale, None, self.model.norm_eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def normalize(
    x_btd: jax.Array,
    scale_d: jax.Array,
    bias_d: jax.Array,
    eps: float,
    separate_statistics: bool = False,
) -> jax.Array:
    """x / rms(x) x scale; with a bias, (x - mean(x)) / std(x) x scale + bias.

    Computed in fp32, returned in the dtype of x. The backward pass is written out: from the VJP
    that JAX derives, XLA makes an intermediate fp32 tensor that it writes once and reads twice.

    separate_statistics computes 1 / rms(x) in a kernel of its own. If y is then quantized per
    tensor, XLA would otherwise fuse both into one kernel that writes y in fp32, to be read twice.
    """
    x, inverse = _centered(x_btd, bias_d is not None, eps)
    inverse = jax.lax.optimization_barrier(inverse) if separate_statistics else inverse
    y_btd = x * inverse * scale_d
    return (y_btd if bias_d is None else y_btd + bias_d).astype(x_btd.dtype)


def _centered(x_btd, center: bool, eps: float):
    """x, minus its mean if `center`, and 1 / rms of that; fp32."""
    x = x_btd.astype(jnp.float32)
    if center:
        x -= jnp.mean(x, -1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)
    return x, inverse


def _normalize_backward(eps, separate_statistics, saved, dy_btd):
    x_btd, scale_d, bias_d = saved
    center = bias_d is not None
    x, inverse = _centered(x_btd, center, eps)
    unit_btd = x * inverse
    dy = dy_btd.astype(jnp.float32)
    dunit = dy * scale_d
    mean = lambda x: jnp.mean(dunit * x, -1, keepdims=True)
    # The mean of dunit x (and not unit) is computed in the same pass over x as the mean of squares.
    # With collectives, unit is needed before dy has arrived, and its pass must not wait for dy.
    dx = dunit - unit_btd * (inverse * mean(x) if linear.no_comm() else mean(unit_btd))
    if center:
        dx -= jnp.mean(dunit, -1, keepdims=True)
    dx_btd = (dx * inverse).astype(x_btd.dtype)
    return dx_btd, _sum_positions(dy * unit_btd), _sum_positions(dy) if center else None


def _sum_positions(x_btd):
    """Sum over batch and positions, in two steps: XLA would write x to memory first for one
    reduction with so few outputs."""
    d = x_btd.shape[-1]
    parts_pd = jnp.sum(x_btd.reshape(math.gcd(x_btd.size // d, 8), -1, d), 1)
    return jnp.sum(jax.lax.optimization_barrier(parts_pd), 0)


normalize.defvjp(lambda *args: (normalize(*args), args[:3]), _normalize_backward)


def rope_angles(m: Model, position_t: jax.Array | np.ndarray) -> tuple[jax.Array, jax.Array]:
    """cos and sin of RoPE (arXiv:2104.09864) at each position, [t, rotated dims / 2], fp32.

    With rope_factor != 1, low frequencies are divided by it and high ones are unchanged:

      llama3  wavelengths longer than rope_context / rope_low are low, those shorter than
              rope_context / rope_high are high; frequencies between are interpolated linearly.
      yarn    (arXiv:2309.00071) frequencies with at most rope_beta_slow periods in rope_context are
              low, those with at least rope_beta_fast are high; between, the interpolation is linear
              in the index of the dim. cos and sin are multiplied by 0.1 ln(rope_factor) + 1, unless
              rope_mscale is set, which Model.logit_factor has.
    """
    freq, scale = m.rope_base ** (-np.arange(0, m.rope_dims, 2) / m.rope_dims), 1.0
    if m.rope_factor != 1:
        if m.rope_scaling == "yarn":
            mix = _yarn_mix(m)
            scale = 1.0 if m.rope_mscale else 0.1 * math.log(m.rope_factor) + 1
        else:
            periods = m.rope_context * freq / (2 * np.pi)  # in the original context
            mix = np.clip((periods - m.rope_low) / (m.rope_high - m.rope_low), 0, 1)
        freq *= mix + (1 - mix) / m.rope_factor
    angle_tk = jnp.asarray(position_t, jnp.float32)[:, None] * jnp.asarray(freq, jnp.float32)
    cos_tk, sin_tk = jnp.cos(angle_tk), jnp.sin(angle_tk)
    return (cos_tk, sin_tk) if scale == 1 else (cos_tk * scale, sin_tk * scale)


def _yarn_mix(m: Model) -> np.ndarray:
    """1 for unscaled frequencies, 0 for scaled ones, and a ramp between."""

    def index(periods):  # of the frequency with so many periods in the original context
        wavelength = m.rope_context / periods
        return m.rope_dims * math.log(wavelength / (2 * math.pi)) / (2 * math.log(m.rope_base))

    first, last = index(m.rope_beta_fast), index(m.rope_beta_slow)
    if m.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, m.rope_dims - 1)
    last += 0.001 * (first == last)  # a step
    return 1 - np.clip((np.arange(m.rope_dims // 2) - first) / (last - first), 0, 1)


def rotate(x_bthk: jax.Array, cos_tk: jax.Array, sin_tk: jax.Array) -> jax.Array:
    """Applies RoPE: rotates pairs (i, i + n) for i < n = cos_tk.shape[1]; later dims pass through.
    Computed in fp32, returned in the dtype of x."""
    n = cos_tk.shape[1]
    if not n:  # attention without positions
        return x_bthk
    x = x_bthk.astype(jnp.float32)
    a, b, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    cos, sin = cos_tk[:, None], sin_tk[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1).astype(x_bthk.dtype)


def seq_major(x: jax.Array) -> jax.Array:
    """With tp, [b, t, ...] <-> [t, b, ...] (Megatron's layout): tp's collectives over t are then
    contiguous. Without tp, x."""
    return x.swapaxes(0, 1) if collectives.axis_size("tp") > 1 else x


class Applied(nn.Module):
    """A mixer or channel whose kind has its body in Sublayer.apply()."""

    model: Sublayer

    @nn.compact
    def __call__(self, x_bud, context, orders):
        return self.model.apply(self, x_bud, context, orders)


def projection(m: Sublayer, name: str, std: float, **how: Any) -> Linear:
    """Linear() with the weight 'name/w', and the bias 'name/bias' if there is one, that a kind
    declares."""
    bias = m.weights.get(f"{name}/bias")
    how["bias"] = bias.axes if bias else ""
    return Linear(m, m.weights[f"{name}/w"].axes, std, name=name, **how)


class Attention(nn.Module):
    """Grouped-query attention with one fused QKV projection, whose output is grouped by KV head so
    that tp can split it: each group has its queries, then its key, then its value."""

    model: AttentionKind

    @nn.compact
    def __call__(self, x_bud, context, orders):
        m, rope = self.model, context.rope
        qkv_projection = projection(m, "qkv", m.init_std, sequence="gather")
        qkv, first_token = qkv_projection(seq_major(x_bud), orders.first)
        q_btgrk, k_btgk, v_btgk = split_qkv(m, seq_major(qkv))
        q_bthk = q_btgrk.reshape(*q_btgrk.shape[:2], -1, m.head_dim)
        if m.qk_norm:
            # Saved before the norm, whose backward pass reads it.
            q_bthk, k_btgk = checkpoint_name(q_bthk, "query"), checkpoint_name(k_btgk, "key")
            q_bthk = rotate(
                RmsNorm(m, m.weights["q_norm/scale"].axes, name="q_norm")(q_bthk), *rope
            )
            k_btgk = rotate(
                RmsNorm(m, m.weights["k_norm/scale"].axes, name="k_norm")(k_btgk), *rope
            )
        else:
            q_bthk = checkpoint_name(rotate(q_bthk, *rope), "query")
            k_btgk = checkpoint_name(rotate(k_btgk, *rope), "key")
        v_btgk = checkpoint_name(v_btgk, "value")
        o_bthk = attention(self, context, q_bthk, k_btgk, v_btgk)
        return attention_output(self, o_bthk, first_token, orders)


class LatentAttention(nn.Module):
    """Multi-head latent attention (arXiv:2405.04434, section 2.1).

    One down-projection gives the latent of queries, that of keys and values, and the dims of keys
    that RoPE rotates, which all heads share. It reads this GPU's part of the sequence; then the
    latents, normalized, are all-gathered over tp, and up-projections compute this GPU's heads.
    """

    model: LatentKind

    @nn.compact
    def __call__(self, x_bud, context, orders):
        m, rope = self.model, context.rope
        down = projection(m, "qkv", m.init_std)
        latents_ubc, first_token = down(seq_major(x_bud), orders.first)
        q, kv, k = self._split(checkpoint_name(latents_ubc, "latent"))
        q = RmsNorm(m, m.weights["q_norm/scale"].axes, name="q_norm")(q)
        kv = RmsNorm(m, m.weights["kv_norm/scale"].axes, name="kv_norm")(kv)
        latents_ubc = jnp.concatenate([q, kv, k], -1)
        q, kv, k = self._split(_all_gather_latents(latents_ubc, orders.first.wait_for))
        q_tbhk, _ = projection(m, "q_up", m.init_std)(q)
        kv_tbhk, _ = projection(m, "kv_up", m.init_std)(kv)
        plain = m.head_dim - m.rope_head_dim  # dims that RoPE does not rotate
        k_bthk, v_bthk = jnp.split(seq_major(kv_tbhk), (plain,), -1)
        k_bthk, v_bthk = checkpoint_name(k_bthk, "key"), checkpoint_name(v_bthk, "value")
        shared_bthk = rotate(seq_major(k)[:, :, None], *rope)
        shared_bthk = jnp.broadcast_to(shared_bthk, (*k_bthk.shape[:-1], m.rope_head_dim))
        q_bthk, rotated_bthk = jnp.split(seq_major(q_tbhk), (plain,), -1)
        q_bthk = jnp.concatenate([q_bthk, rotate(rotated_bthk, *rope)], -1)
        k_bthk = jnp.concatenate([k_bthk, shared_bthk], -1)
        o_bthk = attention(self, context, checkpoint_name(q_bthk, "query"), k_bthk, v_bthk)
        return attention_output(self, o_bthk, first_token, orders)

    def _split(self, latents):
        m = self.model
        return jnp.split(latents, (m.q_rank, m.q_rank + m.kv_rank), -1)


def _all_gather_latents(latents_ubc: jax.Array, wait_for: jax.Array | None) -> jax.Array:
    """latents_tbc, used only after wait_for[0]; its cotangent is that of the GEMM (CommOrder)."""
    t = None if wait_for is None else jax.lax.stop_gradient(wait_for[0])
    return ordering.all_gather_after(latents_ubc, "tp", 0, t)


def attention(
    module: Any, context: Context, q_bthk: jax.Array, k_btgk: jax.Array, v_btgk: jax.Array
) -> jax.Array:
    """o_bthk; declares the sinks."""
    m = module.model
    axes = m.weights["sinks"].axes if m.sinks else ""
    sinks_h = param_value(module, "sinks", axes, m.init_std) if m.sinks else None
    mask = {"softcap": m.softcap, "scale": m.logit_scale, "window": m.window}
    return attend(
        q_bthk, k_btgk, v_btgk, sinks_h, context.documents_bt, kind=context.attention, **mask
    )


def attention_output(module: Any, o_bthk: jax.Array, first_token: Any, orders: Ends) -> Any:
    """The output projection 'out': what a mixer returns (Sublayer.apply)."""
    m = module.model
    out = projection(m, "out", out_std(m), sequence="scatter")
    y_ubd, last_token = out(seq_major(o_bthk), orders.last)
    tokens = Ends(last=last_token, first=first_token)
    return checkpoint_name(seq_major(y_ubd), "attn_out"), tokens, None


def split_qkv(m: AttentionKind, qkv: Any) -> Any:
    """Queries, keys and values, from btgqk, or from btgw if values and keys differ in width."""
    if qkv.ndim == 5:
        return qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
    key, value = m.group_width - m.value_width - m.head_dim, m.group_width - m.value_width
    q, k, v = jnp.split(qkv, (key, value), -1)
    return q.reshape(*q.shape[:-1], -1, m.head_dim), k, v


def out_std(m: Sublayer) -> float:
    """Initial std of projections onto the residual stream: Megatron's scaled_init_method_normal."""
    return m.init_std / (2 * m.layers) ** 0.5


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def activate(m: MlpKind | Experts, up_nf: jax.Array, axis: int) -> jax.Array:
    """The activation function, of input 0 of `axis`; gated, times input 1. Computed in fp32."""
    gate, *up = jnp.split(up_nf.astype(jnp.float32), m.mlp_inputs, axis)
    act = ACTS[m.act]
    h = act.function(gate)
    for x in up:
        h = h * (act.up(x) if act.up else x)
    return jnp.squeeze(h, axis).astype(up_nf.dtype)


def activate_backward(m: MlpKind | Experts, axis: int, up_nf: Any, dh: Any) -> tuple[Any]:
    """Elementwise over the inputs and without a concatenation, which XLA would not fuse with the
    quantization that follows: the gradient would be written and read once more."""
    up, dh = up_nf.astype(jnp.float32), jnp.expand_dims(dh, axis).astype(jnp.float32)
    act = ACTS[m.act]
    if m.mlp_inputs == 1:
        return (jax.vjp(act.function, up)[1](dh)[0].astype(up_nf.dtype),)
    other: Any = jnp.flip(up, axis)  # at the gate the other input, and the reverse
    is_gate = jax.lax.broadcasted_iota(jnp.int32, up.shape, axis) == 0
    h, vjp = jax.vjp(act.function, jnp.where(is_gate, up, other))
    up_vjp: Any = lambda dh: (dh,)
    if act.up:
        other, up_vjp = jax.vjp(act.up, jnp.where(is_gate, other, up))
    (dgate,), (dup,) = vjp(dh * other), up_vjp(dh * h)
    return (jnp.where(is_gate, dgate, dup).astype(up_nf.dtype),)


activate.defvjp(lambda m, up_nf, axis: (activate(m, up_nf, axis), up_nf), activate_backward)


class Mlp(nn.Module):
    """The MLP, gated if mlp_inputs is 2."""

    model: MlpKind

    @nn.compact
    def __call__(self, x_bud, context, orders):
        m = self.model
        up = projection(m, "up", m.init_std, sequence="gather")
        down = projection(m, "down", out_std(m), sequence="scatter", saved="mlp_act")
        up_tbgf, first_token = up(seq_major(x_bud), orders.first)
        if m.mlp_bias:
            up_tbgf = add_bias(up_tbgf, param_value(self, "up_bias", m.weights["up_bias"].axes))
        y_ubd, last_token = down(activate(m, checkpoint_name(up_tbgf, "mlp_up"), 2), orders.last)
        if m.mlp_bias:
            y_ubd = add_bias(y_ubd, param_value(self, "down_bias", m.weights["down_bias"].axes))
        tokens = Ends(last=last_token, first=first_token)
        return checkpoint_name(seq_major(y_ubd), "mlp_down"), tokens, jnp.zeros(())


class Embed(nn.Module):
    """Token embedding. Activations are exchanged, never the table: each GPU of fsdp and tp looks
    all tokens up in its columns, and an all-to-all returns its part of the sequence. A tied table
    is sharded by vocabulary over tp, and a reduce-scatter over tp leaves the sequence sharded.

    Attributes:
      embed_axis: logical axis of an untied table's columns (config.sublayers.RULES).
      stages_differ: each stage of a pipeline embeds other tokens, not all the same ones.
    """

    model: Model
    embed_axis: str = "embed_sharded"
    stages_differ: bool = False

    @nn.compact
    def __call__(self, tokens_bt, dtype):
        m = self.model
        axes = "vocab embed" if m.tied else f"vocab_replicated {self.embed_axis}"
        w_vd = param_value(self, "w", axes, m.init_std)
        fsdp = rules.local_axes("embed")
        w_vd, tokens_bt = w_vd.astype(dtype), collectives.all_gather(tokens_bt, fsdp, 0)
        if m.tied:
            local_bt = tokens_bt - collectives.axis_index("tp") * w_vd.shape[0]
            is_local_bt = (local_bt >= 0) & (local_bt < w_vd.shape[0])
            x_btd = jnp.where(is_local_bt[..., None], w_vd[jnp.where(is_local_bt, local_bt, 0)], 0)
            x_bud = collectives.reduce_scatter(collectives.all_to_all(x_btd, fsdp, 0, 2), "tp", 1)
        else:
            over_pp = "pp" in rules.RULES[self.embed_axis]
            if over_pp and self.stages_differ:
                tokens_bt = collectives.all_gather(tokens_bt, "pp", 0)
                x_btd = collectives.all_to_all(w_vd[tokens_bt], "pp", 0, 2)
            else:
                x_btd = w_vd[tokens_bt]
                x_btd = collectives.all_gather(x_btd, "pp", 2) if over_pp else x_btd
            x_btd = collectives.all_to_all(x_btd, fsdp, 0, 2)
            x_bud = collectives.all_to_all(x_btd, "tp", 1, 2)
        return x_bud * jnp.asarray(m.embed_multiplier, dtype)


class Head(nn.Module):
    """Final norm and LM head weight, all-gathered: x_btd, w_dv, and w_dv's gradient accumulator or
    None. Logits are x_btd @ w_dv."""

    model: Model

    @nn.compact
    def __call__(self, x_bud, embed_vd=None):
        m, sums = self.model, None
        x_btd = collectives.all_gather(Norm(m, name="norm")(x_bud), "tp", 1)
        if m.tied:
            w_dv = embed_vd.T
        else:
            w_dv, sums = param(self, "w", "embed vocab", m.init_std)
        # The accumulator is that of this GPU's shard: add to it before the all-gather over fsdp.
        if sums is not None and collectives.axis_size("fsdp") > 1:
            w_dv, sums = accumulate_into(sums, w_dv), None
        return x_btd, collectives.all_gather(w_dv, rules.local_axes("embed"), 0), sums
