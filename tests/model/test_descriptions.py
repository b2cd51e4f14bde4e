"""Declarations of mixers and channels (config/sublayers.py) against the traced network."""

import collections
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from maxbench.config.run import REMATS, TENSORS
from maxbench.config.sublayers import Context
from maxbench.cost_model import memory
from maxbench.model import layer_stack, layers, transformer
from tests.conftest import WORKLOADS, resolve

BATCH, SEQ = 2, 37  # a prime number tells dims of tokens from others
GROK = ("grok1_314b", "tiny,xai")  # with norms after each sublayer
TOYS = [*((workload, "tiny") for workload in WORKLOADS), GROK]
# Toys of the same kinds of layers as another workload's.
ALIKE = ("llama2_70b", "llama31_70b", "llama31_405b", "qwen3_235b_a22b", "gpt_oss_120b", "kimi_k2")
ALIKE += ("nemotron_3_ultra",)
DISTINCT = [toy for toy in TOYS if toy[0] not in ALIKE]


@functools.cache
def toy(workload, presets, remat="none"):
    """All sizes are known: experts have slots for all tokens, and a sequence is one chunk."""
    overrides = {"train.remat": remat, "train.attention": "xla"}
    m = resolve(workload, presets).model
    if m.ssm_heads:
        overrides["model.ssm_chunk"] = SEQ
    if m.experts:
        overrides["model.capacity_factor"] = m.experts / m.top_k
        overrides["model.force_balance"] = False
    return resolve(workload, presets, overrides, seq=SEQ, mbs=BATCH)


def path_of(path) -> str:
    return "/".join(part.key for part in path if hasattr(part, "key"))


@pytest.mark.parametrize(("workload", "presets"), TOYS)
def test_weights_are_those_that_the_network_declares(workload, presets):
    """Names, logical axes, shapes, and which are quantized."""
    m = toy(workload, presets).model
    boxed = jax.eval_shape(lambda key: transformer.init(m, key), jax.random.key(0))
    is_box = lambda x: isinstance(x, nn.Partitioned)

    def of_tree(tree, stacked=0):
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)
        return {
            path_of(path): (x.names[stacked:], x.value.shape[stacked:], x.gemm)
            for path, x in leaves
        }

    def declared(weights, quantized):
        gemm = lambda w: w.is_gemm and not w.plain and w.owner is not m and quantized
        dims = lambda w: (len(w.sides[0]), len(w.sides[1])) if gemm(w) else None
        return {path: (w.names, w.shape, dims(w)) for path, w in weights.items()}

    table = layer_stack.stacks(m)
    for stack, tree in zip(table, layer_stack.split(table, boxed.pop("layers")), strict=True):
        assert of_tree(tree, 1) == declared(m.layer_weights(stack.layer), True)
    assert of_tree(boxed) == declared(m.end_weights | m.mtp_weights, False)


def equations(jaxpr):
    """All equations of a jaxpr and of those inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for x in jax.tree.leaves(list(eqn.params.values())):
            inner = getattr(x, "jaxpr", x)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def gemm_of(eqn):
    """(batch, rows, k, n) of a dot_general with a weight; None of another one."""
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    x, w = (v.aval.shape for v in eqn.invars)
    b, k = (math.prod(x[i] for i in dims) for dims in (batch, contracted))
    rows, n = math.prod(x) // (b * k), math.prod(w) // (b * k)
    return None if 0 in (b % SEQ, k % SEQ, n % SEQ) else (b, rows, k, n)


@pytest.mark.parametrize(("workload", "presets"), TOYS)
def test_gemms_are_the_dots_of_a_traced_layer(workload, presets):
    """Sizes, counts, and for how many of the tokens each is computed."""
    m = toy(workload, presets).model
    x_btd = jnp.zeros((1, SEQ, m.embed))
    context = Context(layers.rope_angles(m, jnp.arange(SEQ)))
    for layer in m.all_layers:
        block = transformer.Block(m, layer)
        init = functools.partial(block.init, x_bud=x_btd, context=context)
        w = nn.unbox(jax.eval_shape(lambda key, init=init: init(key), jax.random.key(0)))
        traced = jax.make_jaxpr(lambda w, block=block: block.apply(w, x_btd, context)[0])(w)
        dots = [eqn for eqn in equations(traced.jaxpr) if eqn.primitive.name == "dot_general"]
        found = collections.Counter(filter(None, map(gemm_of, dots)))
        declared = collections.Counter()
        for _, part in layer.parts():
            for weight in filter(lambda w: w.is_gemm, part.weights.values()):
                batch, *sides = weight.sides
                b, k, n = (math.prod(getattr(weight.owner, x) for x in s) for s in (batch, *sides))
                # With slots for all tokens, capacity_factor times those of top_k experts.
                rows = SEQ * weight.copies * (part.capacity_factor if batch else 1) / b
                declared[b, round(rows, 6), k, n] += 1
                assert weight.multiply_adds == weight.copies * k * n
            if "down_bias" in part.weights and part.routed_params:  # experts.expert_biases()
                declared[1, SEQ, part.experts, m.embed] += 1
        assert found == declared


@pytest.mark.parametrize("remat", ["none", "save_gemms_recompute_act", "selective", "full"])
@pytest.mark.parametrize(("workload", "presets"), DISTINCT)
def test_saved_tensors_are_the_residuals_of_a_traced_layer(workload, presets, remat):
    run = toy(workload, presets, remat)
    m = run.model
    x = jax.ShapeDtypeStruct((BATCH, SEQ, m.embed), jnp.bfloat16)
    rope = layers.rope_angles(m, jnp.arange(SEQ))
    for kind in m.all_layers:

        def residuals(key, x_btd, kind=kind):
            w = nn.unbox(transformer.Block(m, kind).init(key, x_btd, Context(rope))["params"])
            call = lambda w, x_btd: transformer.layer(run, kind, w, None, x_btd, rope)[::2]
            return jax.vjp(call, jax.tree.map(lambda w: w.astype(x_btd.dtype), w), x_btd)[1]

        shapes = jax.tree.leaves(jax.eval_shape(residuals, jax.random.key(0), x))
        # All but the RoPE table: it begins with the tokens, which activations have second.
        activations = [x for x in shapes if x.size % SEQ == 0 and x.shape[:1] != (SEQ,)]
        stashed = sum(x.size * x.dtype.itemsize for x in activations)
        elements = memory._stashed_elements(run, kind, run.train.saved)
        assert stashed == BATCH * SEQ * 2 * elements


def weight_gemms(run, kind):
    """(batch, k, n) -> dots with a weight in the forward and the backward pass of a layer."""
    m, context = run.model, Context(layers.rope_angles(run.model, jnp.arange(SEQ)))
    x_btd = jnp.zeros((BATCH, SEQ, m.embed))
    init = functools.partial(transformer.Block(m, kind).init, x_bud=x_btd, context=context)
    w = nn.unbox(jax.eval_shape(lambda key: init(key), jax.random.key(0)))["params"]
    layer = functools.partial(transformer.layer, run, kind)
    loss = lambda w, x_btd: jnp.sum(layer(w, None, x_btd, context.rope)[0])
    traced = jax.make_jaxpr(jax.grad(loss, (0, 1)))(w, x_btd)
    dots = [eqn for eqn in equations(traced.jaxpr) if eqn.primitive.name == "dot_general"]
    found = filter(None, map(gemm_of, dots))
    return collections.Counter((b, k, n) for b, _, k, n in found)


@pytest.mark.parametrize(("workload", "presets"), DISTINCT)
def test_gemms_that_recompute_tensors_are_those_of_a_traced_layer(workload, presets):
    saves_all = toy(workload, presets)
    for i, (_, kind) in enumerate(saves_all.model.kinds):
        at_least = weight_gemms(saves_all, kind)
        for remat in ("full", "selective", "save_context", "save_dot_except_mlpwi"):
            run = toy(workload, presets, remat)
            _, kind = run.model.kinds[i]
            again, plain = collections.Counter(), set()
            for _, part in kind.parts():
                lost = [t for t in kind.saved(part, run) if t.name not in run.train.saved]
                paths = {path for t in lost for path in t.recompute} - {"scores"}
                for path, w in part.weights.items():
                    shape = tuple(math.prod(getattr(w.owner, x) for x in side) for side in w.sides)
                    again[shape] += path in paths
                    plain |= {shape, (shape[0], *shape[:0:-1])} if w.plain else set()
            more = weight_gemms(run, kind) - at_least
            recomputed = collections.Counter({x: n for x, n in more.items() if x not in plain})
            assert +again == recomputed, remat


@pytest.mark.parametrize(("workload", "presets"), TOYS)
def test_saved_tensors_have_names_of_policies_and_are_recomputed_by_gemms(workload, presets):
    run = toy(workload, presets)
    for _, layer in run.model.kinds:
        for _, part in layer.parts():
            for tensor in part.saved(run):
                assert tensor.name in TENSORS
                assert {*tensor.recompute} <= {*part.weights, "scores"}
    assert {t for names in REMATS.values() for t in names} == {*TENSORS}
