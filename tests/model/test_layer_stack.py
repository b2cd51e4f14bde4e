"""Layers as a loop and unrolled; which activations are saved or recomputed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbench.model import layer_stack
from maxbench.sharding import mesh
from maxbench.step import data
from maxbench.step.train_step import Step
from tests.conftest import resolve


@pytest.mark.parametrize(
    ("axes", "unroll", "unrolled"),
    [
        (dict(tp=2), 4, True),
        (dict(tp=2), 3, False),  # too many layers
        (dict(tp=2, fsdp=2), 4, False),
        (dict(pp=2, gbs=4), 4, False),  # chunks are read from stacked weights
    ],
    ids=str,
)
def test_layers_are_unrolled_without_fsdp_and_pp(axes, unroll, unrolled):
    run = resolve("llama31_8b", "tiny", {"train.unroll_layers": unroll}, layers=4, mbs=1, **axes)
    assert run.train.unrolled == unrolled


@pytest.mark.parametrize(
    ("workload", "dtype", "axes", "remat", "recomputed"),
    [
        ("llama31_70b", "bf16", dict(pp=2), "none", True),  # 6 bytes per element; a copy is 8
        ("llama31_70b", "bf16", {}, "none", False),
        ("llama31_70b", "fp8", dict(pp=2), "none", False),  # 5 and 4
        ("nemotron4_340b", "fp8", dict(pp=2), "selective", True),  # 3 and 4: not gated
        ("llama31_70b", "bf16", dict(pp=2), "query,mlp_act", False),  # its input is not saved
    ],
)
def test_pipeline_recomputes_mlp_act_if_that_moves_fewer_bytes(
    workload, dtype, axes, remat, recomputed
):
    settings = {"train.remat": remat}
    run = resolve(workload, "tiny", settings, dtype=dtype, layers=4, gbs=4, mbs=1, **axes)
    saved = set(run.train.saved)
    assert "mlp_act" in saved
    assert run.saved_on_device(run.train.saved) == saved - ({"mlp_act"} if recomputed else set())


@pytest.mark.parametrize("with_sums", [True, False])
def test_loop_and_unrolled_layers_are_equal(with_sums):
    w = {"a": jnp.arange(1.0, 4), "b": jnp.arange(6.0).reshape(3, 2)}
    sums = jax.tree.map(lambda x: x * 2, w) if with_sums else None

    m = resolve("llama31_8b", "tiny", layers=3).model

    def layer(kind, x, args):
        assert kind == m.per_layer[0]
        w, sums = args
        x = x * w["a"] + w["b"].sum() + (sums["a"] if with_sums else 0)
        return x, x / 3

    run = lambda w, sums: layer_stack.run_layers(m, layer, jnp.float32(2), w, sums)
    unrolled_sums = layer_stack.unstack(m, sums) if with_sums else None
    unrolled = run(layer_stack.unstack(m, w), unrolled_sums)
    np.testing.assert_allclose(run(w, sums), unrolled, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, layer_stack.stack(m, layer_stack.unstack(m, w)), w)


def test_layers_after_remat_layers_recompute_no_gemm():
    def gemms(jaxpr) -> int:
        count = 0
        for eqn in jaxpr.eqns:
            inner = [getattr(x, "jaxpr", x) for x in jax.tree.leaves(eqn.params)]
            inner = [x for x in inner if hasattr(x, "eqns")]
            count += eqn.primitive.name == "dot_general"
            count += eqn.params.get("length", 1) * sum(map(gemms, inner))
        return count

    def gemms_of_step(remat_layers: int | None, remat: str = "full") -> int:
        settings = {"train.remat": remat, "train.remat_layers": remat_layers}
        run = resolve("llama31_8b", "tiny", settings, layers=4)
        step = Step(run, mesh.make_mesh(run.layout))
        batch = data.abstract(run, step.mesh)
        return gemms(jax.make_jaxpr(step.gradients)(step.abstract["params"], batch).jaxpr)

    none, full = gemms_of_step(None, "save_gemms_recompute_act"), gemms_of_step(None)
    assert full > none
    assert gemms_of_step(4) == full
    assert gemms_of_step(3) - none == (full - none) * 3 / 4
