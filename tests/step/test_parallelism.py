"""The same loss and gradients on every mesh, and only the collectives that it requires."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from maxbench.config.channels import Experts
from maxbench.config.mixers import Mamba2
from maxbench.config.sublayers import Layer
from maxbench.model import layer_stack
from maxbench.pipeline import zero_overlap
from maxbench.sharding import mesh as mesh
from maxbench.sharding import rules
from maxbench.step import data
from maxbench.step.train_step import Step
from tests.conftest import resolve
from tests.kinds import dense, routed

# Each of the tiny preset's 4 experts has a slot for every token (top-2): none is dropped.
EXACT = {"precision.grads": "fp32", "model.capacity_factor": 2.0}
FAMILIES = {
    "llama": ("llama31_405b", {}),
    "nemotron": ("nemotron4_340b", {}),
    "grok": ("grok1_314b", {}),
    "dropless": ("grok1_314b", {"model.capacity_factor": 0.0}),
    # The experts of gpt-oss, and those of DeepSeek-V3 as they are benchmarked.
    "gpt_oss": (
        "grok1_314b",
        {
            "model.capacity_factor": 0.0,
            "model.act": "swiglu_clamped",
            "model.mlp_bias": True,
            "model.router_bias": True,
            # Enough for any routing of the toy, so that buffers are used and nothing is lost.
            "model.dispatch_factor": 4.0,
        },
    ),
    "deepseek": (
        "grok1_314b",
        {
            "model.force_balance": True,
            "model.layer_groups": ((1, (dense(192),)), (1, (routed(64, 8),))),
            "model.layers": 2,
            "model.experts": 8,
            "model.router": "sigmoid",
            "model.router_groups": 4,
            "model.router_groups_top": 2,
            "model.router_scale": 2.5,
            "model.shared_mlp": 96,
            "model.mtp_layers": 1,
            "model.init_std": 0.1,  # larger gradients of the router than rounding errors
        },
    ),
    # Layers of one sublayer, and two uses of a layer of both, as Nemotron 3 Super.
    "nemotron_3": (
        "grok1_314b",
        {
            "model.force_balance": True,
            "model.layer_groups": ((2, (Layer(mixer=Mamba2()), Layer(channel=Experts()))),),
            "model.layers": 4,
            "model.post_norm": False,
            "model.rope_fraction": 0.0,
            "model.ssm_heads": 4,
            "model.ssm_groups": 2,
            "model.ssm_head_dim": 16,
            "model.ssm_state": 8,
            "model.ssm_chunk": 8,
            "model.expert_latent": 48,
            "model.router": "sigmoid",
            "model.shared_mlp": 96,
            "model.mtp_layers": 2,
            "model.mtp_block": routed(64, 4),
            "model.init_std": 0.1,
        },
    ),
    # Dense layers before experts, as DeepSeek-V3.
    "dense_first": (
        "grok1_314b",
        {
            "model.capacity_factor": 0.0,
            "model.layer_groups": ((2, (dense(192),)), (4, (routed(64, 4),))),
            "model.layers": 6,
        },
    ),
    # Windows and full attention in turn, as gpt-oss.
    "windows": (
        "llama31_405b",
        {"model.layer_groups": ((3, (dense(192, window=8), dense(192))),), "model.layers": 6},
    ),
    # Three layer groups, heads x head_dim > embed, and values narrower than keys.
    "mixed": (
        "grok1_314b",
        {
            "model.capacity_factor": 0.0,
            # Two cycles of a dense layer and one with experts, then another kind.
            "model.layer_groups": ((2, (dense(192), routed(64, 4))), (1, (routed(96, 2),))),
            "model.layers": 5,
            "model.head_dim": 24,
            "model.value_dim": 16,
        },
    ),
    # QK norm, biases, sinks, YaRN; in every other layer a window, over cp 4 a chunk and one token.
    "window": (
        "llama31_405b",
        {
            "model.qk_norm": True,
            "model.attention_bias": True,
            "model.sinks": True,
            "model.layer_groups": ((2, (dense(256, window=5), dense(256))),),
            "model.rope_scaling": "yarn",
            "model.rope_context": 16,
        },
    ),
    "latent": (
        "llama31_405b",
        {
            "model.kv_heads": 8,
            "model.q_rank": 48,
            "model.kv_rank": 32,
            "model.rope_head_dim": 8,
            "model.value_dim": 12,
            "model.rope_scaling": "yarn",
            "model.rope_mscale": 1.0,
        },
    ),
}
GBS, SEQ = 8, 32
exhaustive = pytest.mark.exhaustive
# Llama on all axes at once, without and with a pipeline; other families on the meshes that split
# what only they have. By default experts here, all axes of Llama in training and a pipeline below.
CASES = [
    # two microbatches
    pytest.param("llama", dict(dp=2, fsdp=2, cp=4, tp=2, mbs=1), marks=exhaustive),
    pytest.param(
        "llama", dict(pp=2, vp=2, dp=2, cp=2, tp=2, mbs=1, stages="1,2,0,1"), marks=exhaustive
    ),
    pytest.param("nemotron", dict(fsdp=2, cp=2, tp=2), marks=exhaustive),
    pytest.param("window", dict(pp=2, cp=2, tp=2, mbs=1), marks=exhaustive),
    pytest.param("latent", dict(pp=2, vp=2, fsdp=2, cp=2, tp=2, mbs=1), marks=exhaustive),
    ("grok", dict(ep=4, ep_nodes=2, tp=2, cp=2, mbs=1)),
    pytest.param("gpt_oss", dict(pp=2, ep=4, ep_nodes=2, tp=2, mbs=1), marks=exhaustive),
    pytest.param("deepseek", dict(cp=2, ep=4, ep_nodes=2, tp=2, mbs=1), marks=exhaustive),
    pytest.param("deepseek", dict(pp=2, ep=2, fsdp=2, mbs=1), marks=exhaustive),
    pytest.param("deepseek", dict(pp=2, ep=4, ep_nodes=2, mbs=1), marks=exhaustive),
    pytest.param("nemotron_3", dict(fsdp=2, ep=2, tp=2, mbs=1), marks=exhaustive),
    pytest.param("nemotron_3", dict(pp=2, ep=2, tp=2, mbs=1), marks=exhaustive),
    # Layers that differ in a slot of the chunks, and empty slots: branches with collectives.
    pytest.param(
        "dense_first",
        dict(pp=2, vp=2, ep=2, tp=2, mbs=1, stages="Et|(tt|)*2tmL"),
        marks=exhaustive,
    ),
    pytest.param("mixed", dict(pp=2, fsdp=2, mbs=1, stages="2,3"), marks=exhaustive),
    pytest.param("windows", dict(pp=3, cp=2, mbs=1), marks=exhaustive),
]


@pytest.fixture(autouse=True)
def overlap_zero(monkeypatch):
    """zero_overlap.py slices weights and gradients, although toy layers are too fast for that."""
    monkeypatch.setattr(zero_overlap, "NETWORK_BYTES_PER_S", math.inf)


def build(family: str, preset: str = "tiny", overrides: dict | None = None, **axes) -> Step:
    """The fp32 step of a family, on a mesh; axes may have 'schedule' and 'remat' too."""
    shards = math.prod(axes.get(a, 1) for a in ("dp", "fsdp", "ep"))
    workload, family_overrides = FAMILIES[family]
    layers = family_overrides.get("model.layers", 4)
    axes = {"layers": layers, "gbs": GBS, "mbs": GBS // shards, **axes}
    settings = EXACT | family_overrides | (overrides or {})
    settings |= {"layout.stages": axes.pop("stages", "")}
    settings |= {"layout.ep_nodes": axes.pop("ep_nodes", 1)}
    settings |= {"train.loss_chunk": 24, "train.schedule": axes.pop("schedule", "1f1b")}
    settings |= {"train.remat": axes.pop("remat")} if "remat" in axes else {}
    run = resolve(workload, preset, settings, dtype="fp32", seq=SEQ, **axes)
    return Step(run, mesh.make_mesh(run.layout))


def gradients(step: Step, params):
    """Gradients and metrics; weights and gradients are in layer order, not in the step's order.
    Gradients of empty slots are zero."""
    stacks, canonical = step.stacks, layer_stack.stacks(step.run.model)
    shardings = jax.tree.map(lambda x: x.sharding, step.abstract["params"])
    params = params | {"layers": layer_stack.permute(params["layers"], stacks, canonical)}
    params, batch = jax.device_put(params, shardings), data.draw(step.run, 3)
    grads, out, _ = jax.device_get(jax.jit(step.gradients)(params, batch))
    jax.tree.map(
        np.testing.assert_array_equal,
        grads["layers"],
        jax.device_get(layer_stack.zero_empty(grads["layers"], stacks)),
    )
    layer_grads = jax.device_get(layer_stack.permute(grads["layers"], canonical, stacks))
    return grads | {"layers": layer_grads}, out


def assert_grads_close(actual, expected):
    """Within 1e-5 of the largest gradient of each weight: another order of sums leaves rounding
    errors where gradients are zero."""
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    jax.tree.map(close, actual, expected)


def assert_metrics_close(actual, expected, rtol=1e-5):
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=rtol, err_msg=name)


@functools.cache
def single_device(family: str, preset: str = "tiny", layers: int = 0, gbs: int = GBS):
    """Weights, gradients and metrics on one device."""
    step = build(family, preset, gbs=gbs, mbs=gbs, **({"layers": layers} if layers else {}))
    params = jax.device_get(step.init()["params"])
    return params, *gradients(step, params)


@pytest.mark.parametrize(("family", "axes"), CASES, ids=str)
def test_loss_and_gradients_do_not_depend_on_the_mesh(family, axes):
    params, grads, out = single_device(family)
    actual_grads, actual_out = gradients(build(family, **axes), params)
    np.testing.assert_allclose(actual_out["loss"], out["loss"], rtol=1e-6)
    assert_metrics_close(actual_out, out)
    assert_grads_close(actual_grads, grads)


@pytest.mark.parametrize(
    ("family", "axes"),
    [
        pytest.param("llama", dict(pp=2, vp=2, dp=2, mbs=1, schedule="gpipe"), marks=exhaustive),
        # Microbatches are no multiple of the stages, tokens no multiple of pp, and the loss is
        # computed for two microbatches at a time.
        pytest.param("llama", dict(pp=3, tp=2, mbs=1, layers=6), marks=exhaustive),
        # 6 layers in 8 slots: the first and the last chunk have an empty slot each, in place of
        # which they compute the embedding and the loss. With a remat policy.
        pytest.param(
            "grok",
            dict(pp=2, vp=4, ep=2, mbs=1, layers=6, remat="save_qkv_proj"),
            marks=[pytest.mark.core, exhaustive],
        ),
        ("llama", dict(pp=2, vp=2, mbs=1)),
    ],
    ids=str,
)
def test_loss_and_gradients_do_not_depend_on_the_schedule(family, axes):
    layers, gbs = axes.get("layers", 0), axes.get("gbs", GBS)
    params, grads, out = single_device(family, layers=layers, gbs=gbs)
    actual_grads, actual_out = gradients(build(family, **axes), params)
    assert_metrics_close(actual_out, out, rtol=1e-6)
    assert_grads_close(actual_grads, grads)


@pytest.mark.parametrize(
    ("family", "axes", "remat"),
    [
        pytest.param("llama", dict(cp=2, tp=2), dict(remat="selective"), marks=exhaustive),
        pytest.param("llama", dict(cp=2, tp=2), dict(remat="query,mlp_act"), marks=exhaustive),
        pytest.param(
            "llama",
            dict(fsdp=2, tp=2),
            dict(remat="none", offload="mlp_up,query"),
            marks=exhaustive,
        ),
        pytest.param(
            "llama", dict(fsdp=2, tp=2), dict(remat="query", remat_layers=3), marks=exhaustive
        ),
        # The last layer of the first cycle is the first without recomputed GEMMs.
        pytest.param("mixed", dict(ep=2), dict(remat="query", remat_layers=1), marks=exhaustive),
    ],
)
def test_gradients_do_not_depend_on_the_remat_policy(family, axes, remat):
    params, grads, _ = single_device(family)
    step = build(family, **axes)
    train = dataclasses.replace(step.run.train, **remat)
    step = Step(dataclasses.replace(step.run, train=train), step.mesh)
    assert_grads_close(gradients(step, params)[0], grads)


@pytest.mark.parametrize(
    ("family", "axes", "remat"),
    [
        # four microbatches
        pytest.param("llama", dict(dp=2, cp=2, tp=2, mbs=1), "save_gemms_only", marks=exhaustive),
        pytest.param("mixed", dict(ep=2, tp=2), "full", marks=exhaustive),
        # The passes of two microbatches overlap.
        pytest.param("windows", dict(tp=2, mbs=4), "none", marks=exhaustive),
        ("llama", dict(tp=2), "none"),
        # The halves of a microbatch run in turn.
        ("deepseek", dict(ep=2, mbs=2), "none"),
        pytest.param("deepseek", dict(ep=2, dp=2, mbs=2), "full", marks=exhaustive),
        pytest.param("nemotron_3", dict(ep=4, mbs=2), "save_gemms_only", marks=exhaustive),
        pytest.param("grok", dict(ep=4, ep_nodes=2, mbs=2), "none", marks=exhaustive),
    ],
)
def test_unrolled_layers_equal_the_loop(family, axes, remat):
    params, grads, out = single_device(family)
    in_halves = "ep" in axes and "tp" not in axes
    overrides = {"train.unroll_layers": 64, "train.two_batch_overlap": in_halves}
    step = build(family, overrides=overrides, remat=remat, **axes)
    assert step.run.train.unrolled
    assert step.run.train.two_batch_overlap == in_halves
    actual_grads, actual_out = gradients(step, params)
    assert_metrics_close(actual_out, out)
    assert_grads_close(actual_grads, grads)


@exhaustive
def test_xai_preset_of_grok_does_not_depend_on_the_mesh():
    params, grads, out = single_device("grok", "xai,tiny")
    actual_grads, actual_out = gradients(build("grok", "xai,tiny", ep=2, fsdp=2, dp=2), params)
    np.testing.assert_allclose(actual_out["loss"], out["loss"], rtol=1e-5)
    assert_grads_close(actual_grads, grads)


@pytest.mark.xdist_group("test_parallelism grok")  # shares single_device("grok")
@pytest.mark.parametrize("axes", [dict(fsdp=8), dict(pp=2, vp=2, ep=2, tp=2, mbs=1)], ids=str)
def test_initial_weights_do_not_depend_on_the_mesh(axes):
    step = build("grok", **axes)
    actual, expected = jax.device_get(step.init()["params"]), single_device("grok")[0]
    source = layer_stack.stacks(step.run.model)
    layers = layer_stack.permute(expected["layers"], step.stacks, source)
    expected = expected | {"layers": jax.device_get(layers)}
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.core
@pytest.mark.exhaustive
def test_training_does_not_depend_on_the_mesh():
    """Three steps: with optimizer, clipping and donation of the state."""

    def train(**axes):
        step = build("llama", **axes)
        compiled, state, values = step.lower().compile(), step.init(), []
        batches = data.Synthetic(step.run, step.mesh)
        for _ in range(3):
            state, out = compiled(state, next(batches))
            values.append([float(out["loss"]), float(out["grad_norm"])])
        return values

    np.testing.assert_allclose(train(dp=2, fsdp=2, cp=2, tp=2, mbs=1), train(), rtol=1e-5)


def test_master_state_is_sharded_over_all_axes():
    """ZeRO-1: no mesh axis stores a copy."""
    for axes in (dict(dp=2, cp=2, tp=2), dict(ep=4, dp=2), dict(pp=2, fsdp=2, cp=2, mbs=1)):
        step = build("grok", **axes)
        total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(step.abstract))
        per_device = rules.size_gib(step.abstract) * 2**30
        assert per_device == pytest.approx(total / 8, rel=1e-3), axes


@pytest.mark.parametrize(
    ("names", "shape", "dp", "dim"),
    [
        (("layers", "embed", "mlp_inputs", "mlp"), (32, 4096, 2, 14336), 8, 1),  # not mlp, larger
        # Neither 64 / 8 heads nor head_dim divides by 64 into whole blocks.
        (("layers", "heads", "head_dim", "embed"), (80, 64, 128, 8192), 64, 3),
        (("layers", "embed"), (4, 64), 8, 1),  # no dim has whole blocks
        (("layers", "embed"), (4, 60), 8, None),  # dp divides no dim
    ],
)
def test_zero1_splits_the_first_dim_with_whole_blocks(names, shape, dp, dim):
    mesh_shape = dict.fromkeys(rules.AXES, 1) | {"dp": dp, "tp": 8}
    sharding = rules.shard_weight(names, shape, mesh_shape)
    dims = [i for i, axes in enumerate(sharding.zero1_axes) if "dp" in axes]
    assert dims == ([] if dim is None else [dim])
    assert ("dp" in sharding.psum_axes) == (dim is None)


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(dict(tp=2, mbs=1, layers=2), marks=exhaustive),
        pytest.param(dict(pp=2, tp=2, mbs=1, layers=2), marks=exhaustive),
    ],
)
def test_an_infinity_of_one_microbatch_reaches_no_other_by_an_order(axes):
    """The embeddings of 16 tokens are infinite: the gradients of the embeddings in microbatches
    without them are finite, with ordering tokens as without."""
    finite = []
    for order in ("auto", "off"):
        step = build("llama", overrides={"train.order": order}, **axes)
        params = jax.device_get(step.init()["params"])
        params["embed"]["w"] = params["embed"]["w"].copy()
        params["embed"]["w"][:16, 0] = np.inf
        grads, _ = gradients(step, params)
        finite.append(np.isfinite(grads["embed"]["w"]).all(-1))
    assert finite[1].any()
    assert not finite[1].all()
    np.testing.assert_array_equal(*finite)
