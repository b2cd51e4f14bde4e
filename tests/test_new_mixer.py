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
from maxbench.config.precedence import build_config
from maxbench.config.run import RunConfig
from maxbench.cost_model import compile_cache, memory, remat
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.metrics import flops
from maxbench.model import layer_stack, transformer
from maxbench.planning import planner, search
from maxbench.run import loop
from maxbench.sharding import mesh
from maxbench.step import data
from maxbench.step.train_step import Step
from tests.conftest import CPU
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
    asked = build_config(config, gpus=gpus, flags=flags, overrides=overrides)
    return resolve.resolve(asked, GPU_TYPES, CPU if presets else None)


EXACT = {"precision.grads": "fp32", "model.capacity_factor": 0.0}


def assert_gradients_are_equal(workload, settings, axes):
    """Gradients and loss on a mesh, and on one device."""

    def gradients(**axes):
        run = build(workload, "tiny", settings, dtype="fp32", seq=32, **axes)
        step = Step(run, mesh.make_mesh(run.layout))
        batch = data.draw(run, 3)
        grads, out, _ = jax.jit(step.gradients)(step.init()["params"], batch)
        return step.stacks, jax.device_get((grads, out["loss"]))

    stacks, (expected, loss) = gradients(mbs=axes["gbs"], gbs=axes["gbs"])
    others, (actual, actual_loss) = gradients(**axes)
    assert actual_loss == pytest.approx(loss, rel=1e-5)
    actual["layers"] = layer_stack.permute(actual["layers"], stacks, others)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())
    jax.tree.map(close, actual, expected)


exhaustive = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(MESH, id="fsdp ep tp"),
        pytest.param(MESH | dict(pp=2, fsdp=1), id="pp ep tp", marks=exhaustive),
    ],
)
def test_gradients_do_not_depend_on_the_mesh(workload, axes):
    assert_gradients_are_equal(workload, EXACT, axes)


RECURRENCE, ATTENTION, EXPERTS = (
    {"kind": kind} for kind in ("gated_recurrence", "attention", "experts")
)
# As on a command line: layers of one sublayer, and of both.
LONE = f"((1, ({{'mixer': {RECURRENCE}}}, {{'channel': {EXPERTS}}}, {{'mixer': {ATTENTION}}}))"
LONE += f", (1, ({{'mixer': {RECURRENCE}, 'channel': {EXPERTS}}},)))"


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(MESH, id="fsdp ep tp", marks=exhaustive),
        pytest.param(dict(pp=2, ep=2, tp=2, mbs=1, gbs=8), id="pp ep tp", marks=exhaustive),
        pytest.param(dict(pp=2, vp=2, dp=2, mbs=1, gbs=8), id="pp vp dp", marks=exhaustive),
    ],
)
def test_a_layer_may_have_a_mixer_or_a_channel_alone(workload, axes):
    assert_gradients_are_equal(workload, EXACT | {"model.layer_groups": LONE}, axes)


@exhaustive
def test_a_network_may_have_mixers_alone(workload):
    alone = f"((4, ({{'mixer': {RECURRENCE}}},)),)"
    overlapped = dict(tp=2, mbs=1, gbs=4)
    settings = EXACT | {"model.layer_groups": alone, "model.experts": 0, "train.unroll_layers": 4}
    assert_gradients_are_equal(workload, settings, overlapped)
    assert_gradients_are_equal(workload, settings, dict(pp=2, tp=2, mbs=1, gbs=4))


@pytest.mark.exhaustive
def test_it_trains_saves_and_resumes(workload, tmp_path):
    settings = EXACT | {"optim.warmup": 0, "train.data": "bigram"}
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
    written = json.loads(json.dumps(run.config.asdict()))
    assert written["model"]["layer_groups"][0][1][0]["mixer"] == {"kind": "gated_recurrence"}
    assert RunConfig.from_dict(written) == run.config


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


@pytest.mark.exhaustive
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
