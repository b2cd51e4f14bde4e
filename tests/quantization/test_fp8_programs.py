"""Programs in FP8: which operands, all-gathers and kernels are quantized."""

import collections
import math
import re

import jax
import jax.numpy as jnp
import pytest

from maxbench import quantization
from maxbench.config.number_formats import FORMATS, SCALINGS
from maxbench.config.run import Device
from maxbench.cost_model import compile_cache, hlo
from maxbench.cost_model.costs import GEMM
from maxbench.hardware.gpus import GPU_TYPES
from tests.conftest import resolve
from tests.planning.plans import planned
from tests.quantization.fp8_step import FAMILIES, build

GEMM_NAMES = r"(attn/qkv|attn/out|mlp/up|mlp/down|mlp\.experts/(?:up|down))/dot_general"


@pytest.mark.parametrize("family", FAMILIES)
def test_step_quantizes_weights_of_attention_mlp_and_experts(family):
    """And not that of the router."""
    step = build(FAMILIES[family])
    layers = jax.tree.map(lambda x: jnp.zeros(x.shape), step.abstract["params"]["layers"])
    args = step.arithmetic, step.shardings["layers"], layers
    weights = quantization.weights(*args, quantization.scales(*args, True)[0], True)
    is_fp8 = lambda x: isinstance(x, quantization.Weight)
    leaves = jax.tree_util.tree_leaves_with_path(weights, is_leaf=is_fp8)
    fp8 = {jax.tree_util.keystr(path) for path, x in leaves if is_fp8(x)}
    w = "" if family == "grok" else "['w']"
    mlp = {f"['mlp']['{name}']{w}" for name in ("up", "down")}
    assert fp8 == {"['attn']['qkv']['w']", "['attn']['out']['w']"} | mlp


def test_router_weight_is_not_cast_to_bf16():
    step = build("grok1_314b", "bf16", {"precision.grads": "fp32"}, layers=1)
    (layer,), text = step.run.model.per_layer, step.lower().as_text()
    m = layer.mixer
    router, qkv = (
        f"{m.embed}x{layer.channel.experts}x",
        f"{m.embed}x{m.kv_heads}x{m.qkv}x{m.head_dim}x",
    )
    assert [f"{w}bf16" in text for w in (router, qkv)] == [False, True]
    assert f"{router}f32" in text


@pytest.mark.parametrize("family", FAMILIES)
def test_operands_of_all_gemms_of_layers_are_fp8(family):
    text = build(FAMILIES[family]).lower().as_text("hlo", debug_info=True)
    definitions = dict(re.findall(r"(\S+) = (\w+\[.*)", text))
    gemms = [line for line in definitions.values() if re.search(rf" dot\(.*{GEMM_NAMES}", line)]
    assert len(gemms) >= 12  # four GEMMs, each with dgrad and wgrad

    def before_convert(name: str) -> str:
        """The definition that a GEMM's operand is converted from."""
        opcode, operand = re.search(r" ([\w-]+)\(([^,) ]+)", definitions[name]).groups()
        return definitions[operand] if opcode == "convert" else before_convert(operand)

    dtypes = collections.Counter()
    for line in gemms:
        operands = re.search(r" dot\(([^,]+), ([^,)]+)\)", line).groups()
        dtypes[tuple(sorted(before_convert(name)[:6] for name in operands))] += 1
    assert set(dtypes) == {("f8e4m3", "f8e4m3"), ("f8e4m3", "f8e5m2")}
    assert dtypes["f8e4m3", "f8e5m2"] == 8


@pytest.mark.parametrize(
    "scaling",
    [
        pytest.param(x, marks=[] if x in ("current", "mxfp8") else pytest.mark.exhaustive)
        for x in (*SCALINGS, "nvfp4")
    ],
)
def test_weights_and_activations_are_all_gathered_quantized(scaling):
    f = FORMATS[scaling]
    gpu = "gb200" if f.blocks else "h100"
    overrides = {"model.head_dim": 32}
    overrides |= {"precision.scaling": scaling} if scaling in SCALINGS else {}
    step = build(FAMILIES["llama"], f.dtype, overrides, gpu_type=gpu, dp=2, fsdp=2, tp=2)
    text = step.lower().as_text("hlo", debug_info=True)
    gathers = re.findall(r"= (\w+)\[([\d,]*)\]\S* all-gather\(.*op_name=\"([^\"]*)\"", text)
    in_layers = {d for d, _, name in gathers if re.search("attn/(qkv|out)|mlp/(up|down)", name)}
    assert in_layers == ({"f8e4m3fn", "u8"} if f.blocks else {"f8e4m3fn", "f8e5m2"})
    bf16_shapes = {shape for dtype, shape, _ in gathers if dtype == "bf16"}
    shardings = jax.tree.leaves(step.shardings["layers"])
    weights = jax.tree.leaves(step.abstract["params"]["layers"])
    for sharding, w in zip(shardings, weights, strict=True):
        if w.ndim > 2:  # norms are gathered in bf16
            shards = [math.prod(step.mesh.shape[a] for a in axes) for axes in sharding.compute_axes]
            shape = [str(size // n) for size, n in zip(w.shape, shards, strict=True)]
            assert ",".join(shape) not in bf16_shapes


@pytest.mark.gpu_compile
@pytest.mark.exhaustive
def test_pipeline_with_experts_compiles_to_fp8_gemms():
    """A row of Grok-1 with as few layers as zero_overlap.py can slice: every axis but fsdp."""
    flags = dict(gpus=128, vp=2, layers=4, dtype="fp8")
    words = " ".join(f"--{name} {value}" for name, value in flags.items())
    planned(f"--config configs/grok1_314b.py {words}")
    program = hlo.parse(compile_cache.load(resolve("grok1_314b", **flags)).text)
    ops = [op for c in program.computations.values() for op in c.ops]
    kernels = collections.Counter(
        (op.opcode, op.target)
        for op in ops
        if (op.opcode == "dot" or op.target in GEMM) and re.search(GEMM_NAMES, op.attrs)
    )
    assert set(kernels) == {("custom-call", "__cublas$lt$matmul$f8")}
    assert kernels.total() >= 12


@pytest.mark.gpu_compile
@pytest.mark.parametrize(
    ("workload", "scaling", "kernel", "gathered", "flags"),
    [
        (
            "llama31_8b",
            "delayed",
            "__cublas$lt$matmul$f8",
            {"f8e4m3fn"},
            dict(gpu_type="h100", fsdp=8, seq=4096, layers=2),
        ),
        pytest.param(
            "nemotron4_340b",
            "mxfp8",
            "__cudnn$blockScaledDot",
            {"f8e4m3fn", "u8"},
            dict(gpu_type="gb200", tp=4, fsdp=2, layers=2),
            marks=pytest.mark.exhaustive,
        ),
        # jaxlib 0.12's kernel for small all-reduces would abort on the scales of this program
        # (jax_compat.collective_kernels_off).
        pytest.param(
            "nemotron4_340b",
            "current",
            "__cublas$lt$matmul$f8",
            {"f8e4m3fn", "f8e5m2"},  # over tp gradients too
            dict(gpu_type="h100", tp=8, dp=8, layers=2),
            marks=[pytest.mark.core, pytest.mark.exhaustive],
        ),
    ],
)
def test_each_scaling_compiles_to_fp8_kernels(workload, scaling, kernel, gathered, flags):
    flags |= {"dtype": "fp8"}
    words = " ".join(f"--{name} {value}" for name, value in flags.items())
    words += f" --config.precision.scaling={scaling}"
    plan = planned(f"--config configs/{workload}.py:proxy {words}")
    gpu = Device("gpu", GPU_TYPES[flags["gpu_type"]].chip.capability)
    run = resolve(workload, "proxy", {"precision.scaling": scaling}, gpu, **flags)
    text = compile_cache.load(run).text
    ops = [op for c in hlo.parse(text).computations.values() for op in c.ops]
    gemms = [op for op in ops if (op.opcode == "dot" or op.target in GEMM)]
    in_layers = r'op_name="[^"]*/(attn|mlp)/(qkv|out|up|down)/'
    kernels = [op.target for op in gemms if re.search(in_layers, op.attrs)]
    assert set(kernels) == {kernel}
    assert len(kernels) >= 12
    # The program has the model's FLOPs, and more if it recomputes: each GEMM has a cost.
    assert plan["hfu"] > 0.95 * plan["mfu"]["causal"]
    results = re.findall(r" = (.*) all-gather(?:-start)?\(", text)
    assert {d for result in results for d in re.findall(r"(f8\w+|u8)\[", result)} == gathered
