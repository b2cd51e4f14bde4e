"""Fingerprints of arrays: the same wherever the array lies, and others when it is another."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbench.run import checkpoint

DTYPES = (np.float32, np.int32, np.float16, np.uint8)


@st.composite
def arrays(draw):
    """Few values, so that many elements are the same; one to three dimensions."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99))
    return np.random.default_rng(seed).integers(0, 3, shape).astype(dtype)


def fingerprint(x: np.ndarray) -> int:
    return checkpoint.array_checksums({"x": x})["x"]


@given(arrays(), st.data())
def test_bits_that_change_and_elements_that_change_places_are_seen(x, data):
    bits = x.reshape(-1).view(f"u{x.itemsize}")
    some = st.integers(0, bits.size - 1)
    i, j, bit = data.draw(some), data.draw(some), data.draw(st.integers(0, 8 * x.itemsize - 1))
    flip, changed = bits.dtype.type(1 << bit), bits.copy()
    if data.draw(st.booleans()):  # the same bit of two; two changes of one would be none
        changed[i] ^= flip
        changed[j] ^= flip if i != j else 0
    else:
        changed[[i, j]] = changed[[j, i]]
    same = (changed == bits).all()
    assert (fingerprint(x) == fingerprint(changed.view(x.dtype).reshape(x.shape))) == same


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (4,), (4, 8), (4, 2, 8)])
def test_on_a_mesh_as_on_a_host(shape, dtype):
    x = np.arange(np.prod(shape), dtype=dtype).reshape(shape)
    mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.device_put(x, jax.NamedSharding(mesh, jax.P(*["a"][: x.ndim])))
    assert checkpoint.array_checksums({"x": spread}) == {"x": fingerprint(x)}
    assert checkpoint.array_checksums({"x": jax.numpy.asarray(x)}) == {"x": fingerprint(x)}


def test_small_numbers_side_by_side():
    """Their bits are those of their places, too."""
    pairs = [np.array([i, j], np.int32) for i in range(16) for j in range(16)]
    assert len({*map(fingerprint, pairs)}) == 256
