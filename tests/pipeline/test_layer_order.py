"""Where the layers of a pipeline are: parts, stacks of weights, and kinds in slots."""

import jax
import numpy as np
import pytest

from maxbench.config import pipeline_layout
from maxbench.config.errors import UserError
from maxbench.config.sublayers import KEYS, ROLES
from maxbench.model import layer_stack
from maxbench.pipeline import layer_order, schedule
from maxbench.sharding import rules
from maxbench.step import state
from tests.conftest import resolve
from tests.kinds import dense, routed

DEEPSEEK = ((3, (dense(256),)), (58, (routed(64, 4),)))  # dense layers, then experts
ALTERNATING = ((6, (routed(64, 4, window=8), routed(64, 4))),)  # windows


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("Et|(tt|)*30mL", (1, *[2] * 30, 0)),
        ("Et*3|(tt|)*29m|L", (3, *[2] * 29, 0, 0)),
        ("Et*4|(t*4|)*14tmL", (4, *[4] * 14, 1)),
        ("(t|(t|)*2)*2t", (1, 1, 1, 1, 1, 1, 1)),
        ("1,2, 0,3", (1, 2, 0, 3)),
    ],
)
def test_layers_of_parts_are_those_of_megatron(text, counts):
    assert pipeline_layout.layers_of_parts(text) == counts


@pytest.mark.parametrize("text", ["E|L", "x", "t*", "(t", "1;2", "-1,2", "(t*99999)*99999"])
def test_other_layouts_are_refused(text):
    with pytest.raises(UserError, match="is not understood: give Megatron's"):
        pipeline_layout.layers_of_parts(text)


def test_layers_that_do_not_divide_leave_slots_at_both_ends_empty():
    even = pipeline_layout.even
    assert even(8, 4) == (2, 2, 2, 2)
    assert even(6, 4) == (1, 2, 2, 1)
    assert even(61, 32) == (1, 1, *[2] * 29, 1)
    assert even(5, 4) == ()  # 3 of 8 slots
    for layers, parts in [(126, 64), (80, 12), (4, 5)]:
        found = even(layers, parts)
        assert (sum(found), len(found)) == (layers, parts)
        assert max(found) - min(found) == 1


def place(groups=(), stages="", mlp_bias=False, **layout):
    overrides = {"model.layer_groups": groups, "layout.stages": stages, "model.mlp_bias": mlp_bias}
    overrides |= {} if groups else {"model.experts": 0}
    run = resolve("grok1_314b", "tiny", overrides, mbs=1, gbs=64, **layout)
    return layer_order.placement(run)


def check(placement):
    """Every layer is in one slot of the stacks of each sublayer, where its stage reads it."""
    stages, chunks, count = placement.layers.shape
    for role, slots in placement.slots.items():
        found = []
        for stage, chunk, i in np.ndindex(stages, chunks, count):
            slot, layer = slots[i], placement.layers[stage, chunk, i]
            index = 0 if slot.table is None else slot.table[stage, chunk]
            if index == len(slot.choices):
                assert layer == -1
                continue
            choice = slot.choices[index]
            stack = next(s for s in placement.stacks if s.name == choice.stack)
            assert role in stack.roles
            entry = placement.entries[choice.stack][stage, chunk, choice.entry]
            assert stack.slots[stage * len(stack.slots) // stages + entry] == layer
            found += [layer] if layer >= 0 else []
        assert sorted(found) == list(range(placement.layers.max() + 1))


def test_a_published_layout_has_a_stack_for_each_form_of_a_sublayer():
    placement = place(DEEPSEEK, "Et|(tt|)*30mL", layers=61, pp=8, vp=4)
    check(placement)
    sizes = {s.name: len(s.slots) // 8 for s in placement.stacks}
    assert sizes == {"attn0": 8, "mlp0": 2, "mlp1": 8}  # two dense layers at most on a stage
    assert placement.sliced == ("attn0", "mlp1")
    attention, mlp = (placement.slots[role] for role in ROLES)
    assert [len(slot.choices) for slot in (*attention, *mlp)] == [1, 1, 2, 2]
    assert all(slot.table is None for slot in attention)  # empty slots have weights of zeros
    assert mlp[0].choices[0].sublayer.experts == 4  # the most frequent kind
    assert mlp[0].table[:2, 0].tolist() == [1, 1]
    assert mlp[1].table[[0, 7], [0, 3]].tolist() == [2, 2]  # empty


def test_share_of_passes_through_other_kinds():
    """The dense layers are in the first of a stage's four chunks."""
    overrides = {"model.layer_groups": DEEPSEEK, "layout.stages": "Et|(tt|)*30mL"}
    run = resolve("grok1_314b", "tiny", overrides, layers=61, pp=8, vp=4, mbs=1, gbs=64)
    share = layer_order.other_kinds(run, schedule.schedule_for(run))
    assert 0.2 < share < 0.35
    assert layer_order.other_kinds(*alike()) == 0


def alike():
    run = resolve("llama31_8b", "tiny", layers=8, pp=2, vp=2, mbs=1, gbs=4)
    return run, schedule.schedule_for(run)


def test_kinds_that_are_alike_in_a_slot_need_no_branch():
    aligned = place(ALTERNATING, layers=12, pp=2, vp=3)
    check(aligned)
    assert [s.name for s in aligned.stacks] == [""]  # windows have no weights
    assert [slot.choices[0].sublayer.window for slot in aligned.slots["mixer"]] == [8, 0]
    assert all(slot.table is None for slots in aligned.slots.values() for slot in slots)
    other = place(ALTERNATING, layers=12, pp=4)
    check(other)
    assert [len(slot.choices) for slot in other.slots["mixer"]] == [2, 2, 2]
    assert all(slot.table is None for slot in other.slots["channel"])


@pytest.mark.parametrize(
    ("layers", "stages", "branches"),
    [
        (8, "", 0),
        (6, "", 0),
        (6, "1,2,2,1", 0),
        (6, "2,1,1,2", 0),
        (7, "3,1,1,2", 2),
        (5, "2,1,0,2", 2),
    ],
)
def test_empty_slots_of_equal_layers(layers, stages, branches):
    """Two empty slots have weights of zeros; more are skipped, or a stage would store more."""
    placement = place((), stages, layers=layers, pp=2, vp=2)
    check(placement)
    assert sum(slot.table is not None for slot in placement.slots["channel"]) == branches


def test_attention_never_branches_over_cp():
    """The permutes of its ring over cp wait for all stages, and a branch runs on one of them."""
    for groups, stages, layers in (((), "1,2,0,2", 5), (DEEPSEEK, "1,2,0,2", 5)):
        placement = place(groups, stages, layers=layers, pp=2, vp=2, cp=2)
        check(placement)
        assert all(slot.table is None for slot in placement.slots["mixer"])
    with pytest.raises(UserError, match="cp=2: mixers differ"):
        place(ALTERNATING, layers=12, pp=4, cp=2)


def test_empty_slots_are_skipped_where_a_bias_would_not_stay_zero():
    placement = place((), layers=6, pp=2, vp=2, mlp_bias=True)
    check(placement)
    assert all(slot.table is None for slot in placement.slots["mixer"])
    assert all(slot.table is not None for slot in placement.slots["channel"])


@pytest.mark.parametrize("stages", ["Et|(tt|)*30mL", "(t|)*3(tt|)*29"])
def test_layers_and_their_state_move_between_stacks(stages):
    """From one device to a pipeline and back, as checkpoints do."""
    to = place(DEEPSEEK, stages, layers=61, pp=8, vp=4).stacks
    source = place(DEEPSEEK, layers=61).stacks

    def tree(table):
        """Layer i has i in each leaf, and in the amax history of three GEMMs of each sublayer."""

        def of_stack(stack):
            ids = np.array(stack.slots, np.float32) + 1  # 0 in an empty slot
            weights = {KEYS[role]: {"w": ids[:, None]} for role in stack.roles}
            amax = np.tile(ids[:, None], 3 * len(stack.roles))
            return weights | {"amax": amax}

        return layer_stack.join(table, list(map(of_stack, table)))

    gemm = rules.WeightSharding((), (), (), gemm=rules.GemmDims(0, 1))
    shardings = lambda table: layer_stack.join(
        table, [{KEYS[role]: {"a": gemm, "b": gemm, "c": gemm} for role in s.roles} for s in table]
    )
    moved = state.permute(tree(source), to, source, shardings(source))
    jax.tree.map(np.testing.assert_array_equal, moved, tree(to))
    back = state.permute(moved, source, to, shardings(to))
    jax.tree.map(np.testing.assert_array_equal, back, tree(source))


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ("t|t", "has 2 parts, and pp=2 x vp=2 are 4"),
        ("2,2,2,2", "has 8 layers, and model.layers=5"),
        ("", "leave 3 of 8 slots .* nearest layers that work: 4 or 6, or give .* layout.stages"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(stages, text):
    with pytest.raises(UserError, match=text):
        place((), stages, layers=5, pp=2, vp=2)
