"""The timeline on cases computed by hand, and the prices of ops."""

import dataclasses
import json
import math
import pathlib

import numpy as np
import pytest

from benchmarks.fit_constants import RANGES
from maxbench import hardware
from maxbench.config.run import AXES
from maxbench.cost_model import hlo, simulate
from maxbench.cost_model.costs import Costs
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.planning import chrome_trace

ONE = dict.fromkeys(AXES, 1)
EFFICIENCY = GPU_TYPES["h100"].efficiency


def costs(contention: float = 0.0, **degrees) -> Costs:
    """H100 with no gaps between kernels, no latency, and all GPUs alike."""
    none = dict.fromkeys(("launch_us", "host_sync_us", "nvlink_us", "network_us", "wave_us"), 0)
    efficiency = dataclasses.replace(EFFICIENCY, contention=contention, step_jitter=0, **none)
    return Costs(GPU_TYPES["h100"], ONE | degrees, efficiency)


EIGHT = costs(dp=8)
# 1 GiB of bf16, read and written by a kernel, and gathered from 8 GPUs.
BIG = "bf16[536870912]{0}"
KERNEL_S = EIGHT.memory(2 * 2**30)
GATHER_S = 2**30 * 7 / 8 / (450e9 * EFFICIENCY.nvlink)
START = (
    "  %start{n} = (bf16[67108864]{{0}}, bf16[536870912]{{0}}) all-gather-start(%shard), "
    "replica_groups=[1,8]<=[8], dimensions={{0}}\n"
)
DONE = "  %done{n} = bf16[536870912]{{0}} all-gather-done(%start{n})\n"
KERNEL = "  %k{n} = bf16[536870912]{{0}} copy(%x)\n"


def play(lines: str, price: Costs = EIGHT, others: str = "", **kwargs) -> simulate.Timeline:
    text = (
        "HloModule m, is_scheduled=true\n\n" + others + "ENTRY %main (x: f32[]) -> f32[] {\n"
        f"  %x = {BIG} parameter(0)\n  %shard = bf16[67108864]{{0}} parameter(1)\n{lines}}}\n"
    )
    return simulate.simulate(hlo.parse(text), price, **kwargs)


def script(text: str) -> str:
    """'s1 k1 d1' -> start, kernel, done."""
    parts = {"s": START, "d": DONE, "k": KERNEL}
    return "".join(parts[word[0]].format(n=word[1:]) for word in text.split())


def test_no_overlap():
    t = play(script("s1 d1 k1"))
    assert t.seconds == pytest.approx(GATHER_S + KERNEL_S)
    assert t.exposed_s == pytest.approx(GATHER_S)


def test_partial_overlap():
    assert KERNEL_S < GATHER_S
    t = play(script("s1 k1 d1"))
    assert t.seconds == pytest.approx(GATHER_S)
    assert t.exposed_s == pytest.approx(GATHER_S - KERNEL_S)


def test_perfect_overlap():
    kernels = int(GATHER_S / KERNEL_S) + 1
    t = play(script("s1 " + " ".join(f"k{i}" for i in range(kernels)) + " d1"))
    assert t.seconds == pytest.approx(kernels * KERNEL_S)
    assert t.exposed_s == 0
    assert t.traffic["all-gather", "dp"].busy_s == pytest.approx(GATHER_S)


def test_collectives_of_one_stream_run_one_after_the_other():
    t = play(script("s1 s2 d1 d2"))
    assert t.seconds == pytest.approx(2 * GATHER_S)
    assert t.traffic["all-gather", "dp"].count == 2
    assert t.traffic["all-gather", "dp"].bytes == 2 * 2**30


def test_a_collective_may_be_as_late_as_what_is_queued_behind_it():
    """The first would have the time of two kernels more, but the second waits for it."""
    kernels = " ".join(f"k{i}" for i in range(math.ceil(2 * GATHER_S / KERNEL_S)))
    t = play(script(f"s1 s2 {kernels} d2 ka kb d1 s3 d3"))
    over = pytest.approx(len(kernels.split()) * KERNEL_S - 2 * GATHER_S)
    assert t.slack_s == {"start1": over, "start2": over, "start3": 0}


def test_permutes_queue_behind_collectives():
    permute = (
        f"  %p = ({BIG}, {BIG}) collective-permute-start(%x), source_target_pairs={{{{0,1}}}}\n"
    )
    done = f"  %q = {BIG} collective-permute-done(%p)\n"
    t = play(script("s1") + permute + done + script("d1"))
    alone = 2**30 / (450e9 * EFFICIENCY.nvlink)
    assert t.seconds == pytest.approx(alone + GATHER_S)


def test_a_collective_in_line_overlaps_with_nothing():
    sync = START.format(n=1).rstrip("\n") + ', backend_config={"is_sync":true}\n'
    t = play(sync + script("k1 d1"))
    assert t.seconds == pytest.approx(GATHER_S + KERNEL_S)


def test_contention_slows_both_while_both_run():
    """With 10 %: kernels take longer by a tenth of the gather; it, behind one, of that one."""
    kernels = int(GATHER_S / KERNEL_S) + 2
    slow = costs(contention=0.1, dp=8)
    t = play(script("s1 " + " ".join(f"k{i}" for i in range(kernels)) + " d1"), slow)
    assert t.seconds == pytest.approx(kernels * KERNEL_S + 0.1 * GATHER_S)
    assert t.exposed_s == 0
    t = play(script("s1 s2 k1 d1 d2"), slow)
    assert t.seconds == pytest.approx(2 * GATHER_S + 0.1 * KERNEL_S)


def test_a_copy_beside_the_kernels_is_waited_for():
    """Asynchronous slices and copies are kernels on a stream of their own."""
    slice_ = (
        "%slice (p: f32[]) -> f32[] {{\n  %p = {0} parameter(0)\n  ROOT %c = {0} copy(%p)\n}}\n\n"
    )
    start = f"  %a = (({BIG}), {BIG}) async-start(%x), calls=%slice\n"
    done = f"  %b = {BIG} async-done(%a)\n"
    others = slice_.format(BIG)
    assert play(start + done, others=others).compute["copy"] == pytest.approx(KERNEL_S)
    t = play(start + script("k1 k2") + done, others=others)
    assert t.seconds == pytest.approx(2 * KERNEL_S)


def test_copies_to_the_host_wait_for_each_other_and_for_their_link():
    """Two out, one back: the way back is free."""
    away = BIG.replace("}", ":S(5)}")
    make = lambda n, to, source: f"  %s{n} = ({to}, {BIG}, u32[]) copy-start({source})\n"
    done = lambda n, to: f"  %d{n} = {to} copy-done(%s{n})\n"
    out = make(1, away, "%x") + make(2, away, "%x")
    one = 2**30 / (64e9 * EFFICIENCY.memory)
    t = play(out + done(1, away) + done(2, away))
    assert t.compute["offload"] == pytest.approx(t.seconds) == pytest.approx(2 * one)
    back = make(1, away, "%x") + done(1, away) + make(2, away, "%x") + make(3, BIG, "%d1")
    assert play(back + done(2, away) + done(3, BIG)).seconds == pytest.approx(2 * one)
    beside = make(1, away, "%x") + script("k1 k2") + done(1, away)
    t = play(beside)
    assert t.compute["offload"] == pytest.approx(one - 2 * KERNEL_S)


def test_all_wait_for_the_slowest():
    """Of 2 GPUs the larger of two draws is 0.56 deviations off, of 1,024 it is 3.2."""
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
    """Between branches; `name` as the executor gave it, and what stands behind it."""
    return (
        f"  %c.{one} = {BIG} conditional(%x, %x, %x), branch_computations={{%{one}, %{other}}}, "
        f'metadata={{op_name="jit(_step)/while/body/{name}"}}\n'
    )


def test_a_loop_counts_as_often_as_it_runs():
    t = play(WHILE, others=BODY.format(ops=script("s1 k1 d1")))
    assert t.seconds == pytest.approx(7 * GATHER_S)
    assert t.exposed_s == pytest.approx(7 * (GATHER_S - KERNEL_S))
    assert t.traffic["all-gather", "dp"].count == 7


def test_a_collective_from_before_a_loop_delays_its_first_iteration_only():
    others = BODY.format(ops=script("s1 d1"))
    t = play(script("s9") + WHILE + script("d9"), others=others)
    assert t.seconds == pytest.approx(8 * GATHER_S)


@pytest.mark.parametrize(
    ("shares", "seconds", "idle"),
    [
        ({}, 2 * KERNEL_S, 0),
        ({"pipeline_loss": (0.75, 0.25)}, 2 * KERNEL_S, 0.5 * KERNEL_S),
        ({"pipeline_loss": (0.5, 0.0)}, 1.5 * KERNEL_S, 0),  # else the other branch
        ({"another": (0.5, 0.0)}, 2 * KERNEL_S, 0),
    ],
)
def test_a_conditional_takes_as_long_as_its_work_is_frequent(shares, seconds, idle):
    others = branch("busy", script("k1 k2")) + branch("idle", script("k3"))
    op = conditional("busy", "idle", "pipeline_loss/cond")
    t = play(op, others=others, frequencies=shares)
    assert t.seconds == pytest.approx(seconds)
    assert t.idle_s == pytest.approx(idle)


def test_a_conditional_inside_another_is_not_counted_by_its_name_again():
    """Slots without a layer: the chunk's conditional counts how often there is work, once."""
    name = "pipeline_forward/cond"
    inner = conditional("layer", "idle", f"{name}/branch_1_fun/while/body/closed_call/cond")
    others = branch("layer", script("k1")) + branch("idle", script("")) + branch("chunk", inner)
    shares = {"pipeline_forward": (0.5, 0.25)}
    t = play(conditional("chunk", "idle", name), others=others, frequencies=shares)
    assert t.compute["copy"] == pytest.approx(0.5 * KERNEL_S)
    assert t.idle_s == pytest.approx(0.25 * KERNEL_S)


def test_the_host_decides_once_for_a_branch_and_twice_for_a_loop_that_runs():
    """A loop that runs once or not at all stands for a conditional: its sums stay in place."""
    others = BODY.format(ops=script("k1"))
    name = 'metadata={op_name="jit(_step)/while/body/pipeline_bwd_chunk_switch/while"}'
    loop = f"{WHILE.partition(', backend_config')[0]}, {name}\n"
    price = Costs(GPU_TYPES["h100"], ONE, dataclasses.replace(EIGHT.efficiency, host_sync_us=20))
    shares = {"pipeline_bwd_chunk_switch": (0.25, 0.5)}
    t = play(loop, price, others=others, frequencies=shares)
    assert t.compute["copy"] == pytest.approx(0.25 * KERNEL_S)
    assert t.branch_s == {"pipeline_bwd_chunk_switch": pytest.approx(KERNEL_S)}
    assert t.compute["host"] == pytest.approx(1.25 * 20e-6)
    assert t.idle_s == pytest.approx(0.5 * KERNEL_S)
    assert t.seconds == pytest.approx(0.75 * KERNEL_S + 1.25 * 20e-6)


def test_what_hides_behind_a_seldom_piece_of_work_does_not_hide_elsewhere():
    """Of four ticks one has a turn as long as two gathers: in the others the gather is waited for.
    A fourth of the turn in each tick would hide half of each gather."""
    kernels = round(2 * GATHER_S / KERNEL_S) + 1
    turn = script(" ".join(f"k{i}" for i in range(kernels)))
    others = branch("turn", turn) + branch("none", "")
    op = conditional("turn", "none", "pipeline_loss/cond")
    others += BODY.format(ops=script("s1") + op + script("d1"))
    for record in (False, True):
        t = play(WHILE, others=others, frequencies={"pipeline_loss": (0.25, 0.0)}, record=record)
        assert t.seconds == pytest.approx(7 * (0.75 * GATHER_S + 0.25 * kernels * KERNEL_S))
        assert t.exposed_s == pytest.approx(7 * 0.75 * GATHER_S)
        assert t.compute["copy"] == pytest.approx(7 * 0.25 * kernels * KERNEL_S)
        assert t.traffic["all-gather", "dp"].count == pytest.approx(7)


def test_where_ticks_are_too_few_some_have_two_seldom_pieces_of_work():
    """Of ten ticks six have a turn and seven a loss, each somewhat shorter than the gather: three
    have both, and in the others the rest of the gather is waited for."""
    kernels = int(GATHER_S / KERNEL_S)
    others, ops, work = "", "", script(" ".join(f"k{i}" for i in range(kernels)))
    for each in ("turn", "loss"):
        others += branch(each, work) + branch(f"no_{each}", "")
        ops += conditional(each, f"no_{each}", f"pipeline_{each}/cond")
    others += BODY.format(ops=script("s1") + ops + script("d1"))
    t = play(
        WHILE, others=others, frequencies={"pipeline_turn": (0.6, 0), "pipeline_loss": (0.7, 0)}
    )
    assert t.exposed_s == pytest.approx(7 * 0.7 * (GATHER_S - kernels * KERNEL_S))
    assert t.compute["copy"] == pytest.approx(7 * 1.3 * kernels * KERNEL_S)
    assert t.seconds == pytest.approx(t.exposed_s + t.compute["copy"])


def test_ticks_of_a_phase_take_as_long_as_the_busiest_stages():
    """What a stage does for nothing is time in which it would have waited."""
    others = BODY.format(ops=script("k1"))
    name = 'metadata={op_name="jit(_step)/pipeline_warmup/while"}'
    loop = WHILE.replace("\n", f", {name}\n", 1)
    t = play(loop, others=others, frequencies={"pipeline_warmup": (0.75, 0.25)})
    assert t.seconds == pytest.approx(7 * KERNEL_S)
    assert t.compute["copy"] == pytest.approx(0.75 * 7 * KERNEL_S)
    assert t.idle_s == pytest.approx(0.25 * 7 * KERNEL_S)


def test_bars_and_trace(tmp_path):
    others = BODY.format(ops=script("s1 k1 d1"))
    t = play(WHILE, others=others, record=True)
    last = max(s.start + s.seconds for s in t.events)
    assert last == pytest.approx(t.seconds)
    paths = chrome_trace.write(str(tmp_path / "step.json"), t.events, "a step")
    events = json.loads(paths[0].read_text())["traceEvents"]
    bars = [e for e in events if e["ph"] == "X"]
    assert sum(e["cat"] == "all-gather" for e in bars) == simulate.EXPANDED
    assert max(e["ts"] + e["dur"] for e in bars) == pytest.approx(t.seconds * 1e6)
    assert paths[1].read_text().startswith("<svg")


# Prices.


def test_a_collective_over_nodes_is_as_fast_as_its_members_links_together():
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


def test_gemm_fills_rounds_of_cores():
    """132 tiles of 128 x 256 fill H100 exactly once; a fuller grid starts another round."""
    rate = 989e12 * EFFICIENCY.gemm_bf16
    ideal = 2 * (128 * 11) * (256 * 12) * 8192 / rate
    assert EIGHT.gemm(128 * 11, 256 * 12, 8192) == pytest.approx(ideal)
    assert EIGHT.gemm(128 * 11 + 1, 256 * 12, 8192) > 1.3 * ideal
    assert EIGHT.gemm(8192, 8192, 8192) == pytest.approx(2 * 8192**3 / rate, rel=0.04)
    assert EIGHT.gemm(8192, 8192, 8192, dtype="f8e4m3fn") < EIGHT.gemm(8192, 8192, 8192)


def test_a_small_collective_takes_the_protocol_and_the_way_of_least_latency():
    """As NCCL's tuner has it: 2.7 us a step between nodes and 0.6 within for a few bytes."""
    tuner = dataclasses.replace(EFFICIENCY, nvlink_us=3.4, network_us=14.0)
    one = Costs(GPU_TYPES["h100"], ONE | {"dp": 1024}, tuner)
    link = one.axis_link("dp")
    tree = 1e-6 * (6.5 + 2 * (7 * 0.61 + 7 * 2.66))
    assert one.collective("all-reduce", link, 4, 4) == pytest.approx(tree, rel=0.01)
    ring = 1e-6 * (6.5 + (1024 - 128) * 0.61 + 127 * 2.66)
    assert one.collective("all-gather", link, 4, 4096) == pytest.approx(ring, rel=0.01)
    large = one.collective("all-reduce", link, 2**33, 2**33)
    free = costs(dp=1024).collective("all-reduce", link, 2**33, 2**33)
    assert free < large < 1.2 * free  # a tree: no ring of 1,023 steps


def test_a_product_with_little_to_add_up_is_slower():
    p = Costs(GPU_TYPES["h100"], ONE)
    rate = lambda k: 2 * 8192 * 8192 * k / p.gemm(8192, 8192, k)
    assert rate(1024) < 0.9 * rate(8192)
    assert p.gemm(8192, 8192, 8192, dtype="f32") > 1.9 * p.gemm(8192, 8192, 8192)


def test_physics_is_plausible_and_small():
    names = [f.name for f in dataclasses.fields(EFFICIENCY)]
    assert len(names) <= 14
    assert set(names) == set(RANGES)
    for gpu in GPU_TYPES.values():
        for name, (low, high) in RANGES.items():
            assert low <= getattr(gpu.efficiency, name) <= high, name
    lines = (pathlib.Path(hardware.__path__[0]) / "gpus.toml").read_text().splitlines()
    for name in names:  # each says where it comes from
        assert [line for line in lines if line.startswith(f"{name} = ") and " # " in line], name
