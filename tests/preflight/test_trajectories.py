"""Losses of a short training against the stored ones, and faults that they show."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from maxbench.config.number_formats import FORMATS
from maxbench.preflight import trajectories
from maxbench.quantization import fp8_per_tensor
from maxbench.step import data, optimizer
from maxbench.step.train_step import Step
from tests.conftest import resolve
from tools.trajectories import MESHES, job

exhaustive = pytest.mark.exhaustive
ALONE: dict[str, int] = {}


def found(number_format: str, axes: dict[str, int] = ALONE) -> tuple[bool, str]:
    """trajectories.compare() of a training in a number format."""
    devices = jax.devices()[: trajectories.DEVICES if axes else 1]
    run = trajectories.toy(job(number_format, axes), len(devices))
    return trajectories.compare(run, trajectories.train(run, devices))


def compared(changes: dict[int, float]) -> tuple[bool, str]:
    """trajectories.compare() of the stored losses times some factors."""
    losses = [step.loss for step in trajectories.stored("current")]
    for i, factor in changes.items():
        losses[i] *= factor
    return trajectories.compare(trajectories.toy(job("current", ALONE), 1), losses)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_stored(name):
    steps = trajectories.stored(name)
    assert len(steps) == trajectories.STEPS
    run = trajectories.toy(job(name, ALONE), 1)
    first, floor = steps[0].loss, data.entropy(run)
    assert first == pytest.approx(math.log(run.model.vocab), rel=0.01)
    assert first - steps[-1].loss > 0.75 * (first - floor)
    assert [s.apart for s in steps] == sorted(s.apart for s in steps)
    wide = {"delayed": 0.11, "nvfp4": 0.1}
    assert max(s.tolerance for s in steps) < wide.get(name, 0.02)


@pytest.mark.parametrize("axes", [ALONE, *MESHES], ids=str)
def test_batches_do_not_depend_on_the_mesh(axes):
    run = trajectories.toy(job("bf16", axes), trajectories.DEVICES if axes else 1)
    alone = trajectories.toy(job("bf16", ALONE), 1)
    drawn = [data.draw(r, 3).reshape(trajectories.GBS, -1) for r in (run, alone)]
    assert (drawn[0] == drawn[1]).all()


def test_a_run_of_experts_trains_the_toy_without_them():
    experts = resolve("mixtral_8x7b", "tiny", ep=2, tp=2, mbs=1)
    small = trajectories.toy(experts, 4)
    assert not small.model.has_experts
    assert small.layout.describe() == "4 devices, dp 2 x tp 2, mbs 4, gbs 8 (1 microbatch)"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({0: 1.05, 20: 2.0}, "at step 0: 6.5434, stored 6.2318, 5.00% apart (at most 0.10%): the "),
        ({1: 0.9}, "the gradients or the update are wrong, or a product"),
        ({17: 1.1, 18: 1.1}, "each step has a small error: "),
        ({5: math.nan}, "an overflow, or memory that is read before it is written"),
        ({39: math.inf}, "at step 39: inf"),
    ],
)
def test_the_first_wrong_step_is_named(changes, words):
    right, text = compared(changes)
    assert not right
    assert text.startswith("the loss of 40 steps in fp8 (current), 1 device, mbs 8, gbs 8")
    assert words in text


def test_stored_losses_are_right():
    right, text = compared({7: 1.0002})
    assert right
    assert "40 steps in fp8 (current), 1 device, mbs 8, gbs 8 (1 microbatch): at most 0.02%" in text


def test_the_host_of_a_wrong_training_is_named(monkeypatch):
    losses = [step.loss for step in trajectories.stored("bf16")]
    monkeypatch.setattr(trajectories, "train", lambda run, devices: losses)
    monkeypatch.setattr(trajectories.environment, "hostname", lambda: "node7")
    ((right, text),) = trajectories.findings(job("bf16", ALONE))
    assert right
    assert text.endswith(" s")
    losses[9] *= 1.5
    ((right, text),) = trajectories.findings(job("bf16", ALONE))
    assert not right
    assert text.startswith("node7: the loss of 40 steps in bf16, ")


@exhaustive
@pytest.mark.parametrize("name", FORMATS)
def test_a_right_training_is_as_stored(name):
    right, text = found(name)
    assert right, text


@exhaustive
@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", ["bf16", "current"])
def test_a_mesh_trains_as_stored(name, axes):
    right, text = found(name, axes)
    assert right, text


def wrong_product(fprop, others):
    """Factors of products of FP8 operands: of fprop, and of dgrad and wgrad (exact)."""

    def inject(monkeypatch):
        product = fp8_per_tensor.PerTensor.product

        def changed(self, a, b, over, dtype, exact=False):
            return product(self, a, b, over, dtype, exact) * (others if exact else fprop)

        monkeypatch.setattr(fp8_per_tensor.PerTensor, "product", changed)

    return inject


def wrong_gradient(factor):
    """A factor of the gradients of one GPU of dp."""

    def inject(monkeypatch):
        accumulate = Step._accumulated_grads

        def changed(self, *args):
            grads, out = accumulate(self, *args)
            of_gpu = jnp.where(jax.lax.axis_index("dp") == 3, factor, 1)
            return jax.tree.map(lambda g: g * of_gpu.astype(g.dtype), grads), out

        monkeypatch.setattr(Step, "_accumulated_grads", changed)

    return inject


def wrong_optimizer(**settings):
    """Other settings of the optimizer."""

    def inject(monkeypatch):
        transform = optimizer.transform

        def changed(run, *args):
            optim = dataclasses.replace(run.optim, **settings)
            return transform(dataclasses.replace(run, optim=optim), *args)

        monkeypatch.setattr(optimizer, "transform", changed)

    return inject


FAULTS = {
    "sign of fprop": ("current", ALONE, wrong_product(-1, 1), "at step 1: "),
    "sign of dgrad and wgrad": ("current", ALONE, wrong_product(1, -1), "at step 1: "),
    "scale of fprop, 2 %": ("current", ALONE, wrong_product(1.02, 1), "small error: of a scale"),
    "gradient of a GPU x 4": ("bf16", {"dp": 8}, wrong_gradient(4), "of one GPU's gradients"),
    "no gradient of a GPU": ("bf16", {"dp": 8}, wrong_gradient(0), "of one GPU's gradients"),
    "decay of Adam": ("bf16", ALONE, wrong_optimizer(b2=0.8), "of the optimizer"),
    "learning rate, 3 %": ("bf16", ALONE, wrong_optimizer(lr=2.06e-3), "of the optimizer"),
}


@exhaustive
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_its_format_named(fault, monkeypatch):
    name, axes, inject, words = FAULTS[fault]
    inject(monkeypatch)
    jax.clear_caches()  # of sublayers that were traced without the fault
    right, text = found(name, axes)
    assert not right
    assert f"40 steps in {'bf16' if name == 'bf16' else 'fp8 (current)'}, " in text
    assert words in text
