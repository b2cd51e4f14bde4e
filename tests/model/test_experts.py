"""Mixture of experts: routing, capacity and dropless, against a loop over choices."""

import dataclasses
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxbench.config.sublayers import Context, Ends
from maxbench.model import expert_slots, experts, layers, linear, router
from tests.conftest import resolve
from tests.quantization import blackwell


def loop_over_choices(m, x_jd, w, capacity):
    """The MoE layer, one choice at a time in the order of slots: output, and choices per expert."""
    load, out = np.zeros(m.experts, int), np.zeros_like(x_jd)
    gates, chosen, _ = jax.device_get(router.route(m, x_jd @ w["router"]["w"]))
    act = lambda x: np.asarray(layers.ACTS[m.act].function(x))
    choices = list(
        zip(gates.ravel(), np.arange(gates.size) // m.top_k, chosen.ravel(), strict=True)
    )
    if m.drop_policy == "probs":
        choices.sort(key=lambda choice: -choice[0])
    for gate, j, e in choices:
        load[e] += 1
        if load[e] <= capacity:
            up = np.einsum("d,dnf->nf", x_jd[j], w["up"][e])
            out[j] += gate * ((act(up[0]) * up[1]) @ w["down"][e])
    return out, load


UNORDERED = Context(None), Ends(linear.UNORDERED, linear.UNORDERED)
GROK = resolve("grok1_314b", "tiny").model.per_layer[0].channel


@pytest.mark.parametrize(
    "factor", [0.5, *(pytest.param(f, marks=pytest.mark.exhaustive) for f in (0.0, 1.0, 2.0))]
)
@pytest.mark.parametrize(
    ("scores", "drop"), [("topk_softmax", "probs"), ("softmax_topk", "position")]
)
def test_experts_process_tokens_up_to_their_capacity(factor, scores, drop):
    m = dataclasses.replace(
        GROK, capacity_factor=factor, router=scores, drop_policy=drop, init_std=0.3
    )
    x = np.float32(np.random.default_rng(0).standard_normal((2, 24, m.embed)))
    w = jax.device_get(experts.Moe(m).init(jax.random.key(0), x, *UNORDERED)["params"])
    w = jax.tree.map(
        lambda leaf: getattr(leaf, "value", leaf), w, is_leaf=lambda b: hasattr(b, "names")
    )
    capacity = m.capacity(48) if factor else 48
    expected, load = loop_over_choices(m, x.reshape(-1, m.embed), w, capacity)
    apply = lambda w, x: experts.Moe(m).apply({"params": w}, x, *UNORDERED)[0]
    actual = jax.jit(apply)(w, x)
    np.testing.assert_allclose(actual.reshape(-1, m.embed), expected, rtol=2e-3, atol=2e-3)
    if factor == 0.5:
        assert load.max() > capacity  # some tokens were dropped
    if factor == m.experts / m.top_k:
        assert capacity == 48


def dense_experts(m, w, x_jd, choice_jk=None):
    """Every expert for every token, in plain jax: for gradients, and independent of dispatch."""
    gate_jk, expert_jk, _ = router.route(
        m, x_jd @ w["router"]["w"] + w["router_bias"], None, choice_jk
    )
    gate_je = jnp.sum(jax.nn.one_hot(expert_jk, m.experts) * gate_jk[..., None], 1)

    def clamped(up):
        gate, up = jnp.minimum(up[..., 0, :], 7), jnp.clip(up[..., 1, :], -7, 7)
        return (up + 1) * gate / (1 + jnp.exp(-1.702 * gate))

    up = jnp.einsum("jd,ednf->jenf", x_jd, w["up"]) + w["up_bias"]
    y_jed = jnp.einsum("jef,efd->jed", clamped(up), w["down"]) + w["down_bias"]
    w = w["shared_expert"]
    up = jnp.einsum("jd,dnf->jnf", x_jd, w["up"]["w"]) + w["up_bias"]
    shared = clamped(up) @ w["down"]["w"] + w["down_bias"]
    return jnp.einsum("jed,je->jd", y_jed, gate_je) + shared


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["slots", "dropless", "force_balance"])
def test_biases_clamped_activation_and_shared_expert(how):
    """Values and gradients of everything that gpt-oss and DeepSeek-V3 add."""
    m = dataclasses.replace(
        GROK,
        **dict(experts=8, top_k=2, mlp=48, shared_mlp=80, embed=32, act="swiglu_clamped"),
        **dict(mlp_bias=True, router_bias=True, router="sigmoid", router_groups=4),
        **dict(router_groups_top=2, router_scale=2.5, init_std=0.5),
        **dict(capacity_factor=4.0 * (how == "slots"), force_balance=how == "force_balance"),
    )
    x = jax.random.normal(jax.random.key(1), (2, 24, m.embed))
    w = nn.unbox(experts.Moe(m).init(jax.random.key(0), x, *UNORDERED)["params"])
    keys = iter(jax.random.split(jax.random.key(2), 20))
    w = jax.tree.map(lambda a: a + 0.3 * jax.random.normal(next(keys), a.shape), w)
    choice = jnp.tile(router.balanced_choice(m, 24), (2, 1)) if how == "force_balance" else None

    def value_and_grads(apply):
        loss = lambda w, x: (jnp.sum(y := apply(w, x).reshape(cotangent.shape) * cotangent), y)
        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(w, x)

    cotangent = jax.random.normal(jax.random.key(3), (48, m.embed))
    actual = value_and_grads(lambda w, x: experts.Moe(m).apply({"params": w}, x, *UNORDERED)[0])
    expected = value_and_grads(lambda w, x: dense_experts(m, w, x.reshape(-1, m.embed), choice))
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    jax.tree.map(close, actual, expected)
    assert jnp.abs(x.reshape(-1, m.embed) @ w["up"].reshape(8, 32, -1)).max() > 7  # clamped


@pytest.mark.parametrize(
    ("experts_and_top_k", "tokens"),
    [
        ((4, 2), 48),
        pytest.param((16, 4), 64, marks=pytest.mark.exhaustive),
        pytest.param((8, 8), 40, marks=pytest.mark.exhaustive),
    ],
)
def test_dropless_equals_a_capacity_for_all_tokens(experts_and_top_k, tokens):
    """Values and gradients, with many, few and unevenly filled blocks."""
    count, top_k = experts_and_top_k
    m = dataclasses.replace(GROK, experts=count, top_k=top_k, mlp=64, init_std=0.3)
    x = jax.random.normal(jax.random.key(1), (2, tokens // 2, m.embed))
    w = nn.unbox(experts.Moe(m).init(jax.random.key(0), x, *UNORDERED)["params"])
    w["router"]["w"] = w["router"]["w"].at[:, 0].add(0.2)  # expert 0 is chosen more often

    def loss_and_grads(factor):
        moe = experts.Moe(dataclasses.replace(m, capacity_factor=factor))
        loss = lambda w, x: jnp.sum(jnp.sin(moe.apply({"params": w}, x, *UNORDERED)[0]))
        return jax.jit(jax.value_and_grad(jax.checkpoint(loss), (0, 1)))(w, x)

    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    jax.tree.map(close, loss_and_grads(0.0), loss_and_grads(count / top_k))


def test_dropless_rows_are_choices_and_partly_filled_blocks():
    """With 128 experts, top-8: at most 25 % more rows than choices."""
    m = dataclasses.replace(
        GROK,
        **dict(experts=128, top_k=8, mlp=24, embed=16, capacity_factor=0.0),
    )
    tokens = 2048
    x = jax.ShapeDtypeStruct((1, tokens, m.embed), jnp.float32)
    init = lambda: experts.Moe(m).init(jax.random.key(0), jnp.zeros(x.shape), *UNORDERED)
    w = nn.unbox(jax.eval_shape(init))
    loss = lambda w, x: jnp.sum(experts.Moe(m).apply(w, x, *UNORDERED)[0])
    sizes = [
        v.aval.size
        for eqn in jax.make_jaxpr(jax.grad(loss, (0, 1)))(w, x).eqns
        for v in eqn.outvars
        if v.aval.shape[-1:] == (m.embed,)
    ]
    assert max(sizes) <= 1.25 * tokens * m.top_k * m.embed


@pytest.mark.parametrize("with_gates", [True, False])
def test_gradients_of_dispatch_experts_and_combine_equal_indexing(with_gates):
    m = dataclasses.replace(GROK, capacity_factor=0.75)
    key = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(key[0], (12, 8))
    _, expert, _ = router.route(m, jax.random.normal(key[1], (12, m.experts)))
    gate = jax.random.uniform(key[2], expert.shape)
    slot, token = expert_slots.sending_order(*experts.assign_slots(m, gate, expert))
    act, w = layers.ACTS[m.act].function, jax.random.normal(key[0], (4, 8))

    def with_custom_vjp(x, gate):
        rows = experts.gate_gradient(token.shape, gate, slot)
        up = experts.dispatch(x, slot, token).reshape(*token.shape, 2, 4).swapaxes(0, 1)
        h = layers.activate(m, up, 2) if with_gates else experts.activate_rows(m, up, rows)
        y = (h @ w).swapaxes(0, 1)
        return jnp.sum(jnp.cos(experts.combine(with_gates, y, gate, slot, token)))

    def indexing(x, gate):
        up = jnp.where((token >= 0)[..., None], x[token], 0).reshape(-1, 2, 4)
        y = (act(up[:, 0]) * up[:, 1]) @ w
        picked = jnp.where((slot >= 0)[..., None], y[slot], 0)
        return jnp.sum(jnp.cos(jnp.einsum("jkd,jk->jd", picked, gate)))

    both = (jax.jit(jax.grad(f, (0, 1)))(x, gate) for f in (with_custom_vjp, indexing))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *both)


def test_balance_loss_is_minimal_for_balanced_load():
    m = dataclasses.replace(GROK, aux_loss=1.0)
    even = jnp.full((8, m.experts), 1 / m.experts)
    choices = jnp.stack([jnp.arange(8) % m.experts, (jnp.arange(8) + 1) % m.experts], 1)
    loss = lambda probs, choices: router.balance_loss(m, probs, router.expert_load(m, choices, 1))
    assert loss(even, choices) == pytest.approx(1.0)
    skewed = jax.nn.softmax(jnp.tile(jnp.array([4.0, 4.0] + [0.0] * (m.experts - 2)), (8, 1)))
    assert loss(skewed, jnp.tile(jnp.array([[0, 1]]), (8, 1))) > 1.5


@pytest.mark.core
@pytest.mark.gpu_compile
def test_gemms_read_slots_as_they_arrive():
    """XLA moves no slot for its GEMMs or for an all-to-all: each GPU has two experts."""
    dims = dict(ins=1, batch=1)
    first, last = (linear.MatmulSpec(**dims, sequence=way) for way in ("gather", "scatter"))

    def gradients(x_red, up_edf, down_efd, dy_red):
        def mlp(x_red, up_edf, down_efd):
            h_ecf, _ = linear.linear(x_red, up_edf, None, first)
            return linear.linear(jnp.tanh(h_ecf), down_efd, None, last)[0]

        y_red, vjp = jax.vjp(mlp, x_red, up_edf, down_efd)
        return y_red, *vjp(dy_red)

    shard, slots = P("ep"), (4 * 4096, 2, 1024)
    shapes = [(slots, shard), ((8, 1024, 512), shard), ((8, 512, 1024), shard), (slots, shard)]
    text = blackwell.compiled(gradients, "ep", shapes, "h100")
    assert text.count("cublas$lt$matmul") + text.count("cublas$gemm") >= 6
    assert len(re.findall(r" all-to-all(?:-start)?\(", text)) == 4
    moved = re.findall(r"= bf16\[[\d,]+\]\S* (?:transpose|copy)\(.*", text)
    assert not moved
