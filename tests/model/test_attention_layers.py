"""Attention sublayers against plain formulas with dense masks, with gradients."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbench.config.model import Model
from maxbench.model import hugging_face, layers
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


def rope(m, x_bthk):
    """Pairs (i, i + n / 2) of the n dims of x, as complex numbers."""
    n = x_bthk.shape[-1]
    cos, sin = layers.rope_angles(m, np.arange(x_bthk.shape[1]))
    z = jax.lax.complex(x_bthk[..., : n // 2], x_bthk[..., n // 2 :])
    z *= jax.lax.complex(cos, sin)[:, None]
    return jnp.concatenate([z.real, z.imag], -1)


def attended(m, w, q, k, v):
    o = attention_formula(q, k, v, w.get("sinks"), m.softcap, m.window, m.logit_scale)
    return jnp.einsum("bthk,hkd->btd", o, w["out"]["w"]) + w["out"].get("bias", 0)


def grouped_formula(m, w, x_btd):
    r, k, v = m.heads // m.kv_heads, m.head_dim, m.value_width
    weight = w["qkv"]["w"].reshape(m.embed, m.kv_heads, -1)
    bias = w["qkv"]["bias"].reshape(m.kv_heads, -1) if m.attention_bias else 0
    qkv = jnp.einsum("btd,dgw->btgw", x_btd, weight) + bias
    q = qkv[..., : r * k].reshape(*x_btd.shape[:2], m.heads, k)
    key, value = qkv[..., r * k : -v], qkv[..., -v:]
    if m.qk_norm:
        q = rms(q, w["q_norm"]["scale"], m.norm_eps)
        key = rms(key, w["k_norm"]["scale"], m.norm_eps)
    return attended(m, w, rope(m, q), rope(m, key), value)


def latent_formula(m, w, x_btd):
    latents = x_btd @ w["qkv"]["w"] + w["qkv"].get("bias", 0)
    q, kv, shared = np.split(np.arange(m.latents), [m.q_rank, m.q_rank + m.kv_rank])
    q_norm, kv_norm = w["q_norm"]["scale"], w["kv_norm"]["scale"]
    q = jnp.einsum("btc,chk->bthk", rms(latents[..., q], q_norm, m.norm_eps), w["q_up"]["w"])
    kv = jnp.einsum("btc,chk->bthk", rms(latents[..., kv], kv_norm, m.norm_eps), w["kv_up"]["w"])
    shared = rope(m, latents[..., None, shared])
    plain = m.head_dim - m.rope_head_dim
    q = jnp.concatenate([q[..., :plain], rope(m, q[..., plain:])], -1)
    shared = jnp.broadcast_to(shared, (*x_btd.shape[:2], m.heads, m.rope_head_dim))
    k = jnp.concatenate([kv[..., :plain], shared], -1)
    return attended(m, w, q, k, kv[..., plain:])


CASES = [(layers.Attention, grouped_formula, SIZES | x) for x in GROUPED.values()]
CASES += [(layers.LatentAttention, latent_formula, SIZES | LATENT | x) for x in LATENTS.values()]


@pytest.mark.parametrize(("kind", "formula", "sizes"), CASES, ids=[*GROUPED, *LATENTS])
def test_attention_and_its_gradients_equal_the_formula(kind, formula, sizes):
    m, random = Model(**sizes), np.random.default_rng(0)
    module, orders = kind(m, "xla"), {"qkv": UNORDERED, "out": UNORDERED}
    x, dy = (jnp.asarray(random.standard_normal((2, 16, m.embed)), jnp.float32) for _ in range(2))
    angles = layers.rope_angles(m, np.arange(16))
    w = nn.unbox(module.init(jax.random.key(0), x, angles, orders)["params"])
    w = jax.tree.map(lambda w: jnp.asarray(random.standard_normal(w.shape) / 3, jnp.float32), w)

    def value_and_grads(f):
        y, vjp = jax.vjp(f, w, x)
        return y, vjp(dy)

    actual = jax.jit(lambda: value_and_grads(
        lambda w, x: module.apply({"params": w}, x, angles, orders)[0]
    ))()  # fmt: skip
    expected = jax.jit(lambda: value_and_grads(lambda w, x: formula(m, w, x)))()
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))
    jax.tree.map(close, actual, expected)


def test_interleaved_rope_of_hugging_face_is_ours_reordered():
    m, random = Model(**SIZES | LATENT), np.random.default_rng(0)
    theirs = random.standard_normal((1, 5, 2, m.head_dim)).astype(np.float32)
    order, plain = hugging_face.rope_order(m, m.head_dim), m.head_dim - m.rope_head_dim
    angle = np.arange(5)[:, None] * m.rope_base ** (-np.arange(0, m.rope_head_dim, 2) / 4)
    pairs = theirs[..., plain::2] + 1j * theirs[..., plain + 1 :: 2]
    pairs = pairs * np.exp(1j * angle)[:, None]
    rotated = np.stack([pairs.real, pairs.imag], -1).reshape(1, 5, 2, -1)
    expected = np.concatenate([theirs[..., :plain], rotated], -1)
    ours = theirs[..., order]
    ours = np.concatenate([ours[..., :plain], rope(m, ours[..., plain:])], -1)
    np.testing.assert_allclose(ours[..., np.argsort(order)], expected, atol=1e-6)
