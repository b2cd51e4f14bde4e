"""Transformer Engine against numpy. test_transformer_engine.py runs this file in a subprocess.

On a CPU, NVTE_JAX_CUSTOM_CALLS=false selects TE's implementation in JAX.
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

from maxbench.config.run import Device
from maxbench.cost_model import absent_gpus, aot, hlo, stub_libcuda
from maxbench.cost_model.costs import GEMM, TE_GEMM, Costs
from maxbench.cost_model.simulate import kernel_cost
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.quantization import QuantizedArray, mxfp8, transformer_engine
from maxbench.quantization.fp8_per_tensor import scale_of
from maxbench.sharding.mesh import make_mesh
from maxbench.step import data
from maxbench.step.train_step import Step
from tests.conftest import resolve

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
BITS = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}


@pytest.fixture(autouse=True)
def hopper():
    stub_libcuda.install(GPU_TYPES["h100"].chip)


def integers(key: int, *shape: int) -> np.ndarray:
    """Random integers of up to six bits: FP8 rounds the large ones, and fp32 sums are exact."""
    return np.random.default_rng(key).integers(-60, 61, shape).astype(np.float64)


def bf16(x):
    return jnp.asarray(x, jnp.bfloat16)


def bits(x) -> np.ndarray:
    return np.atleast_1d(x).view(np.uint8)


# Per-tensor scaling.


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scale", [None, 1.0, 0.01, 0.37], ids=lambda s: f"scale-{s}")
def test_quantized_values_and_amax_equal_numpy(dtype, scale):
    """scale None is current scaling. 0.01 saturates e4m3 values over 4.48."""
    x = np.random.default_rng(0).normal(size=(3, 32, 48)) * 4
    x = np.asarray(bf16(x))
    scale = scale_of(bf16(x), dtype) if scale is None else jnp.float32(scale)
    quantize = jax.jit(lambda x, s: transformer_engine.quantize_per_tensor(x, dtype, s))
    q, amax = quantize(bf16(x), scale)
    top = float(ml_dtypes.finfo(BITS[dtype]).max)
    scaled = x.astype(np.float32) * (np.float32(1) / np.float32(scale))
    expected = np.clip(scaled, -top, top).astype(BITS[dtype])
    np.testing.assert_array_equal(bits(q), bits(expected))
    assert amax == np.abs(x).max()


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear(x, w, current):
    return forward(x, w, current)[0]


def forward(x, w, current):
    quantize = functools.partial(scaled, current=current)
    x, w = quantize(x, E4M3), quantize(w, E4M3)
    w_t = QuantizedArray(jnp.swapaxes(w.q, -1, -2), w.scale)
    return transformer_engine.gemm(x, w_t, "nt"), (x, w)


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
def test_fprop_dgrad_and_wgrad_equal_numpy(experts, current):
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
    transpose = lambda a: a.swapaxes(-1, -2)
    expected = x8 @ w8, dy8 @ transpose(w8), transpose(x8) @ dy8
    for actual, right in zip(step(bf16(x), bf16(w), bf16(dy)), expected, strict=True):
        assert actual.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(actual), right.astype(ml_dtypes.bfloat16))


def test_scan_and_remat_in_shard_map_equal_a_loop_on_one_device():
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


# MXFP8. TE's GEMM of blocks has no CPU implementation.


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("batch", [(), (2,)], ids=["linear", "experts"])
def test_mxfp8_quantization_equals_xlas_bit_for_bit(batch, dtype):
    x = np.random.default_rng(0).normal(size=(*batch, 64, 96)) ** 9
    x[..., :32, :32] = 0
    row, col = jax.jit(lambda x: transformer_engine.quantize_mxfp8(x, dtype))(bf16(x))
    for actual, dim in ((row, -1), (col, -2)):
        for a, b in zip(actual[:2], mxfp8.quantize(bf16(x), dtype, dim)[:2], strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))


# Programs compiled for GPUs.


@pytest.mark.gpu_compile
@pytest.mark.parametrize(("gpu", "blocks"), [("h100", False), ("gb200", True)])
def test_gpu_program_in_shard_map_calls_tes_kernels(gpu, blocks, monkeypatch):
    from jax.experimental import topologies

    stub_libcuda.install(GPU_TYPES[gpu].chip)
    monkeypatch.setenv("NVTE_JAX_CUSTOM_CALLS", "true")
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=absent_gpus.target(GPU_TYPES[gpu].chip), topology="1x1x4"
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
    text = call.lower(*shapes).compile(compiler_options=absent_gpus.PROGRAM_ONLY).as_text()
    calls = [line for line in text.splitlines() if "custom_call_target=" in line]
    targets = [re.search(r'custom_call_target="([^"]*)"', line)[1] for line in calls]
    kernels = ["te_dbias_quantize_ffi"] * 4 + ["te_gemm_v2_ffi"] * 3
    assert sorted(targets) == kernels
    gemms = [line for line in calls if "te_gemm_v2_ffi" in line]
    operands = [re.findall(r"(f8e\dm\d\w*)\[", line.split("constraints=")[1]) for line in gemms]
    gradient = "f8e4m3fn" if blocks else "f8e5m2"
    data = [[kind for kind in kinds if kind != "f8e8m0fnu"] for kinds in operands]
    assert sorted(map(sorted, data)) == sorted(
        map(sorted, [["f8e4m3fn"] * 2, ["f8e4m3fn", gradient], ["f8e4m3fn", gradient]])
    )
    assert text.count("use_split_accumulator = true") == 1


# Training steps.


def trained(backend: str, scaling: str, **axes) -> tuple[list[float], dict]:
    """Losses and gradient norms of three steps, and the state."""
    fast = {"optim.warmup": 2.0, "optim.lr": 3e-3, "train.data": "uniform"}
    fp8 = {"precision.backend": backend, "precision.scaling": scaling, "precision.history": 4}
    flags = {"gbs": 4, "seq": 32, "layers": 2} | axes
    run = resolve("llama31_405b", "tiny", fast | fp8, dtype="fp8", **flags)
    step = Step(run, make_mesh(run.layout))
    compiled, state, values = step.lower().compile(), step.init(), []
    batches = data.Synthetic(step.run, step.mesh)
    for _ in range(3):
        state, out = compiled(state, next(batches))
        values += float(out["loss"]), float(out["grad_norm"])
    return values, state


def test_training_equals_xlas_backend(monkeypatch):
    """With microbatches, recomputation and the amax history."""
    gemm, calls = transformer_engine.gemm, []
    monkeypatch.setattr(
        transformer_engine, "gemm", lambda *a, **kw: calls.append(a[2]) or gemm(*a, **kw)
    )
    axes = dict(fsdp=2, tp=2, mbs=1)
    expected, expected_state = trained("xla", "delayed", **axes)
    assert not calls
    values, state = trained("te", "delayed", **axes)
    assert {*calls} == {"nt", "tn"}
    np.testing.assert_allclose(values, expected, rtol=2e-3)
    (history,), (expected_history,) = (
        jax.tree.leaves(s["layer_state"]["layers"]) for s in (state, expected_state)
    )
    assert (expected_history[..., -3:] > 0).all()
    np.testing.assert_allclose(history, expected_history, rtol=0.1)


@pytest.mark.gpu_compile
@pytest.mark.parametrize(
    ("gpu", "scaling", "axes"),
    [
        ("h100", "delayed", dict(fsdp=2, tp=2, mbs=2)),
        ("gb200", "mxfp8", dict(pp=2, tp=2, mbs=2)),
    ],
)
def test_all_gemms_of_a_gpu_step_are_tes(gpu, scaling, axes, monkeypatch):
    """In shard_map and in a pipeline, forward and backward; with the FLOPs of XLA's GEMMs."""
    monkeypatch.setenv("NVTE_JAX_CUSTOM_CALLS", "true")
    overrides = {"precision.backend": "te", "precision.scaling": scaling, "train.attention": "xla"}
    flags = {"gbs": 8, "seq": 256, "layers": 2, "gpu_type": gpu} | axes
    device = Device("gpu", GPU_TYPES[gpu].chip.capability)
    run = resolve("llama31_405b", "tiny", overrides, device, dtype="fp8", **flags)
    program = hlo.parse(aot.compile_run(run).text)
    costs = Costs(GPU_TYPES[gpu], run.layout.mesh_shape)
    gemms = [
        (op, kernel_cost(program, c, op, costs)[2])
        for c in program.computations.values()
        for op in c.ops
        if op.target in GEMM and re.search(r"attn/(qkv|out)|mlp/(up|down)", op.attrs)
    ]
    assert {op.target for op, _ in gemms} == {TE_GEMM}
    assert len(gemms) >= 24 // axes.get("pp", 1)
    m, channel = run.model.per_layer[0].mixer, run.model.per_layer[0].channel
    rows = axes["mbs"] * 256
    # FLOPs of each of a layer's four GEMMs on one GPU of tp=2, forward or backward.
    sizes = (
        m.heads * m.head_dim,
        m.kv_heads * m.qkv * m.head_dim,
        channel.mlp,
        channel.mlp_inputs * channel.mlp,
    )
    assert {flops for _, flops in gemms} <= {2.0 * rows * m.embed * n / 2 for n in sizes}
