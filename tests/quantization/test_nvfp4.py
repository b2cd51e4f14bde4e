"""NVFP4: quantization and GEMMs against numpy, and Blackwell's kernels."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxbench import quantization
from maxbench.config import number_formats
from maxbench.config.errors import UserError
from maxbench.model import grad_accumulation, linear
from maxbench.quantization import nvfp4
from maxbench.sharding import rules
from maxbench.step import data
from tests.conftest import resolve
from tests.quantization.blackwell import BLOCK_SCALED_GEMM, compiled_gemms
from tests.quantization.fp8_step import FAMILIES, build
from tests.step.test_parallelism import overlap_zero  # noqa: F401

E2M1, E4M3, FP32 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn, np.float32
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # of e2m1


def scales_of(block_amax: np.ndarray, amax: float):
    """The tensor scale, the e4m3 scales of blocks, and the factor of their elements, as the recipe
    defines them, in fp32."""
    tensor = FP32(amax) * FP32(1 / 2688) if amax else FP32(1)
    encoded = block_amax.astype(FP32) * (FP32(1) / tensor * FP32(1 / 6))
    scale = np.minimum(encoded, FP32(448)).astype(E4M3)
    decoded = scale.astype(FP32) * tensor
    factor = np.divide(FP32(1), decoded, out=np.zeros_like(decoded), where=decoded > 0)
    return tensor, scale, factor


def round_to_e2m1(y: np.ndarray, random: np.ndarray | None) -> np.ndarray:
    """y, saturated and rounded: to nearest even by ml_dtypes, or up with the probability of the
    distance from the value below."""
    y = np.clip(y, -6, 6)
    if random is None:
        return y.astype(E2M1)
    below = np.searchsorted(VALUES, np.abs(y), "right") - 1
    above = np.minimum(below + 1, len(VALUES) - 1)
    gap = np.where(above > below, VALUES[above] - VALUES[below], 1)
    up = (np.abs(y) - VALUES[below]) / gap + random >= 1
    return np.copysign(VALUES[np.where(up, above, below)], y).astype(E2M1)


def mix(x: np.ndarray) -> np.ndarray:
    """MurmurHash3's finalizer."""
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    x = (x ^ x >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return x ^ x >> np.uint32(16)


def random_of(shape: tuple[int, ...], amax: float, axis: int) -> np.ndarray:
    """Random numbers of stochastic rounding: two of 16 bits for the two elements of each byte."""
    packed = [n // 2 if i == axis % len(shape) else n for i, n in enumerate(shape)]
    seed = np.asarray([amax], FP32).view(np.uint32) + np.uint32(-axis)
    bits = mix(np.arange(math.prod(packed), dtype=np.uint32) ^ mix(seed)).reshape(packed)
    pairs = np.stack([bits & np.uint32(0xFFFF), bits >> np.uint32(16)], axis % len(shape) + 1)
    return pairs.reshape(shape) / 2.0**16


def oracle(x: np.ndarray, axis: int, stochastic: bool = False):
    """Elements, block scales, and tensor scale of x in blocks of 16 along a negative axis."""
    amax = float(np.abs(x).max())
    moved = np.moveaxis(x, axis, -1)
    blocks = moved.reshape(*moved.shape[:-1], -1, 16)
    tensor, scale, factor = scales_of(np.abs(blocks).max(-1), amax)
    y = np.moveaxis((blocks.astype(FP32) * factor[..., None]).reshape(moved.shape), -1, axis)
    random = random_of(x.shape, amax, axis) if stochastic else None
    return round_to_e2m1(y, random), np.moveaxis(scale, -1, axis), tensor


def oracle_tiles(w: np.ndarray):
    """The same in blocks of 16 x 16, of a stack of matrices with one tensor scale."""
    amax = np.abs(w).max()
    *batch, rows, columns = w.shape
    tiles = w.reshape(*batch, rows // 16, 16, columns // 16, 16)
    tensor, scale, factor = scales_of(np.abs(tiles).max((-3, -1)), amax)
    y = (tiles.astype(FP32) * factor[..., :, None, :, None]).reshape(w.shape)
    return round_to_e2m1(y, None), scale, tensor


def value(q: np.ndarray, scale: np.ndarray, tensor, axis: int) -> np.ndarray:
    """q x block scale, in float64: the tensor scale multiplies the result of a GEMM."""
    return q.astype(np.float64) * np.repeat(scale.astype(np.float64), 16, axis)


def tile_value(w: np.ndarray) -> tuple[np.ndarray, np.float32]:
    q, scale, tensor = oracle_tiles(w)
    return value(q, np.repeat(scale, 16, -2), tensor, -1), tensor


def hadamard(x: np.ndarray) -> np.ndarray:
    """Groups of 16 along the rows of x, with random signs, times the matrix whose elements are
    (-1) to the number of common bits of row and column."""
    bits = np.array([[(i & j).bit_count() for j in range(16)] for i in range(16)])
    signed = x.reshape(*x.shape[:-2], -1, 16, x.shape[-1]) * nvfp4.SIGNS[:, None]
    return bf16(np.matmul((-1.0) ** bits / 4, signed).reshape(x.shape)).astype(np.float64)


def bf16(x) -> np.ndarray:
    return np.asarray(x, ml_dtypes.bfloat16)


def unpacked(q, axis: int) -> np.ndarray:
    """e2m1 elements of bytes, of which two consecutive ones lie along an axis."""
    q = np.moveaxis(np.asarray(q), axis, -1)
    codes = np.stack([q & 0xF, q >> 4], -1).reshape(*q.shape[:-1], -1)
    return np.moveaxis(codes, -1, axis).view(E2M1)


def bits(x) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


def gradients_like(key: int, *shape: int) -> np.ndarray:
    """Values in bf16 over many binades, with blocks of zeros and an outlier."""
    random = np.random.default_rng(key)
    x = random.normal(size=shape) * 2.0 ** -random.integers(0, 24, shape)
    x[..., :16, 16:48] = 0
    x[..., 5, 7] = -50
    return bf16(x).astype(np.float64)


@pytest.mark.core
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_elements_and_scales_equal_numpy_bit_for_bit(axis, stochastic):
    """Of two experts, at several magnitudes."""
    quantize = jax.jit(functools.partial(nvfp4.quantize, dim=axis, stochastic=stochastic))
    for magnitude in (1, 2.0**-40, 2.0**30):
        x = gradients_like(0, 2, 64, 96) * magnitude
        actual = quantize(jnp.asarray(bf16(x)))
        q, scale, tensor = oracle(x, axis, stochastic)
        np.testing.assert_array_equal(np.asarray(actual.tensor_scale), tensor)
        np.testing.assert_array_equal(bits(actual.scale), bits(scale))
        np.testing.assert_array_equal(bits(unpacked(actual.q, axis)), bits(q))
        assert len(np.unique(bits(q))) == 16  # every element, and -0


def test_all_values_and_ties_round_to_nearest_even():
    exact = np.concatenate([VALUES, -VALUES])
    middle = (VALUES[1:] + VALUES[:-1]) / 2
    near = [np.nextafter(middle.astype(FP32), FP32(limit)) for limit in (0, 9)]
    y = np.concatenate([exact, middle, -middle, *near, [7, -7]]).astype(FP32)
    y = np.resize(y, 64)
    actual = jax.jit(lambda y: nvfp4._pack(y, -1))(y)
    np.testing.assert_array_equal(bits(unpacked(actual, -1)), bits(np.clip(y, -6, 6).astype(E2M1)))
    np.testing.assert_array_equal(nvfp4.unpack(actual), unpacked(actual, -1).astype(FP32))


def test_stochastic_rounding_is_unbiased_and_its_bits_are_uniform():
    x = np.full((512, 256), 2.6)
    x[:, ::16] = 6  # makes the scale of each block 1, once divided by the tensor scale
    quantized = jax.jit(lambda x: nvfp4.quantize(x, -1, True))(jnp.asarray(bf16(x)))
    rounded = value(unpacked(quantized.q, -1), np.asarray(quantized.scale), 1, -1)
    rounded *= float(quantized.tensor_scale)
    below, above = np.unique(np.round(rounded[:, 1], 5))
    assert (below, above) == pytest.approx((2, 3), rel=1e-5)
    sigma = 0.5 / math.sqrt(x.size * 15 / 16)
    rest = np.delete(rounded, np.s_[::16], 1)
    assert abs(rest.mean() - float(bf16(2.6))) < 4 * sigma
    random = np.stack(nvfp4.random_bits(jnp.uint32(7), (1 << 16,))) / 2.0**16
    assert abs(np.corrcoef(random)[0, 1]) < 0.02
    counts = np.histogram(random, 64, (0, 1))[0]
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 64 + 5 * math.sqrt(128)


def test_hadamard_transform_equals_numpy_and_cancels_in_the_product():
    x, y = (np.random.default_rng(i).integers(-99, 99, (2, 64, 96)) for i in range(2))
    rotated = jax.jit(nvfp4.hadamard)(jnp.asarray(bf16(x)))
    np.testing.assert_array_equal(np.asarray(rotated).astype(np.float64), hadamard(x))
    fp32 = [jax.jit(nvfp4.hadamard)(jnp.asarray(a, jnp.float32)) for a in (x, y)]
    product = np.matmul(np.swapaxes(fp32[0], -1, -2), fp32[1])
    np.testing.assert_allclose(product, np.swapaxes(x, -1, -2) @ y, atol=1)


def test_weight_operands_have_the_same_values():
    """Of stacked layers, with one scale for each."""
    w = gradients_like(2, 4, 32, 96).reshape(4, 32, 2, 48)  # layers, ins, outs
    sharding = rules.WeightSharding((), ((),) * 4, (), rules.GemmDims(0, 1))

    @jax.jit
    def quantize(w):
        args = nvfp4.Nvfp4(), (sharding,), (w,)
        return quantization.weights(*args, quantization.scales(*args, True)[0], True)[0]

    weight = quantize(jnp.asarray(bf16(w)))
    assert weight.shape == w.shape
    dgrad, fprop = weight.dgrad_operand, weight.fprop_operand
    for i, layer in enumerate(w):
        q, scale, tensor = oracle_tiles(layer.reshape(32, 96))
        assert dgrad.tensor_scale[i] == fprop.tensor_scale[i] == tensor
        actual = unpacked(dgrad.q[i], -1).reshape(32, 96)
        np.testing.assert_array_equal(bits(actual), bits(q))
        np.testing.assert_array_equal(bits(unpacked(fprop.q[i], -1)), bits(q).T)
        np.testing.assert_array_equal(bits(dgrad.scale[i]), np.repeat(bits(scale), 16, 0))
        np.testing.assert_array_equal(bits(fprop.scale[i]), np.repeat(bits(scale).T, 16, 0))


@pytest.mark.parametrize("gpus", [4, 16], ids=["whole blocks", "blocks that are cut"])
def test_weights_are_the_same_on_every_mesh(gpus):
    """Quantized before the all-gather, or after it where a GPU has 8 of 16 rows."""
    w, dims = jnp.asarray(bf16(gradients_like(3, 128, 96))), rules.GemmDims(0, 1)

    def quantize(w, zero1):
        sharding = rules.WeightSharding(((), ()), (zero1, ()), (), dims)
        args = nvfp4.Nvfp4(), (sharding,), (w,)
        return quantization.weights(*args, quantization.scales(*args, False)[0], False)[0]

    mesh = jax.make_mesh((gpus,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = dict(in_specs=P("dp"), out_specs=P(), check_vma=False)
    share = jax.shard_map(lambda w: quantize(w, ("dp",)), mesh=mesh, **specs)
    single, sharded = jax.jit(lambda w: quantize(w, ()))(w), jax.jit(share)(w)
    for expected, actual in zip(*map(jax.tree.leaves, (single, sharded)), strict=True):
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))
    gathered = re.findall(r"= (\w+)\[.* all-gather\(", jax.jit(share).lower(w).as_text("hlo"))
    assert {*gathered} == ({"u8", "f8e4m3fn"} if gpus == 4 else {"bf16"})


@pytest.mark.core
@pytest.mark.parametrize(
    "experts",
    [
        pytest.param((), id="linear"),
        pytest.param((3,), id="experts", marks=pytest.mark.exhaustive),
    ],
)
def test_fprop_dgrad_and_wgrad_equal_numpy(experts):
    """Sums are exact in fp32: operands have few bits, and the scales of blocks few binades."""
    random = np.random.default_rng(0)
    sizes = (64, 64), (64, 96), (64, 96)
    x, w, dy = (random.integers(-9, 10, (*experts, *dims)).astype(np.float64) for dims in sizes)
    gemm = linear.MatmulSpec(2, len(experts))
    matrices = jnp.asarray(bf16(w.reshape(*experts, 4, 16, 2, 48)))
    sharding = rules.WeightSharding((), ((),) * matrices.ndim, (), rules.GemmDims(len(experts), 2))
    arithmetic = nvfp4.Nvfp4()
    scales, _ = quantization.scales(arithmetic, (sharding,), (matrices,), False)
    (weight,) = quantization.weights(arithmetic, (sharding,), (matrices,), scales, False)
    sums = jax.tree.map(lambda x: x + 512, grad_accumulation.zeros(weight, jnp.bfloat16))
    rows = (3, 64) if experts else (2, 32)
    call = lambda x, sums: linear.linear(x, weight, sums, gemm)[0]

    @jax.jit
    def step(x, dy):
        y, vjp = jax.vjp(call, x, sums)
        return y, *vjp(dy)

    inputs = x.reshape(*rows, 4, 16), dy.reshape(*rows, 2, 48)
    y, dx, dw = step(*(jnp.asarray(bf16(a)) for a in inputs))

    def operand(x, axis, stochastic=False):
        q, scale, tensor = oracle(x, axis, stochastic)
        return value(q, scale, tensor, axis), tensor

    def product(a, b):
        result = bf16((a[0] @ b[0]).astype(FP32)).astype(FP32)
        return bf16(result * (a[1] * b[1]))

    transposed = lambda a: (a[0].swapaxes(-1, -2), a[1])
    weights = tile_value(w)
    grads = product(transposed(operand(hadamard(x), -2)), operand(hadamard(dy), -2, True))
    expected = {
        "y": (y, product(operand(x, -1), weights)),
        "dx": (dx, product(operand(dy, -1, True), transposed(weights))),
        "dw": (dw, bf16(512 + grads.astype(FP32))),
    }
    for name, (actual, right) in expected.items():
        assert actual.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(actual).reshape(right.shape), right, name)


@pytest.mark.exhaustive
def test_zeros_stay_zero_and_nan_and_inf_are_not_hidden():
    zeros = nvfp4.quantize(jnp.zeros((32, 64), jnp.bfloat16), -1, True)
    ones = nvfp4.quantize(jnp.ones((32, 64), jnp.bfloat16), -1)
    assert not nvfp4.gemm(zeros, ones, "nt").any()
    for bad in (jnp.nan, jnp.inf):
        quantized = nvfp4.quantize(jnp.ones((32, 64), jnp.bfloat16).at[0, 0].set(bad), -1)
        assert not jnp.isfinite(nvfp4.gemm(quantized, ones, "nt")[0]).any()


@functools.cache
def losses(family: str, dtype: str, **axes) -> np.ndarray:
    """Losses of three steps of a toy."""
    fast = {"optim.warmup": 2.0, "optim.lr": 3e-3, "train.data": "uniform"}
    step = build(FAMILIES[family], dtype, fast, gpu_type="b200", **axes)
    compiled, state, values = step.lower().compile(), step.init(), []
    batches = data.Synthetic(step.run, step.mesh)
    for _ in range(3):
        state, out = compiled(state, next(batches))
        values.append(float(out["loss"]))
    return np.array(values)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("llama", dict(pp=2, vp=2, fsdp=2, tp=2, mbs=1)),
        ("llama", dict(dp=2, cp=2, mbs=1)),
        ("grok", dict(ep=2, mbs=1)),
    ],
    ids=str,
)
def test_toys_train_as_in_bf16_on_every_mesh(family, axes):
    """Each GPU scales its own part of an activation, so every mesh rounds differently."""
    single, mesh = losses(family, "nvfp4"), losses(family, "nvfp4", **axes)
    bf16 = losses(family, "bf16")
    assert (single != bf16).any()
    assert (mesh != single).any()
    np.testing.assert_allclose(single, bf16, rtol=2e-3)
    np.testing.assert_allclose(mesh, bf16, rtol=2e-3)


@pytest.mark.core
@pytest.mark.gpu_compile
def test_blackwell_runs_block_scaled_gemms_on_packed_operands():
    """fprop, dgrad and wgrad read the bytes without a conversion; other GPU types refuse NVFP4."""

    def products(x, w, dy):
        row, col = (functools.partial(nvfp4.quantize, dim=dim) for dim in (-1, -2))
        x_col, dy_col = col(nvfp4.hadamard(x)), col(nvfp4.hadamard(dy), stochastic=True)
        operands = (row(x), row(w.T), "nt"), (row(dy), row(w), "nt"), (x_col, dy_col, "tn")
        return tuple(nvfp4.gemm(*args) for args in operands)

    text = compiled_gemms(products, "b200")
    assert text.count(BLOCK_SCALED_GEMM) == 3
    assert "convert(f4e2m1fn" not in text


def test_unsupported_gpus_backends_and_dims_are_refused():
    use = functools.partial(resolve, "llama31_8b", "tiny", dtype="nvfp4", gpu_type="b200", fsdp=2)
    assert use().format.name == "nvfp4"
    with pytest.raises(UserError, match=r"only b200, .*; use dtype=bf16 or fp32 or fp8"):
        number_formats.resolve_format("nvfp4", "auto", "h100")
    with pytest.raises(UserError, match=r"backend='te'.*use precision.backend=xla"):
        use({"precision.backend": "te"})
    with pytest.raises(UserError, match=r"multiples of 32.*train.seq=96.*nearest that works: 128"):
        use(tp=4, seq=96, fsdp=1)
