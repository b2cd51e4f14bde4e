"""Muon: optax's update of each matrix, on every mesh, and one momentum per matrix."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from maxbench.cost_model import memory
from maxbench.model import hugging_face, layer_stack
from maxbench.sharding import mesh, rules
from maxbench.step import data, muon, optimizer
from maxbench.step.train_step import Step
from tests.conftest import resolve
from tests.step.test_parallelism import build

MUON = {"optim.name": "muon", "optim.warmup": 0.0, "optim.lr": 0.01}
MATRIX = re.compile(r"_proj(_with_mqa)?\.weight(\.\d)?$")
UNDECAYED = re.compile(r"norm(_f)?\.weight$|bias$|A_log$|\.D$")
exhaustive = pytest.mark.exhaustive


def step_of(workload: str, **axes) -> Step:
    run = resolve(workload, "tiny", MUON, dtype="fp32", gbs=8, mbs=1, **axes)
    return Step(run, mesh.make_mesh(run.layout))


def separate(m, tree) -> dict[str, np.ndarray]:
    """The tensors of Hugging Face, each of which is one matrix: of Mamba-2, z, x, B, C and dt."""
    tensors = hugging_face.to_hugging_face(m, jax.device_get(tree))
    if m.ssm_heads:
        inner, state = m.ssm_heads * m.ssm_head_dim, m.ssm_groups * m.ssm_state
        ends = np.cumsum([inner, inner, state, state])
        for name in [name for name in tensors if "in_proj" in name]:
            parts = np.split(tensors.pop(name), ends)
            tensors |= {f"{name}.{i}": part for i, part in enumerate(parts)}
    return tensors


def normal(step: Step) -> list:
    """Weights and two gradients: normal numbers, with layers in their order."""
    rng = np.random.default_rng(0)
    shapes = step.with_stacks(layer_stack.stacks(step.run.model))["params"]
    draw = lambda x: rng.normal(size=x.shape).astype(np.float32)
    return [jax.tree.map(draw, shapes) for _ in range(3)]


def second_update(step: Step) -> dict[str, np.ndarray]:
    """The update of the second step, in which the momentum counts, matrix by matrix."""
    canonical = layer_stack.stacks(step.run.model)
    of = lambda tree: jax.tree.map(lambda x: x.sharding, step.abstract[tree])

    def put(tree):
        layers = layer_stack.permute(tree["layers"], step.stacks, canonical)
        return jax.device_put(tree | {"layers": layers}, of("params"))

    params, *grads = map(put, normal(step))
    opt = jax.jit(step.tx.init, out_shardings=of("opt"))(params)
    update = jax.jit(step.tx.update, out_shardings=(of("params"), of("opt")))
    for g in grads:
        updates, opt = update(g, opt, params, norm=jnp.zeros(()))
    updates = jax.device_get(updates)
    layers = layer_stack.permute(updates["layers"], canonical, step.stacks)
    return separate(step.run.model, updates | {"layers": layers})


@functools.cache
def by_optax(workload: str) -> dict[str, np.ndarray]:
    """second_update() by optax, of each matrix alone."""
    step = step_of(workload)
    o, rate = step.run.optim, optimizer.learning_rate(step.run)

    @functools.partial(jax.jit, static_argnums=0)
    def second(kind, w, *grads):
        decay = 0 if kind == "undecayed" else o.weight_decay
        tx = optax.adamw(rate, o.b1, o.b2, o.eps, weight_decay=decay)
        if kind == "matrix":
            tx = contrib.muon(rate, beta=o.momentum, weight_decay=decay, consistent_rms=0.2)
        opt = tx.init(w)
        for g in grads:
            update, opt = tx.update(g, opt, w)
        return update

    def kind(name):
        rest = "undecayed" if UNDECAYED.search(name) else "other"
        return "matrix" if MATRIX.search(name) else rest

    w, *grads = (separate(step.run.model, tree) for tree in normal(step))
    return {name: np.asarray(second(kind(name), w[name], *(g[name] for g in grads))) for name in w}


@pytest.mark.parametrize(
    ("workload", "axes"),
    [
        ("llama31_8b", dict(dp=2, fsdp=2, tp=2)),
        pytest.param("nemotron_3_nano", dict(ep=2, dp=2, tp=2), marks=exhaustive),
        pytest.param("kimi_k2", dict(ep=2, fsdp=2, tp=2), marks=exhaustive),
        pytest.param("kimi_k2", dict(pp=2, ep=2, dp=2), marks=exhaustive),
    ],
    ids=str,
)
def test_update_equals_that_of_optax(workload, axes):
    """On a mesh, of fused projections, latents, experts, Mamba-2, and of the weights of AdamW."""
    actual, expected = second_update(step_of(workload, **axes)), by_optax(workload)
    assert actual.keys() == expected.keys()
    for name in expected.keys() - {x for x in expected if "correction_bias" in x}:
        atol = 1e-4 * np.abs(expected[name]).max()
        np.testing.assert_allclose(actual[name], expected[name], atol=atol, err_msg=name)


def test_newton_schulz_in_bf16_orthogonalizes():
    """Singular values of 1 to 1/30 end near 1, in tall and in wide matrices; zeros stay zeros."""
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.normal(size=(rows, 32)))[0] for rows in (48, 32))
    tall = (u * np.geomspace(1, 1 / 30, 32)) @ v
    for x in (tall, tall.T):
        given = jnp.asarray(np.stack([x, 0 * x]), jnp.bfloat16)
        found, zeros = np.asarray(muon.newton_schulz(given), np.float32)
        values = np.linalg.svd(found, compute_uv=False)
        assert 0.6 < values.min() < values.max() < 1.25
        assert not zeros.any()


@pytest.mark.parametrize(
    ("family", "axes"),
    [
        pytest.param("grok", dict(ep=2, dp=2, tp=2, mbs=1), marks=exhaustive),
        pytest.param("latent", dict(fsdp=2, tp=2, dp=2), marks=exhaustive),
        pytest.param("llama", dict(pp=2, vp=2, dp=2, cp=2, tp=2, mbs=1), marks=exhaustive),
        pytest.param("mixed", dict(pp=2, fsdp=2, mbs=1, stages="2,3"), marks=exhaustive),
    ],
    ids=str,
)
def test_training_does_not_depend_on_the_mesh(family, axes):
    """Losses and weights of three steps."""

    def train(**axes):
        step = build(family, overrides=MUON, **axes)
        compiled, state, losses = step.lower().compile(), step.init(), []
        batches = data.Synthetic(step.run, step.mesh)
        for _ in range(3):
            state, out = compiled(state, next(batches))
            losses.append(float(out["loss"]))
        params, canonical = jax.device_get(state["params"]), layer_stack.stacks(step.run.model)
        layers = layer_stack.permute(params["layers"], canonical, step.stacks)
        return losses, params | {"layers": jax.device_get(layers)}

    (losses, params), (expected, single) = train(**axes), train()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=5e-5)
    jax.tree.map(close, params, single)


def test_a_matrix_has_one_moment_of_which_no_axis_stores_a_copy():
    axes = dict(ep=2, dp=2, tp=2, mbs=1)
    step, adamw = build("grok", overrides=MUON, **axes), build("grok", **axes)
    size = lambda s: rules.size_gib(s.abstract["opt"]) * 2**30
    params = rules.size_gib(step.abstract["params"]) * 2**30
    ends = sum(rules.size_gib(step.abstract["params"][x]) for x in ("embed", "head")) * 2**30
    assert size(adamw) == pytest.approx(2 * params, rel=1e-3)
    assert size(step) == pytest.approx(params + ends, rel=0.02)
    saved = memory.lower_bound(adamw.run) - memory.lower_bound(step.run)
    assert saved == pytest.approx(size(adamw) - size(step), rel=0.05)
