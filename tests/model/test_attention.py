"""Attention: the XLA kernel against the formula, over cp too, the choice of kernel, and cuDNN's
limits."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxbench.config import resolve as resolving
from maxbench.config.errors import UserError
from maxbench.config.run import Device
from maxbench.cost_model import absent_gpus, hlo, simulate
from maxbench.model import attention
from maxbench.sharding import mesh
from maxbench.step.train_step import on_device
from tests.conftest import layout, resolve


def attention_formula(q_bthk, k_bsgk, v_bsgk, sinks_h, softcap=0.0, window=0, scale=0.0):
    """With a [seq, seq] mask, and a sink as one more key whose value is 0."""
    r = q_bthk.shape[2] // k_bsgk.shape[2]
    k, v = (jnp.repeat(x, r, 2) for x in (k_bsgk, v_bsgk))
    x = jnp.einsum("bthk,bshk->bhts", q_bthk, k) * (scale or q_bthk.shape[-1] ** -0.5)
    x = softcap * jnp.tanh(x / softcap) if softcap else x
    seen = np.tri(x.shape[-1], dtype=bool)
    seen &= ~np.tri(x.shape[-1], k=-window, dtype=bool) if window else True
    x = jnp.where(seen, x, -jnp.inf)
    if sinks_h is not None:
        sinks = jnp.broadcast_to(sinks_h[:, None, None], (*x.shape[:-1], 1))
        x = jnp.concatenate([x, sinks], -1)
    p = jax.nn.softmax(x)[..., : k.shape[1]]
    return jnp.einsum("bhts,bshk->bthk", p, v)


def assert_attention_equals_the_formula(seq, widths, sinks, options, cp=1):
    """Output and gradients within 1e-5 of the largest, in fp32; over cp as one shard_map."""
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    shapes = [(2, seq, h, width) for h, width in zip((4, 2, 2), widths, strict=True)]
    args = *(draw(*shape) for shape in shapes), draw(4) if sinks else None
    weigh = draw(2, seq, 4, widths[2])
    chunks = np.split(np.arange(seq), 2 * cp)  # those of mesh.token_positions()
    order = np.concatenate([np.r_[chunks[i], chunks[-1 - i]] for i in range(cp)])

    def over_cp(*args):
        attend = jax.shard_map(
            lambda *x: attention.attend(*x, kind="xla", **options),
            mesh=mesh.make_mesh(layout(cp=cp)),
            in_specs=(*(P(None, "cp"),) * 3, P()),
            out_specs=P(None, "cp"),
            check_vma=False,
        )
        return attend(*(x[:, order] for x in args[:3]), args[3])[:, np.argsort(order)]

    def outputs(attend):
        def weighted(*args):
            o = attend(*args)
            return jnp.sum(weigh * o), o

        return jax.jit(jax.grad(weighted, range(3 + sinks), has_aux=True))(*args)

    single = lambda *x: attention.attend(*x, kind="xla", **options)
    formula = lambda *x: attention_formula(*x, **options)
    largest = lambda x: float(jnp.abs(x).max()) or 1.0  # one key has no gradient
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * largest(b))
    jax.tree.map(close, outputs(over_cp if cp > 1 else single), outputs(formula))


OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.7},
    "window": {"window": 5},
    "window 1": {"window": 1},
    "window of two blocks": {"window": attention.BLOCK + 9},
    "softcap and window": {"softcap": 2.0, "window": 7, "scale": 0.2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_xla_attention_and_its_gradient_equal_the_formula(name):
    sinks = name in ("plain", "window", "softcap and window")
    options = OPTIONS[name]
    assert_attention_equals_the_formula(2 * attention.BLOCK + 40, (8, 8, 8), sinks, options)


@pytest.mark.parametrize("sinks", [False, True])
def test_short_attention_and_its_gradient_equal_the_formula(sinks):
    assert_attention_equals_the_formula(8, (8, 8, 8), sinks, {})


@pytest.mark.parametrize(
    ("cp", "sinks", "options"),
    [
        pytest.param(2, True, {}, marks=pytest.mark.exhaustive),
        (4, True, {"softcap": 2.0}),
        pytest.param(2, True, {"window": 5}, marks=pytest.mark.exhaustive),
        (4, False, {"window": 9}),  # a chunk and one token
        (4, True, {"window": 1, "scale": 0.2}),
        (4, True, {"window": 64}),  # the whole sequence: a ring
    ],
    ids=str,
)
def test_attention_over_cp_equals_the_formula(cp, sinks, options):
    assert_attention_equals_the_formula(64, (12, 12, 8), sinks, options, cp)


# Widths of keys and values. Each GPU supports the first `supported` of them.
WIDTHS = [(64, 64), (128, 128), (128, 64), (192, 128), (136, 136), (192, 96)]
WIDTHS += [(256, 256), (192, 192)]


@pytest.mark.parametrize(
    ("capability", "supported"),  # measured with cuDNN 9.28; (256, 256) on Blackwell in 9.23 only
    [((8, 0), 3), ((9, 0), 8), ((10, 0), 4), ((10, 3), 4), ((12, 0), 3)],
)
def test_kernel_is_cudnn_if_the_gpu_supports_it(capability, supported):
    def kind(keys, values, dtype="bf16", **others):
        m = dataclasses.replace(model, head_dim=keys, value_dim=values, **others)
        return resolving.cudnn_kernel(m.per_layer[0].mixer, dtype, capability)

    model = resolve("llama2_70b").model
    assert {kind(*each) for each in WIDTHS[:supported]} == {"cudnn"}
    assert {kind(*each) for each in WIDTHS[supported:-1]} <= {"xla"}
    assert kind(192, 192) == {9: "cudnn", 10: "cudnn_split"}.get(capability[0], "xla")
    unsupported = kind(64, 64, "fp32"), kind(64, 64, softcap=30.0), kind(100, 100), kind(264, 264)
    assert unsupported == ("xla",) * 4


def test_compile_error_of_cudnn_selects_xla(caplog):
    """A CPU that claims to be a GPU: cuDNN's kernel does not compile."""
    gpu = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
    run = resolve("llama2_70b", "tiny", device=Device("gpu", (9, 0)))
    assert run.train.attention == "cudnn"
    assert on_device(run, jax.devices()[0]).train.attention == "xla"
    assert on_device(run, gpu).train.attention == "xla"
    assert "attention uses the slower XLA kernel: " in caplog.text
    asked = resolve("llama2_70b", "tiny", {"train.attention": "cudnn"}, Device("gpu", (9, 0)))
    with pytest.raises(UserError, match=r"use train\.attention=xla"):
        on_device(asked, gpu)


def test_backward_pass_by_slices_of_values_equals_the_whole(monkeypatch):
    shapes = [(2, 16, h, width) for h, width in ((4, 192), (2, 192), (2, 200), (4, 200))]
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, do = (jax.random.normal(*x) for x in zip(keys, shapes, strict=True))
    forward, backward = attention.KERNELS["xla"]
    widths = []

    def one_slice(q, k, v, *rest):
        widths.append((q.shape[-1], v.shape[-1]))
        return backward(q, k, v, *rest)

    @jax.jit
    def both(*qkv):
        logits = attention.Logits(192**-0.5)
        rest = *forward(*qkv, True, logits), do, True, logits
        return attention.KERNELS["cudnn_split"][1](*qkv, *rest), backward(*qkv, *rest)

    monkeypatch.setattr(attention, "_cudnn_backward", one_slice)
    for a, b in zip(*both(q, k, v), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert widths == [(192, 128)] * 2


@pytest.mark.gpu_compile
def test_heads_of_192_on_blackwell_have_two_backward_calls():
    """cuDNN's backward pass supports 128 dims of the values there. Memory is linear in seq."""
    run = resolve("nemotron4_340b", gpus=128, gpu_type="gb200")
    device = absent_gpus.devices(run.gpu, run.layout.gpus)[0]
    kind = run.train.attention
    grad = jax.grad(lambda *qkv: jnp.sum(attention.attend(*qkv, kind=kind)), (0, 1, 2))
    temporaries = []
    for seq in (1024, 2048):
        shapes = (1, seq, 12, 192), (1, seq, 1, 192), (1, seq, 1, 192)
        sharding = jax.sharding.SingleDeviceSharding(device)
        qkv = [jax.ShapeDtypeStruct(x, jnp.bfloat16, sharding=sharding) for x in shapes]
        program = jax.jit(grad).lower(*qkv).compile()
        temporaries.append(program.memory_analysis().temp_size_in_bytes)
    calls = sorted(
        (op.target, *(x.shape.dims[-1] for x in c.operands(op)[:3]))
        for c in hlo.parse(program.as_text()).computations.values()
        for op in c.ops
        if "fmha" in op.target
    )
    backward = ("__cudnn$fmhaSoftmaxBackward", 192, 192, 128)
    assert calls == [("__cudnn$fmhaSoftmax", 192, 192, 192), backward, backward]
    assert temporaries[1] < 2.1 * temporaries[0]


@pytest.mark.gpu_compile
def test_window_is_that_of_cudnn_and_is_priced():
    """Forward and backward, of gpt-oss: with sinks, which need no other kernel."""
    run = resolve("llama2_70b", gpus=64)
    device = absent_gpus.devices(run.gpu, 64)[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = (1, 1024, 8, 64), (1, 1024, 2, 64), (1, 1024, 2, 64), (8,)
    args = [jax.ShapeDtypeStruct(x, jnp.bfloat16, sharding=sharding) for x in shapes]
    attend = lambda *x: jnp.sum(attention.attend(*x, kind="cudnn", window=128))
    program = jax.jit(jax.grad(attend, (0, 1, 2, 3))).lower(*args).compile()
    computations = hlo.parse(program.as_text()).computations.values()
    calls = [op for c in computations for op in c.ops if "fmha" in op.target]
    assert len(calls) == 2
    scores = np.tri(1024) - np.tri(1024, k=-128)
    for call in calls:
        unmasked, computed = simulate.score_fractions(call)
        assert unmasked == pytest.approx(scores.mean(), rel=1e-2)
        assert unmasked < computed < 2 * unmasked


def test_xla_attention_has_no_seq_by_seq_array():
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
