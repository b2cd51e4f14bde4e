"""Norms and activations, and their gradients, against the formulas."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbench.config import activations
from maxbench.config.model import Model
from maxbench.metrics import flops
from maxbench.model import layers
from tests.conftest import resolve


@pytest.mark.parametrize(("dtype", "close"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(2, 12), (1, 7)])
def test_norm_and_its_gradient_equal_the_formula(rows, bias, dtype, close):
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    x, dy = (draw(*rows, 16).astype(dtype) for _ in range(2))
    scale, bias = draw(16).at[3].set(0), draw(16) if bias else None

    def formula(x, scale, bias, eps):
        x = x.astype(jnp.float32)
        if bias is None:
            return (x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + eps) * scale).astype(dtype)
        standardized = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + eps)
        return (standardized * scale + bias).astype(dtype)

    def value_and_grads(norm):
        y, vjp = jax.vjp(lambda *w: norm(*w, 1e-5), x + 1, scale, bias)
        return y, vjp(dy)

    leaves = [jax.tree.leaves(value_and_grads(norm)) for norm in (layers.normalize, formula)]
    for actual, expected in zip(*leaves, strict=True):
        assert actual.dtype == expected.dtype
        actual, expected = actual.astype(jnp.float32), expected.astype(jnp.float32)
        np.testing.assert_allclose(actual, expected, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("act", "mlp_inputs"), [("swiglu", 2), ("geglu", 2), ("relu2", 1)])
def test_activation_and_its_gradient_equal_the_formula(act, mlp_inputs, dtype):
    m = types.SimpleNamespace(act=act, mlp_inputs=mlp_inputs)
    up = jax.random.normal(jax.random.key(0), (2, 3, mlp_inputs, 8)).astype(dtype)
    dh = jax.random.normal(jax.random.key(1), (2, 3, 8)).astype(dtype)

    def formula(up):
        h = layers.ACTS[act].function(up[:, :, 0])
        return h * up[:, :, 1] if mlp_inputs == 2 else h

    h, vjp = jax.vjp(lambda up: layers.activate(m, up, 2), up)
    expected, expected_vjp = jax.vjp(formula, up.astype(jnp.float32))
    (dup,), (expected_dup,) = vjp(dh), expected_vjp(dh.astype(jnp.float32))
    assert h.dtype == dup.dtype == dtype
    np.testing.assert_allclose(h.astype(jnp.float32), expected, rtol=1e-2, atol=1e-5)
    np.testing.assert_allclose(dup.astype(jnp.float32), expected_dup, rtol=1e-2, atol=1e-5)


def test_every_activation_of_the_configuration_has_its_function():
    assert layers.ACTS.keys() == activations.GATED.keys()
    assert all(activations.GATED[name] for name, act in layers.ACTS.items() if act.up)


def test_an_added_activation_is_gated_only_if_its_entry_says_so(monkeypatch):
    """As docs/how-to/add_a_model.md adds one: an entry in each of two tables."""
    monkeypatch.setitem(activations.GATED, "relu", False)
    monkeypatch.setitem(layers.ACTS, "relu", layers.Activation(jax.nn.relu))
    run = resolve("llama31_8b", "tiny", {"model.act": "relu"})
    assert run.model.mlp_inputs == 1
    gated = resolve("llama31_8b", "tiny")
    up = gated.model.layers * gated.model.embed * gated.model.mlp
    assert flops.params(gated.model) - flops.params(run.model) == up
    x = jax.random.normal(jax.random.key(0), (2, 3, 1, 8))
    h, vjp = jax.vjp(lambda x: layers.activate(run.model, x, 2), x)
    np.testing.assert_array_equal(h, jnp.maximum(x[:, :, 0], 0))
    np.testing.assert_array_equal(vjp(h)[0], jnp.maximum(x, 0))


@pytest.mark.parametrize("mscale", [0.0, 1.0])
@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize(("base", "fast"), [(150_000.0, 32.0), (5e4, 1.0)])
def test_yarn_equals_its_definition(base, fast, truncate, mscale):
    """Dim by dim, from the paper's equations 17 to 22 as DeepSeek and gpt-oss use them."""
    factor, context, dims = 32.0, 4096, 64
    yarn = dict(rope_scaling="yarn", rope_factor=factor, rope_context=context, rope_base=base)
    m = Model(
        name="a", size="b", layers=1, embed=64, heads=1, kv_heads=1, head_dim=dims, mlp=8, vocab=8,
        rope_beta_fast=fast, rope_truncate=truncate, rope_mscale=mscale, **yarn,
    )  # fmt: skip
    position = np.array([0, 1, 77, 5000])

    def limit(periods, rounded):
        x = dims * math.log(context / (2 * math.pi * periods)) / (2 * math.log(base))
        return rounded(x) if truncate else x

    low, high = limit(fast, math.floor), limit(1, math.ceil)
    for i in range(dims // 2):
        freq = base ** (-2 * i / dims)
        scaled = float(i > low) if low == high else min(max((i - low) / (high - low), 0), 1)
        angle = position * (freq * (1 - scaled) + freq / factor * scaled)
        a = 1.0 if mscale else 0.1 * math.log(factor) + 1
        cos, sin = (x[:, i] for x in layers.rope_angles(m, position))
        np.testing.assert_allclose(cos, a * np.cos(angle), atol=2e-3)
        np.testing.assert_allclose(sin, a * np.sin(angle), atol=2e-3)
        np.testing.assert_allclose(cos[:3], a * np.cos(angle)[:3], atol=2e-5)
    logits = (0.1 * mscale * math.log(factor) + 1) ** 2 / math.sqrt(dims)
    assert m.per_layer[0].mixer.logit_scale == pytest.approx(logits)
