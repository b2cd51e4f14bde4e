"""The gradient with respect to sums is the sums with the gradient of the weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbench.model import linear, loss
from maxbench.model.grad_accumulation import accumulate_into

USES = {
    "add_to": lambda sums, w, x: x @ accumulate_into(sums, w),
    "linear": lambda sums, w, x: linear.linear(x, w, sums, linear.MatmulSpec(1))[0],
}


@pytest.mark.parametrize("use", USES)
def test_microbatches_add_up_without_a_gradient_of_the_weight(use):
    random = np.random.default_rng(0)
    w = jnp.asarray(random.integers(-4, 5, (3, 2)), jnp.float32)
    micro = jnp.asarray(random.integers(-4, 5, (5, 4, 3)), jnp.float32)
    loss = lambda y: jnp.sum(y**2)
    start = jnp.full(w.shape, 1000, jnp.bfloat16)  # each addition rounds to this

    def accumulate(sums, x):
        value, (grad, of_w) = jax.value_and_grad(
            lambda sums, w: loss(USES[use](sums, w, x)), (0, 1)
        )(sums, w)
        return grad, (value, of_w)

    summed, (values, of_w) = jax.jit(lambda: jax.lax.scan(accumulate, start, micro))()
    expected = start
    for x, value in zip(micro, values, strict=True):
        plain, grad = jax.value_and_grad(lambda w, x=x: loss(x @ w))(w)
        assert value == plain  # whatever the sums are
        expected = expected + grad.astype(jnp.bfloat16)
    assert summed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(summed, expected)
    assert not of_w.any()


@pytest.mark.parametrize(("dtype", "close"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("chunk", [4, 5, 16])
def test_the_loss_adds_to_the_sums_of_the_head(chunk, dtype, close):
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    x, w, sums, target = draw(10, 8), draw(8, 24), draw(8, 24), random.integers(0, 24, 10)
    ours = lambda x, w, sums: loss.cross_entropy(x, w, sums, target, chunk, 0.1, 0.5, 1 / 7)
    plain = lambda x, w: ours(x, w, None)
    value, (dx, dw, summed) = jax.value_and_grad(ours, (0, 1, 2))(x, w, sums.astype(dtype))
    expected, (dx_plain, dw_plain) = jax.value_and_grad(plain, (0, 1))(x, w)
    assert value == expected
    assert summed.dtype == dtype
    assert not dw.any()
    np.testing.assert_array_equal(dx, dx_plain)
    np.testing.assert_allclose(summed, sums + dw_plain, rtol=close, atol=close)
