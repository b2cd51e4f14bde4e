"""Muon: optax's update of each matrix of a model, on every mesh."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxbench.config.mixers import Mamba2
from maxbench.model import hugging_face, layer_stack
from maxbench.sharding import mesh
from maxbench.step import data, muon, optimizer
from maxbench.step.train_step import Step
from tests.conftest import resolve

MATRIX = re.compile(r"(?<!embed)_proj\.weight$")  # of Hugging Face's tensors, which are not fused
exhaustive = pytest.mark.exhaustive


def build(family: str, overrides: dict | None = None, **axes) -> Step:
    settings = {"optim.name": "muon", "optim.warmup": 0.0, "precision.grads": "fp32"}
    flags = {"dtype": "fp32", "gbs": 8, "mbs": 1, **axes}
    run = resolve(family, "tiny", settings | (overrides or {}), **flags)
    return Step(run, mesh.make_mesh(run.layout))


def tree_of(step: Step, seed: int):
    """Normal numbers for each weight, with layers in their order."""
    rng = np.random.default_rng(seed)
    stacks = layer_stack.stacks(step.run.model)
    params = step.with_stacks(stacks)["params"]
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)


def updates(step: Step) -> dict[str, np.ndarray]:
    """The update of a second step, in which the momentum counts, as Hugging Face's tensors."""
    canonical = layer_stack.stacks(step.run.model)
    shardings = jax.tree.map(lambda x: x.sharding, step.abstract["params"])

    def put(tree):
        layers = layer_stack.permute(tree["layers"], step.stacks, canonical)
        return jax.device_put(tree | {"layers": layers}, shardings)

    params, *grads = (put(tree_of(step, seed)) for seed in range(3))
    opt = jax.tree.map(lambda x: x.sharding, step.abstract["opt"])
    state = jax.jit(step.tx.init, out_shardings=opt)(params)
    update = jax.jit(step.tx.update, out_shardings=(shardings, opt))
    for g in grads:
        found, state = update(g, state, params, norm=jnp.zeros(()))
    found = jax.device_get(found)
    layers = layer_stack.permute(found["layers"], canonical, step.stacks)
    return hugging_face.to_hugging_face(step.run.model, found | {"layers": layers})


def taken_apart(step: Step, tensors: dict) -> dict:
    """Tensors without those that are fused in Hugging Face's format, too: the inputs of Mamba-2."""
    found = {}
    for name, tensor in tensors.items():
        found[name] = tensor
        if name.endswith("in_proj.weight"):
            m = next(
                layer.mixer
                for _, layer in step.run.model.kinds
                if isinstance(layer.mixer, Mamba2)
            )
            widths = m.ssm_inner, m.ssm_inner, m.ssm_state, m.ssm_state
            ends = np.cumsum(widths) * m.ssm_groups
            parts = np.split(found.pop(name), ends)
            found |= {f"{i}.{name}": part for i, part in enumerate(parts)}
    return found


@functools.cache
def expected(family: str) -> dict[str, np.ndarray]:
    """updates() by optax, tensor by tensor."""
    step = build(family)
    o = step.run.optim
    of = lambda seed: taken_apart(
        step, hugging_face.to_hugging_face(step.run.model, tree_of(step, seed))
    )
    params, *grads = map(of, range(3))
    rate = optimizer.learning_rate(step.run)
    its = optax.contrib.muon(
        rate, beta=o.momentum, weight_decay=o.weight_decay, consistent_rms=0.2
    )
    adamw = lambda decay: optax.adamw(rate, o.b1, o.b2, o.eps, weight_decay=decay)
    plain = ("norm.weight", "layernorm.weight", "bias", "A_log")

    def label(name: str) -> str:
        if MATRIX.search(name):
            return "muon"
        return "plain" if name.endswith(plain) else "adamw"

    tx = optax.partition(
        {"muon": its, "adamw": adamw(o.weight_decay), "plain": adamw(0)},
        {name: label(name) for name in params},
    )
    state = tx.init(params)
    update = jax.jit(tx.update)
    for g in grads:
        found, state = update(g, state, params)
    return jax.device_get(found)


CASES = [
    ("deepseek_v3", {}),
    ("nemotron_3_nano", {}),
    ("llama31_8b", dict(dp=2, fsdp=2, tp=2)),
    ("deepseek_v3", dict(pp=2, ep=2, dp=2)),
    ("deepseek_v3", dict(ep=2, fsdp=2, tp=2)),
    ("nemotron_3_nano", dict(dp=2, ep=2, tp=2)),
]


@pytest.mark.parametrize(("family", "axes"), CASES, ids=str)
def test_updates_equal_those_of_optax_on_every_mesh(family, axes):
    step = build(family, **axes)
    actual = taken_apart(step, updates(step))
    assert actual.keys() == expected(family).keys()
    for name, value in expected(family).items():
        atol = 1e-4 * np.abs(value).max()
        np.testing.assert_allclose(actual[name], value, atol=atol, err_msg=name)
