"""What a schedule says of its program's loops: shares, orders of ticks, how long turns are waited
for."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxbench.config.run import SCHEDULES
from maxbench.cost_model import hlo, pipeline_timing, simulate
from maxbench.pipeline.schedule import Row, build_schedule

NAMES = {"b": "pipeline_bwd_chunk_switch/while", "f": "pipeline_fwd_chunk_switch/while"}
NAMES |= {"l": "pipeline_loss/while", "e": "pipeline_embed_backward/while"}
NAMES |= {"o": "pipeline_end_of_tick/while", "y": "pipeline_send_x/ppermute"}
NAMES |= {"x": "pipeline_send_dx/ppermute"}


def program(events: str) -> hlo.Program:
    """A computation of ops that stand for events, in their order; 'e' is none of a tick's, 'o' the
    loop in which the turn and the loss are."""
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
    ("events", "found"),
    [
        ("XYbfxyl", {"XYbfxyl"}),
        ("YfyXblxeYfyXbxl", {"YfyXblx", "YfyXbxl"}),  # two ticks in one body
        ("lXbxYfye", {"lXbxYfy"}),
        ("YfyXox", {"YfyXblx"}),
        ("XYxy", set()),  # no tick of both passes
    ],
)
def test_orders_of_ticks_are_those_of_the_program(events, found):
    assert pipeline_timing.event_orders(program(events)).keys() == found


def test_y_may_come_as_late_as_the_tick_that_leaves_it_least():
    made = program("YfyXoxYfyXox")
    starts = [op.name for op in made.entry.ops if op.opcode.endswith("-start")]
    early = dict(zip(starts, (0.5, 0.1, 0.3, 0.0), strict=True))  # Y, X, Y, X
    assert pipeline_timing.event_orders(made, early) == {"YfyXblx": 0.3}


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
    turns=st.sampled_from(((1.0, 3.0), (0.5, 4.0))),
    longer=st.integers(0, 9),
    **SIZES,
)
def test_turns_are_waited_for_as_clocks_of_all_stages_say(
    name, order, slack, turns, longer, pp, vp, extra
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
                    clock[p] += turns[0] * (row["fwd_chunk_switch"] >= 0)
                elif event == "b":  # that of the next tick
                    clock[p] += turns[1] * (then[p]["bwd_chunk_switch"] >= 0)
                elif event == "l":
                    clock[p] = max(before) if row["loss_microbatch"] >= 0 else clock[p]
                elif event.isupper():
                    left[p, event] = clock[p]
                else:
                    other, late = (p + 1, 0.0) if event == "x" else (p - 1, slack)
                    clock[p] = max(clock[p], left[other % pp, event.upper()] - late)
        for p, row in enumerate(rows):
            own[p] += turns[0] * (row["fwd_chunk_switch"] >= 0) + turns[1] * (
                row["bwd_chunk_switch"] >= 0
            )
            clock[p] += work
    lengths = dict(zip(pipeline_timing.CHUNK_SWITCHES, turns, strict=True))
    delay = pipeline_timing.chunk_switch_delay(s, order, lengths, slack)
    assert max(clock) - s.ticks * work == pytest.approx(delay * np.mean(own))
    assert delay >= 1 - 1e-9


def test_longer_turns_are_where_they_wait_least():
    """Backward work starts so much later that stages' turns meet least (405B on 64 GPUs, 70B)."""
    for pp, vp, micro, least in ((4, 8, 64, 1.1), (4, 5, 32, 1.17)):
        assert (
            pipeline_timing.chunk_switch_delay(build_schedule("1f1b", pp, vp, micro, 8), slack=2.0)
            <= least
        )


def test_shares_are_of_the_slowest_order():
    s = build_schedule("1f1b", 4, 8, 64, 8)
    turn = pipeline_timing.FORWARD_CHUNK_SWITCH
    fast, slow = (
        pipeline_timing.branch_frequencies(s, program(order))[turn][0]
        for order in ("YfyXbxl", "XbxYfyl")
    )
    assert fast < slow
    assert pipeline_timing.branch_frequencies(s, program("YfyXbxlXbxYfyl"))[turn][0] == slow
    assert (
        pipeline_timing.branch_frequencies(s)[turn][0]
        == pipeline_timing.branch_frequencies(s, program(pipeline_timing.ORDER))[turn][0]
    )


def test_what_is_in_the_output_is_had_as_often_as_the_schedule_says():
    s = build_schedule("1f1b", 4, 8, 64)
    found = pipeline_timing.branch_frequencies(s)
    forward = sum(
        len(s.phases[name]) * found[name][0]
        for name in (pipeline_timing.WARMUP, pipeline_timing.STEADY)
    )
    inside = found[pipeline_timing.END_OF_TICK][0] * found[pipeline_timing.LOSS][0]
    assert inside * forward == pytest.approx(64 / s.microbatches_per_loss)


def test_turns_are_waited_for_less_where_y_may_be_late():
    s, made = build_schedule("1f1b", 4, 8, 64, 8), program("YfyXox")
    turns = {
        pipeline_timing.FORWARD_CHUNK_SWITCH: 1e-3,
        pipeline_timing.BACKWARD_CHUNK_SWITCH: 3e-3,
    }
    early = {op.name: 2e-3 for op in made.entry.ops}
    first = (simulate.Timeline(branch_s=turns, slack_s=each) for each in ({}, early))
    alike, now, later = (
        pipeline_timing.branch_frequencies(s, made, each)[pipeline_timing.FORWARD_CHUNK_SWITCH][0]
        for each in (None, *first)
    )
    assert now == pytest.approx(alike)
    assert later < 0.75 * now


@given(st.lists(st.floats(0.001, 0.999), min_size=1, max_size=6))
def test_kinds_of_ticks_have_as_much_as_is_had(parts):
    often = {str(i): part for i, part in enumerate(parts)}
    kinds = pipeline_timing.tick_mix(often)
    assert sum(part for part, _ in kinds) == pytest.approx(1)
    for which, part in often.items():
        assert sum(many for many, had in kinds if which in had) == pytest.approx(part)
    fewest, most = math.floor(sum(parts) + 1e-9), math.ceil(sum(parts) - 1e-9)
    assert all(fewest <= len(had) <= most for many, had in kinds if many > 1e-6)
