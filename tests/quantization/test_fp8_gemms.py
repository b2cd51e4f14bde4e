"""FP8 GEMMs and their gradients, against numpy."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxbench import quantization
from maxbench.config.number_formats import SCALINGS
from maxbench.model import grad_accumulation, linear
from maxbench.quantization import fp8_per_tensor, mxfp8
from maxbench.sharding import rules

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
ARITHMETICS = {
    "current": fp8_per_tensor.PerTensor(False),
    "delayed": fp8_per_tensor.PerTensor(True),
    "mxfp8": mxfp8.Mxfp8(),
}


def round_per_tensor(x: np.ndarray, dtype, amax: float = 0) -> np.ndarray:
    """x after rounding to FP8 with one scale, from amax or its own."""
    top = float(ml_dtypes.finfo(dtype).max)
    scale = 2.0 ** np.ceil(np.log2((amax or np.abs(x).max()) / top))
    return np.clip(x / scale, -top, top).astype(dtype).astype(np.float64) * scale


def round_in_blocks(x: np.ndarray, dtype, axis: int) -> np.ndarray:
    """x after rounding to MXFP8 in blocks of 32 along an axis."""
    x = np.moveaxis(x, axis, -1)
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    ratio = np.abs(blocks).max(-1, keepdims=True) / float(ml_dtypes.finfo(dtype).max)
    scale = 2.0 ** np.ceil(np.log2(np.where(ratio > 0, ratio, 1)))
    rounded = (blocks / scale).astype(dtype).astype(np.float64) * scale
    return np.moveaxis(rounded.reshape(x.shape), -1, axis)


def integers(key: int, *shape: int) -> np.ndarray:
    """Random integers of up to six bits: FP8 rounds the large ones, and fp32 sums are exact."""
    return np.random.default_rng(key).integers(-60, 61, shape).astype(np.float64)


def quantize_weight(w, gemm: linear.MatmulSpec, scaling="current", past=None):
    """The quantization.Weight of w on one GPU."""
    dims = rules.GemmDims(gemm.batch, gemm.ins)
    sharding = rules.WeightSharding(((),) * w.ndim, ((),) * w.ndim, (), dims)
    if past is not None:
        past = jnp.asarray(past, jnp.float32)
    arithmetic = ARITHMETICS[scaling]
    scales, _ = quantization.scales(arithmetic, (sharding,), (w,), False, past)
    (weight,) = quantization.weights(arithmetic, (sharding,), (w,), scales, False)
    return weight


def add_outlier_lines(x, w, dy):
    """Multiplies some rows and columns by 2^13, so that blocks along rows and along columns round
    differently. The GEMMs multiply them with zeros, which keeps their sums exact."""
    x[..., 5, :] *= 2**13
    dy[..., 5, :] = 0
    dy[..., 15, :] *= 2**13
    x[..., 15, :] = 0
    x[..., 11] *= 2**13
    w[..., 11, :] = 0
    w[..., 7, :] *= 2**13
    x[..., 7] = 0
    w[..., 9] *= 2**13
    dy[..., 9] = 0
    dy[..., 13] *= 2**13
    w[..., 13] = 0


# Past amax of x, dy and w. Their amax in the test is 60: e4m3 operands saturate, e5m2 ones do not.
PAST = {"x": 31.0, "dy": 40.0, "w": 20.0}


@pytest.mark.core
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(
    "experts",
    [
        pytest.param((), id="linear"),
        pytest.param((3,), id="experts", marks=pytest.mark.exhaustive),
    ],
)
def test_fprop_dgrad_and_wgrad_equal_numpy(experts, scaling):
    x, w, dy = (
        integers(i, *experts, *dims) for i, dims in enumerate(((64, 64), (64, 96), (64, 96)))
    )
    if scaling == "mxfp8":
        add_outlier_lines(x, w, dy)
    bf16 = lambda a: jnp.asarray(a, jnp.bfloat16)
    gemm = linear.MatmulSpec(2, len(experts))
    past = [[[*PAST.values()]]] if scaling == "delayed" else None
    weight = quantize_weight(bf16(w.reshape(*experts, 4, 16, 2, 48)), gemm, scaling, past)
    sums = jax.tree.map(lambda x: x + 512, grad_accumulation.zeros(weight, jnp.bfloat16))
    rows = (3, 64) if experts else (2, 32)
    call = lambda x, sums: linear.linear(x, weight, sums, gemm)[0]
    y, vjp = jax.vjp(call, bf16(x.reshape(*rows, 4, 16)), sums)
    dx, sums = vjp(bf16(dy.reshape(*rows, 2, 48)))
    if scaling == "mxfp8":
        (x_row, x_col), (w_row, w_col), (dy_row, dy_col) = (
            [round_in_blocks(a, E4M3, axis) for axis in (-1, -2)] for a in (x, w, dy)
        )
        assert not np.array_equal(x_row, x_col)
    else:
        amax = PAST if past else dict.fromkeys(PAST, 0)
        x_row = x_col = round_per_tensor(x, E4M3, amax["x"])
        w_row = w_col = round_per_tensor(w, E4M3, amax["w"])
        dy_row = dy_col = round_per_tensor(dy, E5M2, amax["dy"])
        assert not np.array_equal(dy_row, round_per_tensor(dy, E4M3))
    assert not np.array_equal(x_row, x)
    if past:
        assert np.abs(x_row).max() == 56  # saturated: 448 / 8
        np.testing.assert_array_equal(sums.amax, 512)
        sums = sums.grad
    transpose = lambda a: a.swapaxes(-1, -2)
    for name, actual, expected in (
        ("y", y, x_row @ w_col),
        ("dx", dx, dy_row @ transpose(w_row)),
        ("dw", sums, transpose(x_col) @ dy_col),
    ):
        shape, expected = expected.shape, expected.astype(ml_dtypes.bfloat16)
        if name == "dw":
            expected = (expected.astype(float) + 512).astype(ml_dtypes.bfloat16)
        assert actual.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(actual).reshape(shape), expected, name)


def test_amax_of_a_step_is_the_maximum_over_microbatches():
    gemm = linear.MatmulSpec(1)
    w = quantize_weight(jnp.ones((16, 16), jnp.bfloat16), gemm, "delayed", [[[1.0, 1.0, 1.0]]])
    amaxes = jnp.array([[2.0, 0.5], [8.0, 0.25], [4.0, 3.0], [1.0, 0.125]], jnp.bfloat16)

    def micro(sums, amax):
        x, dy = (jnp.zeros((16, 16), jnp.bfloat16).at[3, 5].set(-a) for a in amax)
        call = jax.checkpoint(lambda sums: linear.linear(x, w, sums, gemm)[0])
        return jax.vjp(call, sums)[1](dy)[0], None

    sums, _ = jax.lax.scan(micro, grad_accumulation.zeros(w, jnp.bfloat16), amaxes)
    np.testing.assert_array_equal(sums.amax, [8, 3])


@pytest.mark.parametrize("amax", [1.0, 448.0, 449.0, 3e-30, 2e38, 57344.0])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scale_is_the_smallest_power_of_two_that_fits(amax, dtype):
    x = jnp.asarray([0.1 * amax, -amax], jnp.bfloat16)
    scale = fp8_per_tensor.scale_of(x, dtype)
    assert math.frexp(float(scale))[0] == 0.5
    assert 0.5 < float(abs(x[1])) / float(scale) / float(ml_dtypes.finfo(dtype).max) <= 1
    q = fp8_per_tensor.quantize(x, scale, dtype)
    error = np.asarray(fp8_per_tensor.dequantize(q, scale, x.dtype), float) / np.asarray(x, float)
    assert np.abs(error - 1).max() <= 1 / 8


def test_zeros_stay_zero_and_nan_and_inf_become_nan():
    def dot(x, w):
        gemm = linear.MatmulSpec(1)
        return linear.linear(x, quantize_weight(w, gemm), jnp.zeros_like(w), gemm)[0]

    w = jnp.ones((16, 16), jnp.bfloat16)
    assert not dot(jnp.zeros((16, 16), jnp.bfloat16), w).any()
    for bad in (jnp.nan, jnp.inf):
        assert jnp.isnan(dot(w.at[0, 0].set(bad), w)[0]).all()


def test_without_an_accumulator_the_weight_has_the_gradient():
    x, w = integers(0, 8, 16), integers(1, 16, 4)
    call = lambda w: linear.linear(jnp.asarray(x), w, None, linear.MatmulSpec(1))[0].sum()
    np.testing.assert_array_equal(jax.grad(call)(jnp.asarray(w))[:, 0], x.sum(0))
