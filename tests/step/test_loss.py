"""The loss of an evaluation equals that of a training step, on every mesh and in every format."""

import jax
import numpy as np
import pytest

from maxbench.pipeline import schedule
from maxbench.sharding import mesh
from maxbench.step import data, state
from maxbench.step.train_step import Step
from tests.conftest import resolve

exhaustive = pytest.mark.exhaustive
CASES = {
    "alone": ("llama31_8b", {}, {"mbs": 2, "gbs": 4}),
    "fsdp, cp, tp": ("llama31_8b", {}, {"fsdp": 2, "cp": 2, "tp": 2, "gbs": 8}),
    "overlapped": (
        "llama31_8b",
        {"train.unroll_layers": 4},
        {"tp": 2, "gbs": 4},
    ),
    "experts": ("mixtral_8x7b", {}, {"ep": 2, "fsdp": 2, "gbs": 8}),
    "pipeline": ("llama31_8b", {}, {"pp": 2, "gbs": 4, "mbs": 1}),
    "interleaved": ("llama31_8b", {}, {"pp": 2, "vp": 2, "dp": 2, "tp": 2, "gbs": 8, "mbs": 1}),
    "pipeline of four": ("llama31_8b", {}, {"pp": 4, "dp": 2, "gbs": 16, "mbs": 1}),
    "pipeline, unordered": (
        "llama31_8b",
        {"train.order": "off"},
        {"pp": 2, "vp": 2, "gbs": 8, "mbs": 1},
    ),
    "pipeline, delayed fp8": (
        "llama31_8b",
        {"precision.scaling": "delayed"},
        {"dtype": "fp8", "pp": 2, "vp": 2, "seq": 64, "gbs": 4, "mbs": 1},
    ),
    "pipeline, mtp": ("deepseek_v3", {}, {"pp": 2, "gbs": 4, "mbs": 1}),
    "pipeline, kinds": ("nemotron_h_56b", {}, {"pp": 2, "gbs": 4, "mbs": 1}),
    "delayed fp8": (
        "llama31_8b",
        {"precision.scaling": "delayed"},
        {"dtype": "fp8", "tp": 2, "seq": 64},
    ),
    "mtp, latent": ("deepseek_v3", {}, {"fsdp": 2, "gbs": 4}),
    "mamba": ("nemotron_3_nano", {}, {"dp": 2, "gbs": 4}),
}
EARLY = ("alone", "fsdp, cp, tp")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[exhaustive] * (c not in EARLY)) for c in CASES]
)
def test_loss_without_gradients_is_that_of_the_step(case):
    workload, settings, flags = CASES[case]
    run = resolve(workload, "tiny", settings, **flags)
    step = Step(run, mesh.make_mesh(run.layout))
    before = step.init()
    batch = next(data.Synthetic(run, step.mesh))
    args = before["params"], batch, before.get(state.KEY)
    loss, targets = step.lower_loss().compile()(before, batch)
    expected = jax.jit(lambda *x: step.gradients(*x)[1]["loss"])(*args)
    np.testing.assert_allclose(loss, expected, rtol=2e-5)
    assert targets == run.layout.gbs * run.train.seq


def test_an_evaluation_of_a_pipeline_has_no_backward_passes():
    run = resolve("llama31_8b", "tiny", pp=2, vp=2, gbs=8, mbs=1)
    step = Step(run, mesh.make_mesh(run.layout))
    text = lambda lowered: lowered.as_text(debug_info=True)
    training, evaluation = text(step.lower()), text(step.lower_loss())
    for scope in (schedule.COOLDOWN, schedule.STASH, schedule.SEND_DX, schedule.EMBED_BACKWARD):
        assert scope in training
        assert scope not in evaluation
    assert schedule.STEADY in evaluation
