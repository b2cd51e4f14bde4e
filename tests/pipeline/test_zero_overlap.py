"""What travels in pieces is what would travel whole."""

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

# Widths of which a part is still whole blocks of 32.
WIDE = {"model.embed": 256, "model.mlp": 512, "model.head_dim": 128}


@pytest.mark.parametrize(
    ("family", "how", "axes"),
    [
        ("llama31_405b", {}, dict(pp=2, vp=4, cp=2, layers=6)),  # + 2 slots
        ("llama31_405b", {"precision.scaling": "delayed"}, dict(pp=2, vp=2, dp=2, layers=8)),
        ("llama31_405b", {"precision.scaling": "mxfp8"} | WIDE, dict(pp=2, vp=2, dp=2, layers=4)),
        ("grok1_314b", {"precision.scaling": "current"}, dict(pp=2, vp=2, cp=2, ep=2, layers=8)),
    ],
    ids=str,
)
def test_pieces_make_the_whole(family, how, axes, monkeypatch):
    monkeypatch.setattr(zero_overlap, "NETWORK", math.inf)
    axes |= {"mbs": 1, "gbs": 8, "seq": 32, "dtype": "fp8" if how else "bf16"}
    gpu_type = "gb200" if "mxfp8" in how.values() else "h100"
    run = resolve(family, "tiny", how, gpu_type=gpu_type, **axes)
    step = Step(run, make_mesh(run.layout))
    places, params = step.shardings["layers"], step.init()["params"]["layers"]
    travelled = []

    def local(masters):
        cast = lambda place, w: w if place.full_precision else w.astype(jnp.bfloat16)
        past = jnp.ones((len(jax.tree.leaves(masters)[0]), 4, 3))
        past = past if step.run.precision.amax_history_len else None
        going = zero_overlap.ZeroOverlap(step.run, step.arithmetic, places, masters, cast, past)
        travelled.append((going.parts, len(going.cuts)))
        ticks = range(going.zero_overlap_ticks * (going.chunks - 1))
        of = lambda go, tick: [p for i in range(going.size) for p in go(jnp.int32(tick), i)]

        came = going.start()
        for tick in ticks:
            came = going.put_weights(came, of(going.gather, tick))
        ready = jax.tree.map(cast, places, masters)
        whole = quantization.weights(step.arithmetic, places, ready, going.scales, True)

        ours = 1 + sum(jax.lax.axis_index(axis) for axis in AXES)  # of each GPU others
        grads = jax.tree.map(
            lambda w: ours * jnp.arange(math.prod(w.shape), dtype=jnp.float32).reshape(w.shape),
            whole,
            is_leaf=lambda w: isinstance(w, quantization.Weight),
        )
        sums = grads
        for tick in (-1, *ticks):  # the first for nothing
            pieces_of_it = of(lambda *at: going.reduce(sums, *at), tick)  # noqa: B023
            sums = going.put_gradients(sums, pieces_of_it, tick)
        went, reduced = going.finish(sums), jax.tree.map(reduce_grad, places, grads)

        pairs = zip(*map(jax.tree.leaves, ((came, went), (whole, reduced))), strict=True)
        same = [jnp.array_equal(*(x.astype(jnp.float32) for x in pair)) for pair in pairs]
        return jnp.stack(same)[None]

    specs = jax.tree.map(lambda place: place.master_spec, places)
    check = jax.shard_map(
        local, mesh=step.mesh, in_specs=(specs,), out_specs=P(AXES), check_vma=False
    )
    assert jax.jit(check)(params).all()
    parts, cuts = travelled[0]
    assert parts > 1
    assert cuts == 4


@pytest.mark.parametrize("axes", [dict(pp=2, vp=4, cp=2, tp=2), dict(pp=4, dp=2)], ids=str)
def test_parts_of_the_head_make_the_whole(axes):
    run = resolve("llama31_405b", "tiny", {}, **axes, layers=8, mbs=1, gbs=16, seq=32)
    step = Step(run, make_mesh(run.layout))
    place, master = step.shardings["head"]["w"], step.init()["params"]["head"]["w"]
    travelled = []

    def local(w):
        going = zero_overlap.HeadPrefetch(run, place, w)
        travelled.append(going.parts)
        came = jnp.zeros(going.shape)
        for tick in range(going.parts + 2):  # the last of them for nothing
            came = going.gather(came, tick)
        return (came == gather_master(place, w)).all()[None]

    check = jax.shard_map(
        local, mesh=step.mesh, in_specs=place.master_spec, out_specs=P(AXES), check_vma=False
    )
    assert jax.jit(check)(master).all()
    # All have come when the first loss reads them, at the end of its tick.
    plan = schedule_for(run)
    first = 1 + np.flatnonzero(plan.column("loss_microbatch")[:, 0] >= 0)[0]
    assert 1 < travelled[0] <= min(first, len(plan.phases[WARMUP]))
