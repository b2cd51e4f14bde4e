"""Attention sublayers against plain formulas with dense masks, with gradients."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbench.config.model import Model
from maxbench.config.sublayers import Context, Ends
from maxbench.model import hugging_face, layers, transformer
from maxbench.model.linear import UNORDERED
from tests.model.test_attention import attention_formula

SIZES = dict(name="a", size="b", layers=2, embed=24, mlp=8, vocab=8)
SIZES |= dict(heads=4, kv_heads=2, head_dim=8)
YARN = dict(rope_scaling="yarn", rope_factor=8.0, rope_context=16, rope_beta_fast=4.0)
GROUPED = {
    "plain": {},
    "qk_norm": dict(qk_norm=True, norm_eps=1e-2),
    "biases": dict(attention_bias=True, value_dim=6),
    "gpt_oss": dict(attention_bias=True, sinks=True, window=5, rope_truncate=False, **YARN),
    "all": dict(qk_norm=True, attention_bias=True, sinks=True, window=3, softcap=2.0),
}
LATENT = dict(kv_heads=4, head_dim=12, value_dim=6, q_rank=10, kv_rank=14, rope_head_dim=4)
LATENTS = {
    "plain": {},
    "yarn": dict(rope_mscale=1.0, norm_eps=1e-2, **YARN),
    "all": dict(attention_bias=True, sinks=True, window=6),
}


def rms(x, scale, eps):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


def rotated(angles, x_bthk):
    """Pairs (i, i + n / 2) of the n dims of x, as complex numbers."""
    n = x_bthk.shape[-1]
    cos, sin = angles
    z = jax.lax.complex(x_bthk[..., : n // 2], x_bthk[..., n // 2 :])
    z *= jax.lax.complex(cos, sin)[:, None]
    return jnp.concatenate([z.real, z.imag], -1)


def attended(m, w, q, k, v):
    o = attention_formula(q, k, v, w.get("sinks"), m.softcap, m.window, m.logit_scale)
    return jnp.einsum("bthk,hkd->btd", o, w["out"]["w"]) + w["out"].get("bias", 0)


def grouped_formula(m, angles, w, x_btd):
    r, k, v = m.heads // m.kv_heads, m.head_dim, m.value_width
    weight = w["qkv"]["w"].reshape(m.embed, m.kv_heads, -1)
    bias = w["qkv"]["bias"].reshape(m.kv_heads, -1) if m.attention_bias else 0
    qkv = jnp.einsum("btd,dgw->btgw", x_btd, weight) + bias
    q = qkv[..., : r * k].reshape(*x_btd.shape[:2], m.heads, k)
    key, value = qkv[..., r * k : -v], qkv[..., -v:]
    if m.qk_norm:
        q = rms(q, w["q_norm"]["scale"], m.norm_eps)
        key = rms(key, w["k_norm"]["scale"], m.norm_eps)
    return attended(m, w, rotated(angles, q), rotated(angles, key), value)


def latent_formula(m, angles, w, x_btd):
    latents = x_btd @ w["qkv"]["w"] + w["qkv"].get("bias", 0)
    q, kv, shared = np.split(np.arange(m.latents), [m.q_rank, m.q_rank + m.kv_rank])
    q_norm, kv_norm = w["q_norm"]["scale"], w["kv_norm"]["scale"]
    q = jnp.einsum("btc,chk->bthk", rms(latents[..., q], q_norm, m.norm_eps), w["q_up"]["w"])
    kv = jnp.einsum("btc,chk->bthk", rms(latents[..., kv], kv_norm, m.norm_eps), w["kv_up"]["w"])
    shared = rotated(angles, latents[..., None, shared])
    plain = m.head_dim - m.rope_head_dim
    q = jnp.concatenate([q[..., :plain], rotated(angles, q[..., plain:])], -1)
    shared = jnp.broadcast_to(shared, (*x_btd.shape[:2], m.heads, m.rope_head_dim))
    k = jnp.concatenate([kv[..., :plain], shared], -1)
    return attended(m, w, q, k, kv[..., plain:])


# By default with every part at once.
marks = lambda name: [] if name == "all" else [pytest.mark.exhaustive]
CASES = [
    pytest.param(layers.Attention, grouped_formula, SIZES | x, id=name, marks=marks(name))
    for name, x in GROUPED.items()
]
CASES += [
    pytest.param(
        layers.LatentAttention, latent_formula, SIZES | LATENT | x, id=name, marks=marks(name)
    )
    for name, x in LATENTS.items()
]


@pytest.mark.parametrize(("kind", "formula", "sizes"), CASES)
def test_attention_and_its_gradients_equal_the_formula(kind, formula, sizes):
    model, random = Model(**sizes), np.random.default_rng(0)
    m = model.per_layer[0].mixer
    module, orders = kind(m), Ends(UNORDERED, UNORDERED)
    x, dy = (jnp.asarray(random.standard_normal((2, 16, m.embed)), jnp.float32) for _ in range(2))
    context = Context(layers.rope_angles(model, np.arange(16)))
    w = nn.unbox(module.init(jax.random.key(0), x, context, orders)["params"])
    w = jax.tree.map(lambda w: jnp.asarray(random.standard_normal(w.shape) / 3, jnp.float32), w)

    def value_and_grads(f):
        y, vjp = jax.vjp(f, w, x)
        return y, vjp(dy)

    actual = jax.jit(lambda: value_and_grads(
        lambda w, x: module.apply({"params": w}, x, context, orders)[0]
    ))()  # fmt: skip
    expected = jax.jit(lambda: value_and_grads(lambda w, x: formula(m, context.rope, w, x)))()
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))
    jax.tree.map(close, actual, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [GROUPED["all"], LATENT | LATENTS["all"]], ids=["all", "latent"])
def test_weights_of_hugging_face_are_converted_and_back(sizes):
    m = Model(**SIZES | sizes)
    params = nn.unbox(transformer.init(m, jax.random.key(0)))
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda x: random.standard_normal(x.shape).astype(np.float32), params)
    tensors = hugging_face.to_hugging_face(m, params)
    weights = sum(x.size for x in jax.tree.leaves(params))
    assert sum(x.size for x in tensors.values()) == weights
    converted = hugging_face.from_hugging_face(m, tensors)
    jax.tree.map(np.testing.assert_array_equal, converted, params)


@pytest.mark.exhaustive
def test_latent_attention_of_hugging_face_rotates_neighbouring_dims():
    """DeepSeek-V3's attention from its own tensors, in numpy, equals ours."""
    m, random = Model(**SIZES | LATENT), np.random.default_rng(0)
    params = nn.unbox(transformer.init(m, jax.random.key(0)))
    draw = lambda x: random.standard_normal(x.shape).astype(np.float32) / 3
    params = jax.tree.map(draw, params)
    hf = hugging_face.to_hugging_face(m, params)
    hf = {k.split("self_attn.")[1]: v for k, v in hf.items() if "layers.0.self_attn" in k}
    x, plain = random.standard_normal((2, 16, m.embed)).astype(np.float32), m.head_dim - 4

    def neighbours_rotated(x):
        freq = m.rope_base ** (-np.arange(0, 4, 2) / 4)
        angle = np.arange(16)[:, None, None] * freq
        pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
        return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)

    kv, shared = np.split(x @ hf["kv_a_proj_with_mqa.weight"].T, [m.kv_rank], -1)
    kv = rms(kv, hf["kv_a_layernorm.weight"], m.norm_eps) @ hf["kv_b_proj.weight"].T
    q = rms(x @ hf["q_a_proj.weight"].T, hf["q_a_layernorm.weight"], m.norm_eps)
    q = np.asarray(q @ hf["q_b_proj.weight"].T).reshape(2, 16, m.heads, m.head_dim)
    q = np.concatenate([q[..., :plain], neighbours_rotated(q[..., plain:])], -1)
    k, v = np.split(np.asarray(kv).reshape(2, 16, m.heads, -1), [plain], -1)
    shared = np.broadcast_to(neighbours_rotated(shared[:, :, None]), (2, 16, m.heads, 4))
    o = attention_formula(q, np.concatenate([k, shared], -1), v, None)
    expected = np.asarray(o).reshape(2, 16, -1) @ hf["o_proj.weight"].T
    w = jax.tree.map(lambda x: x[0], params["layers"]["attn"])
    angles = layers.rope_angles(m, np.arange(16))
    actual = latent_formula(m.per_layer[0].mixer, angles, w, x)
    np.testing.assert_allclose(actual, expected, atol=1e-4)
