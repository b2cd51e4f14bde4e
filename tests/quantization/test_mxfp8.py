"""MXFP8: quantization and GEMMs against numpy, and Blackwell's kernels."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxbench.quantization import block_scaled, mxfp8
from tests.quantization.blackwell import BLOCK_SCALED_GEMM, compiled_gemms

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def rounded(x: np.ndarray, dtype, axis: int) -> np.ndarray:
    """x after rounding to MXFP8 in blocks of 32 along an axis."""
    x = np.moveaxis(x, axis, -1)
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    ratio = np.abs(blocks).max(-1, keepdims=True) / float(ml_dtypes.finfo(dtype).max)
    scale = 2.0 ** np.ceil(np.log2(np.where(ratio > 0, ratio, 1)))
    values = (blocks / scale).astype(dtype).astype(np.float64) * scale
    return np.moveaxis(values.reshape(x.shape), -1, axis)


def integers(key: int, *shape: int) -> np.ndarray:
    """Random multiples of 1/16 of up to six bits, smaller in some rows: fp32 sums are exact."""
    random = np.random.default_rng(key)
    return random.integers(-60, 61, shape) // 2.0 ** random.integers(0, 5, (*shape[:-1], 1))


def products(x, w, dy):
    """y = x w, dx and dw."""
    row, col = (lambda a, dim=dim: mxfp8.quantize(a, E4M3, dim) for dim in (-1, -2))
    return (
        mxfp8.gemm(row(x), block_scaled.transpose(col(w)), "nt"),
        mxfp8.gemm(row(dy), row(w), "nt"),
        mxfp8.gemm(col(x), col(dy), "tn"),
    )


def bf16(x):
    return jnp.asarray(x, jnp.bfloat16)


@pytest.mark.parametrize("experts", [(), (3,)], ids=["linear", "experts"])
def test_fprop_dgrad_and_wgrad_equal_numpy(experts):
    x, w, dy = (
        integers(0, *experts, 64, 96),
        integers(1, *experts, 96, 32),
        integers(2, *experts, 64, 32),
    )

    @jax.jit
    def step(x, w, dy):
        return products(x, w, dy)

    transpose = lambda a: a.swapaxes(-1, -2)
    row, col = lambda a: rounded(a, E4M3, -1), lambda a: rounded(a, E4M3, -2)
    assert not np.array_equal(row(x), x)
    expected = row(x) @ col(w), row(dy) @ transpose(row(w)), transpose(col(x)) @ col(dy)
    for actual, right in zip(step(bf16(x), bf16(w), bf16(dy)), expected, strict=True):
        assert actual.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(actual), right.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("amax", [1.0, 448.0, 449.0, 3e-27, 2e38])
def test_quantized_values_equal_numpy(amax, dtype):
    random = np.random.default_rng(0)
    x = random.uniform(-amax, amax, (64, 96)) * 2.0 ** -random.integers(0, 24, (64, 96))
    x[0, 0], x[:32, 32:64] = amax, 0
    x = np.asarray(bf16(x)).astype(np.float64)
    expected = rounded(x, dtype, 0), rounded(x, dtype, 1)
    assert not np.array_equal(*expected)  # blocks along rows and along columns round differently
    for dim, values in enumerate(expected):
        quantized = mxfp8.quantize(bf16(x), dtype, dim)
        scale = np.asarray(quantized.scale).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        q = np.asarray(quantized.q).astype(np.float64)
        np.testing.assert_array_equal(q * np.repeat(scale, 32, dim), values)


def test_nan_and_inf_become_nan_in_their_block_only():
    x = jnp.ones((32, 64), jnp.bfloat16)
    for bad in (jnp.nan, jnp.inf):
        quantized = mxfp8.quantize(x.at[0, 0].set(bad), E4M3, 1)
        y = mxfp8.gemm(quantized, mxfp8.quantize(x, E4M3, 1), "nt")
        assert jnp.isnan(y[0]).all()
        assert jnp.isfinite(y[1:]).all()


@pytest.mark.core
@pytest.mark.gpu_compile
def test_blackwell_runs_block_scaled_gemms_in_shard_map():
    """fprop, dgrad and wgrad. Other GPU types refuse precision.scaling=mxfp8."""
    assert compiled_gemms(products, "gb200").count(BLOCK_SCALED_GEMM) == 3
