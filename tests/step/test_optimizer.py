"""AdamW: learning rates of the recipes, weight decay, and a bf16 state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from maxbench.sharding import mesh, rules
from maxbench.step import data, optimizer
from maxbench.step.train_step import Step
from tests.conftest import layout as layout_of
from tests.conftest import resolve


def test_learning_rate_equals_the_recipes():
    rate = optimizer.learning_rate(resolve("llama31_8b"))
    assert f"{rate(49):.4}" == "7.496e-06"  # step 49 of the published log
    maxtext = optimizer.learning_rate(resolve("llama2_70b", steps=100))
    rates = [float(maxtext(i)) for i in (0, 5, 10, 55, 100)]
    assert rates == pytest.approx([0, 1.5e-5, 3e-5, 1.65e-5, 3e-6])
    nemo = optimizer.learning_rate(resolve("grok1_314b", steps=20_000))
    ends = 636, (636 + 8127) / 2, 8127, 8128, 19_999
    rates = [float(nemo(i)) for i in (0, 318, *ends)]
    middle, low = 6.6e-5, 1.2e-5
    assert rates == pytest.approx([0, 6e-5, 1.2e-4, middle, low, low, low])


@pytest.mark.parametrize(("family", "decays"), [("llama2_70b", True), ("llama31_8b", False)])
def test_norms_decay_if_the_recipe_decays_them(family, decays):
    run = resolve(family, overrides={"optim.warmup": 0.0})
    weights = {"w": jnp.ones(2), "norm": {"scale": jnp.ones(2)}}
    tx = optimizer.transform(run)
    updates, _ = tx.update(
        jax.tree.map(jnp.zeros_like, weights), tx.init(weights), weights, norm=jnp.zeros(())
    )
    rate = run.optim.lr * run.optim.weight_decay
    np.testing.assert_allclose(updates["w"], -rate, rtol=1e-6)
    np.testing.assert_allclose(updates["norm"]["scale"], -rate * decays, rtol=1e-6)


@pytest.mark.exhaustive
def test_bf16_state_is_updated_in_fp32():
    """The update equals that of the fp32 state, rounded to bf16."""
    step, exact = (
        Step(run, mesh.make_mesh(run.layout))
        for run in (resolve("nemotron4_340b", presets) for presets in ("tiny,bf16_state", "tiny"))
    )
    batch = data.draw(step.run, 0)
    alone = lambda state: exact._step(optimizer.cast(state, "fp32"), batch)[0]
    rounded = jax.jit(lambda state: optimizer.cast(alone(state), "bf16"))
    state = step.init()
    for _ in range(2):
        expected, state = rounded(state), jax.jit(step._step)(state, batch)[0]
        jax.tree.map(np.testing.assert_array_equal, state, expected)
    assert {x.dtype.name for x in jax.tree.leaves(state)} == {"bfloat16", "int32"}


def test_the_global_norm_counts_each_weight_once():
    """Of weights split over some axes and replicated over others, on dp 3 x tp 2."""
    layout = layout_of(dp=3, tp=2)
    sizes = layout.mesh_shape
    weights = {
        "norm": (("embed_replicated",), (7,)),
        "up": (("embed", "mlp"), (6, 4)),
        "odd": (("embed", "mlp"), (7, 4)),  # which dp 3 does not divide
    }
    shardings = {n: rules.shard_weight(*w, sizes) for n, w in weights.items()}
    assert [s.psum_axes for s in shardings.values()] == [("dp", "tp"), (), ("dp",)]
    grads = {n: jnp.arange(1.0, 1 + np.prod(s)).reshape(s) for n, (_, s) in weights.items()}
    norm = jax.shard_map(
        lambda grads: optimizer.global_norm(shardings, grads),
        mesh=mesh.make_mesh(layout),
        in_specs=({n: s.master_spec for n, s in shardings.items()},),
        out_specs=P(),
        check_vma=False,
    )
    np.testing.assert_allclose(jax.jit(norm)(grads), optax.tree.norm(grads), rtol=1e-6)
