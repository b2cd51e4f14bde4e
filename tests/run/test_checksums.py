"""Checksums of arrays: equal on every mesh, and different for different arrays."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbench.run.checksums import array_checksums

DTYPES = (np.float32, np.int32, np.float16, np.uint8)


@st.composite
def arrays(draw):
    """Arrays of one to three dims with few values, so that many elements are equal."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99))
    return np.random.default_rng(seed).integers(0, 3, shape).astype(dtype)


def checksum(x: np.ndarray) -> int:
    return array_checksums({"x": x})["x"]


@given(arrays(), st.data())
def test_flipped_bits_and_swapped_elements_change_the_checksum(x, data):
    bits = x.reshape(-1).view(f"u{x.itemsize}")
    index = st.integers(0, bits.size - 1)
    i, j, bit = data.draw(index), data.draw(index), data.draw(st.integers(0, 8 * x.itemsize - 1))
    flip, changed = bits.dtype.type(1 << bit), bits.copy()
    if data.draw(st.booleans()):  # flips the same bit of two elements; of one, if i == j
        changed[i] ^= flip
        changed[j] ^= flip if i != j else 0
    else:
        changed[[i, j]] = changed[[j, i]]
    equal = (changed == bits).all()
    assert (checksum(x) == checksum(changed.view(x.dtype).reshape(x.shape))) == equal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (4,), (4, 8), (4, 2, 8)])
def test_checksum_is_equal_on_devices_and_on_the_host(shape, dtype):
    x = np.arange(np.prod(shape), dtype=dtype).reshape(shape)
    mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P(*["a"][: x.ndim])))
    assert array_checksums({"x": sharded}) == {"x": checksum(x)}
    assert array_checksums({"x": jax.numpy.asarray(x)}) == {"x": checksum(x)}


def test_pairs_of_small_integers_differ():
    """Their bits overlap with those of the positions."""
    pairs = [np.array([i, j], np.int32) for i in range(16) for j in range(16)]
    assert len({*map(checksum, pairs)}) == 256
