"""Branch frequencies of a schedule: orders of events, delays of chunk switches, kinds of ticks."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxbench.config.run import SCHEDULES
from maxbench.cost_model import hlo, simulate
from maxbench.pipeline.schedule import Row, build_schedule
from maxbench.planning import pipeline_timing

NAMES = {"b": "pipeline_bwd_chunk_switch/while", "f": "pipeline_fwd_chunk_switch/while"}
NAMES |= {"l": "pipeline_loss/while", "e": "pipeline_embed_backward/while"}
NAMES |= {"o": "pipeline_end_of_tick/while", "y": "pipeline_send_x/ppermute"}
NAMES |= {"x": "pipeline_send_dx/ppermute"}


def program(events: str) -> hlo.Program:
    """A computation with an op per event, in order. 'e' is not in pipeline_timing.EVENTS; 'o' is
    the loop that contains the chunk switch and the loss."""
    text = "HloModule m, is_scheduled=true\n\nENTRY %tick (x: f32[]) -> f32[] {\n"
    text += "  %x = f32[] parameter(0)\n"
    for i, event in enumerate(events):
        if event.isupper():
            op = "collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}"
        elif event in "xy":
            op = f"collective-permute-done(%op{events.rindex(event.upper(), 0, i)})"
        else:
            op = "while(%x), condition=%c, body=%b"
        where = "jit(_step)/pipeline_steady/while/body/closed_call/" + NAMES[event.lower()]
        text += f'  %op{i} = f32[] {op}, metadata={{op_name="{where}"}}\n'
    return hlo.parse(text + "}\n")


@pytest.mark.parametrize(
    ("events", "orders"),
    [
        ("XYbfxyl", {"XYbfxyl"}),
        ("YfyXblxeYfyXbxl", {"YfyXblx", "YfyXbxl"}),  # two ticks in one body
        ("lXbxYfye", {"lXbxYfy"}),
        ("YfyXox", {"YfyXblx"}),
        ("XYxy", set()),  # no tick of both passes
    ],
)
def test_event_orders_are_those_of_the_program(events, orders):
    assert pipeline_timing.event_orders(program(events)).keys() == orders


def test_slack_of_y_is_that_of_the_tick_with_the_least():
    hlo_program = program("YfyXoxYfyXox")
    starts = [op.name for op in hlo_program.entry.ops if op.opcode.endswith("-start")]
    slack = dict(zip(starts, (0.5, 0.1, 0.3, 0.0), strict=True))  # Y, X, Y, X
    assert pipeline_timing.event_orders(hlo_program, slack) == {"YfyXblx": 0.3}


SIZES = dict(pp=st.integers(2, 8), vp=st.integers(1, 5), extra=st.integers(0, 20))
ORDERS = [
    order
    for order in map("".join, itertools.permutations("XYbfxyl"))
    if order.index("X") < order.index("x") and order.index("Y") < order.index("y")
]


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(SCHEDULES),
    order=st.sampled_from(ORDERS),
    slack=st.sampled_from((0.0, 0.5, 2.0)),
    switch_s=st.sampled_from(((1.0, 3.0), (0.5, 4.0))),
    longer=st.integers(0, 9),
    **SIZES,
)
def test_chunk_switch_delay_is_that_of_simulated_stages(
    name, order, slack, switch_s, longer, pp, vp, extra
):
    """Stage by stage, with work between the ticks."""
    s = build_schedule(name, pp, vp, pp + extra, pp + longer)
    work, clock, own = 10.0, [0.0] * pp, [0.0] * pp
    table = [
        [dict(zip(Row._fields, row, strict=True)) for row in rows] for rows in s.rows().tolist()
    ]
    for tick, rows in enumerate(table):
        then, left = table[(tick + 1) % s.ticks], {}
        for event in order:
            before = list(clock)
            for p, row in enumerate(rows):
                if event == "f":
                    clock[p] += switch_s[0] * (row["fwd_chunk_switch"] >= 0)
                elif event == "b":  # that of the next tick
                    clock[p] += switch_s[1] * (then[p]["bwd_chunk_switch"] >= 0)
                elif event == "l":
                    clock[p] = max(before) if row["loss_microbatch"] >= 0 else clock[p]
                elif event.isupper():
                    left[p, event] = clock[p]
                else:
                    other, late = (p + 1, 0.0) if event == "x" else (p - 1, slack)
                    clock[p] = max(clock[p], left[other % pp, event.upper()] - late)
        for p, row in enumerate(rows):
            own[p] += switch_s[0] * (row["fwd_chunk_switch"] >= 0) + switch_s[1] * (
                row["bwd_chunk_switch"] >= 0
            )
            clock[p] += work
    lengths = dict(zip(pipeline_timing.CHUNK_SWITCHES, switch_s, strict=True))
    delay = pipeline_timing.chunk_switch_delay(s, order, lengths, slack)
    assert max(clock) - s.ticks * work == pytest.approx(delay * np.mean(own))
    assert delay >= 1 - 1e-9


def test_larger_groups_of_microbatches_delay_least():
    """The start of backward work is chosen so that few stages switch at once (405B on 64 GPUs,
    70B)."""
    for pp, vp, micro, least in ((4, 8, 64, 1.1), (4, 5, 32, 1.17)):
        assert (
            pipeline_timing.chunk_switch_delay(build_schedule("1f1b", pp, vp, micro, 8), slack=2.0)
            <= least
        )


def test_frequencies_are_those_of_the_slowest_order():
    s = build_schedule("1f1b", 4, 8, 64, 8)
    switch = pipeline_timing.FORWARD_CHUNK_SWITCH
    fast, slow = (
        pipeline_timing.branch_frequencies(s, program(order))[switch][0]
        for order in ("YfyXbxl", "XbxYfyl")
    )
    assert fast < slow
    assert pipeline_timing.branch_frequencies(s, program("YfyXbxlXbxYfyl"))[switch][0] == slow
    assert (
        pipeline_timing.branch_frequencies(s)[switch][0]
        == pipeline_timing.branch_frequencies(s, program(pipeline_timing.ORDER))[switch][0]
    )


def test_nested_frequencies_are_those_of_the_schedule():
    s = build_schedule("1f1b", 4, 8, 64)
    found = pipeline_timing.branch_frequencies(s)
    forward = sum(
        len(s.phases[name]) * found[name][0]
        for name in (pipeline_timing.WARMUP, pipeline_timing.STEADY)
    )
    inside = found[pipeline_timing.END_OF_TICK][0] * found[pipeline_timing.LOSS][0]
    assert inside * forward == pytest.approx(64 / s.microbatches_per_loss)


def test_slack_of_y_shortens_the_delay():
    s, hlo_program = build_schedule("1f1b", 4, 8, 64, 8), program("YfyXox")
    switch_s = {
        pipeline_timing.FORWARD_CHUNK_SWITCH: 1e-3,
        pipeline_timing.BACKWARD_CHUNK_SWITCH: 3e-3,
    }
    slack = {op.name: 2e-3 for op in hlo_program.entry.ops}
    timelines = (simulate.Timeline(branch_s=switch_s, slack_s=x) for x in ({}, slack))
    default, on_time, late = (
        pipeline_timing.branch_frequencies(s, hlo_program, first_pass)[
            pipeline_timing.FORWARD_CHUNK_SWITCH
        ][0]
        for first_pass in (None, *timelines)
    )
    assert on_time == pytest.approx(default)
    assert late < 0.75 * on_time


@given(st.lists(st.floats(0.001, 0.999), min_size=1, max_size=6))
def test_tick_mix_has_each_branch_at_its_frequency(values):
    """Spread as evenly as possible over the ticks."""
    frequencies = {str(i): value for i, value in enumerate(values)}
    kinds = simulate.iteration_kinds(frequencies)
    assert sum(share for share, _ in kinds) == pytest.approx(1)
    for name, frequency in frequencies.items():
        assert sum(share for share, branches in kinds if name in branches) == pytest.approx(
            frequency
        )
    fewest, most = math.floor(sum(values) + 1e-9), math.ceil(sum(values) - 1e-9)
    assert all(fewest <= len(branches) <= most for share, branches in kinds if share > 1e-6)
