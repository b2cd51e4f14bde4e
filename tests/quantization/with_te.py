"""Transformer Engine against arithmetic in numpy; test_te.py runs this in its own process.

NVTE_JAX_CUSTOM_CALLS=false for a CPU.
"""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxbench.config.run import AXES
from maxbench.cost_model import aot, hlo, stub_libcuda
from maxbench.cost_model.costs import GEMM, TE_GEMM, Costs
from maxbench.cost_model.simulate import kernel_cost
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.quantization import QuantizedArray, mxfp8, transformer_engine
from maxbench.quantization.fp8_per_tensor import scale_of
from maxbench.sharding.mesh import make_mesh
from maxbench.step.train_step import Step
from tests.conftest import resolve

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
BITS = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}


@pytest.fixture(autouse=True)
def hopper():
    stub_libcuda.install((9, 0))


def integers(key: int, *shape: int) -> np.ndarray:
    """Of up to six bits: FP8 has to round the large ones, and every sum of products is exact."""
    return np.random.default_rng(key).integers(-60, 61, shape).astype(np.float64)


def bf16(x):
    return jnp.asarray(x, jnp.bfloat16)


def bits(x) -> np.ndarray:
    return np.atleast_1d(x).view(np.uint8)


# Tensor scaling: the scale is given.


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scale", [None, 1.0, 0.01, 0.37], ids=lambda s: f"scale-{s}")
def test_quantized_bits_and_the_largest_magnitude(dtype, scale):
    """Without a scale: current scaling. 0.01 saturates what is over 448 (4.48)."""
    x = np.random.default_rng(0).normal(size=(3, 32, 48)) * 4
    x = np.asarray(bf16(x))
    given = scale_of(bf16(x), dtype) if scale is None else jnp.float32(scale)
    quantize = jax.jit(lambda x, s: transformer_engine.quantize_per_tensor(x, dtype, s))
    made, amax = quantize(bf16(x), given)
    top = float(ml_dtypes.finfo(BITS[dtype]).max)
    scaled = x.astype(np.float32) * (np.float32(1) / np.float32(given))
    expected = np.clip(scaled, -top, top).astype(BITS[dtype])
    np.testing.assert_array_equal(bits(made), bits(expected))
    assert amax == np.abs(x).max()


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear(x, w, current):
    return forward(x, w, current)[0]


def forward(x, w, current):
    quantize = functools.partial(scaled, current=current)
    x, w = quantize(x, E4M3), quantize(w, E4M3)
    turned = QuantizedArray(jnp.swapaxes(w.q, -1, -2), w.scale)
    return transformer_engine.gemm(x, turned, "nt"), (x, w)


def backward(current, saved, dy):
    (x, w), dy = saved, scaled(dy, E5M2, current)
    return transformer_engine.gemm(dy, w, "nt", exact=True), transformer_engine.gemm(
        x, dy, "tn", exact=True
    )


linear.defvjp(forward, backward)


def scaled(x, dtype, current=True):
    scale = scale_of(x, dtype) if current else jnp.float32(0.25)
    return QuantizedArray(transformer_engine.quantize_per_tensor(x, dtype, scale)[0], scale)


def rounded(x, dtype, current) -> np.ndarray:
    scale = float(scale_of(bf16(x), dtype)) if current else 0.25
    top = float(ml_dtypes.finfo(BITS[dtype]).max)
    return np.clip(x / scale, -top, top).astype(BITS[dtype]).astype(np.float64) * scale


@pytest.mark.parametrize("current", [True, False], ids=["current", "delayed"])
@pytest.mark.parametrize("experts", [(), (3,)], ids=["linear", "experts"])
def test_a_product_and_its_gradients_are_the_oracles(experts, current):
    x, w, dy = (
        integers(0, *experts, 64, 48),
        integers(1, *experts, 48, 80),
        integers(2, *experts, 64, 80),
    )

    @jax.jit
    def step(x, w, dy):
        y, vjp = jax.vjp(lambda x, w: linear(x, w, current), x, w)
        return y, *vjp(dy)

    x8, w8, dy8 = rounded(x, E4M3, current), rounded(w, E4M3, current), rounded(dy, E5M2, current)
    assert not np.array_equal(x8, x)
    turn = lambda a: a.swapaxes(-1, -2)
    expected = x8 @ w8, dy8 @ turn(w8), turn(x8) @ dy8
    for ours, right in zip(step(bf16(x), bf16(w), bf16(dy)), expected, strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(ours), right.astype(ml_dtypes.bfloat16))


def test_layers_scanned_and_recomputed_in_shard_map_over_eight_devices():
    mesh = jax.make_mesh((2, 4), ("dp", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = bf16(np.random.default_rng(0).normal(size=(8 * 32, 64)))
    w = bf16(np.random.default_rng(1).normal(size=(3, 64, 64)) / 8)

    def loss(x, w):
        layer = jax.checkpoint(lambda x, w: (linear(x, w, True), None))
        return jnp.sum(jax.lax.scan(layer, x, w)[0].astype(jnp.float32) ** 2)

    def share(x, w):
        w = jax.lax.all_gather(w, "fsdp", axis=1, tiled=True)
        dx, dw = jax.grad(loss, (0, 1))(x, w)
        return dx, dw[None]

    rows, cut = P(("dp", "fsdp")), P(None, "fsdp")
    specs = dict(in_specs=(rows, cut), out_specs=(rows, rows), check_vma=False)
    dx, dw = jax.jit(jax.shard_map(share, mesh=mesh, **specs))(x, w)
    for i, part in enumerate(jnp.split(x, 8)):

        def plain(x, w):
            for layer in w:
                x = linear(x, layer, True)
            return jnp.sum(x.astype(jnp.float32) ** 2)

        one, two = jax.jit(jax.grad(plain, (0, 1)))(part, w)
        np.testing.assert_array_equal(np.asarray(dx[32 * i : 32 * i + 32]), np.asarray(one))
        np.testing.assert_array_equal(np.asarray(dw[i]), np.asarray(two))


# MXFP8. Its GEMM has no form for a CPU.


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("batch", [(), (2,)], ids=["linear", "experts"])
def test_blocks_have_the_bits_of_xlas(batch, dtype):
    x = np.random.default_rng(0).normal(size=(*batch, 64, 96)) ** 9
    x[..., :32, :32] = 0
    row, col = jax.jit(lambda x: transformer_engine.quantize_mxfp8(x, dtype))(bf16(x))
    for ours, dim in ((row, -1), (col, -2)):
        for a, b in zip(ours, mxfp8.quantize(bf16(x), dtype, dim), strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))


# With the GPU compiler: the kernels themselves.


@pytest.mark.parametrize(("gpu", "blocks"), [("h100", False), ("gb200", True)])
def test_the_gpu_program_has_tes_kernels_in_shard_map(gpu, blocks, monkeypatch):
    from jax.experimental import topologies

    stub_libcuda.install(GPU_TYPES[gpu].chip.capability)
    monkeypatch.setenv("NVTE_JAX_CUSTOM_CALLS", "true")
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=aot.target(GPU_TYPES[gpu].chip), topology="1x1x4"
    )
    mesh = topologies.make_mesh(topology, (4,), ("fsdp",))

    def share(w, wt, dy, x):
        mxfp8_forms = transformer_engine.quantize_mxfp8
        forms = lambda x, d: mxfp8_forms(x, d) if blocks else [scaled(x, d)] * 2
        (x, x_col), (w, _), (wt, _) = forms(x, E4M3), forms(w, E4M3), forms(wt, E4M3)
        dy, dy_col = forms(dy, E4M3 if blocks else E5M2)
        gemm = functools.partial(transformer_engine.gemm, blocks=blocks)
        y, dw = gemm(x, wt, "nt"), gemm(x_col, dy_col, "tn", exact=True)
        return y, gemm(dy, w, "nt"), dw[None]

    rows = P("fsdp")
    specs = dict(in_specs=(P(), P(), rows, rows), out_specs=rows, check_vma=False)
    array = lambda shape, spec: jax.ShapeDtypeStruct(
        shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec)
    )
    weights = array((1024, 256), P()), array((256, 1024), P())
    shapes = *weights, array((2048, 256), rows), array((2048, 1024), rows)
    call = jax.jit(jax.shard_map(share, mesh=mesh, **specs))
    text = call.lower(*shapes).compile(compiler_options=aot.PROGRAM_ONLY).as_text()
    made = [line for line in text.splitlines() if "custom_call_target=" in line]
    targets = [re.search(r'custom_call_target="([^"]*)"', line)[1] for line in made]
    kernels = ["te_dbias_quantize_ffi"] * 4 + ["te_gemm_v2_ffi"] * 3
    assert sorted(targets) == kernels
    gemms = [line for line in made if "te_gemm_v2_ffi" in line]
    operands = [re.findall(r"(f8e\dm\d\w*)\[", line.split("constraints=")[1]) for line in gemms]
    gradient = "f8e4m3fn" if blocks else "f8e5m2"
    data = [[kind for kind in kinds if kind != "f8e8m0fnu"] for kinds in operands]
    assert sorted(map(sorted, data)) == sorted(
        map(sorted, [["f8e4m3fn"] * 2, ["f8e4m3fn", gradient], ["f8e4m3fn", gradient]])
    )
    assert text.count("use_split_accumulator = true") == 1


# The trainer on these kernels.


def trained(backend: str, scaling: str, **axes) -> tuple[list[float], dict]:
    """Losses and gradient norms of some steps, and the state."""
    fast = {"optim.warmup": 2.0, "optim.lr": 3e-3}
    how = {"precision.backend": backend, "precision.scaling": scaling, "precision.history": 4}
    flags = {"gbs": 4, "seq": 32, "layers": 2} | axes
    run = resolve("llama31_405b", "tiny", fast | how, dtype="fp8", **flags)
    step = Step(run, make_mesh(run.layout))
    call, state, found = step.lower().compile(), step.init(), []
    for _ in range(3):
        state, out = call(state)
        found += float(out["loss"]), float(out["grad_norm"])
    return found, state


def test_a_model_trains_as_through_xla(monkeypatch):
    """Two backends, one recipe: microbatches, recomputation and the state included."""
    gemm, calls = transformer_engine.gemm, []
    monkeypatch.setattr(
        transformer_engine, "gemm", lambda *a, **how: calls.append(a[2]) or gemm(*a, **how)
    )
    axes = dict(fsdp=2, tp=2, mbs=1)
    theirs, expected = trained("xla", "delayed", **axes)
    assert not calls
    ours, state = trained("te", "delayed", **axes)
    assert {*calls} == {"nt", "tn"}
    np.testing.assert_allclose(ours, theirs, rtol=2e-3)
    ours, theirs = (s["fp8"]["layers"] for s in (state, expected))
    assert (theirs[..., -3:] > 0).all()
    np.testing.assert_allclose(ours, theirs, rtol=0.1)


@pytest.mark.parametrize(
    ("gpu", "scaling", "axes"),
    [
        ("h100", "delayed", dict(fsdp=2, tp=2, mbs=2)),
        ("gb200", "mxfp8", dict(pp=2, tp=2, mbs=2)),
    ],
)
def test_the_gpu_program_of_a_step_multiplies_with_te_alone(gpu, scaling, axes, monkeypatch):
    """In the step's shard_map, in its pipeline, forward and backward; priced as XLA's are."""
    monkeypatch.setenv("NVTE_JAX_CUSTOM_CALLS", "true")
    how = {"precision.backend": "te", "precision.scaling": scaling, "train.attention": "xla"}
    flags = {"gbs": 8, "seq": 256, "layers": 2, "gpu_type": gpu} | axes
    run = resolve("llama31_405b", "tiny", how, dtype="fp8", **flags)
    program = hlo.parse(aot.compile_run(run).text)
    prices = Costs(GPU_TYPES[gpu], {axis: getattr(run.layout, axis) for axis in AXES})
    products = [
        (op, kernel_cost(program, c, op, prices)[2])
        for c in program.computations.values()
        for op in c.ops
        if op.target in GEMM and re.search(r"attn/(qkv|out)|mlp/(up|down)", op.attrs)
    ]
    assert {op.target for op, _ in products} == {TE_GEMM}
    assert len(products) >= 24 // axes.get("pp", 1)
    m = run.model
    rows = axes["mbs"] * 256
    # Each of a layer's four products on one GPU, in whatever direction.
    sizes = m.heads * m.head_dim, m.kv_heads * m.qkv * m.head_dim, m.mlp, m.mlp_inputs * m.mlp
    assert {f for _, f in products} <= {2.0 * rows * m.embed * n / 2 for n in sizes}
