"""Non-trainable state of routers: the bias of the choice of experts, and lost rows."""

import jax
import numpy as np
import pytest

from maxbench.sharding import mesh
from maxbench.step import data
from maxbench.step.train_step import Step
from tests.conftest import resolve

EXPERTS = {
    "model.capacity_factor": 0.0,
    "model.router": "sigmoid",
    "model.aux_loss": 0.0,
    "model.expert_bias_rate": 2**-7,
}


def two_steps(overrides, **axes):
    """The state after two steps, and the metrics of the second."""
    overrides = EXPERTS | {"model.init_std": 0.1} | overrides
    run = resolve("grok1_314b", "tiny", overrides, dtype="fp32", seq=32, layers=2, gbs=8, **axes)
    step = Step(run, mesh.make_mesh(run.layout))
    compiled, state = step.lower().compile(), step.init()
    batches = data.Synthetic(step.run, step.mesh)
    for _ in range(2):
        state, out = compiled(state, next(batches))
    return jax.device_get((state["layer_state"]["layers"]["mlp"], out))


@pytest.mark.parametrize(
    "axes",
    [
        dict(ep=2, tp=2, cp=2, mbs=1),
        pytest.param(dict(pp=2, ep=2, dp=2, mbs=1), marks=pytest.mark.exhaustive),
    ],
)
def test_expert_bias_does_not_depend_on_the_mesh(axes):
    expected, out = two_steps({}, mbs=8)
    bias = expected["expert_bias"]
    assert {*np.abs(bias).ravel()} <= {0, 2**-7, 2**-6}
    assert len({*bias.ravel()}) > 1
    actual, actual_out = two_steps({}, **axes)
    np.testing.assert_array_equal(actual["expert_bias"], bias)
    np.testing.assert_allclose(actual_out["loss"], out["loss"], rtol=1e-5)


@pytest.mark.exhaustive
def test_rows_beyond_the_dispatch_factor_are_counted():
    """Both steps' rows are in the state. Each GPU of ep has half of the experts: a token that
    chooses two of four stays on one GPU with probability 1/3."""
    lost = []
    for factor in (1.0, 1.3, 2.0):
        state, out = two_steps({"model.dispatch_factor": factor}, ep=2, dp=2, mbs=2)
        lost.append(float(out["lost_rows"]))
        assert state["lost_rows"].sum() >= out["lost_rows"]
    assert lost[0] > lost[1] >= lost[2] == 0
