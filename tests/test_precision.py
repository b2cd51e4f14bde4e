"""FP8: one product against arithmetic in numpy, whole steps against bf16, and the programs."""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxbench import artifact, hlo, mesh, precision
from maxbench.config import FP8_MULTIPLE, Precision
from maxbench.costs import GEMM
from maxbench.step import Step
from tests.conftest import resolve
from tests.test_parallelism import gradients
from tests.test_plan import compiler, planned

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
FAMILIES = {"llama": "llama31_405b", "nemotron": "nemotron4_340b", "grok": "grok1_314b"}


# One product.


def rounded(x: np.ndarray, dtype) -> np.ndarray:
    """x as FP8 holds it, by its own largest magnitude: the oracle."""
    top = np.abs(x).max() / float(ml_dtypes.finfo(dtype).max)
    scale = 2.0 ** np.ceil(np.log2(top))
    return (x / scale).astype(dtype).astype(np.float64) * scale


def integers(key: int, *shape: int) -> np.ndarray:
    """Of up to six bits: FP8 has to round the large ones, and every sum of products is exact."""
    return np.random.default_rng(key).integers(-60, 61, shape).astype(np.float64)


HOW = {scaling: Precision(backend="xla", scaling=scaling) for scaling in FP8_MULTIPLE}


def quantized(w, gemm: precision.Gemm, scaling="current", past=None) -> precision.Fp8Weight:
    """A weight as step makes it, alone on its GPU."""
    name = "out" if gemm.ins == 2 else "up"
    path = {name: w if gemm.batch else {"w": w}}
    place = mesh.Place((None,) * w.ndim, ((),) * w.ndim, ())
    places = jax.tree.map(lambda _: place, path)
    if past is not None:
        past = jnp.asarray(past, jnp.float32)
    made, _ = precision.fp8_weights(places, path, False, HOW[scaling], past)
    (weight,) = jax.tree.leaves(made, is_leaf=lambda x: isinstance(x, precision.Fp8Weight))
    return weight


@pytest.mark.parametrize("experts", [(), (3,)], ids=["linear", "experts"])
def test_a_product_and_its_gradients_are_the_oracles(experts):
    x, w, dy = (
        integers(0, *experts, 2, 32, 4, 16),
        integers(1, *experts, 4, 16, 2, 48),
        integers(2, *experts, 2, 32, 2, 48),
    )
    if experts:  # rows of one dim
        x, dy = x.reshape(3, 64, 4, 16), dy.reshape(3, 64, 2, 48)
    bf16 = lambda a: jnp.asarray(a, jnp.bfloat16)
    gemm = precision.Gemm(2, len(experts))
    sums = bf16(np.full(w.shape, 512.0))
    call = lambda x, sums: precision.linear(x, quantized(bf16(w), gemm), sums, gemm)
    y, vjp = jax.vjp(call, bf16(x), sums)
    dx, summed = vjp(bf16(dy))
    x8, w8, dy8 = rounded(x, E4M3), rounded(w, E4M3), rounded(dy, E5M2)
    assert not np.array_equal(x8, x)
    assert not np.array_equal(dy8, rounded(dy, E4M3))
    rows = "...tnf" if experts else "btnf"
    x_rows = rows.replace("nf", "dk")
    weight = "...dknf" if experts else "dknf"
    for ours, text, a, b in (
        (y, f"{x_rows},{weight}->{rows}", x8, w8),
        (dx, f"{rows},{weight}->{x_rows}", dy8, w8),
        (summed, f"{x_rows},{rows}->{weight}", x8, dy8),
    ):
        expected = np.einsum(text, a, b).astype(ml_dtypes.bfloat16)
        if ours is summed:
            expected = (expected.astype(float) + 512).astype(ml_dtypes.bfloat16)
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(ours), expected, err_msg=text)


@pytest.mark.parametrize("largest", [1.0, 448.0, 449.0, 3e-30, 2e38, 57344.0])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scales_are_powers_of_two_that_fit(largest, dtype):
    x = jnp.asarray([0.1 * largest, -largest], jnp.bfloat16)
    scale = precision.scale_of(x, dtype)
    assert math.frexp(float(scale))[0] == 0.5
    within = float(abs(x[1])) / float(scale) / float(ml_dtypes.finfo(dtype).max)
    assert 0.5 < within <= 1
    back = precision.dequantize(precision.quantize(x, scale, dtype), scale, x.dtype)
    assert np.abs(np.asarray(back, float) / np.asarray(x, float) - 1).max() <= 1 / 8


def test_zeros_stay_zeros_and_what_is_no_number_stays_none():
    def dot(x, w):
        gemm = precision.Gemm(1)
        return precision.linear(x, quantized(w, gemm), jnp.zeros_like(w), gemm)

    w = jnp.ones((16, 16), jnp.bfloat16)
    assert not dot(jnp.zeros((16, 16), jnp.bfloat16), w).any()
    for bad in (jnp.nan, jnp.inf):
        assert jnp.isnan(dot(w.at[0, 0].set(bad), w)[0]).all()


def test_without_sums_the_gradient_is_that_of_the_weight():
    x, w = integers(0, 8, 16), integers(1, 16, 4)
    call = lambda w: precision.linear(jnp.asarray(x), w, None, precision.Gemm(1)).sum()
    np.testing.assert_array_equal(jax.grad(call)(jnp.asarray(w))[:, 0], x.sum(0))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_only_the_table_is_fp8(family):
    """The weights that a step quantizes: of attention, MLP and experts, never of the router."""
    step = build(FAMILIES[family])
    layers = jax.tree.map(lambda x: jnp.zeros(x.shape), step.abstract["params"]["layers"])
    made, _ = precision.fp8_weights(step.places["layers"], layers, True, HOW["current"])
    paths = jax.tree_util.tree_leaves_with_path(
        made, is_leaf=lambda x: isinstance(x, precision.Fp8Weight)
    )
    fp8 = {jax.tree_util.keystr(p) for p, x in paths if isinstance(x, precision.Fp8Weight)}
    w = "" if family == "grok" else "['w']"
    mlp = {f"['mlp']['{name}']{w}" for name in ("up", "down")}
    assert fp8 == {"['attn']['qkv']['w']", "['attn']['out']['w']"} | mlp


# Whole steps.


def build(workload: str, dtype: str = "fp8", overrides: dict | None = None, **flags) -> Step:
    data = math.prod(flags.get(a, 1) for a in mesh.DATA)
    flags = {"gbs": 8, "seq": 64, "layers": 4, "mbs": 8 // data} | flags
    overrides = {"model.capacity_factor": 0.0} | (overrides or {})
    run = resolve(workload, "tiny", overrides, dtype=dtype, **flags)
    return Step(run, mesh.make_mesh(run.layout))


def losses(step: Step, steps: int) -> np.ndarray:
    call, state, found = step.lower().compile(), step.init(), []
    for _ in range(steps):
        state, out = call(state)
        found.append(float(out["loss"]))
    return np.array(found)


FAST = {"optim.warmup": 2.0, "optim.lr": 3e-3}


@functools.cache
def trained(workload: str, dtype: str) -> np.ndarray:
    return losses(build(workload, dtype, FAST), 8)


@pytest.mark.parametrize("workload", ["llama2_70b", *FAMILIES.values()])  # two policies of Llama
def test_every_family_trains_as_in_bf16(workload):
    fp8, bf16 = trained(workload, "fp8"), trained(workload, "bf16")
    assert (fp8 != bf16).any()
    assert np.isfinite(fp8).all()
    # Grok's choice of experts is discrete: a rounding may send a token elsewhere.
    np.testing.assert_allclose(fp8, bf16, rtol=5e-3 if workload == "grok1_314b" else 2e-3)


@functools.cache
def reference(family: str):
    """Weights, FP8 gradients and loss on one device, and how far off bf16's gradients are."""
    step = build(FAMILIES[family])
    params = jax.device_get(step.init()["params"])
    grads, out = gradients(step, params)
    bf16, _ = gradients(build(FAMILIES[family], "bf16"), params)
    return params, grads, out["loss"], distance(grads, bf16)


def distance(ours, theirs) -> float:
    """The largest distance between two gradients of a weight, relative to its length."""
    length = lambda x: np.linalg.norm(np.asarray(x, np.float64).ravel())
    apart = jax.tree.map(lambda a, b: length(a - b) / length(b), ours, theirs)
    return max(jax.tree.leaves(apart))


CASES = [
    ("llama", dict(fsdp=4)),
    ("llama", dict(tp=4)),
    ("llama", dict(cp=4)),
    ("llama", dict(dp=2, mbs=1)),  # four microbatches
    ("llama", dict(pp=2, vp=2, tp=2, mbs=1)),
    ("nemotron", dict(fsdp=2, tp=2)),
    ("grok", dict(ep=4)),
    ("grok", dict(pp=2, ep=2, tp=2, mbs=1)),
]


@pytest.mark.parametrize(("family", "axes"), CASES, ids=str)
def test_meshes_differ_by_their_scales_only(family, axes):
    """Each GPU scales by its own part: another mesh is another rounding, as bf16 to FP8 is."""
    params, grads, loss, rounding = reference(family)
    ours, out = gradients(build(FAMILIES[family], **axes), params)
    np.testing.assert_allclose(out["loss"], loss, rtol=5e-4)
    assert distance(ours, grads) < rounding


# The programs.

LINEARS = r"(attn/qkv|attn/out|mlp/up|mlp/down|mlp\.experts)/dot_general"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_product_of_the_program_has_fp8_operands(family):
    text = build(FAMILIES[family]).lower().as_text("hlo", debug_info=True)
    made = dict(re.findall(r"(\S+) = (\w+\[.*)", text))
    products = [line for line in made.values() if re.search(rf" dot\(.*{LINEARS}", line)]
    assert len(products) >= 12  # of four GEMMs, with both gradients

    def origin(name: str) -> str:
        """What a product's operand was converted from."""
        opcode, first = re.search(r" ([\w-]+)\(([^,) ]+)", made[name]).groups()
        return made[first] if opcode == "convert" else origin(first)

    kinds = collections.Counter()
    for line in products:
        operands = re.search(r" dot\(([^,]+), ([^,)]+)\)", line).groups()
        kinds[tuple(sorted(origin(name)[:6] for name in operands))] += 1
    assert set(kinds) == {("f8e4m3", "f8e4m3"), ("f8e4m3", "f8e5m2")}
    assert kinds["f8e4m3", "f8e5m2"] == 8


@compiler
@pytest.mark.parametrize(
    ("workload", "gpus"),
    [
        ("llama2_70b", 64),
        ("llama31_8b", 8),
        ("llama31_70b", 64),
        ("llama31_405b", 32),
        ("nemotron4_340b", 128),
        ("grok1_314b", 8),
    ],
)
def test_the_gpu_compiler_makes_fp8_gemms_of_them(workload, gpus, tmp_path, monkeypatch):
    planned(f"--config configs/{workload}.py --gpus {gpus} --dtype fp8", tmp_path)
    monkeypatch.setenv("MAXBENCH_CACHE", str(tmp_path))
    program = hlo.parse(artifact.load(resolve(workload, gpus=gpus, dtype="fp8")).text)
    ops = [op for c in program.computations.values() for op in c.ops]
    found = collections.Counter(
        (op.opcode, op.target)
        for op in ops
        if (op.opcode == "dot" or op.target in GEMM) and re.search(LINEARS, op.attrs)
    )
    assert set(found) == {("custom-call", "__cublas$lt$matmul$f8")}
    assert found.total() >= 12
