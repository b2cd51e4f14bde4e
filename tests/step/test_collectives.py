"""Collectives in the compiled step: each mesh axis communicates what it must, and nothing else."""

import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbench.config import resolve as resolving
from maxbench.cost_model import memory
from maxbench.model import transformer
from maxbench.pipeline.schedule import schedule_for
from maxbench.sharding import rules
from maxbench.step import data
from maxbench.step.train_step import Step
from tests.step.test_parallelism import (  # noqa: F401
    GBS,
    SEQ,
    assert_grads_close,
    assert_metrics_close,
    build,
    gradients,
    overlap_zero,
    single_device,
)


def collectives(step: Step, compiled: jax.stages.Compiled | None = None) -> Counter:
    """(operation, dims of its result) -> number of such instructions in the program."""
    text = (compiled or step.lower().compile()).as_text()
    names = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    instructions = re.findall(rf"= (.*?) ({names})(?:-start)?\(", text)
    named = re.findall(rf" (?:{names})(?:-start)?\(.*op_name=\"([^\"]*)", text)
    assert len(named) == len(instructions)
    # The partitioner adds none, for the norm of gradients or for the optimizer.
    assert [name for name in named if "/shard_map/" not in name] == []
    shapes = lambda result: re.findall(r"\w+\[([\d,]*)\]", result)
    return Counter((op, shape) for result, op in instructions for shape in shapes(result))


def operations(counts: Counter) -> set[str]:
    return {op for op, _ in counts}


def number(counts: Counter, op: str) -> int:
    return sum(n for (o, _), n in counts.items() if o == op)


def sizes(counts: Counter, op: str) -> set[int]:
    """Elements of the results of an operation."""
    return {math.prod(map(int, s.split(","))) if s else 1 for o, s in counts if o == op}


def leaves(step: Step) -> list[rules.WeightSharding]:
    """The shardings of a step's weights."""
    return jax.tree.leaves(step.shardings, is_leaf=lambda s: isinstance(s, rules.WeightSharding))


def weight_sizes(step: Step) -> set[int]:
    """Elements of one GPU's compute shard of each weight, with and without fsdp: of all layers, and
    of one layer."""
    result = set()
    for x, s in zip(
        jax.tree.leaves(step.abstract["params"]),
        leaves(step),
        strict=True,
    ):
        shard = x.size // math.prod(step.mesh.shape[a] for axes in s.compute_axes for a in axes)
        fsdp = {axis for axes in s.compute_axes if "fsdp" in axes for axis in axes if axis != "tp"}
        gathered = shard * math.prod(step.mesh.shape[axis] for axis in fsdp)
        result |= {shard, gathered, gathered // x.shape[0]}
    return result


def test_fsdp_communicates_weights_and_gradients_only():
    step = build("llama", fsdp=8)
    counts = collectives(step)
    tokens, embed = GBS * SEQ, step.run.model.embed
    assert operations(counts) <= {"all-gather", "reduce-scatter", "all-reduce", "all-to-all"}
    assert sizes(counts, "all-gather") <= weight_sizes(step) | {tokens}
    assert max(sizes(counts, "all-reduce")) <= 8  # loss and norms: scalars, perhaps combined
    # Embedded tokens are exchanged; the table is not gathered.
    assert max(sizes(counts, "all-to-all")) <= tokens * embed // 8
    assert ("all-gather", f"{step.run.model.vocab},{embed}") not in counts


@pytest.mark.parametrize("axes", [dict(fsdp=2, ep=2), dict(fsdp=4), dict(ep=4)], ids=str)
@pytest.mark.parametrize("family", ["deepseek", "nemotron_3"])
def test_estimates_of_memory_know_how_weights_are_sharded(family, axes):
    step = build(family, **axes)
    weights, sizes = jax.tree.leaves(step.abstract["params"]), step.mesh.shape
    shards = [math.prod(sizes[a] for axes in s.compute_axes for a in axes) for s in leaves(step)]
    estimated = memory.stage_weights(step.run, gathered=False)
    actual = sum(w.size / n for w, n in zip(weights, shards, strict=True))
    assert estimated.layers + estimated.ends == pytest.approx(actual, rel=1e-3)


@pytest.mark.exhaustive
def test_dp_gathers_weights_and_reduces_gradients_once_per_step():
    one, four = (collectives(build("llama", dp=2, mbs=m)) for m in (4, 1))  # 1 and 4 microbatches
    assert one == four
    step = build("llama", dp=2)
    assert sizes(one, "all-gather") <= weight_sizes(step)
    assert number(one, "all-gather") <= len(jax.tree.leaves(step.shardings))


def test_tp_communicates_activations_only():
    step = build("llama", tp=4)
    counts, m = collectives(step), step.run.model
    norms = {m.layers * m.embed, m.embed}
    assert sizes(counts, "all-gather") <= {GBS * SEQ * m.embed, *norms}
    assert operations(counts) <= {"all-gather", "reduce-scatter", "all-reduce", "all-to-all"}
    # The embedding: each GPU has columns of all tokens, and receives its part of the sequence.
    assert max(sizes(counts, "all-to-all")) <= GBS * SEQ * m.embed // 4
    # The largest all-reduce is of the loss: two numbers per token of a chunk.
    assert max(sizes(counts, "all-reduce")) <= 2 * 24


@pytest.mark.exhaustive
def test_cp_permutes_keys_and_values_only():
    step = build("llama", cp=4)
    counts, m = collectives(step), step.run.model
    assert sizes(counts, "collective-permute") == {GBS * SEQ // 4 * m.kv_heads * m.head_dim}
    # Forward, recomputed and backward: 3 hops of k and v each; and 3 hops of dk and dv.
    assert number(counts, "collective-permute") <= 3 * 3 * 2 + 3 * 2
    assert sizes(counts, "all-gather") <= weight_sizes(step)
    assert "all-to-all" not in operations(counts)


@pytest.mark.exhaustive
def test_ep_exchanges_slots_by_all_to_all():
    step = build("grok", overrides={"model.capacity_factor": 1.0}, ep=4)
    counts, m = collectives(step), step.run.model
    tokens = GBS // 4 * SEQ
    assert sizes(counts, "all-to-all")
    assert max(sizes(counts, "all-to-all")) <= m.top_k * tokens * m.embed
    assert sizes(counts, "all-gather") <= weight_sizes(step)


@pytest.mark.exhaustive
def test_dropless_ep_gathers_each_token_once():
    step = build("dropless", ep=4)
    counts, m = collectives(step), step.run.model
    tokens = GBS * SEQ
    assert "all-to-all" not in operations(counts)
    activations = {tokens * m.embed, tokens * m.top_k}
    assert activations < sizes(counts, "all-gather") <= weight_sizes(step) | activations
    assert tokens * m.embed // 4 in sizes(counts, "reduce-scatter")


def gradients_per_gpu(step, params):
    """Gradients and metrics if each GPU drops its own tokens: the mean over GPUs of the results of
    one device for the sequences of each GPU, in one microbatch."""
    run, gpus = step.run, step.run.layout.shards
    alone = dict(dp=1, fsdp=1, ep=1, ep_nodes=None)
    single_run = resolving.changed(run, layout=alone | {"gbs": run.layout.mbs})

    @jax.jit
    def grads(tokens_bt, targets_bt):
        loss = lambda sums: transformer.loss_fn(single_run, params, tokens_bt, targets_bt, sums)
        return jax.grad(loss, has_aux=True)(jax.tree.map(jnp.zeros_like, params))

    global_run = resolving.changed(run, layout=alone | {"mbs": GBS, "gbs": GBS})
    whole = data.microbatch(global_run, data.draw(global_run, 3), 0)
    batches = [x.reshape(gpus, -1, SEQ) for x in whole]
    per_gpu = [grads(*batch) for batch in zip(*batches, strict=True)]
    return jax.tree.map(lambda *x: sum(x) / gpus, *per_gpu)


@pytest.mark.exhaustive
@pytest.mark.xdist_group("test_collectives grok")
def test_each_gpu_drops_its_own_tokens():
    step = build("grok", overrides={"model.capacity_factor": 0.5}, ep=2, fsdp=2)
    params, dropless, _ = single_device("grok")
    grads, out = gradients_per_gpu(step, params)
    down, dropless_down = (g["layers"]["mlp"]["down"] for g in (grads, dropless))
    assert np.abs(down - dropless_down).max() > 0.1 * np.abs(dropless_down).max()  # some dropped
    actual_grads, actual_out = gradients(step, params)
    assert_metrics_close(actual_out, out)
    assert_grads_close(actual_grads, grads)


@pytest.mark.exhaustive
def test_tied_head_has_both_gradients_in_a_pipeline():
    """That of the embedding, of the first stage, and that of the LM head, of the last stage."""
    tied = {"model.tied": True}
    single = build("llama", overrides=tied)
    pipeline = build("llama", overrides=tied, pp=2, fsdp=2, mbs=1)
    params = jax.device_get(single.init()["params"])
    assert "w" not in params["head"]
    grads, out = gradients(single, params)
    actual_grads, actual_out = gradients(pipeline, params)
    np.testing.assert_allclose(actual_out["loss"], out["loss"], rtol=1e-5)
    assert_grads_close(actual_grads, grads)


@pytest.mark.exhaustive
def test_pp_permutes_activations_and_memory_does_not_grow_with_microbatches():
    few, many = (build("llama", pp=2, vp=2, mbs=1, gbs=gbs) for gbs in (16, 64))
    programs = [step.lower().compile() for step in (few, many)]
    counts, m = collectives(few, programs[0]), few.run.model
    assert sizes(counts, "collective-permute") == {SEQ * m.embed}
    # Forward in the warm-up, both directions in the steady state, backward in the cool-down.
    assert number(counts, "collective-permute") == 4
    # Weights of the stage itself, and the output gradient of the last stage.
    assert sizes(counts, "all-gather") - weight_sizes(few) == {SEQ * m.embed}
    assert SEQ // 2 * m.embed in sizes(counts, "reduce-scatter")  # tokens of y, for the loss
    memory = [program.memory_analysis().temp_size_in_bytes for program in programs]
    assert memory[1] <= memory[0] * 1.02


@pytest.mark.exhaustive
def test_embedding_is_sharded_over_pp_if_a_step_has_fewer_tokens_than_vocab():
    """Then neither the table nor its gradient is communicated over pp; the gradient of the head,
    which has the same size, is."""
    few, many = (build("llama", pp=2, vp=2, mbs=1, gbs=gbs) for gbs in (8, 32))
    m, microbatches = few.run.model, schedule_for(few.run).microbatches_per_embedding
    columns = [step.shardings["embed"]["w"].compute_axes[1] for step in (few, many)]
    assert columns == [("pp",), ()]
    table = m.vocab * m.embed
    counts = [collectives(step) for step in (few, many)]
    gathered = [sizes(c, "all-gather") for c in counts]
    assert microbatches * SEQ * m.embed in gathered[0]
    assert [table in g for g in gathered] == [False, True]
    is_half = lambda shape: shape and math.prod(map(int, shape.split(","))) == table // 2
    reduced = lambda c: sum(n for (op, s), n in c.items() if op == "reduce-scatter" and is_half(s))
    assert [reduced(c) for c in counts] == [1, 2]
