"""Plans of programs that XLA's GPU compiler compiles, without pipelines: memory and communication
against figures derived by hand."""

import json
import os
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree

import pytest

import maxbench
from maxbench.config.run import Device
from maxbench.cost_model import absent_gpus, aot, hlo
from maxbench.cost_model.memory import GIB
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.host import environment
from maxbench.planning import drawings
from maxbench.sharding import mesh
from maxbench.step.train_step import Step
from tests.conftest import CACHE, persistent_cache, resolve
from tests.planning.plans import exposed_share, planned, program_of, run_of, traffic

pytestmark = [
    pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning"),
    pytest.mark.gpu_compile,
    pytest.mark.xdist_group("plan"),  # several tests plan one program, which one worker compiles
]
ROOT = pathlib.Path(__file__).parents[2]
LLAMA2_70B = "--config configs/llama2_70b.py --gpus 128"
SAVED = f"{LLAMA2_70B} --config.train.remat=save_dot_except_mlpwi"  # compiled once for three tests
LLAMA31_70B = "--config configs/llama31_70b.py --fsdp 8 --tp 4 --layers 4 --gpu_type h200"
H100 = Device("gpu", GPU_TYPES["h100"].chip.capability)


def command(arguments: str) -> subprocess.CompletedProcess:
    """`maxbench plan ARGUMENTS` in a process of its own."""
    words = [sys.executable, "-m", "maxbench.plan", *arguments.split()]
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(CACHE)}
    env["MAXBENCH_CACHE"] = os.environ["MAXBENCH_CACHE"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=env)


def drawn_memory(folder: pathlib.Path) -> tuple[float, ...]:
    """GiB of the drawing of memory: live buffers at the peak, and the compiler's assignment."""
    text = (folder / "step.memory.svg").read_text()
    xml.etree.ElementTree.fromstring(text)
    found = re.search(r"([\d.]+) GiB at the peak; .* ([\d.]+) GiB<", text)
    return tuple(map(float, found.groups()))


@pytest.mark.skipif(not environment.version("nvidia-cuda-nvcc"), reason="needs a real ptxas")
def test_program_without_code_generation_is_the_same():
    run = resolve("llama31_8b", "tiny", {"model.layers": 1}, H100, gpu_type="h100", dp=2, gbs=8)
    step = Step(run, mesh.make_mesh(run.layout, absent_gpus.devices(run.gpu, run.layout.gpus)))
    programs = [step.compile(**options)[0] for options in ({}, absent_gpus.PROGRAM_ONLY)]
    texts = [re.sub(", metadata=.*", "", p.as_text()).split("\n", 1)[1] for p in programs]
    assert "__cublas$lt$matmul" in texts[0]
    assert texts[0] == texts[1]
    assert len({p.memory_analysis().temp_size_in_bytes for p in programs}) == 1


@pytest.mark.exhaustive
@pytest.mark.core
def test_fsdp(check_figures):
    """Llama 2 70B on 128 GPUs. Layer weights are 856 M x 2 bytes; each is all-gathered twice and
    its gradient reduce-scattered once."""
    plan = planned(SAVED)
    m = plan["memory"]
    state = 68_976_648_192 * 12 / 128  # fp32 weights and two moments, sharded over all GPUs
    assert m["weights"] + m["optimizer"] == pytest.approx(state * 14 / 12, rel=0.01)  # and copy
    tokens = 2 * 4096
    saved = tokens * 2 * (8192 + 8192 + 2 * 1024 + 8192) * 80  # input, q, k, v, attn_out
    assert m["activations"] == pytest.approx(saved, rel=0.01)
    assert m["gradients"] == pytest.approx(68_976_648_192 * 2 / 128, rel=0.01)
    assert m["total"] < 50 * GIB
    layers = 80 * 2 * (8192 * 128 * (64 + 8 + 8 + 64) + 3 * 8192 * 28672)
    collectives = traffic(plan)
    # The head once; tokens are sent to the embedding.
    gathered = 2 * layers + 2 * 32000 * 8192
    assert collectives["all-gather", "fsdp"]["bytes"] == pytest.approx(gathered, rel=0.01)
    # The head's gradient is reduced with the layers'; the embedding's may be in fp32.
    assert collectives["reduce-scatter", "fsdp"]["bytes"] == pytest.approx(layers, rel=0.02)
    assert collectives["all-gather", "fsdp"]["link"] == "network"
    assert exposed_share(plan, "all-gather", "fsdp") < 0.1
    # Saved activations are copied into the stash and out of it; no gradient is transposed.
    assert plan["parts_s"]["copy"] < 0.01 * plan["step_s"]
    assert sum(plan["parts_s"].values()) == pytest.approx(plan["step_s"], rel=1e-6)
    assert abs(plan["published"]["over_published"]) < 0.05
    check_figures("llama2_70b 128 h100 bf16 save_dot_except_mlpwi", plan)


@pytest.mark.exhaustive
def test_sensitivity_to_the_cluster():
    plan = planned(f"{LLAMA2_70B} --sensitivity")
    sensitivity = plan["sensitivity_s"]
    half, *_, double = sensitivity.pop("memory size")  # with less or more recomputation
    assert double < plan["step_s"] < half
    assert 1.05 < half / double < 1.3
    for seconds in sensitivity.values():  # factors in ascending order
        assert sorted(seconds) in (seconds, seconds[::-1])
        assert min(seconds) <= plan["step_s"] <= max(seconds)
    slower = sensitivity["GEMMs"][0] - plan["step_s"]
    assert slower == pytest.approx(plan["parts_s"]["gemm"], rel=0.1)  # at half the rate


@pytest.mark.exhaustive
def test_recomputation_in_some_layers_saves_memory(check_figures):
    """The row of the recipe recomputes in fewer layers: 22 layers save the attention context and
    the MLP's first GEMM."""
    all_layers = planned(f"{LLAMA2_70B} --config.train.remat=save_dot_except_mlpwi")
    some_layers = planned(LLAMA2_70B)
    assert some_layers["step_s"] < all_layers["step_s"]
    more = some_layers["memory"]["activations"] - all_layers["memory"]["activations"]
    assert more == pytest.approx(22 * 2 * 4096 * 2 * (8192 + 2 * 28672), rel=0.02)
    check_figures("llama2_70b 128 h100 bf16", some_layers)


def test_a_cached_plan_needs_no_jax():
    plan = planned(SAVED)
    words = f"import sys; sys.modules['jax'] = None; from maxbench.cli import entry; \
sys.exit(entry.run('plan', {[*SAVED.split(), '--json']}))"
    env = {"PATH": "/usr/bin:/bin", "HOME": str(CACHE), "PYTHONPATH": str(ROOT)}
    env["MAXBENCH_CACHE"] = os.environ["MAXBENCH_CACHE"]
    done = subprocess.run([sys.executable, "-c", words], cwd=ROOT, env=env, capture_output=True)
    cached = json.loads(done.stdout)
    assert cached["compile"]["cached"]
    assert cached["step_s"] == plan["step_s"]


def test_another_cluster_runs_the_same_program():
    plan = planned(SAVED)
    cluster = "--network_gbytes_per_s 5 --memory_margin 0.2 --gpus_per_node 8 --nvlink_gpus 8"
    other = planned(f"{SAVED} {cluster} --tokens 1e12")
    assert other["compile"]["cached"]
    capacity = plan["memory"]["capacity"] * 0.74 / 0.94
    assert other["memory"]["capacity"] == pytest.approx(capacity, rel=1e-6)
    fast, slow = (traffic(p)["all-gather", "fsdp"]["busy_s"] for p in (plan, other))
    # A tenth of the network rate: ten times the transfer time, and the same latency.
    assert 6 < slow / fast < 10
    assert other["step_s"] > slow
    days = other["step_s"] * 1e12 / (256 * 4096) / 86400
    assert other["budget"]["days_without_failures"] == pytest.approx(days, rel=1e-4)


@pytest.mark.exhaustive
def test_unrolled_layers_are_recomputed(check_figures):
    """XLA could merge recomputation with the forward pass (CSE), and would keep the activations."""
    row = "--config configs/llama31_8b.py --layers 2 --mbs 4 --config.train.remat="
    none, full = (planned(f"{row}{policy}") for policy in ("none", "full"))
    per_token = 4096 + 2 * 1024 + 4096 + 4096 + 3 * 14336  # q, k, v, context, attn_out, up, act
    layer = 4 * 8192 * 2 * per_token
    # One of two layers: the other is the one that is being recomputed.
    assert none["memory"]["total"] - full["memory"]["total"] > 0.95 * layer
    assert none["memory"]["activations"] > 0.9 * 2 * layer
    check_figures("llama31_8b 8 h100 bf16 2 layers full", full)


@pytest.mark.exhaustive
def test_recomputed_norms_save_memory_at_no_cost(check_figures):
    row = "--config configs/llama31_8b.py --gpus 8 --layers 4 --config.train.remat="
    none, gemms = (planned(f"{row}{policy}") for policy in ("none", "save_gemms_only"))
    stream = 2 * 2 * 4096 * 4096  # the residual stream of two sequences over cp, once
    # Per layer the outputs of both norms, and the queries in zigzag order over cp.
    assert none["memory"]["total"] - gemms["memory"]["total"] > 0.9 * 4 * 3 * stream
    assert gemms["step_s"] < 1.01 * none["step_s"]
    # GEMMs add to the residual stream in place. A loop body of two microbatches copies it only
    # after their embeddings.
    program = program_of(run_of(f"{row}save_gemms_only"))
    ops = [op for computation in program.computations.values() for op in computation.ops]
    assert sum(op.base == "copy" and hlo.size(op.shape) == stream for op in ops) <= 2
    check_figures("llama31_8b 8 h100 bf16 4 layers save_gemms_only", gemms)


@pytest.mark.exhaustive
def test_offloaded_activations_are_in_host_memory(tmp_path, check_figures):
    """Four layers over fsdp. Transfers block the step where nothing hides them."""
    row = "--layers 4 --fsdp 8 --mbs 2 --config.train.remat=none --config.train.offload=mlp_up"
    plan = planned(f"--config configs/llama31_8b.py {row} --timeline {tmp_path}/step.json")
    size = 4 * 2 * 8192 * 2 * 14336 * 2
    assert plan["memory"]["host"] == size
    per_token = 2 * 4096 + 2 * 1024 + 2 * 4096 + 14336  # input, q, k, v, context, attn_out, act
    on_device = 4 * 2 * 8192 * 2 * per_token
    assert plan["memory"]["activations"] == pytest.approx(on_device, rel=0.02)
    one_way_s = size / (64e9 * GPU_TYPES["h100"].efficiency.memory)
    assert 0 < plan["parts_s"]["offload"] < 2 * one_way_s
    assert drawings.COLORS["offload"] in (tmp_path / "step.svg").read_text()
    peak, compiled = drawn_memory(tmp_path)
    assert peak == pytest.approx(compiled, rel=0.04)  # without host memory
    check_figures("llama31_8b 8 h100 bf16 4 layers offload", plan)


@pytest.mark.exhaustive
@pytest.mark.core
def test_tensor_parallel_layers_on_b200(check_figures):
    """Llama 3.1 405B, 4 layers, 4 microbatches. FLOPs are the model's, causal, 3 passes: the
    forward pass runs once."""
    row = "--config configs/llama31_405b.py --gpu_type b200 --tp 8 --cp 2 --gbs 4 --layers 4"
    plan = planned(row)
    executed = plan["hfu"] * GPU_TYPES["b200"].bf16_tflops
    assert executed == pytest.approx(plan["tflops_per_gpu"]["causal"], rel=0.05)
    collectives = traffic(plan)
    assert collectives["all-gather", "tp"]["link"] == "NVLink"
    assert collectives["reduce-scatter", "tp"]["count"] >= 4 * 4 * 2
    # A ring of two: per layer and microbatch, k and v of half a sequence are sent forward. The
    # backward pass has them saved and returns their gradients.
    ring, kv = collectives["permute", "cp"], 2 * 4096 * 8 * 128 * 2 / 8
    assert ring["link"] == "network"
    assert ring["bytes"] == 4 * 4 * (kv + kv)
    check_figures("llama31_405b 16 b200 bf16 4 layers", plan)


@pytest.mark.exhaustive
def test_forward_and_backward_passes_hide_each_others_collectives(check_figures):
    """Also without a pipeline."""
    plan = planned("--config configs/llama31_405b.py --gpus 32 --layers 2")
    for kind in ("all-gather", "reduce-scatter"):
        assert exposed_share(plan, kind, "tp") < 0.4
    check_figures("llama31_405b 32 h100 bf16 2 layers", plan)


@pytest.mark.exhaustive
@pytest.mark.core
def test_experts_exchange_tokens(check_figures):
    """Grok-1: dispatch and combine, forward and backward, are at least four all-to-alls a layer."""
    plan = planned("--config configs/grok1_314b.py --gpus 16")
    exchanged = traffic(plan)["all-to-all", "ep"]
    assert exchanged["link"] == "network"
    tokens = 8 * 4096 * 2 // 4  # of one GPU: mbs x seq / tp, top-2
    calls = 4 * 4 * 32  # of 4 layers and 32 microbatches
    assert exchanged["count"] >= calls
    assert exchanged["bytes"] >= calls * tokens * 6144 * 2
    check_figures("grok1_314b 16 h100 bf16", plan)


@pytest.mark.exhaustive
def test_hint_of_a_plan_that_does_not_fit_fits():
    """Of 79 GiB, 29 may be used: of the 30 that are needed, 7 are activations."""
    row = "--config configs/llama31_8b.py --layers 2 --mbs 4 --memory_margin 0.57"
    done = command(f"{row} --config.train.remat=none")
    assert done.returncode == 3
    hint = re.search(
        r"does not fit: \d+\.\d GiB over; try --config\.train\.remat=(\w+)", done.stdout
    )
    best = planned(f"{row} --best_remat")
    assert best["fits"]
    assert best["remat"] == hint[1]


@pytest.mark.exhaustive
def test_screen_and_timeline(tmp_path, check_figures):
    done = command(f"{LLAMA31_70B} --explain --timeline {tmp_path}/step.json")
    assert done.returncode == 0, done.stderr
    screen, _, explained = done.stdout.partition("\noperation")
    for text in ("fits, ", "all-gather", "predicted step", "GEMMs", "MFU", "days to 1T"):
        assert text in screen
    assert len(screen.splitlines()) < 50
    for text in ("forward mlp/up", "layers.py:", "part of the network", "100.0%"):
        assert text in explained
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    for drawing in ("step.svg", "step.explain.svg"):
        xml.etree.ElementTree.fromstring((tmp_path / drawing).read_text())
    peak, compiled = drawn_memory(tmp_path)
    assert peak == pytest.approx(compiled, rel=0.03)
    check_figures("llama31_70b 32 h200 bf16 4 layers", planned(LLAMA31_70B))


def test_the_python_api_returns_what_the_command_prints():
    done, before = command(LLAMA31_70B), dict(os.environ)
    result = maxbench.plan("llama31_70b", fsdp=8, tp=4, layers=4, gpu_type="h200", sensitivity=True)
    assert dict(os.environ) == before
    screen = str(result).partition("\ncompiled in")[0]
    assert screen == done.stdout.partition("\ncompiled in")[0]
    assert result.data() == result.figures
    assert result.figures["step_s"] == result.records()[0]["step_s"] == result.best.step_s
    assert len(result.figures["sensitivity_s"]["network bandwidth"]) == 4
    operations = result.explain().records()
    assert sum(x["seconds"] for x in operations) == pytest.approx(result.best.step_s)
    gemm = next(x for x in operations if x["name"] == "forward mlp/up")
    tokens, mlp = result.best.run.train.seq, result.best.run.model.mlp // 4
    assert gemm["shape"] == f"bf16 {tokens}x{2 * mlp}x8192 nn"
    assert (gemm["bound"], gemm["source"].partition(":")[0]) == ("compute", "model/layers.py")
    html = result._repr_html_()
    assert html.count("<table>") == 3
    for text in (f"{result.best.step_s:.3f} s a step", "GEMMs", "activations", "x 0.5"):
        assert text in html


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "row",
    [
        "llama2_70b.py --layers 16 --config.train.remat=full",
        "qwen3_30b_a3b.py --layers 6 --config.train.remat=save_gemms_recompute_act",
    ],
)
def test_microbatches_run_one_after_the_other(row):
    """XLA unrolls a loop over two and double-buffers a longer one, and must not keep the
    activations of two."""
    row = f"--config configs/{row} --gpu_type h100 --fsdp 16 --mbs 2"
    one, two, four = (planned(f"{row} --gbs {32 * n}")["memory"] for n in (1, 2, 4))
    for more in (two, four):
        assert more["activations"] == pytest.approx(one["activations"], rel=0.02)
    assert one["total"] <= two["total"] <= four["total"] <= 1.2 * one["total"]


@pytest.mark.exhaustive
def test_search_compiles_the_given_layout_and_others():
    done = command(f"{LLAMA31_70B} --search --compiled 1")
    assert done.returncode == 0, done.stderr
    assert "(as given)" in done.stdout


@pytest.mark.exhaustive
def test_programs_are_not_in_the_cache_of_jax(tmp_path):
    """Which the user may have set for training: it cannot load a program for an absent GPU."""
    run = resolve("llama31_8b", "tiny", device=H100, gpu_type="h100", layers=1)
    with persistent_cache(tmp_path):
        assert aot.compile_run(run).text
    assert not [*tmp_path.glob("jit__step*")]
