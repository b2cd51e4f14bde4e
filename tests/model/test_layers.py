"""Norms and activations, and their gradients, against the formulas."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbench.model import layers


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
        h = layers.ACTS[act](up[:, :, 0])
        return h * up[:, :, 1] if mlp_inputs == 2 else h

    h, vjp = jax.vjp(lambda up: layers.activate(m, up, 2), up)
    expected, expected_vjp = jax.vjp(formula, up.astype(jnp.float32))
    (dup,), (expected_dup,) = vjp(dh), expected_vjp(dh.astype(jnp.float32))
    assert h.dtype == dup.dtype == dtype
    np.testing.assert_allclose(h.astype(jnp.float32), expected, rtol=1e-2, atol=1e-5)
    np.testing.assert_allclose(dup.astype(jnp.float32), expected_dup, rtol=1e-2, atol=1e-5)
