"""The gradient with respect to an accumulator is the accumulator plus that of the weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbench.model import linear, loss
from maxbench.model.grad_accumulation import accumulate_into

USES = {
    "accumulate_into": lambda sums, w, x: x @ accumulate_into(sums, w),
    "linear": lambda sums, w, x: linear.linear(x, w, sums, linear.MatmulSpec(1))[0],
}


@pytest.mark.parametrize("use", USES)
def test_microbatches_accumulate_and_the_weight_has_no_gradient(use):
    random = np.random.default_rng(0)
    w = jnp.asarray(random.integers(-4, 5, (3, 2)), jnp.float32)
    micro = jnp.asarray(random.integers(-4, 5, (5, 4, 3)), jnp.float32)
    loss = lambda y: jnp.sum(y**2)
    start = jnp.full(w.shape, 1000, jnp.bfloat16)  # so that each addition rounds

    def accumulate(sums, x):
        value, (sums, dw) = jax.value_and_grad(lambda sums, w: loss(USES[use](sums, w, x)), (0, 1))(
            sums, w
        )
        return sums, (value, dw)

    sums, (values, dws) = jax.jit(lambda: jax.lax.scan(accumulate, start, micro))()
    expected = start
    for x, value in zip(micro, values, strict=True):
        expected_value, grad = jax.value_and_grad(lambda w, x=x: loss(x @ w))(w)
        assert value == expected_value  # it does not depend on the accumulator
        expected = expected + grad.astype(jnp.bfloat16)
    assert sums.dtype == jnp.bfloat16
    np.testing.assert_array_equal(sums, expected)
    assert not dws.any()


@pytest.mark.parametrize(("dtype", "close"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("chunk", [4, 5, 16])
def test_cross_entropy_accumulates_the_gradient_of_the_head(chunk, dtype, close):
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    x, w, sums, target = draw(10, 8), draw(8, 24), draw(8, 24), random.integers(0, 24, 10)
    accumulating = lambda x, w, sums: loss.cross_entropy(x, w, sums, target, chunk, 0.1, 0.5, 1 / 7)
    plain = lambda x, w: accumulating(x, w, None)
    grads = jax.value_and_grad(accumulating, (0, 1, 2))
    value, (dx, dw, new_sums) = grads(x, w, sums.astype(dtype))
    expected, (dx_plain, dw_plain) = jax.value_and_grad(plain, (0, 1))(x, w)
    assert value == expected
    assert new_sums.dtype == dtype
    assert not dw.any()
    np.testing.assert_array_equal(dx, dx_plain)
    np.testing.assert_allclose(new_sums, sums + dw_plain, rtol=close, atol=close)
