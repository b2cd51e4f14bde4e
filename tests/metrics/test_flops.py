"""Parameter counts, FLOPs, and every published figure as it follows from its step time."""

import dataclasses
import math
import statistics

import jax
import jax.numpy as jnp
import pytest

from maxbench.config import recipes
from maxbench.config.errors import UserError
from maxbench.evidence import published
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.metrics import flops
from maxbench.model import layer_stack, transformer
from tests.conftest import WORKLOADS, config, resolve
from tests.kinds import dense, routed

PARAMETERS = {
    "llama2_70b": 68_976_648_192,
    "llama31_8b": 8_030_261_248,
    "llama31_70b": 70_553_706_496,
    "llama31_405b": 405_853_388_800,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    # with the routers' correction biases, without multi-token prediction
    "deepseek_v3": 671_026_419_200,
    "kimi_k2": 1_026_408_232_448,
    "nemotron_3_nano": 31_577_940_288,
    "nemotron_3_super": 120_668_707_840,  # so are they, as NVIDIA's 120B and 550B
    "nemotron_3_ultra": 549_308_993_536,
    "nemotron_h_56b": 56_324_350_464,
}
APPROXIMATE_PARAMETERS = {"nemotron4_340b": 341.0e9, "grok1_314b": 316.5e9}
FLOPS = {  # of one sequence, at the sequence length and convention of the source
    ("llama2_70b", 4096, "full"): 1.82064e15,
    ("llama31_8b", 8192, "full"): 4.74422e14,
    ("llama31_70b", 8192, "full"): 3.9437e15,
    ("llama31_405b", 8192, "full"): 2.1507e16,
    ("nemotron4_340b", 4096, "full"): 8.62124e15,
    ("grok1_314b", 8192, "causal"): 4.27405e15,
}


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("preset", ["", "xai", "tiny"])
def test_parameter_count_is_that_of_the_weights_and_of_the_source(workload, preset):
    if preset == "xai" and workload != "grok1_314b":
        pytest.skip("a preset of Grok-1 alone")
    m = resolve(workload, preset).model
    shapes = jax.eval_shape(lambda key: transformer.init(m, key), jax.random.key(0))
    counted = sum(x.size for x in jax.tree.leaves(shapes))
    assert flops.params(m) == counted
    if preset == "":
        published = counted - flops.mtp_params(m) + flops.expert_biases(m)
        assert published == PARAMETERS.get(workload, published)
        assert counted == pytest.approx(APPROXIMATE_PARAMETERS.get(workload, counted), rel=2e-3)


MLA = dict(head_dim=24, value_dim=16, q_rank=40, kv_rank=32, rope_head_dim=8)
UNUSUAL = [
    dict(head_dim=24),  # heads x head_dim above embed
    dict(head_dim=24, value_dim=8),
    dict(layer_groups=((1, (dense(192),)), (2, (routed(64, 4),)), (1, (routed(96, 2),)))),
    dict(
        layer_groups=((2, (routed(64, 4), dense(192))),),
        post_norm=True,
        tied=True,
    ),
]


UNUSUAL += [
    dict(qk_norm=True, sinks=True, attention_bias=True),
    dict(qk_norm=True, head_dim=24, value_dim=8, attention_bias=True, mlp_bias=True),
    dict(router_bias=True, mlp_bias=True, shared_mlp=96, act="swiglu_clamped"),
    dict(kv_heads=8, **MLA),
    dict(kv_heads=8, sinks=True, attention_bias=True, experts=0, **MLA),
]


@pytest.mark.parametrize("sizes", UNUSUAL, ids=str)
def test_parameter_count_of_unusual_heads_and_layer_groups(sizes):
    m = dataclasses.replace(resolve("grok1_314b", "tiny").model, **sizes)
    shapes = jax.eval_shape(lambda key: transformer.init(m, key), jax.random.key(0))
    assert flops.params(m) == sum(x.size for x in jax.tree.leaves(shapes))
    if m.layer_groups:
        stacks = layer_stack.split(layer_stack.stacks(m), shapes["layers"])
        counts = [jax.tree.leaves(stack)[0].shape[0] for stack in stacks]
        assert counts == [g.count for g in m.layer_groups for _ in g.cycle]
        assert sum(counts) == m.layers


DENSE = dict(experts=0, softcap=0.0)


@pytest.mark.parametrize(
    "sizes",
    [
        DENSE,
        DENSE | dict(head_dim=24, value_dim=8),
        DENSE | dict(layer_groups=((1, (dense(192),)), (3, (dense(96),))), act="relu2", tied=True),
        DENSE | dict(window=16, sinks=True, attention_bias=True),  # masked scores are computed here
        DENSE | dict(kv_heads=8, **MLA),
        dict(experts=4, top_k=4, capacity_factor=1.0, shared_mlp=96, act="swiglu_clamped"),
        # Every expert gets every token, so that no slot is empty.
        dict(experts=4, top_k=4, capacity_factor=1.0),
        dict(layer_groups=((2, (dense(192), routed(64, 4))),), top_k=4, capacity_factor=1.0),
    ],
    ids=str,
)
def test_flops_are_three_times_the_dots_of_a_traced_forward_pass(sizes):
    m, seq = dataclasses.replace(resolve("grok1_314b", "tiny").model, **sizes), 64
    net, tokens = transformer.Transformer(m), jnp.zeros((1, seq), jnp.int32)
    params = jax.eval_shape(net.init, jax.random.key(0), tokens)
    forward = dots(jax.make_jaxpr(net.apply)(params, tokens).jaxpr)
    # No convention counts routers and the weighted sums of a token's experts.
    channels = [(n, layer.channel) for n, layer in m.kinds if layer.has_experts]
    uncounted = sum(n * (c.experts + c.top_k) for n, c in channels)
    forward -= 2 * seq * m.embed * uncounted
    assert 3 * forward == flops.per_sequence(m, seq, "full")


def dots(jaxpr) -> int:
    """FLOPs of the GEMMs of a jaxpr; those in loops count once per iteration."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), (_, batch) = eqn.params["dimension_numbers"]
            a, b = (v.aval.shape for v in eqn.invars)
            k = math.prod(a[i] for i in contracted)
            n = math.prod(b) // k // math.prod(b[i] for i in batch)
            total += 2 * math.prod(a) * n
        inner = [x for p in eqn.params.values() for x in (p if isinstance(p, tuple) else (p,))]
        iterations = eqn.params.get("length", 1)
        total += iterations * sum(dots(getattr(x, "jaxpr", x)) for x in inner if is_jaxpr(x))
    return total


def is_jaxpr(x) -> bool:
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")


def test_equal_layer_groups_are_merged_and_checked():
    m = resolve("grok1_314b", "tiny").model
    same, other = m.default_layer, dense(64)
    groups = (1, (same,)), (1, (same, same)), (1, (same,))
    assert dataclasses.replace(m, layer_groups=groups) == m
    for groups, merged in (
        (((1, (same, other)), (1, (same,)), (1, (other,))), ((2, (same, other)),)),
        (((1, (other, same)), (2, (same,))), ((1, (other,)), (3, (same,)))),
        (((9, (other, same)),), ((2, (other, same)),)),  # the first 4 layers
        (((2, (other,)), (30, (same, other))), ((2, (other,)), (1, (same,)), (1, (other,)))),
    ):
        assert dataclasses.replace(m, layer_groups=groups).layer_groups == merged
    few = dataclasses.replace(m, layers=2, layer_groups=((3, (other,)), (58, (same,))))
    assert [layer.channel.mlp for _, layer in few.kinds] == [64]
    assert few.experts == 0
    with pytest.raises(UserError, match="layers=3"):
        dataclasses.replace(m, layer_groups=((3, (same,)),))


@pytest.mark.parametrize(("workload", "seq", "convention"), FLOPS)
def test_flops_per_sequence_are_those_of_the_source(workload, seq, convention):
    per_sequence = flops.per_sequence(resolve(workload).model, seq, convention)
    assert per_sequence == pytest.approx(FLOPS[workload, seq, convention], rel=1e-4)


def test_flops_of_grok_with_few_layers_are_those_of_the_source():
    for layers, seq, expected in ((2, 4096, 8.4306e13), (4, 4096, 1.49246e14)):
        m = resolve("grok1_314b", layers=layers).model
        assert flops.per_sequence(m, seq, "causal") == pytest.approx(expected, rel=2e-5)
    for layers, expected in ((8, 5.68147e14), (16, 1.09756e15), (32, 2.15639e15)):
        m = resolve("grok1_314b", layers=layers).model
        assert flops.per_sequence(m, 8192, "causal") == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize(
    ("workload", "kinds", "uses", "embed", "ssm_heads", "heads", "experts", "published"),
    [
        ("nemotron_3_nano", (23, 23, 6), 0, 2688, 64, 32, (6, 1856, 0, 3712), 22.28e9),
        ("nemotron_3_super", (40, 40, 8), 2, 4096, 128, 32, (22, 2688, 1024, 5376), 84.73e9),
        # 355.6 to 360.6 from tokens/s, which are whole sequences/s
        ("nemotron_3_ultra", (48, 48, 12), 2, 8192, 256, 64, (22, 5120, 2048, 10240), 358.9e9),
    ],
    ids=("nano", "super", "ultra"),
)
def test_flops_of_nemotron_3_are_those_of_megatron_bridge(
    workload, kinds, uses, embed, ssm_heads, heads, experts, published
):
    """hybrid_flops() of its training/utils/flop_utils.py, written out: inner widths of Mamba-2 are
    twice the network's, a scan is 7 x width x state, and each use of the layer of multi-token
    prediction is one of attention, one of experts and the head, without its input's projection."""
    inner, groups_and_state, state, seq = 2 * embed, 8 * 128, 128, 8192
    top_k, width, latent, shared = experts
    mamba = 2 * embed * (3 * inner + 2 * groups_and_state + ssm_heads) + 7 * inner * state
    of_experts = 4 * (width * top_k * (latent or embed) + embed * latent + embed * shared)
    attention = 4 * 128 * heads * (embed + embed * 2 / heads + seq / 2)
    mambas, channels, attentions = kinds
    layers = mambas * mamba + (channels + uses) * of_experts + (attentions + uses) * attention
    total = 3 * (layers + 2 * embed * 131072 * (1 + uses))
    assert total == pytest.approx(published, rel=1e-3)
    assumed = dict(config(workload).published)
    convention = assumed.pop("convention")
    m = dataclasses.replace(resolve(workload).model, **assumed)
    assert flops.per_sequence(m, seq, convention) / seq == pytest.approx(total, rel=1e-3)


def workload_of(row) -> str:
    (path,) = recipes.find_workloads(row.model, row.size)
    return path.stem


@pytest.mark.parametrize(
    "row", published.step_time_rows(), ids=lambda r: f"{r.model}-{r.dtype}-{r.gpus}"
)
def test_published_figures_follow_from_their_step_time(row):
    assumed = dict(config(workload_of(row)).published)
    convention = assumed.pop("convention", "full")
    m = resolve(workload_of(row), layers=row.layers).model
    m = dataclasses.replace(m, **assumed)
    peak = GPU_TYPES[row.gpu_type].peak_tflops(row.dtype)
    figures = flops.figures(m, row.seq, row.gbs, row.gpus, row.step_s, peak)
    assert figures["tokens_per_s"] == pytest.approx(row.tokens_per_s, rel=1.5e-3)
    if row.days_to_1t is not None:
        rounded = row.days_to_1t == int(row.days_to_1t)  # a few are rounded to days
        digits = 0.5 if rounded else 0.006
        days = figures["days_to_1t_tokens"]
        assert days == pytest.approx(row.days_to_1t, abs=digits, rel=1.5e-3)
    if row.mfu_pct is not None:
        assert 100 * figures["mfu"][convention] == pytest.approx(row.mfu_pct, rel=1.6e-3)


def tflops_error(row) -> float:
    """TFLOP/s of a row of Megatron-Bridge from its tokens/s and our FLOPs, over those published."""
    m = resolve(workload_of(row)).model
    known = {r.model for r in published.step_time_rows()}
    if row.model not in known:  # whose rows assume the sizes
        assumed = dict(config(workload_of(row)).published)
        m = dataclasses.replace(m, **{k: v for k, v in assumed.items() if k != "convention"})
    per_token = flops.per_sequence(m, row.seq, row.convention) / row.seq
    return row.tokens_per_s / row.gpus * per_token / 1e12 / row.tflops_per_gpu - 1


# Rows whose tokens/s are whole sequences/s, so few that they are more than 1 % from the true ones.
ROUNDED = {
    ("llama31", "70b", "h100", "current"),  # 13 sequences/s
    ("llama31", "405b", "gb300", "current"),  # 32
    ("llama31", "405b", "gb300", "mxfp8"),  # 30
    ("llama31", "405b", "gb200", "current"),  # 27
    ("llama31", "405b", "gb200", "mxfp8"),  # 25
    ("nemotron_3_nano", "30b_a3b", "gb300", "mxfp8"),  # 39
}
# Its TFLOP/s are 365.1 GFLOP for each of its tokens, and those of the other row of Ultra 360.6.
CONTRADICTS = ("nemotron_3_ultra", "550b_a55b", "gb200", "mxfp8")


def test_published_tflops_follow_from_published_tokens():
    """Within 1 %, or within the rounding of tokens/s; and without a bias for any model, but the
    rounding of an only row."""
    bridge = [r for r in published.rows() if r not in published.step_time_rows()]
    of = lambda r: (r.model, r.size, r.gpu_type, r.format)
    errors = {r: tflops_error(r) for r in bridge if of(r) != CONTRADICTS}
    assert len(errors) == 106
    outside = {r for r, error in errors.items() if abs(error) > 0.01}
    assert {of(r) for r in outside} == ROUNDED
    assert all(abs(errors[r]) < r.rounding for r in outside)
    for model in {(r.model, r.size, r.convention) for r in errors}:
        of_model = {r: e for r, e in errors.items() if (r.model, r.size, r.convention) == model}
        only = min(of_model, key=lambda r: r.rounding)
        limit = 3e-3 if len(of_model) > 1 else max(3e-3, only.rounding + 1e-3)
        assert abs(statistics.median(of_model.values())) < limit


@pytest.mark.parametrize(("window", "scores"), [(0, 32), (16, 14.125), (64, 32), (100, 32)])
def test_causal_flops_count_the_scores_inside_a_window(window, scores):
    m, seq = dataclasses.replace(resolve("llama31_8b", "tiny").model, window=window), 64
    full = flops.per_sequence(m, seq, "full")
    assert full == flops.per_sequence(dataclasses.replace(m, window=0), seq, "full")
    causal = full - 6 * seq * m.layers * m.heads * 2 * m.head_dim * (seq - scores)
    assert flops.per_sequence(m, seq, "causal") == pytest.approx(causal)


def test_causal_scores_of_a_window_are_those_that_its_mask_keeps():
    seq, window = 64, 16
    kept = sum(min(query + 1, window) for query in range(seq)) / seq
    m = dataclasses.replace(resolve("llama31_8b", "tiny").model, window=window)
    mixer = m.per_layer[0].mixer
    assert mixer.scores(seq) == mixer.heads * 2 * mixer.head_dim * kept
