"""Parameter counts, FLOPs, and every cell that was published, computed again."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from maxbench.config.errors import UserError
from maxbench.config.model import LayerGroup
from maxbench.hardware import published
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.metrics import flops
from maxbench.model import layer_stack, transformer
from tests.conftest import WORKLOADS, config, resolve

PARAMETERS = {
    "llama2_70b": 68_976_648_192,
    "llama31_8b": 8_030_261_248,
    "llama31_70b": 70_553_706_496,
    "llama31_405b": 405_853_388_800,
}
ABOUT = {"nemotron4_340b": 341.0e9, "grok1_314b": 316.5e9}
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
def test_parameter_counts(workload, preset):
    """The formula counts what the model really has, and what was published."""
    if preset == "xai" and workload != "grok1_314b":
        pytest.skip("a preset of Grok")
    m = resolve(workload, preset).model
    shapes = jax.eval_shape(lambda key: transformer.init(m, key), jax.random.key(0))
    counted = sum(x.size for x in jax.tree.leaves(shapes))
    assert flops.params(m) == counted
    if preset == "":
        assert counted == PARAMETERS.get(workload, counted)
        assert counted == pytest.approx(ABOUT.get(workload, counted), rel=2e-3)


ODD = [
    dict(head_dim=24),  # heads together wider than embed
    dict(head_dim=24, value_dim=8),
    dict(layer_groups=(LayerGroup(1, 192), LayerGroup(2, 64, 4), LayerGroup(1, 96, 2))),
    dict(
        layer_groups=(LayerGroup(1, 64, 4), LayerGroup(2, 192), LayerGroup(1, 192)),
        post_norm=True,
        tied=True,
    ),
]


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_parameter_counts_of_layers_that_differ(odd):
    m = dataclasses.replace(resolve("grok1_314b", "tiny").model, **odd)
    shapes = jax.eval_shape(lambda key: transformer.init(m, key), jax.random.key(0))
    assert flops.params(m) == sum(x.size for x in jax.tree.leaves(shapes))
    if m.layer_groups:
        stacks = layer_stack.split(m, shapes["layers"])
        counts = [jax.tree.leaves(stack)[0].shape[0] for stack in stacks]
        assert counts == [k.layers for k in m.layer_groups]
        assert sum(counts) == m.layers


DENSE = dict(experts=0, softcap=0.0)


@pytest.mark.parametrize(
    "odd",
    [
        DENSE,
        DENSE | dict(head_dim=24, value_dim=8),
        DENSE | dict(layer_groups=(LayerGroup(1, 192), LayerGroup(3, 96)), act="relu2", tied=True),
        # Every expert takes every token: no slot stays empty.
        dict(experts=4, top_k=4, capacity_factor=1.0),
        dict(layer_groups=(LayerGroup(2, 192), LayerGroup(2, 64, 4)), top_k=4, capacity_factor=1.0),
    ],
    ids=str,
)
def test_flops_are_those_of_the_dots(odd):
    """Of the forward pass as traced, with all scores; with the backward pass three times that."""
    m, seq = dataclasses.replace(resolve("grok1_314b", "tiny").model, **odd), 64
    net, tokens = transformer.Transformer(m), jnp.zeros((1, seq), jnp.int32)
    params = jax.eval_shape(net.init, jax.random.key(0), tokens)
    found = dots(jax.make_jaxpr(net.apply)(params, tokens).jaxpr)
    # Routers, and the weighted sums of each token's experts: no convention counts them.
    rest = sum(n * (kind.experts + kind.top_k) for n, kind in m.stacks if kind.experts)
    found -= 2 * seq * m.embed * rest
    assert 3 * found == flops.per_sequence(m, seq, "full")


def dots(jaxpr) -> int:
    """FLOPs of the matrix products of a jaxpr, those of its loops as often as they run."""
    found = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (over, _), (_, batch) = eqn.params["dimension_numbers"]
            a, b = (v.aval.shape for v in eqn.invars)
            summed = math.prod(a[i] for i in over)
            outs = math.prod(b) // summed // math.prod(b[i] for i in batch)
            found += 2 * math.prod(a) * outs
        inner = [x for p in eqn.params.values() for x in (p if isinstance(p, tuple) else (p,))]
        times = eqn.params.get("length", 1)
        found += times * sum(dots(getattr(x, "jaxpr", x)) for x in inner if is_jaxpr(x))
    return found


def is_jaxpr(x) -> bool:
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")


def test_equal_neighbours_are_one_stack_and_one_kind_is_no_kind():
    m = resolve("grok1_314b", "tiny").model
    kinds = (LayerGroup(1, m.mlp, 4), LayerGroup(2, m.mlp, 4), LayerGroup(1, m.mlp, 4))
    assert dataclasses.replace(m, layer_groups=kinds) == m
    for wrong, text in ((kinds[:2], "layers=3"), ((LayerGroup(4, 64, 2),), "experts=2")):
        with pytest.raises(UserError, match=text):
            dataclasses.replace(m, layer_groups=wrong)


@pytest.mark.parametrize(("workload", "seq", "convention"), FLOPS)
def test_flops(workload, seq, convention):
    found = flops.per_sequence(resolve(workload).model, seq, convention)
    assert found == pytest.approx(FLOPS[workload, seq, convention], rel=1e-4)


def test_grok_proxies():
    for layers, seq, expected in ((2, 4096, 8.4306e13), (4, 4096, 1.49246e14)):
        m = resolve("grok1_314b", layers=layers).model
        assert flops.per_sequence(m, seq, "causal") == pytest.approx(expected, rel=2e-5)
    for layers, expected in ((8, 5.68147e14), (16, 1.09756e15), (32, 2.15639e15)):
        m = resolve("grok1_314b", layers=layers).model
        assert flops.per_sequence(m, 8192, "causal") == pytest.approx(expected, rel=2e-5)


NAMES = {("llama2", "70b"): "llama2_70b", ("nemotron4", "340b"): "nemotron4_340b"}
NAMES |= {("llama31", s): f"llama31_{s}" for s in ("8b", "70b", "405b")}
NAMES |= {("grok1", "314b"): "grok1_314b"}


@pytest.mark.parametrize("row", published.rows(), ids=lambda r: f"{r.model}-{r.dtype}-{r.gpus}")
def test_published_cells_follow_from_their_step_time(row):
    convention = dict(config(NAMES[row.model, row.size]).published)
    name = convention.pop("convention", "full")
    m = resolve(NAMES[row.model, row.size], layers=row.layers).model
    m = dataclasses.replace(m, **convention)
    peak = GPU_TYPES[row.gpu_type].peak_tflops(row.dtype)
    found = flops.figures(m, row.seq, row.gbs, row.gpus, row.step_s, peak)
    assert found["tokens_per_s"] == pytest.approx(row.tokens_per_s, rel=1.5e-3)
    if row.days_to_1t is not None:
        whole = row.days_to_1t == int(row.days_to_1t)  # a few cells are rounded to days
        digits = 0.5 if whole else 0.006
        days = found["days_to_1t_tokens"]
        assert days == pytest.approx(row.days_to_1t, abs=digits, rel=1.5e-3)
    if row.mfu_pct is not None:
        assert 100 * found["mfu"][name] == pytest.approx(row.mfu_pct, rel=1.6e-3)


def test_nearest_and_what_differs():
    work = {"seq": 8192, "layers": 32}
    compare = lambda gpu, gpus, gbs: published.compare(
        "llama31", "8b", "bf16", gpu, gpus=gpus, gbs=gbs, **work
    )
    assert compare("h100", 24, 128).row.gpus in (16, 32)
    none = compare("b200", 8, 128)
    assert (none.row, none.about, none.share(1.0)) == (None, {}, None)
    assert none.refusal == "nothing published for llama31 8b bf16 on b200"
    same = compare("h100", 8, 128)
    assert (same.differences, same.refusal) == ([], "")
    assert same.share(2 * same.row.step_s) == 0.5
    other = compare("h100", 8, 64)
    assert other.differences == ["GBS 64, published 128"]
    assert (other.refusal, other.share(1.0)) == ("not comparable: GBS 64, published 128", None)
