"""Tokens order and change no value, also of arrays with infinities and NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxbench.model import linear
from maxbench.sharding import mesh, ordering
from tests.conftest import layout

NOT_FINITE = (jnp.inf, -jnp.inf, jnp.nan)


@pytest.mark.parametrize("first", NOT_FINITE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_a_token_of_any_value_is_zero(dtype, first):
    x = jnp.full((2, 3), first, dtype)
    values = jnp.array([1.5, -2, jnp.inf, jnp.nan], jnp.float32)

    @jax.jit
    def ordered(x, values):
        t = ordering.token({"x": x, "y": x.astype(jnp.float32)})
        return ordering.after(values, t), ordering.index_after(7, x), ordering.index_token(x), t

    after, index, zero, t = ordered(x, values)
    np.testing.assert_array_equal(
        np.asarray(after).view("uint32"), np.asarray(values).view("uint32")
    )
    assert (index, zero, t) == (7, 0, 0)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_a_token_of_integers_is_zero(dtype):
    for value in (0, 1, np.iinfo(dtype).max if dtype != "bool" else 1):
        assert jax.jit(ordering.token)(jnp.full(3, value, dtype)) == 0


@pytest.mark.parametrize("sequence", ["gather", "scatter"])
def test_an_infinity_reaches_no_value_by_an_order(sequence):
    """A GEMM and its gradients over tp, ordered and not, with an infinity where tokens are taken:
    in the first row of x, and of the gradient of y."""
    devices = mesh.make_mesh(layout(tp=2), jax.devices()[:2])
    spec = linear.MatmulSpec(1, sequence=sequence)
    x, w = (jax.random.normal(key, (8, 8)) for key in jax.random.split(jax.random.key(0)))
    x, dy = x.at[0, 0].set(jnp.inf), jnp.ones((8, 8)).at[0, 0].set(jnp.inf)
    rows, columns = P("tp", None), P(None, "tp")
    gathers = sequence == "gather"
    specs = (rows, columns, columns) if gathers else (columns, rows, rows)

    def gradients(x, w, dy):
        order = linear.CommOrder(jnp.zeros(3), jnp.zeros(()))
        y, vjp = jax.vjp(lambda x, w: linear.linear(x, w, None, spec, order)[0], x, w)
        return y, *vjp(dy)

    results = []
    for on in (True, False):
        with ordering.enabled(on):
            step = jax.shard_map(
                gradients, mesh=devices, in_specs=specs, out_specs=(specs[2], *specs[:2]),
                check_vma=False,
            )  # fmt: skip
            results.append(jax.jit(step)(x, w, dy))
    for ordered, plain in zip(*results, strict=True):
        assert np.isfinite(plain).any()
        np.testing.assert_array_equal(ordered, plain)
