"""Attention, the loss and the experts, each against a form that is too simple to be wrong."""

import dataclasses
import itertools
import math
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxbench.config.errors import UserError
from maxbench.config.run import AXES, Layout
from maxbench.cost_model import aot, compile_cache, hlo
from maxbench.model import attention, experts, layers, linear, loss, transformer
from maxbench.sharding import mesh as mesh
from maxbench.sharding import rules
from maxbench.step import data, optimizer
from maxbench.step.train_step import Step
from tests.conftest import resolve


def plain_attention(q_bthk, k_bsgk, v_bsgk, softcap):
    r = q_bthk.shape[2] // k_bsgk.shape[2]
    k, v = (jnp.repeat(x, r, 2) for x in (k_bsgk, v_bsgk))
    x = jnp.einsum("bthk,bshk->bhts", q_bthk, k) / np.sqrt(q_bthk.shape[-1])
    x = softcap * jnp.tanh(x / softcap) if softcap else x
    x = jnp.where(np.tri(x.shape[-1], dtype=bool), x, -jnp.inf)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(x), v)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("seq", [8, attention.BLOCK + 40])
def test_attention_and_its_gradient(seq, softcap):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (2, seq, h, 8)) for key, h in zip(keys, (4, 2, 2), strict=True)
    )
    weigh = jax.random.normal(jax.random.key(1), q.shape)
    ours = lambda *x: jnp.sum(weigh * attention.attend(*x, kind="xla", softcap=softcap))
    plain = lambda *x: jnp.sum(weigh * plain_attention(*x, softcap))
    both = (jax.jit(jax.value_and_grad(f, (0, 1, 2)))(q, k, v) for f in (ours, plain))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-4), *both)


WIDTHS = [
    (64, 64),
    (128, 128),
    (128, 64),
    (192, 128),
    (136, 136),
    (192, 96),
    (256, 256),
    (192, 192),
]


@pytest.mark.parametrize(
    ("capability", "taken"),  # as cuDNN 9.28 answered; Blackwell's (256, 256) is of 9.23 only
    [((8, 0), 3), ((9, 0), 8), ((10, 0), 4), ((10, 3), 4), ((12, 0), 3)],
)
def test_attention_is_a_kernel_that_the_gpu_has(capability, taken):
    def kind(keys, values, dtype="bf16", **others):
        m = dataclasses.replace(model, head_dim=keys, value_dim=values, **others)
        return attention.kernel_for(m, dtype, capability)

    model = resolve("llama2_70b").model
    assert {kind(*each) for each in WIDTHS[:taken]} == {"cudnn"}
    assert {kind(*each) for each in WIDTHS[taken:-1]} <= {"xla"}
    assert kind(192, 192) == {9: "cudnn", 10: "cudnn_split"}.get(capability[0], "xla")
    none = kind(64, 64, "fp32"), kind(64, 64, softcap=30.0), kind(100, 100), kind(264, 264)
    assert none == ("xla",) * 4


def test_a_gpu_that_refuses_the_kernel_gets_xlas(monkeypatch, caplog):
    """The device is no GPU: cuDNN's kernel does not compile for it."""
    gpu = types.SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="H999")
    run = resolve("llama2_70b", "tiny")
    assert attention.select_kernel(run, gpu) == "cudnn"
    assert attention.select_kernel(run, jax.devices()[0]) == "xla"
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    assert attention.select_kernel(run, gpu) == "xla"
    assert "cuDNN has no attention for H999, bf16, heads of" in caplog.text
    with pytest.raises(UserError, match=r"use train\.attention=xla"):
        attention.select_kernel(resolve("llama2_70b", "tiny", {"train.attention": "cudnn"}), gpu)


def test_the_backward_pass_of_split_values_is_that_of_the_whole(monkeypatch):
    shapes = [(2, 16, h, width) for h, width in ((4, 192), (2, 192), (2, 200), (4, 200))]
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, do = (jax.random.normal(*x) for x in zip(keys, shapes, strict=True))
    forward, backward = attention.KERNELS["xla"]
    widths = []

    def half(q, k, v, *rest):
        widths.append((q.shape[-1], v.shape[-1]))
        return backward(q, k, v, *rest)

    @jax.jit
    def both(*qkv):
        rest = *forward(*qkv, True, 0.0), do, True, 0.0
        return attention.KERNELS["cudnn_split"][1](*qkv, *rest), backward(*qkv, *rest)

    monkeypatch.setattr(attention, "_cudnn_backward", half)
    for a, b in zip(*both(q, k, v), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert widths == [(192, 128)] * 2


@pytest.mark.skipif(not compile_cache.versions()["jax-cuda13-plugin"], reason="needs .[plan]")
def test_the_program_of_heads_of_192_on_blackwell():
    """cuDNN's backward pass takes 128 dims of their values there, so there are two."""
    run = resolve("nemotron4_340b", gpus=128, gpu_type="gb200")
    device = aot.devices(run)[0]
    kind = attention.select_kernel(run, device)
    grad = jax.grad(lambda *qkv: jnp.sum(attention.attend(*qkv, kind=kind)), (0, 1, 2))
    temporaries = []
    for seq in (1024, 2048):
        shapes = (1, seq, 12, 192), (1, seq, 1, 192), (1, seq, 1, 192)
        place = jax.sharding.SingleDeviceSharding(device)
        qkv = [jax.ShapeDtypeStruct(x, jnp.bfloat16, sharding=place) for x in shapes]
        program = jax.jit(grad).lower(*qkv).compile()
        temporaries.append(program.memory_analysis().temp_size_in_bytes)
    calls = sorted(
        (op.target, *(x.shape.dims[-1] for x in c.operands(op)[:3]))
        for c in hlo.parse(program.as_text()).computations.values()
        for op in c.ops
        if "fmha" in op.target
    )
    back = ("__cudnn$fmhaSoftmaxBackward", 192, 192, 128)
    assert calls == [("__cudnn$fmhaSoftmax", 192, 192, 192), back, back]
    assert temporaries[1] < 2.1 * temporaries[0]


def test_attention_holds_no_square_of_the_sequence():
    seq = 16 * attention.BLOCK
    x = jax.ShapeDtypeStruct((1, seq, 1, 8), jnp.bfloat16)
    grad = jax.grad(lambda *a: jnp.sum(attention.attend(*a, kind="xla")), (0, 1, 2))
    sizes = [
        np.prod(v.aval.shape)
        for eqn in jax.make_jaxpr(grad)(x, x, x).eqns
        for v in eqn.outvars
        if v.aval.shape
    ]
    assert max(sizes) <= seq * attention.BLOCK


@pytest.mark.parametrize(("dtype", "close"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(2, 12), (1, 7)])
def test_the_gradient_of_a_norm_is_that_of_the_plain_form(rows, bias, dtype, close):
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    x, dy = (draw(*rows, 16).astype(dtype) for _ in range(2))
    scale, bias = draw(16).at[3].set(0), draw(16) if bias else None

    def plain(x, scale, bias, eps):
        x = x.astype(jnp.float32)
        if bias is None:
            return (x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + eps) * scale).astype(dtype)
        off = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + eps)
        return (off * scale + bias).astype(dtype)

    def made(norm):
        y, vjp = jax.vjp(lambda *w: norm(*w, 1e-5), x + 1, scale, bias)
        return y, vjp(dy)

    leaves = [jax.tree.leaves(made(norm)) for norm in (layers.normalize, plain)]
    for ours, theirs in zip(*leaves, strict=True):
        assert ours.dtype == theirs.dtype
        ours, theirs = ours.astype(jnp.float32), theirs.astype(jnp.float32)
        np.testing.assert_allclose(ours, theirs, rtol=close, atol=close)


@settings(max_examples=3, deadline=None)
@given(
    tokens=st.integers(1, 40),
    chunk=st.integers(1, 50),
    z_loss=st.sampled_from([0.0, 0.1]),
    multiplier=st.sampled_from([1.0, 0.5]),
    padded=st.booleans(),
)
def test_cross_entropy(tokens, chunk, z_loss, multiplier, padded):
    random = np.random.default_rng(tokens)
    x = jnp.float32(random.standard_normal((tokens, 8)))
    w = jnp.float32(random.standard_normal((8, 24)))
    target = random.integers(-1 if padded else 0, 24, tokens)

    def plain(x, w):
        logits = x @ w * multiplier
        each = optax.softmax_cross_entropy_with_integer_labels(logits, target)
        each += z_loss * jax.nn.logsumexp(logits, -1) ** 2
        return jnp.sum(each, where=target >= 0)

    how = chunk, z_loss, multiplier, 1.0, padded
    ours = lambda x, w: loss.cross_entropy(x, w, None, target, *how)
    both = (jax.jit(jax.value_and_grad(f, (0, 1)))(x, w) for f in (ours, plain))
    (found, grads), (expected, others) = both
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, grads, others)


@pytest.mark.parametrize("at", [0.0, -1e6, 1e6])
def test_one_pass_over_logits_finds_what_two_do(at):
    logits = 10 * jax.random.normal(jax.random.key(0), (5, 300)) + at
    for one, two in zip(
        loss._max_and_sum_in_one_pass(logits), loss._max_and_sum(logits), strict=True
    ):
        np.testing.assert_allclose(one, two, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("act", "mlp_inputs"), [("swiglu", 2), ("geglu", 2), ("relu2", 1)])
def test_the_gradient_of_an_activation_is_that_of_the_plain_form(act, mlp_inputs, dtype):
    m = types.SimpleNamespace(act=act, mlp_inputs=mlp_inputs)
    up = jax.random.normal(jax.random.key(0), (2, 3, mlp_inputs, 8)).astype(dtype)
    dh = jax.random.normal(jax.random.key(1), (2, 3, 8)).astype(dtype)

    def plain(up):
        h = layers.ACTS[act](up[:, :, 0])
        return h * up[:, :, 1] if mlp_inputs == 2 else h

    h, back = jax.vjp(lambda up: layers.activate(m, up, 2), up)
    expected, plain_back = jax.vjp(plain, up.astype(jnp.float32))
    (dup,), (expected_dup,) = back(dh), plain_back(dh.astype(jnp.float32))
    assert h.dtype == dup.dtype == dtype
    np.testing.assert_allclose(h.astype(jnp.float32), expected, rtol=1e-2, atol=1e-5)
    np.testing.assert_allclose(dup.astype(jnp.float32), expected_dup, rtol=1e-2, atol=1e-5)


def test_logits_of_a_large_vocabulary_never_stand_whole():
    tokens, d, vocab, chunk = 512, 8, 4096, 32
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((tokens, d), (d, vocab))]
    target = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    grad = jax.grad(lambda x, w, t: loss.cross_entropy(x, w, None, t, chunk, 0.0, 1.0), (0, 1))
    memory = jax.jit(grad).lower(*shapes, target).compile().memory_analysis()
    assert memory.temp_size_in_bytes < tokens * vocab * 4 / 4


def plain_moe(m, x_jd, w, capacity):
    """Choices one by one, in the order in which they find a slot; returns what the layer should."""
    taken, out = np.zeros(m.experts, int), np.zeros_like(x_jd)
    gates, chosen, _ = jax.device_get(experts.route(m, x_jd @ w["router"]["w"]))
    act = lambda x: np.asarray(layers.ACTS[m.act](x))
    choices = list(
        zip(gates.ravel(), np.arange(gates.size) // m.top_k, chosen.ravel(), strict=True)
    )
    if m.drop_policy == "probs":
        choices.sort(key=lambda choice: -choice[0])
    for gate, j, e in choices:
        taken[e] += 1
        if taken[e] <= capacity:
            up = np.einsum("d,dnf->nf", x_jd[j], w["up"][e])
            out[j] += gate * ((act(up[0]) * up[1]) @ w["down"][e])
    return out, taken


FREE = dict.fromkeys(sum(transformer.SUBLAYERS.values(), ()), linear.UNORDERED)


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ("router", "drop"), [("topk_softmax", "probs"), ("softmax_topk", "position")]
)
def test_experts_take_their_tokens_in_order_up_to_capacity(factor, router, drop):
    m = resolve("grok1_314b", "tiny").model
    m = dataclasses.replace(
        m, capacity_factor=factor, router=router, drop_policy=drop, init_std=0.3
    )
    x = np.float32(np.random.default_rng(0).standard_normal((2, 24, m.embed)))
    w = jax.device_get(experts.Moe(m).init(jax.random.key(0), x, FREE)["params"])
    w = jax.tree.map(
        lambda leaf: getattr(leaf, "value", leaf), w, is_leaf=lambda b: hasattr(b, "names")
    )
    room = m.capacity(48) if factor else 48
    expected, taken = plain_moe(m, x.reshape(-1, m.embed), w, room)
    ours, *_ = jax.jit(experts.Moe(m).apply)({"params": w}, x, FREE)
    np.testing.assert_allclose(ours.reshape(-1, m.embed), expected, rtol=2e-3, atol=2e-3)
    if factor == 0.5:
        assert taken.max() > room  # some were dropped, or this tests nothing
    if factor == m.experts / m.top_k:
        assert room == 48


@pytest.mark.parametrize(("experts_of", "tokens"), [((4, 2), 48), ((16, 4), 64), ((8, 8), 40)])
def test_dropless_experts_are_those_with_room_for_all(experts_of, tokens):
    """Values and gradients of the grouped products, where blocks are many, few or uneven."""
    count, top = experts_of
    m = dataclasses.replace(
        resolve("grok1_314b", "tiny").model, experts=count, top_k=top, mlp=64, init_std=0.3
    )
    x = jax.random.normal(jax.random.key(1), (2, tokens // 2, m.embed))
    w = nn.unbox(experts.Moe(m).init(jax.random.key(0), x, FREE)["params"])
    w["router"]["w"] = w["router"]["w"].at[:, 0].add(0.2)  # one is chosen more than others

    def found(factor):
        moe = experts.Moe(dataclasses.replace(m, capacity_factor=factor))
        loss = lambda w, x: jnp.sum(jnp.sin(moe.apply({"params": w}, x, FREE)[0]))
        return jax.jit(jax.value_and_grad(jax.checkpoint(loss), (0, 1)))(w, x)

    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    jax.tree.map(close, found(0.0), found(count / top))


def test_dropless_experts_hold_no_room_that_none_may_fill():
    """128 experts, 8 of them for each token: rows are tokens x 8 and a part of a block for each."""
    m = dataclasses.replace(
        resolve("grok1_314b", "tiny").model,
        **dict(experts=128, top_k=8, mlp=24, embed=16, capacity_factor=0.0),
    )
    tokens = 2048
    x = jax.ShapeDtypeStruct((1, tokens, m.embed), jnp.float32)
    init = lambda: experts.Moe(m).init(jax.random.key(0), jnp.zeros(x.shape), FREE)
    w = nn.unbox(jax.eval_shape(init))
    loss = lambda w, x: jnp.sum(experts.Moe(m).apply(w, x, FREE)[0])
    sizes = [
        v.aval.size
        for eqn in jax.make_jaxpr(jax.grad(loss, (0, 1)))(w, x).eqns
        for v in eqn.outvars
        if v.aval.shape[-1:] == (m.embed,)
    ]
    assert max(sizes) <= 1.25 * tokens * m.top_k * m.embed


def test_dispatch_and_combine_have_the_gradients_of_plain_indexing():
    m = dataclasses.replace(resolve("grok1_314b", "tiny").model, capacity_factor=0.75)
    key = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(key[0], (12, 8))
    _, expert, _ = experts.route(m, jax.random.normal(key[1], (12, m.experts)))
    gate = jax.random.uniform(key[2], expert.shape)
    slot, token = experts.assign_slots(m, gate, expert)

    def ours(x, gate):
        y = jnp.sin(experts.dispatch(x, slot, token))
        return jnp.sum(jnp.cos(experts.combine(y, gate, slot, token)))

    def plain(x, gate):
        y = jnp.sin(jnp.where((token >= 0)[..., None], x[token], 0)).reshape(-1, 8)
        picked = jnp.where((slot >= 0)[..., None], y[slot], 0)
        return jnp.sum(jnp.cos(jnp.einsum("jkd,jk->jd", picked, gate)))

    both = (jax.jit(jax.grad(f, (0, 1)))(x, gate) for f in (ours, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *both)


def test_balance_loss_is_lowest_when_balanced():
    m = dataclasses.replace(resolve("grok1_314b", "tiny").model, aux_loss=1.0)
    even = jnp.full((8, m.experts), 1 / m.experts)
    choices = jnp.stack([jnp.arange(8) % m.experts, (jnp.arange(8) + 1) % m.experts], 1)
    loss = lambda probs, choices: experts.balance_loss(m, probs, experts.expert_load(m, choices, 1))
    assert loss(even, choices) == pytest.approx(1.0)
    skewed = jax.nn.softmax(jnp.tile(jnp.array([4.0, 4.0] + [0.0] * (m.experts - 2)), (8, 1)))
    assert loss(skewed, jnp.tile(jnp.array([[0, 1]]), (8, 1))) > 1.5


@given(
    names=st.lists(st.sampled_from(sorted(rules.RULES)), min_size=1, max_size=4, unique=True),
    sizes=st.lists(st.sampled_from([1, 3, 8, 64, 96]), min_size=4, max_size=4),
    degrees=st.fixed_dictionaries({a: st.sampled_from([1, 2, 4]) for a in AXES}),
)
def test_places_split_evenly_and_use_each_axis_once(names, sizes, degrees):
    times = lambda axes: math.prod(degrees[a] for a in axes)
    shape = [size * times(rules.RULES[n]) for n, size in zip(names, sizes, strict=False)]
    axes = [a for n in names for a in rules.RULES[n]]
    if len(set(axes)) < len(axes):
        return  # no weight has two dims on one mesh axis
    place = rules.shard_weight(tuple(names), tuple(shape), degrees)
    used = [*itertools.chain(*place.compute_axes, *place.zero1_axes), *place.psum_axes]
    assert sorted(used) == sorted(a for a in AXES if degrees[a] > 1)
    for size, compute, zero in zip(shape, place.compute_axes, place.zero1_axes, strict=True):
        assert size % times(compute + zero) == 0


def test_learning_rate_is_the_recipes():
    rate = optimizer.learning_rate(resolve("llama31_8b"))
    assert f"{rate(49):.4}" == "7.496e-06"  # as the published log says of step 49
    maxtext = optimizer.learning_rate(resolve("llama2_70b", steps=100))
    rates = [float(maxtext(i)) for i in (0, 5, 10, 55, 100)]
    assert rates == pytest.approx([0, 1.5e-5, 3e-5, 1.65e-5, 3e-6])
    nemo = optimizer.learning_rate(resolve("grok1_314b", steps=20_000))
    ends = 636, (636 + 8127) / 2, 8127, 8128, 19_999
    rates = [float(nemo(i)) for i in (0, 318, *ends)]
    middle, low = 6.6e-5, 1.2e-5
    assert rates == pytest.approx([0, 6e-5, 1.2e-4, middle, low, low, low])


@pytest.mark.parametrize(("family", "decays"), [("llama2_70b", True), ("llama31_8b", False)])
def test_which_weights_decay(family, decays):
    run = resolve(family, overrides={"optim.warmup": 0.0})
    weights = {"w": jnp.ones(2), "norm": {"scale": jnp.ones(2)}}
    tx = optimizer.transform(run)
    change, _ = tx.update(jax.tree.map(jnp.zeros_like, weights), tx.init(weights), weights)
    rate = run.optim.lr * run.optim.weight_decay
    np.testing.assert_allclose(change["w"], -rate, rtol=1e-6)
    np.testing.assert_allclose(change["norm"]["scale"], -rate * decays, rtol=1e-6)


def test_a_state_in_bf16_is_computed_in_fp32(monkeypatch):
    """It is the fp32 state from the same numbers, rounded."""
    step, exact = (
        Step(run, mesh.make_mesh(run.layout))
        for run in (resolve("nemotron4_340b", presets) for presets in ("tiny,bf16_state", "tiny"))
    )
    grads = lambda self, w, i, past: (jax.tree.map(lambda x: x / 2, w), {}, None)
    monkeypatch.setattr(Step, "gradients", grads)
    rounded = jax.jit(lambda s: optimizer.cast(exact._step(optimizer.cast(s, "fp32"))[0], "bf16"))
    state = step.init()
    for _ in range(2):
        expected, state = rounded(state), jax.jit(step._step)(state)[0]
        jax.tree.map(np.testing.assert_array_equal, state, expected)
    assert {x.dtype.name for x in jax.tree.leaves(state)} == {"bfloat16", "int32"}


def test_tokens_differ_every_step_and_row():
    run = resolve("llama31_8b", "tiny", mbs=4)
    batches = [np.asarray(data.batch(run, step, 0)[0]) for step in (0, 1)]
    rows = np.concatenate(batches)
    assert len(np.unique(rows, axis=0)) == 8
    assert rows.min() >= 0
    assert rows.max() < run.model.vocab
    tokens, targets = data.batch(run, 0, 0)
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    assert not np.array_equal(
        batches[0],
        data.batch(resolve("llama31_8b", "tiny", mbs=4, overrides={"train.seed": 1}), 0, 0)[0],
    )


def test_layout_counts():
    layout = Layout(dp=2, fsdp=4, ep=1, cp=2, tp=2, mbs=2, gbs=64)
    assert (layout.gpus, layout.shards, layout.microbatches) == (32, 8, 4)
