"""Muon: optax's update of each matrix, on every mesh, and one momentum per matrix."""

import jax
import numpy as np
import optax
import pytest
from optax import contrib

from maxbench.cost_model import memory
from maxbench.model import hugging_face, layer_stack
from maxbench.sharding import mesh, rules
from maxbench.step import data
from maxbench.step.train_step import Step
from tests.conftest import resolve
from tests.step.test_parallelism import build

MUON = {"optim.name": "muon", "optim.warmup": 0.0, "optim.lr": 0.01}


def separate(m, tree) -> dict[str, np.ndarray]:
    """The tensors of Hugging Face, each of which is one matrix: of Mamba-2, z, x, B, C and dt."""
    tensors = hugging_face.to_hugging_face(m, jax.device_get(tree))
    inner, state = m.ssm_heads * m.ssm_head_dim, m.ssm_groups * m.ssm_state
    ends = np.cumsum([inner, inner, state, state])
    for name in [name for name in tensors if "in_proj" in name]:
        parts = np.split(tensors.pop(name), ends)
        tensors |= {f"{name}.{i}": part for i, part in enumerate(parts)}
    return tensors


def is_matrix(name: str, w) -> bool:
    return w.ndim == 2 and not any(x in name for x in ("embed", "lm_head", "router", ".gate."))


@pytest.mark.parametrize("workload", ["kimi_k2", "nemotron_3_nano"])
def test_update_equals_optax(workload):
    """Of two steps, matrix by matrix: fused projections, latents, experts, Mamba-2."""
    overrides = MUON | {"optim.eps": 1e-8, "optim.clip": 1e9, "optim.decay_norms": True}
    run = resolve(workload, "tiny", overrides, dtype="fp32", steps=4)
    step, o = Step(run, mesh.make_mesh(run.layout)), run.optim
    rate = lambda count: o.lr_min + (o.lr - o.lr_min) * 0.5 * (1 + np.cos(np.pi * count / 4))
    of_matrices = contrib.muon(
        rate, beta=o.momentum, weight_decay=o.weight_decay, consistent_rms=0.2
    )
    of_others = optax.adamw(rate, o.b1, o.b2, o.eps, weight_decay=o.weight_decay)
    params = step.init()["params"]
    opt, tensors = step.tx.init(params), separate(run.model, params)
    part = lambda x, which: {k: w for k, w in x.items() if is_matrix(k, w) == which}
    references = {True: of_matrices, False: of_others}
    opts = {which: tx.init(part(tensors, which)) for which, tx in references.items()}
    update = jax.jit(lambda g, opt, w: step.tx.update(g, opt, w, norm=np.float32(1)))
    for i in range(2):
        key = lambda path, i=i: np.random.default_rng(abs(hash((str(path), i))) % 2**32)
        draw = lambda path, w, key=key: key(path).normal(size=w.shape).astype(np.float32)
        grads = jax.tree_util.tree_map_with_path(draw, params)
        updates, opt = update(grads, opt, params)
        actual, drawn = separate(run.model, updates), separate(run.model, grads)
        for which, tx in references.items():
            args = part(drawn, which), opts[which], part(tensors, which)
            expected, opts[which] = jax.jit(tx.update)(*args)
            for name in expected.keys() - {x for x in expected if "correction_bias" in x}:
                np.testing.assert_allclose(
                    actual[name], expected[name], atol=1e-5, rtol=1e-3, err_msg=name
                )


@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("grok", dict(ep=2, dp=2, tp=2, mbs=1)),
        pytest.param("latent", dict(fsdp=2, tp=2, dp=2), marks=pytest.mark.exhaustive),
        pytest.param(
            "llama", dict(pp=2, vp=2, dp=2, cp=2, tp=2, mbs=1), marks=pytest.mark.exhaustive
        ),
        pytest.param(
            "mixed", dict(pp=2, fsdp=2, mbs=1, stages="2,3"), marks=pytest.mark.exhaustive
        ),
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
