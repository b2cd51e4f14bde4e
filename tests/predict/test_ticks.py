"""What a schedule says of its program's loops: shares, orders of ticks, how long turns are waited
for."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxbench.predict import hlo, ticks
from maxbench.spec.run import SCHEDULES
from maxbench.step.schedule import COLUMNS, schedule

PAIRS = {"Y": "{{0,1},{1,2},{2,0}}", "X": "{{0,2},{1,0},{2,1}}"}
NAMES = {"b": "pipeline_backward_turn/while", "f": "pipeline_forward_turn/while"}
NAMES |= {"l": "pipeline_loss/while", "e": "pipeline_embed_backward/while"}


def program(events: str) -> hlo.Program:
    """A computation of ops that stand for events, in their order; 'e' is none of a tick's, and 'z'
    is waited for after a product."""
    text = "HloModule m, is_scheduled=true\n\nENTRY %tick (x: f32[]) -> f32[] {\n"
    text += "  %x = f32[] parameter(0)\n"
    sent = {}
    for i, event in enumerate(events.replace("z", "py")):
        if event in PAIRS:
            sent[event.lower()] = f"%send{i}"
            op = f"collective-permute-start(%x), source_target_pairs={PAIRS[event]}"
        elif event in sent:
            op = f"collective-permute-done({sent[event]})"
        elif event == "p":
            op = 'custom-call(%x), custom_call_target="__cublas$lt$matmul"'
        else:
            op = "while(%x), condition=%c, body=%b"
        name = f"send{i}" if event in PAIRS else f"op{i}"
        where = "jit(_step)/pipeline_both/while/body/closed_call/" + NAMES.get(event, "ppermute")
        text += f'  %{name} = f32[] {op}, metadata={{op_name="{where}"}}\n'
    return hlo.parse(text + "}\n")


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ("XYbfxyl", {"XYbfxyl"}),
        ("YfzXblxeYfyXbxl", {"YfzXblx", "YfyXbxl"}),  # two ticks in one body
        ("lXbxYfye", {"lXbxYfy"}),
        ("XYxy", set()),  # no tick of both passes
    ],
)
def test_orders_of_ticks_are_those_of_the_program(events, found):
    assert ticks.orders(program(events)) == found


SIZES = dict(pp=st.integers(2, 8), vp=st.integers(1, 5), extra=st.integers(0, 20))
ORDERS = [
    order
    for order in map("".join, itertools.permutations("XYbfxzl"))
    if order.index("X") < order.index("x") and order.index("Y") < order.index("z")
]


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(SCHEDULES),
    order=st.sampled_from(ORDERS + [order.replace("z", "y") for order in ORDERS]),
    longer=st.integers(0, 9),
    **SIZES,
)
def test_turns_are_waited_for_as_clocks_of_all_stages_say(name, order, longer, pp, vp, extra):
    """Stage by stage, with work between the ticks."""
    s = schedule(name, pp, vp, pp + extra, pp + longer)
    work, clock, own = 10.0, [0.0] * pp, [0.0] * pp
    table = [[dict(zip(COLUMNS, row, strict=True)) for row in rows] for rows in s.table.tolist()]
    for tick, rows in enumerate(table):
        then, left = table[(tick + 1) % s.ticks], {}
        for event in order:
            before = list(clock)
            for p, row in enumerate(rows):
                if event == "f":
                    clock[p] += row["f_load"] >= 0
                elif event == "b":  # that of the next tick
                    clock[p] += 3 * (then[p]["b_load"] >= 0)
                elif event == "l":
                    clock[p] = max(before) if row["loss"] >= 0 else clock[p]
                elif event.isupper():
                    left[p, event] = clock[p]
                else:
                    other, late = (p + 1, 0) if event == "x" else (p - 1, event == "z")
                    sent = left[other % pp, "X" if event == "x" else "Y"]
                    clock[p] = max(clock[p], sent - ticks.SLACK * late)
        for p, row in enumerate(rows):
            own[p] += (row["f_load"] >= 0) + 3 * (row["b_load"] >= 0)
            clock[p] += work
    delay = ticks.turn_delay(s, order)
    assert max(clock) - s.ticks * work == pytest.approx(delay * np.mean(own))
    assert delay >= 1 - 1e-9


def test_longer_turns_are_where_they_wait_least():
    """Backward work starts so much later that stages' turns meet least (405B on 64 GPUs, 70B)."""
    for pp, vp, micro, least in ((4, 8, 64, 1.47), (4, 5, 32, 1.55)):
        assert ticks.turn_delay(schedule("1f1b", pp, vp, micro, 8)) <= least


def test_shares_are_of_the_slowest_order():
    s = schedule("1f1b", 4, 8, 64, 8)
    turn = ticks.FORWARD_TURN
    fast, slow = (ticks.shares(s, program(order))[turn][0] for order in ("YfzXbxl", "XbxYfyl"))
    assert fast < slow
    assert ticks.shares(s, program("YfzXbxlXbxYfyl"))[turn][0] == slow
    assert ticks.shares(s)[turn][0] == ticks.shares(s, program(ticks.ORDER))[turn][0]


@given(st.lists(st.floats(0.001, 0.999), min_size=1, max_size=6))
def test_kinds_of_ticks_have_as_much_as_is_had(parts):
    often = {str(i): part for i, part in enumerate(parts)}
    kinds = ticks.kinds(often)
    assert sum(part for part, _ in kinds) == pytest.approx(1)
    for which, part in often.items():
        assert sum(many for many, had in kinds if which in had) == pytest.approx(part)
    fewest, most = math.floor(sum(parts) + 1e-9), math.ceil(sum(parts) - 1e-9)
    assert all(fewest <= len(had) <= most for many, had in kinds if many > 1e-6)
