"""ZeRO slices: gathered weights and reduced gradients equal those of whole collectives."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxbench import quantization
from maxbench.config.run import AXES
from maxbench.pipeline import zero_overlap
from maxbench.pipeline.schedule import WARMUP, schedule_for
from maxbench.sharding.mesh import make_mesh
from maxbench.sharding.rules import gather_master, reduce_grad
from maxbench.step.train_step import Step
from tests.conftest import resolve

# Dims that divide into blocks of 32 after sharding.
MXFP8 = {"precision.scaling": "mxfp8", "model.embed": 256, "model.mlp": 512, "model.head_dim": 128}


def make_step(family, how, axes):
    axes = axes | {"mbs": 1, "gbs": 8, "seq": 32, "dtype": "fp8" if how else "bf16"}
    gpu_type = "gb200" if "mxfp8" in how.values() else "h100"
    run = resolve(family, "tiny", how, gpu_type=gpu_type, **axes)
    return Step(run, make_mesh(run.layout))


def on_every_gpu(step, check, specs):
    check = jax.shard_map(
        check, mesh=step.mesh, in_specs=(specs,), out_specs=P(AXES), check_vma=False
    )
    return jax.jit(check)


@pytest.mark.parametrize(
    ("family", "how", "axes"),
    [
        pytest.param(
            "llama31_405b",
            {},
            dict(pp=2, vp=4, cp=2, layers=6),  # two empty slots
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "llama31_405b",
            {"precision.scaling": "delayed"},
            dict(pp=2, vp=2, dp=2, layers=8),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "llama31_405b",
            MXFP8,
            dict(pp=2, vp=2, dp=2, layers=4),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "grok1_314b",
            {"precision.scaling": "current"},
            dict(pp=2, vp=2, cp=2, ep=2, layers=8),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=str,
)
def test_slices_equal_whole_collectives(family, how, axes, monkeypatch):
    monkeypatch.setattr(zero_overlap, "NETWORK_BYTES_PER_S", math.inf)
    step = make_step(family, how, axes)
    shardings, params = step.shardings["layers"], step.init()["params"]["layers"]
    chosen = []

    def check(masters):
        cast = lambda s, w: w if s.full_precision else w.astype(jnp.bfloat16)
        past = jnp.ones((len(jax.tree.leaves(masters)[0]), 4, 3))
        past = past if step.run.precision.amax_history_len else None
        zero = zero_overlap.ZeroOverlap(step.run, step.arithmetic, shardings, masters, cast, past)
        chosen.append((zero.slices_per_layer, len(zero.slice_dims)))
        ticks = range(zero.ticks * (zero.chunks - 1))
        of_tick = lambda communicate, tick: [
            s for i in range(zero.layers_per_chunk) for s in communicate(jnp.int32(tick), i)
        ]

        weights = zero.initial_weights()
        for tick in ticks:
            weights = zero.write_weights(weights, of_tick(zero.all_gather_slices, tick))
        shards = jax.tree.map(cast, shardings, masters)
        whole = quantization.weights(step.arithmetic, shardings, shards, zero.scales, True)

        gpu = 1 + sum(jax.lax.axis_index(axis) for axis in AXES)  # each GPU has other gradients
        grads = jax.tree.map(
            lambda w: gpu * jnp.arange(math.prod(w.shape), dtype=jnp.float32).reshape(w.shape),
            whole,
            is_leaf=lambda w: isinstance(w, quantization.Weight),
        )
        accumulated = grads
        for tick in (-1, *ticks):  # tick -1 has no slice
            reduce = lambda *at: zero.reduce_scatter_slices(accumulated, *at)  # noqa: B023
            accumulated = zero.write_gradients(accumulated, of_tick(reduce, tick), tick)
        in_slices = zero.reduce_rest(accumulated)
        at_once = jax.tree.map(reduce_grad, shardings, grads)

        pairs = zip(*map(jax.tree.leaves, ((weights, in_slices), (whole, at_once))), strict=True)
        same = [jnp.array_equal(*(x.astype(jnp.float32) for x in pair)) for pair in pairs]
        return jnp.stack(same)[None]

    specs = jax.tree.map(lambda s: s.master_spec, shardings)
    assert on_every_gpu(step, check, specs)(params).all()
    slices_per_layer, leaves = chosen[0]
    assert slices_per_layer > 1
    assert leaves == 4


@pytest.mark.parametrize("axes", [dict(pp=2, vp=4, cp=2, tp=2), dict(pp=4, dp=2)], ids=str)
def test_slices_of_the_head_equal_its_all_gather_before_the_first_loss(axes):
    run = resolve("llama31_405b", "tiny", {}, **axes, layers=8, mbs=1, gbs=16, seq=32)
    step = Step(run, make_mesh(run.layout))
    sharding, master = step.shardings["head"]["w"], step.init()["params"]["head"]["w"]
    slices = []

    def check(shard):
        head = zero_overlap.HeadPrefetch(run, sharding, shard)
        slices.append(head.slices)
        weight = jnp.zeros(head.shape)
        for tick in range(head.slices + 2):  # the last two repeat a slice
            weight = head.all_gather_slice(weight, tick)
        return (weight == gather_master(sharding, shard)).all()[None]

    assert on_every_gpu(step, check, sharding.master_spec)(master).all()
    plan = schedule_for(run)
    first_loss = 1 + np.flatnonzero(plan.column("loss_microbatch")[:, 0] >= 0)[0]
    assert 1 < slices[0] <= min(first_loss, len(plan.phases[WARMUP]))
