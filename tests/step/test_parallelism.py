"""The proof: the same loss and gradients on every mesh, and only the collectives it implies."""

import dataclasses
import functools
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbench.config.model import LayerGroup
from maxbench.model import transformer
from maxbench.pipeline import layer_order, zero_overlap
from maxbench.pipeline.schedule import schedule_for
from maxbench.sharding import mesh as mesh
from maxbench.sharding import rules
from maxbench.step import data
from maxbench.step.train_step import Step
from tests.conftest import resolve

# Room for all tokens on each of tiny's 4 experts, 2 of them for a token: none is dropped.
EXACT = {"precision.grads": "fp32", "model.capacity_factor": 2.0}
FAMILIES = {
    "llama": ("llama31_405b", {}),
    "nemotron": ("nemotron4_340b", {}),
    "grok": ("grok1_314b", {}),
    "dropless": ("grok1_314b", {"model.capacity_factor": 0.0}),
    # Layers of three kinds, heads together wider than embed, and values narrower than keys.
    "mixed": (
        "grok1_314b",
        {
            "model.capacity_factor": 0.0,
            "model.layer_groups": (LayerGroup(1, 192), LayerGroup(2, 64, 4), LayerGroup(1, 96, 2)),
            "model.head_dim": 24,
            "model.value_dim": 16,
        },
    ),
}
GBS, SEQ = 8, 32
# Llama on every axis alone (pp below), and on every pair; of the others the meshes on which their
# own parts are split.
CASES = [
    ("llama", dict(fsdp=8)),
    ("llama", dict(tp=4)),
    ("llama", dict(cp=4)),
    ("llama", dict(dp=2, fsdp=2, mbs=1)),  # two microbatches
    ("llama", dict(fsdp=2, cp=2, tp=2)),
    ("llama", dict(dp=2, cp=2, tp=2, mbs=2)),
    ("llama", dict(pp=2, dp=2, tp=2, mbs=1)),
    ("llama", dict(pp=2, vp=2, fsdp=2, cp=2, mbs=1)),
    ("nemotron", dict(fsdp=2, cp=2, tp=2)),
    ("grok", dict(ep=2, tp=2, cp=2, mbs=1)),
    ("grok", dict(ep=2, fsdp=2, dp=2)),
    ("dropless", dict(pp=2, ep=2, tp=2, mbs=1)),
    ("mixed", dict(cp=2, ep=2, tp=2, mbs=1)),
]


@pytest.fixture(autouse=True)
def in_pieces(monkeypatch):
    """Weights and gradients over dp travel in pieces, however short toy layers are."""
    monkeypatch.setattr(zero_overlap, "NETWORK_BYTES_PER_S", math.inf)


def build(family: str, preset: str = "tiny", overrides: dict | None = None, **axes) -> Step:
    degrees = math.prod(axes.get(a, 1) for a in mesh.DATA_AXES)
    axes = {"mbs": GBS // degrees, **axes}
    axes = {"layers": 4, "gbs": GBS, **axes}
    workload, own = FAMILIES[family]
    exact = EXACT | own | (overrides or {})
    exact |= {"train.loss_chunk": 24, "train.schedule": axes.pop("schedule", "1f1b")}
    exact |= {"train.remat": axes.pop("remat")} if "remat" in axes else {}
    run = resolve(workload, preset, exact, dtype="fp32", seq=SEQ, **axes)
    return Step(run, mesh.make_mesh(run.layout))


def gradients(step: Step, params):
    """Gradients and loss from weights in the order of the layers, and in that order."""
    order, layers = step.order, step.run.model.layers
    shardings = jax.tree.map(lambda x: x.sharding, step.abstract["params"])
    params = params | {"layers": layer_order.permute(params["layers"], order)}
    grads, out, _ = jax.device_get(jax.jit(step.gradients)(jax.device_put(params, shardings), 3))
    if (order < 0).any():
        jax.tree.map(lambda g: np.testing.assert_array_equal(g[order < 0], 0), grads["layers"])
    back = jax.device_get(layer_order.permute(grads["layers"], range(layers), order))
    return grads | {"layers": back}, out


@functools.cache
def reference(family: str, preset: str = "tiny", layers: int = 4, gbs: int = GBS):
    """Weights, gradients and loss on one device."""
    step = build(family, preset, layers=layers, gbs=gbs, mbs=gbs)
    params = jax.device_get(step.init()["params"])
    return params, *gradients(step, params)


@pytest.mark.parametrize(("family", "axes"), CASES, ids=str)
def test_loss_and_gradients_do_not_depend_on_the_mesh(family, axes):
    params, grads, out = reference(family)
    ours, our_out = gradients(build(family, **axes), params)
    for name, value in out.items():
        np.testing.assert_allclose(our_out[name], value, rtol=1e-5, err_msg=name)
    # Relative to the largest gradient of each weight: sums of different order leave noise in zeros.
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    jax.tree.map(close, ours, grads)


@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("llama", dict(pp=2, vp=2, dp=2, mbs=1, schedule="gpipe")),
        # Microbatches that do not fill the stages evenly, tokens that do not divide by them, and
        # losses of two.
        ("llama", dict(pp=3, tp=2, mbs=1, layers=6)),
        # 6 + 2 slots, for embedding and loss: chunks of the ends alone. And what a pipeline keeps.
        pytest.param(
            "grok",
            dict(pp=2, vp=4, ep=2, mbs=1, layers=6, remat="save_qkv_proj"),
            marks=pytest.mark.core,
        ),
    ],
    ids=str,
)
def test_every_schedule_and_split_of_layers_is_the_same_network(family, axes):
    params, grads, out = reference(family, layers=axes.get("layers", 4), gbs=axes.get("gbs", GBS))
    ours, our_out = gradients(build(family, **axes), params)
    for name, value in out.items():
        np.testing.assert_allclose(our_out[name], value, rtol=1e-6, err_msg=name)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    jax.tree.map(close, ours, grads)


@pytest.mark.parametrize(
    ("family", "axes", "how"),
    [
        ("llama", dict(cp=2, tp=2), dict(remat="selective")),
        ("llama", dict(cp=2, tp=2), dict(remat="query,mlp_act")),
        ("llama", dict(fsdp=2, tp=2), dict(remat="none", offload="mlp_up,query")),
        ("llama", dict(fsdp=2, tp=2), dict(remat="query", remat_layers=3)),
    ],
)
def test_remat_changes_nothing_but_memory(family, axes, how):
    params, grads, _ = reference(family)
    step = build(family, **axes)
    train = dataclasses.replace(step.run.train, **how)
    step = Step(dataclasses.replace(step.run, train=train), step.mesh)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    jax.tree.map(close, gradients(step, params)[0], grads)


def unrolled(step: Step, remat: str = "full") -> Step:
    """The same step with layers as code, as on a GPU."""
    train = dataclasses.replace(step.run.train, remat=remat, unroll_layers=step.run.model.layers)
    return Step(dataclasses.replace(step.run, train=train), step.mesh)


@pytest.mark.parametrize(
    ("family", "axes", "remat"),
    [
        ("llama", dict(dp=2, cp=2, tp=2, mbs=1), "none"),  # four microbatches
        ("llama", dict(cp=4), "save_gemms_only"),
        ("grok", dict(ep=2, tp=2), "full"),
        ("mixed", dict(ep=2, tp=2), "none"),
    ],
)
def test_layers_as_code_and_as_a_loop_are_the_same_network(family, axes, remat):
    params, grads, out = reference(family)
    ours, our_out = gradients(unrolled(build(family, **axes), remat), params)
    np.testing.assert_allclose(our_out["loss"], out["loss"], rtol=1e-5)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    jax.tree.map(close, ours, grads)


def test_xai_grok_on_a_mesh():
    params, grads, out = reference("grok", "xai,tiny")
    ours, our_out = gradients(build("grok", "xai,tiny", ep=2, tp=2, cp=2), params)
    np.testing.assert_allclose(our_out["loss"], out["loss"], rtol=1e-5)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    jax.tree.map(close, ours, grads)


@pytest.mark.xdist_group("test_parallelism grok")  # whose reference this is
@pytest.mark.parametrize("axes", [dict(fsdp=8), dict(pp=2, vp=2, ep=2, tp=2, mbs=1)], ids=str)
def test_initial_weights_do_not_depend_on_the_mesh(axes):
    step = build("grok", **axes)
    ours, theirs = jax.device_get(step.init()["params"]), reference("grok")[0]
    theirs = theirs | {"layers": jax.tree.map(lambda x: x[step.order], theirs["layers"])}
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.core
def test_training_goes_the_same_way_on_a_mesh():
    """Three whole steps: optimizer, clipping and state placement included."""

    def losses(**axes):
        step = build("llama", **axes)
        compiled, state, found = step.lower().compile(), step.init(), []
        for _ in range(3):
            state, out = compiled(state)
            found.append([float(out["loss"]), float(out["grad_norm"])])
        return found

    np.testing.assert_allclose(losses(dp=2, fsdp=2, cp=2, tp=2, mbs=1), losses(), rtol=1e-5)


def test_master_state_is_split_over_every_axis_that_would_hold_copies():
    for axes in (dict(dp=2, cp=2, tp=2), dict(ep=4, dp=2), dict(pp=2, fsdp=2, cp=2, mbs=1)):
        step = build("grok", **axes)
        whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(step.abstract))
        share = rules.size_gib(step.abstract) * 2**30
        assert share == pytest.approx(whole / 8, rel=1e-3), axes


@pytest.mark.parametrize(
    ("names", "shape", "dp", "zero"),
    [
        (
            ("layers", "embed", "mlp_inputs", "mlp"),
            (32, 4096, 2, 14336),
            8,
            1,
        ),  # not mlp, the largest
        # Neither 64 / 8 heads nor their dim divides by 64 into whole blocks.
        (("layers", "heads", "head_dim", "embed"), (80, 64, 128, 8192), 64, 3),
        (("layers", "embed"), (4, 64), 8, 1),  # no whole blocks anywhere: as it divides
        (("layers", "embed"), (4, 60), 8, None),
    ],
)
def test_what_travels_lies_in_one_piece(names, shape, dp, zero):
    made = rules.shard_weight(names, shape, dict.fromkeys(rules.AXES, 1) | {"dp": dp, "tp": 8})
    assert [i for i, axes in enumerate(made.zero1_axes) if "dp" in axes] == (
        [] if zero is None else [zero]
    )
    assert ("dp" in made.psum_axes) == (zero is None)


# Collectives of the compiled program: (operation, shape of its result) -> how often it stands.


def collectives(step: Step, compiled: jax.stages.Compiled | None = None) -> Counter:
    text = (compiled or step.lower().compile()).as_text()
    names = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= (.*?) ({names})(?:-start)?\(", text)
    shapes = lambda s: re.findall(r"\w+\[([\d,]*)\]", s)
    return Counter((op, shape) for result, op in found for shape in shapes(result))


def sizes(found: Counter, op: str) -> set[int]:
    return {math.prod(map(int, s.split(","))) if s else 1 for o, s in found if o == op}


def weight_sizes(step: Step) -> set[int]:
    """Sizes of what one GPU may hold of a weight: of all layers, and of one."""
    found = set()
    for x, p in zip(
        jax.tree.leaves(step.abstract["params"]),
        jax.tree.leaves(step.shardings, is_leaf=lambda p: isinstance(p, rules.WeightSharding)),
        strict=True,
    ):
        split = math.prod(step.mesh.shape[a] for axes in p.compute_axes for a in axes)
        fsdp = step.mesh.shape["fsdp"] if ("fsdp",) in p.compute_axes else 1
        found |= {x.size // split, x.size // split * fsdp, x.size // split * fsdp // x.shape[0]}
    return found


def test_fsdp_moves_weights_and_gradients_only():
    step = build("llama", fsdp=8)
    found = collectives(step)
    tokens, embed = GBS * SEQ, step.run.model.embed
    assert {op for op, _ in found} <= {"all-gather", "reduce-scatter", "all-reduce", "all-to-all"}
    assert sizes(found, "all-gather") <= weight_sizes(step) | {tokens}
    assert max(sizes(found, "all-reduce")) <= 8  # loss and norms: scalars, perhaps combined
    # Tokens travel to the table's parts, not the table to the tokens.
    assert max(sizes(found, "all-to-all")) <= tokens * embed // 8
    assert ("all-gather", f"{step.run.model.vocab},{embed}") not in found


def test_dp_gathers_weights_once_and_reduces_gradients_once():
    """However many microbatches there are."""
    one, four = (collectives(build("llama", dp=2, mbs=m)) for m in (4, 1))
    assert one == four
    assert sizes(one, "all-gather") <= weight_sizes(build("llama", dp=2))
    weights = len(jax.tree.leaves(build("llama", dp=2).shardings))
    assert sum(n for (op, _), n in one.items() if op == "all-gather") <= weights


def test_tp_moves_sequences_only():
    step = build("llama", tp=4)
    found, m = collectives(step), step.run.model
    assert sizes(found, "all-gather") <= {GBS * SEQ * m.embed, *norm_sizes(step)}
    assert {op for op, _ in found} <= {"all-gather", "reduce-scatter", "all-reduce", "all-to-all"}
    # Of embedded tokens each GPU has its columns, and is sent its part of the sequence.
    assert max(sizes(found, "all-to-all")) <= GBS * SEQ * m.embed // 4
    # Chunked loss statistics are the largest thing that is summed over tp.
    assert max(sizes(found, "all-reduce")) <= 2 * 24


def norm_sizes(step: Step) -> set[int]:
    m = step.run.model
    return {m.layers * m.embed, m.embed}


def test_cp_sends_keys_and_values_round_and_nothing_else():
    step = build("llama", cp=4)
    found, m = collectives(step), step.run.model
    assert sizes(found, "collective-permute") == {GBS * SEQ // 4 * m.kv_heads * m.head_dim}
    # Forward, recomputed, and backward: 3 hops of k and v each; of dk and dv, 3 go home.
    sent = sum(n for (op, _), n in found.items() if op == "collective-permute")
    assert sent <= 3 * 3 * 2 + 3 * 2
    assert sizes(found, "all-gather") <= weight_sizes(step)
    assert "all-to-all" not in {op for op, _ in found}


def test_ep_moves_slots_by_all_to_all():
    step = build("grok", overrides={"model.capacity_factor": 1.0}, ep=4)
    found, m = collectives(step), step.run.model
    tokens = GBS // 4 * SEQ
    assert sizes(found, "all-to-all")
    assert max(sizes(found, "all-to-all")) <= m.top_k * tokens * m.embed
    assert sizes(found, "all-gather") <= weight_sizes(step)


def test_ep_brings_each_token_once_where_none_is_dropped():
    step = build("dropless", ep=4)
    found, m = collectives(step), step.run.model
    tokens = GBS * SEQ
    assert "all-to-all" not in {op for op, _ in found}
    moved = {tokens * m.embed, tokens * m.top_k}
    assert moved < sizes(found, "all-gather") <= weight_sizes(step) | moved
    assert tokens * m.embed // 4 in sizes(found, "reduce-scatter")


def per_gpu_oracle(step, params):
    """Gradients and loss where each GPU drops tokens of its own: the mean over GPUs of what one
    device makes of each GPU's sequences, one microbatch each."""
    run, gpus = step.run, step.run.layout.shards
    alone = dataclasses.replace(run.layout, dp=1, fsdp=1, ep=1, gbs=run.layout.mbs)
    one = dataclasses.replace(run, layout=alone)

    @jax.jit
    def gradients(tokens_bt, targets_bt):
        total = lambda sums: transformer.loss_fn(one, params, tokens_bt, targets_bt, sums)
        return jax.grad(total, has_aux=True)(jax.tree.map(jnp.zeros_like, params))

    whole = dataclasses.replace(run, layout=dataclasses.replace(alone, mbs=GBS, gbs=GBS))
    batch = [x.reshape(gpus, -1, SEQ) for x in data.batch(whole, 3, 0)]
    parts = [gradients(*part) for part in zip(*batch, strict=True)]
    return jax.tree.map(lambda *x: sum(x) / gpus, *parts)


@pytest.mark.xdist_group("test_parallelism grok")  # whose reference this is
def test_experts_that_drop_tokens_drop_each_gpus_own():
    step = build("grok", overrides={"model.capacity_factor": 0.5}, ep=2, fsdp=2)
    params, dropless, _ = reference("grok")
    expected, out = per_gpu_oracle(step, params)
    down, whole = (g["layers"]["mlp"]["down"] for g in (expected, dropless))
    # Some were dropped, or this tests nothing.
    assert np.abs(down - whole).max() > 0.1 * np.abs(whole).max()
    ours, our_out = gradients(step, params)
    for name, value in out.items():
        np.testing.assert_allclose(our_out[name], value, rtol=1e-5, err_msg=name)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    jax.tree.map(close, ours, expected)


def test_a_tied_head_is_one_weight_on_every_mesh():
    """Its gradient has two parts, made by the first and by the last stage of a pipeline."""
    tied = {"model.tied": True}
    one, two = build("llama", overrides=tied), build("llama", overrides=tied, pp=2, fsdp=2, mbs=1)
    params = jax.device_get(one.init()["params"])
    assert "w" not in params["head"]
    (grads, out), (ours, our_out) = gradients(one, params), gradients(two, params)
    np.testing.assert_allclose(our_out["loss"], out["loss"], rtol=1e-5)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    jax.tree.map(close, ours, grads)


def test_pp_sends_sequences_between_stages_and_holds_no_more_for_more_microbatches():
    few, many = (build("llama", pp=2, vp=2, mbs=1, gbs=gbs) for gbs in (16, 64))
    programs = [step.lower().compile() for step in (few, many)]
    found, m = collectives(few, programs[0]), few.run.model
    assert sizes(found, "collective-permute") == {SEQ * m.embed}
    # Forward in the fill, both ways where a tick has both, and backward.
    assert sum(n for (op, _), n in found.items() if op == "collective-permute") == 4
    # Weights of no stage's but its own, and the gradient of the last one's y.
    assert sizes(found, "all-gather") - weight_sizes(few) == {SEQ * m.embed}
    assert SEQ // 2 * m.embed in sizes(found, "reduce-scatter")  # y's tokens, for the loss
    memory = [program.memory_analysis().temp_size_in_bytes for program in programs]
    assert memory[1] <= memory[0] * 1.02


def test_tokens_travel_between_stages_where_they_are_fewer_than_words():
    """The table has a part of its columns on each stage, and neither it nor its gradient goes
    over pp; the gradient of the head, which is as large, does."""
    few, many = (build("llama", pp=2, vp=2, mbs=1, gbs=gbs) for gbs in (8, 32))
    m, ahead = few.run.model, schedule_for(few.run).microbatches_per_embedding
    assert [step.shardings["embed"]["w"].compute_axes[1] for step in (few, many)] == [("pp",), ()]
    table = m.vocab * m.embed
    found = [collectives(step) for step in (few, many)]
    gathered = [sizes(one, "all-gather") for one in found]
    assert ahead * SEQ * m.embed in gathered[0]
    assert [table in one for one in gathered] == [False, True]
    halves = lambda shape: shape and math.prod(map(int, shape.split(","))) == table // 2
    reduced = lambda one: sum(
        n for (op, s), n in one.items() if op == "reduce-scatter" and halves(s)
    )
    assert [reduced(one) for one in found] == [1, 2]
