"""Mamba-2 against its recurrence, step by step in fp64, and on meshes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbench.config.channels import Experts
from maxbench.config.errors import UserError
from maxbench.config.mixers import Attention, Mamba2
from maxbench.config.sublayers import Layer
from maxbench.model import layer_stack, mamba
from maxbench.sharding import mesh
from maxbench.step import data
from maxbench.step.train_step import Step
from tests.conftest import resolve
from tests.model.test_descriptions import equations

GROUPS, HEADS, WIDTH, STATE = 2, 3, 4, 5  # heads of a group


def inputs(seq: int, dtype=np.float64) -> tuple:
    random = np.random.default_rng(0)
    normal = lambda *shape: random.standard_normal((2, seq, GROUPS, *shape))
    a_gr = -random.uniform(0.1, 4, (GROUPS, HEADS))
    dt = np.log1p(np.exp(normal(HEADS)))
    arrays = normal(HEADS, WIDTH), dt, a_gr, normal(STATE), normal(STATE)
    return tuple(x.astype(dtype) for x in arrays)


def recurrence(x_btgrp, dt_btgr, a_gr, b_btgn, c_btgn):
    """The oracle."""

    def step(h, at):
        x, dt, b, c = at
        added = jnp.einsum("bgr,bgrp,bgn->bgrpn", dt, x, b)
        h = jnp.exp(dt * a_gr)[..., None, None] * h + added
        return h, jnp.einsum("bgrpn,bgn->bgrp", h, c)

    first = jnp.zeros((len(x_btgrp), *x_btgrp.shape[2:], b_btgn.shape[-1]), x_btgrp.dtype)
    time_first = [jnp.moveaxis(v, 1, 0) for v in (x_btgrp, dt_btgr, b_btgn, c_btgn)]
    return jnp.moveaxis(jax.lax.scan(step, first, time_first)[1], 0, 1)


def in_chunks(chunk: int, x, dt, a, b, c):
    """state_space() of arrays [b, t, ...]."""
    seq, *heads = x.shape[1:]
    x, dt, b, c = (mamba.chunks(v, chunk) for v in (x.reshape(*x.shape[:3], -1), dt, b, c))
    x, dt = (jnp.swapaxes(v, -1, -2) for v in (x, dt))
    y = mamba.state_space(x.reshape(*x.shape[:3], *heads[1:], -1), dt, a, b, c)
    y = jnp.swapaxes(y.reshape(x.shape), -1, -2)
    return mamba.positions(y, seq).reshape(-1, seq, *heads)


@pytest.mark.parametrize(("seq", "chunk"), [(32, 8), (29, 8), (7, 8)])
@pytest.mark.parametrize(("dtype", "error"), [(np.float64, 1e-12), (np.float32, 2e-5)])
def test_chunks_equal_the_recurrence(seq, chunk, dtype, error):
    """Values and gradients, for sequences of whole chunks, with a part of one, and of one alone."""
    with jax.enable_x64(True):
        weight = jnp.cos(jnp.arange(2 * seq * GROUPS * HEADS * WIDTH))
        weight = weight.reshape(2, seq, GROUPS, HEADS, WIDTH)
        chunked = functools.partial(in_chunks, chunk)
        y, vjp = jax.vjp(jax.jit(chunked), *inputs(seq, dtype))
        expected, oracle = jax.vjp(recurrence, *inputs(seq))
        actual = (y, *vjp(weight.astype(dtype)))
        for found, right in zip(actual, (expected, *oracle(weight)), strict=True):
            assert found.dtype == dtype
            np.testing.assert_allclose(found, right, atol=error * np.abs(right).max(), rtol=0)


def test_states_are_fp32_where_gemms_are_bf16():
    """Gradients too, those of the time steps and rates among them, whose sums cancel."""
    x, dt, a, b, c = inputs(64, np.float32)
    x, b, c = (jnp.asarray(v, jnp.bfloat16) for v in (x, b, c))
    y, vjp = jax.vjp(jax.jit(functools.partial(in_chunks, 8)), x, dt, a, b, c)
    wide = (v.astype(jnp.float32) for v in (x, dt, a, b, c))
    exact, oracle = jax.vjp(recurrence, *wide)
    assert y.dtype == jnp.float32
    dy = jnp.cos(exact)
    for found, right in zip((y, *vjp(dy)), (exact, *oracle(dy)), strict=True):
        assert 1e-4 < jnp.abs(found - right).max() / jnp.abs(right).max() < 1e-2


def test_convolution_is_causal():
    """Values and gradients."""

    def convolved(u, w, bias):
        at = lambda t: sum(w[k] * u[:, t - 3 + k] for k in range(4) if t >= 3 - k)
        return jax.nn.silu(jnp.stack([bias + at(t) for t in range(9)], 1))

    random = np.random.default_rng(1)
    with jax.enable_x64(True):
        arrays = [random.standard_normal(s) for s in ((2, 9, 2, 3), (4, 2, 3), (2, 3))]
        y, vjp = jax.vjp(mamba.convolve, *arrays)
        expected, oracle = jax.vjp(convolved, *arrays)
        dy = jnp.cos(y)
        for found, right in zip((y, *vjp(dy)), (expected, *oracle(dy)), strict=True):
            np.testing.assert_allclose(found, right, atol=1e-12)


SIZES = dict(ssm_heads=8, ssm_head_dim=8, ssm_groups=4, ssm_state=16, ssm_chunk=8)
CYCLE = (Layer(mixer=Mamba2()), Layer(channel=Experts()), Layer(mixer=Attention()))
SETTINGS = {f"model.{name}": size for name, size in SIZES.items()} | {
    "model.layers": 3,
    "model.embed": 64,
    "model.layer_groups": ((1, CYCLE),),
    "model.experts": 4,
    "model.expert_latent": 16,
    "model.top_k": 3,
    "model.force_balance": True,
    "precision.grads": "fp32",
}


def toy(overrides=None, **flags):
    flags = dict(dtype="fp32", seq=32) | flags
    return resolve("llama31_8b", "tiny", SETTINGS | (overrides or {}), **flags)


@functools.cache
def gradients(**axes):
    run = toy(**axes)
    step = Step(run, mesh.make_mesh(run.layout))
    grads, out, _ = jax.jit(step.gradients)(step.init()["params"], data.draw(run, 3))
    grads, loss = jax.device_get((grads, out["loss"]))
    return step.stacks, grads, loss


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(dict(fsdp=2, ep=2, tp=2), marks=pytest.mark.exhaustive),
        pytest.param(dict(tp=4, dp=2), marks=pytest.mark.exhaustive),
        pytest.param(dict(pp=3, tp=2, gbs=8), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_gradients_do_not_depend_on_the_mesh(axes):
    stacks, expected, loss = gradients(mbs=8, gbs=8)
    others, actual, actual_loss = gradients(**{"mbs": 1, "gbs": 8} | axes)
    assert actual_loss == pytest.approx(loss, rel=1e-5)
    actual["layers"] = layer_stack.permute(actual["layers"], stacks, others)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5 * np.abs(b).max())
    jax.tree.map(close, actual, expected)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(expected))


def test_layouts_and_sizes_that_do_not_work_are_refused():
    with pytest.raises(UserError, match="cp=2 cuts the sequence, along which Mamba-2's states run"):
        toy(cp=2)
    with pytest.raises(UserError, match=r"tp=8 does not divide model\.ssm_groups=4"):
        toy({"model.heads": 8, "model.kv_heads": 8}, tp=8)
    with pytest.raises(UserError, match=r"model\.ssm_heads=6 must be a multiple of .*groups=4"):
        toy({"model.ssm_heads": 6})


def test_scores_are_the_products_of_the_traced_chunks():
    """All dots but those with weights and the recurrence from chunk to chunk."""
    m = toy().model
    mixer = m.per_layer[0].mixer
    seq, chunks, per_group = 32, 4, mixer.ssm_heads // mixer.ssm_groups
    shapes = [(seq, mixer.ssm_groups, *s) for s in ((per_group, mixer.ssm_head_dim), (per_group,))]
    states = (seq, mixer.ssm_groups, mixer.ssm_state)
    x, dt, b, c = (jnp.ones((1, *s)) for s in (*shapes, states, states))
    a = jnp.ones((mixer.ssm_groups, per_group))
    chunked = functools.partial(in_chunks, mixer.ssm_chunk)
    traced = jax.make_jaxpr(chunked)(x, dt, a, b, c)
    sizes = []
    for eqn in equations(traced.jaxpr):
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            k = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
            sizes.append((k, eqn.outvars[0].aval.size * k))
    between = chunks * chunks * mixer.ssm_heads * mixer.ssm_head_dim * mixer.ssm_state
    assert (chunks, between) in sizes
    assert sum(size for _, size in sizes) - between == seq * mixer.scores(seq, causal=False)
