"""Chunked cross entropy against optax, and its memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxbench.model import loss


@settings(max_examples=3, deadline=None)
@given(
    tokens=st.integers(1, 40),
    chunk=st.integers(1, 50),
    z_loss=st.sampled_from([0.0, 0.1]),
    multiplier=st.sampled_from([1.0, 0.5]),
    padded=st.booleans(),
)
def test_cross_entropy_and_its_gradient_equal_optax(tokens, chunk, z_loss, multiplier, padded):
    random = np.random.default_rng(tokens)
    x = jnp.float32(random.standard_normal((tokens, 8)))
    w = jnp.float32(random.standard_normal((8, 24)))
    target = random.integers(-1 if padded else 0, 24, tokens)

    def formula(x, w):
        logits = x @ w * multiplier
        each = optax.softmax_cross_entropy_with_integer_labels(logits, target)
        each += z_loss * jax.nn.logsumexp(logits, -1) ** 2
        return jnp.sum(each, where=target >= 0)

    options = chunk, z_loss, multiplier, 1.0, padded
    chunked = lambda x, w: loss.cross_entropy(x, w, None, target, *options)
    both = (jax.jit(jax.value_and_grad(f, (0, 1)))(x, w) for f in (chunked, formula))
    (value, grads), (expected, expected_grads) = both
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, grads, expected_grads)


@pytest.mark.parametrize("offset", [0.0, -1e6, 1e6])
def test_online_softmax_equals_two_passes(offset):
    logits = 10 * jax.random.normal(jax.random.key(0), (5, 300)) + offset
    for one, two in zip(
        loss._max_and_sum_in_one_pass(logits), loss._max_and_sum(logits), strict=True
    ):
        np.testing.assert_allclose(one, two, rtol=1e-5)


def test_logits_of_one_chunk_are_in_memory():
    tokens, d, vocab, chunk = 512, 8, 4096, 32
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((tokens, d), (d, vocab))]
    target = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    grad = jax.grad(lambda x, w, t: loss.cross_entropy(x, w, None, t, chunk, 0.0, 1.0), (0, 1))
    memory = jax.jit(grad).lower(*shapes, target).compile().memory_analysis()
    assert memory.temp_size_in_bytes < tokens * vocab * 4 / 4
