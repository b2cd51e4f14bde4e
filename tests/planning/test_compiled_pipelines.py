"""Plans of pipelines that XLA's GPU compiler compiles: memory, communication and overlap against
figures derived by hand. Each program takes up to a minute to compile."""

import pytest

from maxbench.cost_model import hlo, memory, simulate
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.pipeline.schedule import FORWARD_CHUNK_SWITCH, STEADY
from maxbench.planning import explain, pipeline_timing, planner
from tests.planning.plans import exposed_share, planned, program_of, run_of, traffic

pytestmark = [
    pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning"),
    pytest.mark.gpu_compile,
    pytest.mark.exhaustive,
]
# Tests of one program run on one worker, which compiles it.
group = pytest.mark.xdist_group
# 30 layers of Llama 3.1 405B in four stages of eight chunks: 32 slots.
XLA = "--config.precision.backend=xla"  # also where Transformer Engine is installed
LLAMA31_405B = "--config configs/llama31_405b.py --gpus 64"
ENDS = 2 * 128256 * 16384  # weights of embedding and LM head
LAYERS = 99_833_823_232 - ENDS  # weights of 30 layers


@pytest.fixture(scope="module")
def plan_405b() -> dict:
    return planned(LLAMA31_405B)


@group("plan 405b")
def test_pipeline_memory(plan_405b, check_figures):
    """The stash has 36 slots, one to spare, each with a chunk's residuals of four sequences."""
    m = plan_405b["memory"]
    assert plan_405b["fits"]
    tokens = 4 * 8192 // 2  # over cp; the rest is over tp
    layer = 2 * tokens * (3 * 16384 + 4 * 1024 + 2 * 53248) // 8  # x, q, o; k, v of two; mlp up
    activation = 2 * tokens * 16384 // 8
    assert m["activations"] == pytest.approx(36 * (layer + activation), rel=0.06)
    weights = 2 * LAYERS * 32 / 30 / 32  # bf16, pp 4 x tp 8, 30 layers in 32 slots
    assert m["gradients"] == pytest.approx(weights + 2 * ENDS / 8, rel=0.01)
    # Each buffer has its own allocation, and the optimizer updates the state in place: the largest
    # arrays of the state have 3.5e9 bytes.
    program = program_of(run_of(LLAMA31_405B))
    copies = [hlo.size(op.shape) for op in program.entry.ops if op.base == "copy"]
    assert max(copies) < 0.6e9
    check_figures("llama31_405b 64 h100 bf16", plan_405b)


@group("plan 405b")
def test_explanation_of_a_pipeline(plan_405b):
    p = planner.plan(run_of(LLAMA31_405B))
    explained = explain.explain(p)
    assert explained.step_s == pytest.approx(plan_405b["step_s"])
    assert sum(sum(x.values()) for x in explained.parts.values()) == pytest.approx(p.step_s)
    assert sum(x.seconds for x in explained.exposed) == pytest.approx(p.timeline.exposed_s)
    assert {"stash", "loss", "backward chunk switch"} < set(explained.tick_events)


@group("plan 405b")
def test_pipeline_communication(plan_405b):
    weights = 2 * LAYERS * 32 / 30 / 32
    collectives = traffic(plan_405b)
    # ZeRO slices overlap the warm-up and the cool-down. Ticks without a slice repeat one: there are
    # 33 for the slices of 7 chunks in 4 ticks each.
    for kind in ("all-gather", "reduce-scatter"):
        zero = collectives[kind, "cp"]
        assert weights <= zero["bytes"] < 33 / (7 * 4) * weights
        assert zero["count"] > 30
        assert exposed_share(plan_405b, kind, "cp") < 0.6
    # Each microbatch, in both directions, for each of a stage's 8 chunks.
    sent, times = collectives["permute", "pp"], 2 * 16 * 8
    activation = 2 * (4 * 8192 // 2) * 16384 // 8
    assert sent["count"] == pytest.approx(times, rel=1e-4)
    assert sent["bytes"] == pytest.approx(times * activation, rel=4e-4)  # of average ticks


@group("plan 405b")
def test_pipeline_overlap(plan_405b):
    parts, step_s = plan_405b["parts_s"], plan_405b["step_s"]
    assert parts["idle"] < 0.05 * step_s
    # Forward and backward pass hide each other's collectives.
    assert parts["exposed"] < 0.08 * step_s
    # Chunk switches and the stash: no array is transposed.
    assert parts["copy"] < 0.035 * step_s
    # A stage computes 8 layers (30 layers in 32 slots) of 64 microbatches, causal.
    flops = 64 * 3 * 2 * LAYERS * 8 / 30 * 4096 / 8
    assert parts["gemm"] > flops / 989e12 / GPU_TYPES["h100"].efficiency.gemm_bf16
    over = step_s / plan_405b["published"]["step_s"] - 1
    assert plan_405b["published"]["over_published"] == pytest.approx(over)


@group("plan 405b")
def test_chunk_switches_overlap_communication(plan_405b):
    """A chunk switch runs between send and receive, and y may be later than a switch takes."""
    run = run_of(LLAMA31_405B)
    program = program_of(run)
    names = planner.meaning_of(run, program)
    first_pass = simulate.simulate(program, planner.costs_of(run), names)
    orders = pipeline_timing.event_orders(program, first_pass.slack_s)
    assert {(order[:3], order[3:5]) for order in orders} == {("Yfy", "Xb")}
    assert min(orders.values()) > first_pass.branch_s[FORWARD_CHUNK_SWITCH]


@pytest.mark.core
@group("plan grok")
def test_expert_counts_overlap_gemms(check_figures):
    """Grok-1 in a pipeline: the all-reduce of the router's counts is not queued behind dx."""
    plan = planned("--config configs/grok1_314b.py --gpus 128")
    assert traffic(plan)["all-reduce", "cp+tp"]["count"] >= 8 * 32  # 8 layers, 32 microbatches
    assert exposed_share(plan, "all-reduce", "cp+tp") < 0.05
    check_figures("grok1_314b 128 h100 bf16", plan)


LLAMA31_405B_FP8 = f"--config configs/llama31_405b.py --gpus 128 --dtype fp8 {XLA}"


@group("plan 405b fp8")
def test_fp8_pipeline_keeps_weights_once():
    """Weights are stashed in one form, and a chunk's are transposed at its switch. If XLA
    transposed the whole stack, copies would be 15 % of the step."""
    plan = planned(LLAMA31_405B_FP8)
    # All collectives share one queue: ZeRO slices must not delay tp's all-gathers.
    assert exposed_share(plan, "all-gather", "tp") < 0.5
    assert plan["parts_s"]["copy"] < 0.07 * plan["step_s"]
    run = run_of(LLAMA31_405B_FP8)
    program = program_of(run)
    steady = next(op for op in program.entry.ops if op.op_name.endswith(f"{STEADY}/while"))
    stack = "f8e4m3fn", memory.stage_slots(run)[0][:1]
    leaves = [s for s in hlo.leaves(steady.shape) if (s.dtype, s.dims[:1]) == stack]
    weights = [s.bytes for s in leaves if s.bytes > 2**28]  # less: of the resident chunks, 16 heads
    assert sum(weights) == pytest.approx(memory.stage_weights(run).layers, rel=0.01)


@group("plan 405b fp8")
def test_quantization_reads_its_input_once(check_figures):
    """XLA alone fuses a norm into an fp32 output that quantization and amax each read, and delays
    amaxes, which then read the operand again."""
    plan = planned(LLAMA31_405B_FP8)
    parts, step_s = plan["parts_s"], plan["step_s"]
    assert parts.get("amax", 0) < 1e-3 * step_s
    ops = [op for c in program_of(run_of(LLAMA31_405B_FP8)).computations.values() for op in c.ops]
    norms = [op for op in ops if "_norm/" in op.op_name and op.base == "fusion"]
    stream = 2 * 8192 * 16384 // 16  # elements of two sequences, over cp and tp
    is_wide = lambda op: any(
        s.dtype == "f32" and s.elements >= stream for s in hlo.leaves(op.shape)
    )
    assert norms
    assert not any(map(is_wide, norms))
    # Most ticks have two host-side branches: on a chunk switch, and on the rare events.
    assert parts["host"] < 0.0025 * step_s
    # y's reduce-scatter overlaps two wgrads.
    assert parts["exposed"] < 0.03 * step_s
    check_figures("llama31_405b 128 h100 fp8", plan)
