"""Layers as a loop and as code, tensors kept or made again: who decides; it is one network."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbench.config import lowering
from maxbench.model import layer_stack
from maxbench.sharding import mesh as mesh
from maxbench.step.train_step import Step
from tests.conftest import resolve


@pytest.mark.parametrize(
    ("axes", "unroll", "code"),
    [
        (dict(tp=2), 4, True),
        (dict(tp=2), 3, False),  # too many layers
        (dict(tp=2, fsdp=2), 4, False),
        (dict(pp=2, gbs=4), 4, False),  # a chunk is taken from the stack
    ],
    ids=str,
)
def test_as_code_where_nothing_speaks_for_a_loop(axes, unroll, code):
    run = resolve("llama31_8b", "tiny", {"train.unroll_layers": unroll}, layers=4, mbs=1, **axes)
    assert lowering.layers_unrolled(run) == code


@pytest.mark.parametrize(
    ("workload", "dtype", "axes", "remat", "again"),
    [
        ("llama31_70b", "bf16", dict(pp=2), "none", True),  # moves 6 bytes a number, a copy 8
        ("llama31_70b", "bf16", {}, "none", False),
        ("llama31_70b", "fp8", dict(pp=2), "none", False),  # 5 and 4
        ("nemotron4_340b", "fp8", dict(pp=2), "selective", True),  # 3 and 4: there is no gate
        ("llama31_70b", "bf16", dict(pp=2), "query,mlp_act", False),  # of what would it be made?
    ],
)
def test_an_activation_is_made_again_where_that_moves_less(workload, dtype, axes, remat, again):
    settings = {"train.remat": remat}
    run = resolve(workload, "tiny", settings, dtype=dtype, layers=4, gbs=4, mbs=1, **axes)
    saved = set(run.train.saved)
    assert "mlp_act" in saved
    assert lowering.saved_on_device(run, run.train.saved) == saved - (
        {"mlp_act"} if again else set()
    )


@pytest.mark.parametrize("with_sums", [True, False])
def test_both_run_the_same_layers(with_sums):
    w = {"a": jnp.arange(1.0, 4), "b": jnp.arange(6.0).reshape(3, 2)}
    sums = jax.tree.map(lambda x: x * 2, w) if with_sums else None

    m = resolve("llama31_8b", "tiny", layers=3).model

    def layer(kind, x, one):
        assert kind == m
        w, sums = one
        x = x * w["a"] + w["b"].sum() + (sums["a"] if with_sums else 0)
        return x, x / 3

    run = lambda w, sums: layer_stack.run_layers(m, layer, jnp.float32(2), w, sums)
    code = run(layer_stack.unstack(m, w), layer_stack.unstack(m, sums) if with_sums else None)
    np.testing.assert_allclose(run(w, sums), code, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, layer_stack.stack(m, layer_stack.unstack(m, w)), w)


def test_layers_past_those_of_remat_make_no_product_again():
    def products(jaxpr) -> int:
        count = 0
        for eqn in jaxpr.eqns:
            inner = [getattr(x, "jaxpr", x) for x in jax.tree.leaves(eqn.params)]
            inner = [x for x in inner if hasattr(x, "eqns")]
            count += eqn.primitive.name == "dot_general"
            count += eqn.params.get("length", 1) * sum(map(products, inner))
        return count

    def of(layers: int, remat: str = "full") -> int:
        settings = {"train.remat": remat, "train.remat_layers": layers}
        run = resolve("llama31_8b", "tiny", settings, layers=4)
        step = Step(run, mesh.make_mesh(run.layout))
        return products(jax.make_jaxpr(step.gradients)(step.abstract["params"], 3).jaxpr)

    none, whole = of(0, "save_gemms_recompute_act"), of(0)
    assert whole > none
    assert of(4) == whole
    assert of(3) - none == (whole - none) * 3 / 4
