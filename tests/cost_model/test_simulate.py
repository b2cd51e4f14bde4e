"""Simulated timelines and op costs, against figures by hand."""

import dataclasses
import gzip
import json
import math
import pathlib
import time

import numpy as np
import pytest

from maxbench import hardware
from maxbench.calibration.fit import PLAUSIBLE
from maxbench.config.run import AXES
from maxbench.cost_model import hlo, simulate
from maxbench.cost_model.costs import Costs
from maxbench.cost_model.meaning import Meaning
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.planning import chrome_trace

ONE = dict.fromkeys(AXES, 1)
EFFICIENCY = GPU_TYPES["h100"].efficiency


def costs(contention: float = 0.0, **degrees) -> Costs:
    """H100 without launch gaps, latency and jitter."""
    none = dict.fromkeys(("launch_us", "host_sync_us", "nvlink_us", "network_us", "wave_us"), 0)
    efficiency = dataclasses.replace(EFFICIENCY, contention=contention, step_jitter=0, **none)
    return Costs(GPU_TYPES["h100"], ONE | degrees, efficiency)


EIGHT = costs(dp=8)
# 1 GiB of bf16, read and written by a kernel, and all-gathered from 8 GPUs.
BIG = "bf16[536870912]{0}"
KERNEL_S = EIGHT.memory(2 * 2**30)
GATHER_S = 2**30 * 7 / 8 / (450e9 * EFFICIENCY.nvlink)
START = (
    "  %start{n} = (bf16[67108864]{{0}}, bf16[536870912]{{0}}) all-gather-start(%shard), "
    "replica_groups=[1,8]<=[8], dimensions={{0}}\n"
)
DONE = "  %done{n} = bf16[536870912]{{0}} all-gather-done(%start{n})\n"
KERNEL = "  %k{n} = bf16[536870912]{{0}} copy(%x)\n"


def run(
    lines: str, op_costs: Costs = EIGHT, others: str = "", record: bool = False, **names
) -> simulate.Timeline:
    """A program of these lines, simulated; `names` are fields of Meaning."""
    text = (
        "HloModule m, is_scheduled=true\n\n" + others + "ENTRY %main (x: f32[]) -> f32[] {\n"
        f"  %x = {BIG} parameter(0)\n  %shard = bf16[67108864]{{0}} parameter(1)\n{lines}}}\n"
    )
    t = simulate.simulate(hlo.parse(text), op_costs, Meaning(**names), record)
    assert sum(op.seconds for op in t.ops.values()) == pytest.approx(t.seconds)
    return t


def script(text: str) -> str:
    """'s1 k1 d1' -> start, kernel, done."""
    parts = {"s": START, "d": DONE, "k": KERNEL}
    return "".join(parts[word[0]].format(n=word[1:]) for word in text.split())


def test_no_overlap():
    t = run(script("s1 d1 k1"))
    assert t.seconds == pytest.approx(GATHER_S + KERNEL_S)
    assert t.exposed_s == pytest.approx(GATHER_S)


def test_partial_overlap():
    assert KERNEL_S < GATHER_S
    t = run(script("s1 k1 d1"))
    assert t.seconds == pytest.approx(GATHER_S)
    assert t.exposed_s == pytest.approx(GATHER_S - KERNEL_S)


def test_perfect_overlap():
    kernels = int(GATHER_S / KERNEL_S) + 1
    t = run(script("s1 " + " ".join(f"k{i}" for i in range(kernels)) + " d1"))
    assert t.seconds == pytest.approx(kernels * KERNEL_S)
    assert t.exposed_s == 0
    assert t.traffic["all-gather", "dp"].busy_s == pytest.approx(GATHER_S)


def test_collectives_share_a_stream():
    t = run(script("s1 s2 d1 d2"))
    assert t.seconds == pytest.approx(2 * GATHER_S)
    assert t.traffic["all-gather", "dp"].count == 2
    assert t.traffic["all-gather", "dp"].bytes == 2 * 2**30


def test_slack_of_a_collective_includes_those_queued_behind_it():
    """The first alone would have the slack of two more kernels, but the second waits for it."""
    kernels = " ".join(f"k{i}" for i in range(math.ceil(2 * GATHER_S / KERNEL_S)))
    t = run(script(f"s1 s2 {kernels} d2 ka kb d1 s3 d3"))
    slack = pytest.approx(len(kernels.split()) * KERNEL_S - 2 * GATHER_S)
    assert t.slack_s == {"start1": slack, "start2": slack, "start3": 0}


def test_permutes_queue_behind_collectives():
    permute = (
        f"  %p = ({BIG}, {BIG}) collective-permute-start(%x), source_target_pairs={{{{0,1}}}}\n"
    )
    done = f"  %q = {BIG} collective-permute-done(%p)\n"
    t = run(script("s1") + permute + done + script("d1"))
    alone = 2**30 / (450e9 * EFFICIENCY.nvlink)
    assert t.seconds == pytest.approx(alone + GATHER_S)


def test_a_synchronous_collective_overlaps_nothing():
    sync = START.format(n=1).rstrip("\n") + ', backend_config={"is_sync":true}\n'
    t = run(sync + script("k1 d1"))
    assert t.seconds == pytest.approx(GATHER_S + KERNEL_S)


def test_contention_slows_both_while_both_run():
    """10 %: kernels slow down by a tenth of the all-gather, and an all-gather by a tenth of the
    kernel that it overlaps."""
    kernels = int(GATHER_S / KERNEL_S) + 2
    slow = costs(contention=0.1, dp=8)
    t = run(script("s1 " + " ".join(f"k{i}" for i in range(kernels)) + " d1"), slow)
    assert t.seconds == pytest.approx(kernels * KERNEL_S + 0.1 * GATHER_S)
    assert t.exposed_s == 0
    t = run(script("s1 s2 k1 d1 d2"), slow)
    assert t.seconds == pytest.approx(2 * GATHER_S + 0.1 * KERNEL_S)


def test_an_asynchronous_copy_takes_time_from_the_kernels_beside_it():
    slice_ = (
        "%slice (p: f32[]) -> f32[] {{\n  %p = {0} parameter(0)\n  ROOT %c = {0} copy(%p)\n}}\n\n"
    )
    start = f"  %a = (({BIG}), {BIG}) async-start(%x), calls=%slice\n"
    done = f"  %b = {BIG} async-done(%a)\n"
    others = slice_.format(BIG)
    assert run(start + done, others=others).compute["copy"] == pytest.approx(KERNEL_S)
    t = run(start + script("k1 k2") + done, others=others)
    assert t.seconds == pytest.approx(3 * KERNEL_S)


def test_transfers_to_the_host_share_a_link_per_direction():
    """Two to the host, one back, which does not wait."""
    away = BIG.replace("}", ":S(5)}")
    make = lambda n, to, source: f"  %s{n} = ({to}, {BIG}, u32[]) copy-start({source})\n"
    done = lambda n, to: f"  %d{n} = {to} copy-done(%s{n})\n"
    out = make(1, away, "%x") + make(2, away, "%x")
    one = 2**30 / (64e9 * EFFICIENCY.memory)
    t = run(out + done(1, away) + done(2, away))
    assert t.compute["offload"] == pytest.approx(t.seconds) == pytest.approx(2 * one)
    back = make(1, away, "%x") + done(1, away) + make(2, away, "%x") + make(3, BIG, "%d1")
    assert run(back + done(2, away) + done(3, BIG)).seconds == pytest.approx(2 * one)
    overlapped = make(1, away, "%x") + script("k1 k2") + done(1, away)
    t = run(overlapped)
    assert t.compute["offload"] == pytest.approx(one - 2 * KERNEL_S)


def test_stragglers_are_the_maximum_of_normal_draws():
    """The expected maximum is 0.56 standard deviations for 2 GPUs, 3.2 for 1,024."""
    waits = Costs(
        GPU_TYPES["h100"], ONE, dataclasses.replace(EFFICIENCY, step_jitter=0.01)
    ).straggler_s
    assert waits(1.0, 1, 1) == 0
    assert waits(1.0, 1, 2) == pytest.approx(0.0056, rel=0.06)
    assert waits(1.0, 1, 1024) == pytest.approx(0.032, rel=0.03)
    assert waits(1.0, 100, 1024) == pytest.approx(10 * waits(1.0, 1, 1024))


BODY = """%body (s: (s32[], f32[])) -> (s32[], f32[]) {{
  %s = (s32[], bf16[536870912]{{0}}, bf16[67108864]{{0}}) parameter(0)
  %x = bf16[536870912]{{0}} get-tuple-element(%s), index=1
  %shard = bf16[67108864]{{0}} get-tuple-element(%s), index=2
{ops}  ROOT %t = (s32[], bf16[536870912]{{0}}, bf16[67108864]{{0}}) tuple(%s, %x, %shard)
}}

"""
WHILE = (
    "  %w = (s32[], f32[]) while(%x), condition=%c, body=%body, "
    'backend_config={"known_trip_count":{"n":"7"}}\n'
)


def branch(name: str, ops: str) -> str:
    head = f"%{name} (x.{name}: f32[]) -> f32[] {{\n  %x = {BIG} parameter(0)\n"
    return f"{head}{ops}}}\n\n"


def conditional(one: str, other: str, name: str) -> str:
    """A conditional of two branches; `name` is the end of its op_name."""
    return (
        f"  %c.{one} = {BIG} conditional(%x, %x, %x), branch_computations={{%{one}, %{other}}}, "
        f'metadata={{op_name="jit(_step)/while/body/{name}"}}\n'
    )


def test_a_loop_counts_each_trip():
    t = run(WHILE, others=BODY.format(ops=script("s1 k1 d1")))
    assert t.seconds == pytest.approx(7 * GATHER_S)
    assert t.exposed_s == pytest.approx(7 * (GATHER_S - KERNEL_S))
    assert t.traffic["all-gather", "dp"].count == 7


def named_loop(op_name: str) -> str:
    """WHILE without a trip count, with a name."""
    loop = f'{WHILE.partition(", backend_config")[0]}, metadata={{op_name="{op_name}"}}\n'
    assert "trip_count" not in loop
    return loop


def test_a_loop_of_unknown_length_is_counted_once_and_reported():
    name = "jit(step)/my_loop/while"
    others = BODY.format(ops=script("k1"))
    t = run(named_loop(name), others=others)
    assert t.seconds == pytest.approx(KERNEL_S)
    (unknown,) = t.unknown.values()
    assert (unknown.name, unknown.op_name, unknown.counted) == ("my_loop", name, "one trip")
    assert unknown.seconds == pytest.approx(KERNEL_S)
    t = run(named_loop(name), others=others, trip_counts={"my_loop": 5})
    assert t.seconds == pytest.approx(5 * KERNEL_S)
    assert not t.unknown
    assert not run(WHILE, others=others).unknown


def test_a_trip_count_is_that_of_the_innermost_scope():
    """A loop in a loop of a given length does not have that length."""
    t = run(
        named_loop("jit(step)/outer/while/body/inner/while"),
        others=BODY.format(ops=script("k1")),
        trip_counts={"outer": 5, "inner": 3},
    )
    assert t.seconds == pytest.approx(3 * KERNEL_S)


def test_a_collective_from_before_a_loop_delays_its_first_iteration_only():
    others = BODY.format(ops=script("s1 d1"))
    t = run(script("s9") + WHILE + script("d9"), others=others)
    assert t.seconds == pytest.approx(8 * GATHER_S)


@pytest.mark.parametrize(
    ("frequencies", "seconds", "idle"),
    [
        ({}, 2 * KERNEL_S, 0),
        ({"pipeline_loss": (0.75, 0.25)}, 2 * KERNEL_S, 0.5 * KERNEL_S),
        ({"pipeline_loss": (0.5, 0.0)}, 1.5 * KERNEL_S, 0),  # otherwise the other branch
        ({"another": (0.5, 0.0)}, 2 * KERNEL_S, 0),
    ],
)
def test_a_conditional_is_weighted_by_its_frequency(frequencies, seconds, idle):
    others = branch("busy", script("k1 k2")) + branch("idle", script("k3"))
    op = conditional("busy", "idle", "pipeline_loss/cond")
    t = run(op, others=others, frequencies=frequencies)
    assert t.seconds == pytest.approx(seconds)
    assert t.idle_s == pytest.approx(idle)


def test_the_frequency_of_a_conditional_is_not_applied_to_nested_ones():
    """A conditional on empty slots in that of a chunk: only the outer one is weighted."""
    name = "pipeline_forward/cond"
    inner = conditional("layer", "idle", f"{name}/branch_1_fun/while/body/closed_call/cond")
    others = branch("layer", script("k1")) + branch("idle", script("")) + branch("chunk", inner)
    frequencies = {"pipeline_forward": (0.5, 0.25)}
    t = run(conditional("chunk", "idle", name), others=others, frequencies=frequencies)
    assert t.compute["copy"] == pytest.approx(0.5 * KERNEL_S)
    assert t.idle_s == pytest.approx(0.25 * KERNEL_S)


def test_a_host_side_branch_costs_one_sync_and_a_loop_that_runs_two():
    """A loop of 0 or 1 trips is used as a conditional that updates its carry in place."""
    others = BODY.format(ops=script("k1"))
    name = 'metadata={op_name="jit(_step)/while/body/pipeline_bwd_chunk_switch/while"}'
    loop = f"{WHILE.partition(', backend_config')[0]}, {name}\n"
    efficiency = dataclasses.replace(EIGHT.efficiency, host_sync_us=20)
    op_costs = Costs(GPU_TYPES["h100"], ONE, efficiency)
    frequencies = {"pipeline_bwd_chunk_switch": (0.25, 0.5)}
    t = run(loop, op_costs, others=others, frequencies=frequencies)
    assert t.compute["copy"] == pytest.approx(0.25 * KERNEL_S)
    assert t.branch_s == {"pipeline_bwd_chunk_switch": pytest.approx(KERNEL_S)}
    assert t.compute["host"] == pytest.approx(1.25 * 20e-6)
    assert t.idle_s == pytest.approx(0.5 * KERNEL_S)
    assert t.seconds == pytest.approx(0.75 * KERNEL_S + 1.25 * 20e-6)


def test_a_rare_branch_hides_communication_only_in_its_own_ticks():
    """One of four ticks has a chunk switch as long as two all-gathers: in the others the all-gather
    is exposed. A quarter of the switch in each tick would hide half of each all-gather."""
    kernels = round(2 * GATHER_S / KERNEL_S) + 1
    switch = script(" ".join(f"k{i}" for i in range(kernels)))
    others = branch("switch", switch) + branch("none", "")
    op = conditional("switch", "none", "pipeline_loss/cond")
    others += BODY.format(ops=script("s1") + op + script("d1"))
    for record in (False, True):
        t = run(WHILE, others=others, frequencies={"pipeline_loss": (0.25, 0.0)}, record=record)
        assert t.seconds == pytest.approx(7 * (0.75 * GATHER_S + 0.25 * kernels * KERNEL_S))
        assert t.exposed_s == pytest.approx(7 * 0.75 * GATHER_S)
        assert t.compute["copy"] == pytest.approx(7 * 0.25 * kernels * KERNEL_S)
        assert t.traffic["all-gather", "dp"].count == pytest.approx(7)


def test_frequent_branches_share_ticks():
    """Of ten ticks six have a chunk switch and seven a loss, each slightly shorter than the
    all-gather: three have both, and in the others the rest of the all-gather is exposed."""
    kernels = int(GATHER_S / KERNEL_S)
    others, ops, work = "", "", script(" ".join(f"k{i}" for i in range(kernels)))
    for name in ("switch", "loss"):
        others += branch(name, work) + branch(f"no_{name}", "")
        ops += conditional(name, f"no_{name}", f"pipeline_{name}/cond")
    others += BODY.format(ops=script("s1") + ops + script("d1"))
    t = run(
        WHILE, others=others, frequencies={"pipeline_switch": (0.6, 0), "pipeline_loss": (0.7, 0)}
    )
    assert t.exposed_s == pytest.approx(7 * 0.7 * (GATHER_S - kernels * KERNEL_S))
    assert t.compute["copy"] == pytest.approx(7 * 1.3 * kernels * KERNEL_S)
    assert t.seconds == pytest.approx(t.exposed_s + t.compute["copy"])


def test_ticks_of_a_phase_are_as_long_as_the_busiest_stage():
    """A stage computes on zeros in the bubble."""
    others = BODY.format(ops=script("k1"))
    name = 'metadata={op_name="jit(_step)/pipeline_warmup/while"}'
    loop = WHILE.replace("\n", f", {name}\n", 1)
    t = run(loop, others=others, frequencies={"pipeline_warmup": (0.75, 0.25)})
    assert t.seconds == pytest.approx(7 * KERNEL_S)
    assert t.compute["copy"] == pytest.approx(0.75 * 7 * KERNEL_S)
    assert t.idle_s == pytest.approx(0.25 * 7 * KERNEL_S)


def test_recorded_events_and_trace(tmp_path):
    others = BODY.format(ops=script("s1 k1 d1"))
    t = run(WHILE, others=others, record=True)
    last = max(s.start + s.seconds for s in t.events)
    assert last == pytest.approx(t.seconds)
    chrome_trace.write(tmp_path / "step.json", t.events, "a step")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    complete = [e for e in events if e["ph"] == "X"]
    assert sum(e["cat"] == "all-gather" for e in complete) == simulate.EXPANDED
    assert max(e["ts"] + e["dur"] for e in complete) == pytest.approx(t.seconds * 1e6)


# Costs of ops.


@pytest.mark.parametrize("order", [(), tuple(reversed(range(64)))])
def test_link_of_axes_is_that_of_the_devices_along_them(order):
    gpu = dataclasses.replace(GPU_TYPES["h100"], pod_gpus=32)
    mesh = Costs(gpu, ONE | {"pp": 2, "dp": 2, "fsdp": 4, "tp": 4}, order=order)
    ids = np.arange(64).reshape(mesh.degrees)
    for axes in ((), ("tp",), ("dp", "tp"), ("tp", "dp"), ("cp",), ("pp", "fsdp"), (*AXES,)):
        group = ids[tuple(slice(None) if a in axes else 0 for a in mesh.axes)].reshape(1, -1)
        assert mesh.axis_link(*axes) == mesh.link_of(group)


def test_costs_of_a_large_mesh_take_no_longer():
    """A search asks for those of thousands of layouts, on 65,536 GPUs too."""
    began = time.process_time()
    for tp in [1, 2, 4, 8] * 500:
        Costs(GPU_TYPES["h100"], ONE | {"dp": 65536 // tp, "tp": tp}).axis_link("tp")
    assert time.process_time() - began < 1


def test_a_collective_over_nodes_uses_the_links_of_all_its_members():
    one = costs(fsdp=128)
    link = one.link_of(np.arange(128)[None])
    assert (link.axes, link.members, link.domains, link.inside) == ("fsdp", 128, 16, 8)
    network, nvlink = 8 * 50e9 * EFFICIENCY.network, 450e9 * EFFICIENCY.nvlink
    expect = 2**30 * 127 / 128 / min(network, nvlink)
    assert one.collective("all-gather", link, 2**23, 2**30) == pytest.approx(expect)
    across = costs(dp=16, tp=8)
    link = across.link_of(np.arange(0, 128, 8)[None])  # one GPU of each node
    assert (link.axes, link.domains, link.inside) == ("dp", 16, 1)
    expect = 2**30 * 15 / 16 / (50e9 * EFFICIENCY.network)
    assert across.collective("reduce-scatter", link, 2**30, 2**26) == pytest.approx(expect)
    assert across.collective("all-reduce", link, 2**30, 2**30) == pytest.approx(2 * expect)


def test_nvlink_domains():
    assert GPU_TYPES["h100"].nvlink_domain(1024) == 8
    assert GPU_TYPES["gb200"].nvlink_domain(128) == 64  # 16 of 18 nodes divide 32
    assert GPU_TYPES["gb200"].nvlink_domain(72) == 72
    assert GPU_TYPES["h100"].nvlink_domain(4) == 8
    assert GPU_TYPES["h100"].topology(128) == "16x1x8"
    assert GPU_TYPES["h100"].topology(4) == "1x1x4"
    assert GPU_TYPES["gb200"].topology(128) == "2x16x4"
    assert GPU_TYPES["h100"].topology(16, 1) == "2x8x1"  # a host with one of a node's GPUs


def test_wave_quantization_of_gemms():
    """132 tiles of 128 x 256 are one wave on H100; one more row starts a second wave."""
    rate = 989e12 * EFFICIENCY.gemm_bf16
    ideal = 2 * (128 * 11) * (256 * 12) * 8192 / rate
    assert EIGHT.gemm(128 * 11, 256 * 12, 8192) == pytest.approx(ideal)
    assert EIGHT.gemm(128 * 11 + 1, 256 * 12, 8192) > 1.3 * ideal
    assert EIGHT.gemm(8192, 8192, 8192) == pytest.approx(2 * 8192**3 / rate, rel=0.04)
    assert EIGHT.gemm(8192, 8192, 8192, dtype="f8e4m3fn") < EIGHT.gemm(8192, 8192, 8192)


def test_a_small_collective_uses_the_protocol_and_algorithm_of_least_latency():
    """NCCL's tuner: 2.7 us per step between nodes, 0.6 within, for a few bytes."""
    tuner = dataclasses.replace(EFFICIENCY, nvlink_us=3.4, network_us=14.0)
    one = Costs(GPU_TYPES["h100"], ONE | {"dp": 1024}, tuner)
    link = one.axis_link("dp")
    tree = 1e-6 * (6.5 + 2 * (7 * 0.61 + 7 * 2.66))
    assert one.collective("all-reduce", link, 4, 4) == pytest.approx(tree, rel=0.01)
    ring = 1e-6 * (6.5 + (1024 - 128) * 0.61 + 127 * 2.66)
    assert one.collective("all-gather", link, 4, 4096) == pytest.approx(ring, rel=0.01)
    large = one.collective("all-reduce", link, 2**33, 2**33)
    free = costs(dp=1024).collective("all-reduce", link, 2**33, 2**33)
    assert free < large < 1.2 * free  # a tree, because a ring has 1,023 steps


def test_a_gemm_with_a_short_k_is_less_efficient():
    p = Costs(GPU_TYPES["h100"], ONE)
    rate = lambda k: 2 * 8192 * 8192 * k / p.gemm(8192, 8192, k)
    assert rate(1024) < 0.9 * rate(8192)
    assert p.gemm(8192, 8192, 8192, dtype="f32") > 1.9 * p.gemm(8192, 8192, 8192)


def test_efficiencies_are_plausible_and_have_a_source():
    names = [f.name for f in dataclasses.fields(EFFICIENCY)]
    assert len(names) <= 15
    assert set(names) == set(PLAUSIBLE)
    for gpu in GPU_TYPES.values():
        for name, (low, high) in PLAUSIBLE.items():
            assert low <= getattr(gpu.efficiency, name) <= high, name
    lines = (pathlib.Path(hardware.__path__[0]) / "gpus.toml").read_text().splitlines()
    for name in names:  # a comment with the source
        assert [line for line in lines if line.startswith(f"{name} = ") and " # " in line], name


@pytest.mark.parametrize(
    ("program", "measured_s"),
    [("plain", 0.1328), ("llama31_8b-bf16", 0.1418), ("llama31_8b-fp8", 0.1179)],
)
def test_steps_measured_on_an_h200(program, measured_s):
    """The text that XLA wrote on the GPU, autotuned, against the step that ran there."""
    folder = pathlib.Path(__file__).parents[2] / "benchmarks/results/h200"
    text = gzip.decompress((folder / f"{program}.hlo.txt.gz").read_bytes()).decode()
    t = simulate.simulate(hlo.parse(text), Costs(GPU_TYPES["h200"], ONE))
    assert t.seconds == pytest.approx(measured_s, rel=0.06)
    assert not t.unknown
    assert t.compute["attention"] < 0.15 * t.seconds


@pytest.mark.parametrize(
    ("mask", "window", "fraction"), [(0, -1, 1), (2, -1, 1 / 2), (3, -1, 1 / 2), (2, 1023, 7 / 32)]
)
def test_attention_of_transformer_engine_is_priced_by_its_sizes(mask, window, fraction):
    """Queries, keys and values are packed in one operand."""
    config = (
        "attn_heads = 32 : i64, input_batch = 2 : i64, kv_max_seqlen = 4096 : i64, mask_type = "
        f"{mask} : i64, num_gqa_groups = 32 : i64, q_max_seqlen = 4096 : i64, qk_head_dim = 128 : "
        f"i64, v_head_dim = 64 : i64, window_size_left = {window} : i64"
    )
    lines = "  %qkv = bf16[2,4096,3,32,128]{4,3,2,1,0} parameter(2)\n"
    for which in ("forward", "backward"):
        lines += (
            f"  %{which} = (bf16[2,4096,32,128]{{3,2,1,0}}) custom-call(%qkv), custom_call_target="
            f'"te_fused_attn_{which}_ffi", backend_config={{{config}}}\n'
        )
    t = run(lines)
    scores = 2 * 32 * 4096**2
    forward, backward = 2 * (128 + 64) * scores, 2 * (3 * 128 + 2 * 64) * scores
    assert t.flops == pytest.approx(fraction * (forward + backward))
    assert t.compute["attention"] == pytest.approx(t.seconds)
    assert not t.unknown
