"""Pipeline schedules by property: order, slots, and the bubble that theory gives."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from maxbench.config.run import SCHEDULES
from maxbench.model import layer_stack
from maxbench.pipeline import layer_order
from maxbench.pipeline.schedule import COOLDOWN, STEADY, WARMUP, WAYS, Row, build_schedule

SIZES = dict(pp=st.integers(2, 8), vp=st.integers(1, 5), extra=st.integers(0, 20))
TURNS = dict(longer=st.integers(0, 9))


def work(s, way):
    """(part of the network, microbatch) -> tick."""
    micro, chunk = s.column(f"{way}_microbatch"), s.column(f"{way}_chunk")
    found = {}
    for tick, p in zip(*np.nonzero(micro >= 0), strict=True):
        key = (int(chunk[tick, p]) * s.pp + int(p), int(micro[tick, p]))
        assert key not in found
        found[key] = int(tick)
    return found


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(SCHEDULES), **SIZES, **TURNS)
def test_all_work_is_done_once_and_in_order(name, pp, vp, extra, longer):
    micro = pp + extra
    s = build_schedule(name, pp, vp, micro, pp + longer)
    f, b = work(s, "fwd"), work(s, "bwd")
    everything = {(part, m) for part in range(pp * vp) for m in range(micro)}
    assert set(f) == set(b) == everything
    for part, m in everything:
        assert f[part, m] < b[part, m]
        if part > 0:
            assert f[part - 1, m] < f[part, m]
            assert b[part, m] < b[part - 1, m]


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(SCHEDULES), **SIZES, **TURNS)
def test_what_is_read_from_a_slot_is_what_was_put_there(name, pp, vp, extra, longer):
    """Plays the executor with names instead of arrays."""
    s = build_schedule(name, pp, vp, pp + extra, pp + longer)
    keep, inbox, grads = (
        [[None] * n for _ in range(pp)] for n in (s.stash_slots, s.input_slots, s.grad_slots)
    )
    y, dx, made = [None] * pp, [None] * pp, [None] * s.microbatches_per_loss
    chunks = [{"fwd": None, "bwd": None} for _ in range(pp)]
    whole = 0  # microbatches whose embedding has its gradients
    forward = [t for name in (WARMUP, STEADY) for t in s.phases[name]]
    backward = [t for name in (STEADY, COOLDOWN) for t in s.phases[name]]
    for tick in range(s.ticks):
        at = [dict(zip(Row._fields, s.rows()[tick, p].tolist(), strict=True)) for p in range(pp)]
        for p, row in enumerate(at):
            inbox[p][row["recv_fwd_slot"]] = y[
                (p - 1) % pp
            ]  # if need be for nothing, as the others
            grads[p][row["recv_bwd_slot"]] = dx[(p + 1) % pp]
            if row["embed_microbatch"] >= 0:  # at the end of the tick before, as what is put
                assert row["embed_microbatch"] == at[0]["embed_microbatch"]
                assert tick == 0 or tick - 1 in forward
                which = "embedded" if p == 0 else "embedded for nothing"
                inbox[p][: s.microbatches_per_embedding] = [
                    (which, row["embed_microbatch"] + i)
                    for i in range(s.microbatches_per_embedding)
                ]
            for way in WAYS:
                if row[f"{way}_chunk_switch"] >= 0:
                    if way == "bwd":  # the first time there is nothing to put away
                        old = chunks[p]["bwd"]
                        assert row["bwd_chunk_writeback"] == (
                            row["bwd_chunk_switch"] if old is None else old
                        )
                    chunks[p][way] = row[f"{way}_chunk_switch"]
        y, dx = [None] * pp, [None] * pp
        for p, row in enumerate(at):
            if row["bwd_microbatch"] >= 0:
                assert tick in backward
                assert row["bwd_chunk"] == chunks[p]["bwd"]
                part, m = row["bwd_chunk"] * pp + p, row["bwd_microbatch"]
                assert keep[p][row["bwd_stash_slot"]] == (part, m)
                assert grads[p][row["bwd_grad_slot"]] == ("dx", part + 1, m)
                dx[p] = ("dx", part, m)
            assert row["embed_grad_microbatch"] == at[0]["embed_grad_microbatch"]
            if row["embed_grad_microbatch"] >= 0 and p == pp - 1:
                assert row["embed_grad_microbatch"] == whole
                assert tick in backward
                assert grads[p][: s.microbatches_per_embedding] == [
                    ("dx", 0, whole + i) for i in range(s.microbatches_per_embedding)
                ]
                whole += s.microbatches_per_embedding
            if row["fwd_microbatch"] < 0:
                keep[p][row["fwd_stash_slot"]] = None
                continue
            assert tick in forward
            assert row["fwd_chunk"] == chunks[p]["fwd"]
            part, m = row["fwd_chunk"] * pp + p, row["fwd_microbatch"]
            given = ("y", part - 1, m) if part > 0 else ("embedded", m)
            assert inbox[p][row["fwd_input_slot"]] == given
            keep[p][row["fwd_stash_slot"]] = (part, m)
            y[p] = ("y", part, m)
        # The loss: of what the last stage has made in this tick, and maybe in those before.
        made[at[-1]["fwd_microbatch"] % s.microbatches_per_loss] = y[-1]
        assert len({row["loss_microbatch"] for row in at}) == 1
        assert (at[-1]["loss_microbatch"] >= 0) == (at[-1]["loss_grad_slot"] >= 0)
        if (m := at[-1]["loss_microbatch"]) >= 0:
            slots = slice(
                at[-1]["loss_grad_slot"], at[-1]["loss_grad_slot"] + s.microbatches_per_loss
            )
            these = range(m + 1 - s.microbatches_per_loss, m + 1)
            assert made == [("y", pp * vp - 1, m) for m in these]
            for p in range(pp):
                grads[p][slots] = [("dx", pp * vp, m) for m in these]
    last = range(whole, pp + extra)  # their embedding's gradients come after the last tick
    grads[-1][(pp + extra - 1) % s.microbatches_per_embedding] = dx[0]
    assert grads[-1][: len(last)] == [("dx", 0, m) for m in last]
    assert 0 < len(last) <= s.microbatches_per_embedding
    assert {c["bwd"] for c in chunks} == {0}  # whose sums are put away at the end


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(SCHEDULES), **SIZES, **TURNS)
def test_weights_come_before_they_are_read_and_gradients_go_when_they_are_whole(
    name, pp, vp, extra, longer
):
    s = build_schedule(name, pp, vp, pp + extra, pp + longer)
    assert (s.zero_overlap_ticks > 0) == (vp > 1)
    for phase in s.phases.values():
        assert all(
            row.tolist() == [i] * pp for i, row in enumerate(s.column("tick_in_phase")[phase])
        )
    for p in range(pp):
        gather, reduce, load, last = (
            s.column(c)[:, p].tolist()
            for c in (
                "allgather_tick",
                "reducescatter_tick",
                "fwd_chunk_switch",
                "bwd_chunk_switch",
            )
        )
        for chunk in range(1, vp):
            begins = load.index(chunk)
            came = {gather[t] for t in s.phases[WARMUP] if t < begins}
            assert came >= set(
                range(s.zero_overlap_ticks * (chunk - 1), s.zero_overlap_ticks * chunk)
            )
            over = max(t for t, c in enumerate(last) if c == chunk - 1)
            went = {reduce[t] for t in s.phases[COOLDOWN] if t >= over}
            first = s.zero_overlap_ticks * (vp - 1 - chunk)
            assert went >= set(range(first, first + s.zero_overlap_ticks))
            early = [reduce[t] for t in s.phases[COOLDOWN] if t < over]
            assert all(o < first for o in early)


@settings(max_examples=40, deadline=None)
@given(pp=st.integers(2, 8), vp=st.integers(1, 6), groups=st.integers(1, 6))
def test_bubble_and_slots_are_those_of_theory(pp, vp, groups):
    micro = pp * groups
    s = build_schedule("1f1b", pp, vp, micro)
    assert s.bubble() == pytest.approx((pp - 1) / (pp - 1 + vp * micro))
    assert s.stash_slots <= (vp - 1) * pp + 2 * (pp - 1) + s.microbatches_per_loss
    gpipe = build_schedule("gpipe", pp, vp, micro)
    assert gpipe.bubble() == pytest.approx(s.bubble())
    assert gpipe.stash_slots == vp * micro + 1  # one for work for nothing, while all others wait


def test_slots_do_not_grow_with_microbatches():
    found = [build_schedule("1f1b", 8, 8, m) for m in (64, 128, 512)]
    assert len({(s.stash_slots, s.input_slots, s.grad_slots) for s in found}) == 1
    assert found[0].stash_slots == 78  # 71, and seven for losses of eight
    assert found[0].bubble() == pytest.approx(7 / (7 + 512))


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(SCHEDULES), mbs=st.integers(1, 5), **SIZES, **TURNS)
@example(name="1f1b", pp=8, vp=2, extra=56, longer=0, mbs=1)
@example(name="1f1b", pp=8, vp=2, extra=56, longer=0, mbs=2)
def test_a_loss_is_of_as_many_microbatches_as_come_together(name, pp, vp, extra, longer, mbs):
    micro = pp + extra
    s = build_schedule(name, pp, vp, micro, pp + longer, mbs)
    losses = s.column("loss_microbatch")
    assert np.flatnonzero(losses[:, 0] >= 0).size == micro // s.microbatches_per_loss
    assert sorted(losses[losses[:, 0] >= 0, 0]) == list(
        range(s.microbatches_per_loss - 1, micro, s.microbatches_per_loss)
    )
    turn = pp if vp == 1 else min(pp + longer, micro)
    most = 1 if name == "gpipe" or pp <= 2 else 8 if pp >= 8 and micro >= 64 else 4
    most = max(most // mbs, 2) if most > 1 else 1
    fits = lambda n: n <= most and micro % n == 0 and (vp == 1 or turn % n == 0)
    whole = [1, *filter(fits, (2, 4, 8))]
    assert s.microbatches_per_loss == whole[-1]


def test_layers_in_slots():
    assert layer_order.layer_order(8, 2, 2).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    order = layer_order.layer_order(126, 8, 8)
    assert len(order) == 128
    assert order[0] == order[-1] == -1
    assert order[1] == 0
    assert order[-2] == 125
    assert sorted(order[order >= 0]) == list(range(126))
    assert order.reshape(8, 8, 2)[0, 0].tolist() == [-1, 0]


@given(
    SIZES["pp"], SIZES["vp"], SIZES["pp"], SIZES["vp"], st.integers(1, 3), st.sampled_from([0, 2])
)
@settings(max_examples=20, deadline=None)
def test_layers_move_from_any_order_to_any_other(pp, vp, to_pp, to_vp, each, empty):
    """As a checkpoint does; empty slots hold zeros, whatever stood there."""
    layers = pp * vp * to_pp * to_vp * each - empty
    source, to = (
        layer_order.layer_order(layers, pp, vp),
        layer_order.layer_order(layers, to_pp, to_vp),
    )
    stack = {"w": np.where(source < 0, 7.0, 10.0 * source)[:, None]}
    tables = ((layer_stack.Stack("", None, tuple(order.tolist())),) for order in (to, source))
    np.testing.assert_array_equal(
        layer_stack.permute(stack, *tables)["w"][:, 0], np.where(to < 0, 0, 10 * to)
    )


def test_picture():
    assert build_schedule("1f1b", 2, 1, 2).render().splitlines() == [
        "1f1b: 5 ticks, bubble 33.3%, slots 3",
        "F forward, B backward, each chunk:microbatch; . the stage waits",
        "stage 0  F 0:0 0:1 .   .   .",
        "         B .   .   .   0:0 0:1",
        "stage 1  F .   0:0 0:1 .   .",
        "         B .   .   0:0 0:1 .",
    ]
    parts = build_schedule("1f1b", 2, 1, 8).render(19 + 4 * 6).splitlines()
    assert parts[0].endswith(" (0 to 1, 4 to 5 and 9 to 10 are shown)")
    assert parts[2:4] == [
        "stage 0  F 0:0 0:1 ... 0:4 0:5 ... .   .",
        "         B .   .   ... 0:1 0:2 ... 0:6 0:7",
    ]


def test_long_picture_has_work_of_every_stage_and_fits_the_width():
    lines = build_schedule("1f1b", 8, 16, 64, 8, 1).render(80).splitlines()[2:]
    assert max(map(len, lines)) <= 80
    assert all(":" in line for line in lines)
