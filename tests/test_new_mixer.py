"""A new kind of mixer, in one file (tests/gated_recurrence.py) and named in a workload file, trains
on a mesh, saves and resumes, is counted, planned and searched."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbench.config import recipes, resolve
from maxbench.config.errors import UserError
from maxbench.cost_model import compile_cache, memory, remat
from maxbench.metrics import flops
from maxbench.model import transformer
from maxbench.planning import planner, search
from maxbench.run import loop
from maxbench.sharding import mesh
from maxbench.step.train_step import Step
from tests.run.conftest import folder_of, losses

WORKLOAD = '''
"""A hybrid: three recurrences, then attention, all with experts."""

from maxbench.config.channels import Experts
from maxbench.config.mixers import Attention
from maxbench.config.recipes import workload
from maxbench.config.sublayers import Layer
from tests.gated_recurrence import GatedRecurrence

LAYOUTS = """
gpu_type dtype scaling gpus layers seq  pp vp dp fsdp ep cp tp mbs gbs
h100     bf16  weak       8     16 4096  1  1  1    2  2  1  2   1  32
"""


def get_config(presets=""):
    cycle = 3 * (Layer(mixer=GatedRecurrence(), channel=Experts()),)
    cycle += (Layer(mixer=Attention(window=1024), channel=Experts()),)
    sizes = dict(embed=1024, heads=16, kv_heads=8, head_dim=64, mlp=2048, vocab=32000)
    return workload(
        presets,
        model=dict(name="hybrid", size="1b", layers=16, layer_groups=((4, cycle),), experts=8,
                   capacity_factor=1.0, **sizes),
        train=dict(seq=4096, remat="none"),
        optim=dict(lr=3e-3, lr_min=3e-4, warmup=2),
        layouts=LAYOUTS,
    )
'''
MESH = dict(fsdp=2, ep=2, tp=2, mbs=1, gbs=8)


@pytest.fixture(scope="module")
def workload(tmp_path_factory):
    path = tmp_path_factory.mktemp("workload") / "hybrid.py"
    path.write_text(WORKLOAD)
    return path


def build(workload, presets="", overrides=None, gpus=None, **flags):
    config = recipes.load_workload(f"{workload}:{presets}")
    return resolve.build_run(config, gpus=gpus, flags=flags, overrides=overrides)


EXACT = {"precision.grads": "fp32", "model.capacity_factor": 0.0}


@pytest.mark.parametrize("axes", [MESH, MESH | dict(pp=2, fsdp=1)], ids=["fsdp ep tp", "pp ep tp"])
def test_gradients_do_not_depend_on_the_mesh(workload, axes):
    def gradients(**axes):
        run = build(workload, "tiny", EXACT, dtype="fp32", seq=32, **axes)
        step = Step(run, mesh.make_mesh(run.layout))
        params = step.init()["params"]
        grads, out, _ = jax.jit(step.gradients)(params, 3)
        ends = {name: grads[name] for name in ("embed", "head")}
        return jax.device_get((ends, out["loss"]))

    expected, loss = gradients(mbs=8, gbs=8)
    actual, actual_loss = gradients(**axes)
    assert actual_loss == pytest.approx(loss, rel=1e-5)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    jax.tree.map(close, actual, expected)


def test_it_trains_saves_and_resumes(workload, tmp_path):
    settings = EXACT | {"optim.warmup": 0, "train.data": "markov"}
    flags = dict(dtype="fp32", seq=32, steps=6) | MESH
    saving = settings | {"output.checkpoint_every": 3}
    run = build(workload, "tiny", saving, output_dir=str(tmp_path / "a"), **flags)
    assert loop.train(run) == 0
    whole = losses(folder := folder_of(tmp_path / "a"))
    assert whole[5] < whole[0]
    saved = str(folder / "checkpoints" / "3")
    again = build(workload, "tiny", settings, output_dir=str(tmp_path / "b"), resume=saved, **flags)
    assert loop.train(again) == 0
    assert losses(folder_of(tmp_path / "b")) == {n: whole[n] for n in (3, 4, 5)}


def test_its_description_is_written_and_read(workload):
    run = build(workload, gpus=8)
    written = json.loads(json.dumps(run.asdict()))
    assert written["model"]["layer_groups"][0][1][0]["mixer"] == {"kind": "gated_recurrence"}
    assert resolve.run_from_dict(written).model == run.model


def test_it_is_counted(workload):
    m = build(workload, "tiny").model
    shapes = jax.eval_shape(lambda key: nn.unbox(transformer.init(m, key)), jax.random.key(0))
    assert flops.params(m) == sum(x.size for x in jax.tree.leaves(shapes))
    recurrence, attention = (m.per_layer[i] for i in (0, 3))
    count = lambda layer: flops.layer_multiply_adds(layer, 64, flops.CONVENTIONS["full"])
    width = m.heads * m.head_dim
    projections = m.embed * (m.heads + m.kv_heads) * 2 * m.head_dim
    difference = 4 * m.embed * width + 2 * width - projections - 64 * 2 * width
    assert count(recurrence) - count(attention) == difference


def test_its_stash_and_recomputation_are_estimated(workload):
    run = build(workload, gpus=8)
    sizes = [memory.activation_bytes(run, policy) for policy in ("none", "selective", "full")]
    shares = [remat.recomputed_fraction(run, policy) for policy in ("none", "selective", "full")]
    assert sizes == sorted(sizes, reverse=True)
    assert shares == sorted(shares)
    assert 0 == shares[0] < shares[2] < 1


def test_layouts_of_it_are_searched_and_refused(workload):
    run = build(workload, gpus=8)
    ranked = search.rank_layouts(run, 8)
    assert {found.layout.gpus for found in ranked} == {8}
    assert all(found.layout.cp == 1 for found in ranked)
    with pytest.raises(UserError, match="cp=2 cuts the sequence"):
        build(workload, cp=2)
    with pytest.raises(UserError, match=r"tp=3 does not divide model\.heads=16"):
        build(workload, tp=3)


@pytest.mark.gpu_compile
def test_it_is_planned(workload):
    """Its program for eight GPUs, whose key in the cache knows the code of the kind."""
    run = build(workload, gpus=8, overrides={"model.layers": 4})
    assert "associative_scan" in compile_cache._kinds_elsewhere(run)[0]
    plan = planner.plan(run)
    assert plan.fits
    assert plan.step_s > 0


def test_logits_do_not_depend_on_later_tokens(workload):
    m = build(workload, "tiny", EXACT).model
    net = transformer.Transformer(m)
    tokens = jnp.arange(24).reshape(1, 24)
    params = net.init(jax.random.key(0), tokens)["params"]
    changed = tokens.at[:, 12:].add(1)
    logits, others = (net.apply({"params": params}, x) for x in (tokens, changed))
    np.testing.assert_allclose(logits[:, :12], others[:, :12], atol=1e-5)
    assert jnp.abs(logits - others)[:, 12:].max() > 1e-3
