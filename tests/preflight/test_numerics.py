"""Injected faults of a GPU, of its memory and of a collective, and what names them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbench.config.errors import UserError
from maxbench.preflight import numerics
from maxbench.preflight.numerics import Gradients
from maxbench.sharding import rules
from maxbench.sharding.collectives import axis_index, axis_size
from maxbench.step import data
from maxbench.step.train_step import Step
from tests.conftest import resolve

DEVICES = 4


@pytest.fixture
def run():
    return resolve("llama31_8b", "tiny", fsdp=2, tp=2, mbs=2)


@pytest.fixture(scope="module")
def reference():
    """The run on one device, and its gradients on a CPU in another process."""
    run = resolve("llama31_8b", "tiny", fsdp=2, tp=2, mbs=2)
    alone = numerics.toy(run, "llama31_8b", 1, gbs=4)
    return alone, numerics.of_cpu(alone)


def found(run) -> list[tuple[bool, str]]:
    return [*numerics.findings(run, "llama31_8b", jax.devices()[:DEVICES])]


def faulty(monkeypatch, change):
    """Gradients of which `change(index of the device, array)` changes each."""
    right = Step.local_gradients

    def local_gradients(self, *args):
        grads, out, statistics = right(self, *args)
        if numerics.COPY in self.mesh.axis_names:
            i = jax.lax.axis_index(numerics.COPY)
            grads = jax.tree.map(lambda g: change(i, g), grads)
        return grads, out, statistics

    monkeypatch.setattr(Step, "local_gradients", local_gradients)


@pytest.mark.exhaustive
def test_right_gradients_pass(run):
    alone, together, unordered = found(run)
    assert all(right for right, _ in (alone, together, unordered))
    assert alone[1].startswith("4 devices, each alone: at most ")
    assert "fsdp 2 x tp 2" in together[1]
    assert "without train.order" in unordered[1]


@pytest.mark.exhaustive
def test_the_toy_of_a_run_with_documents_has_documents():
    job = resolve("llama31_8b", "tiny", {"train.document_end": 7}, fsdp=2, tp=2, mbs=2)
    lines = found(job)
    assert all(right for right, _ in lines)
    toy = numerics.toy(job, "llama31_8b", 1)
    tokens = data.draw(toy, 0)[..., :-1]
    assert toy.train.document_end != 7
    assert np.all(np.sum(tokens == toy.train.document_end, -1) > 1)  # several calls of cuDNN
    plain = numerics.toy(resolve("llama31_8b", "tiny"), "llama31_8b", 1)
    assert plain.train.document_end is None


@pytest.mark.exhaustive
@pytest.mark.xdist_group("reference of a CPU")
@pytest.mark.parametrize(
    "change",
    [
        lambda i, g: g * jnp.where(i == 3, 1.5, 1.0),
        lambda i, g: g.at[(0,) * g.ndim].set(jnp.where(i == 3, jnp.nan, g[(0,) * g.ndim])),
        # The highest bit of an exponent.
        lambda i, g: g.at[(0,) * g.ndim].multiply(jnp.where(i == 3, 2.0**64, 1.0)),
    ],
    ids=["a wrong factor", "NaN", "a flipped bit"],
)
def test_a_gpu_that_computes_wrongly_is_named(reference, monkeypatch, change):
    faulty(monkeypatch, change)
    alone, expected = reference
    ((right, text),) = numerics._alone(alone, jax.devices()[:DEVICES], expected, 0.1)
    assert not right
    assert text.startswith("GPU 3 of 4 on ")
    assert "computes wrong gradients: " in text


@pytest.mark.exhaustive
def test_an_axis_whose_collective_is_wrong_is_named(run, monkeypatch):
    gather = rules.gather_master

    def nan_over_fsdp(sharding, w):
        split = any("fsdp" in axes for axes in sharding.zero1_axes + sharding.compute_axes)
        w = gather(sharding, w)
        if axis_size("fsdp") == 1 or not split or not w.ndim:
            return w
        return jnp.where(axis_index("fsdp") == 1, jnp.nan, w)

    monkeypatch.setattr("maxbench.step.train_step.gather_master", nan_over_fsdp)
    results = found(run)
    assert results[0][0]  # each GPU alone is right
    wrong = [text for right, text in results if not right]
    assert any(text.startswith("4 devices, dp 2 x fsdp 2, ") for text in wrong)
    assert not any(
        text.startswith(("4 devices, dp 4,", "4 devices, dp 2 x tp 2,")) for text in wrong
    )


def test_what_is_not_finite_or_apart_is_wrong():
    reference = Gradients(6.0, 1.0, {})
    right = lambda loss, norm: numerics._compare(Gradients(loss, norm, {}), reference, 0.01)
    assert right(6.01, 1.001)[0]
    assert not right(6.01, 1.02)[0]
    assert not right(float("nan"), 1.0)[0]
    assert right(6.0, float("inf")) == (
        False, "loss 6, a CPU's 6, gradient norm inf, a CPU's 1: more than 1% apart"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "devices", "layout"),
    [
        ({"fsdp": 8, "tp": 4}, 32, "dp 8 x fsdp 2 x tp 2"),
        ({"fsdp": 8, "tp": 4}, 2, "fsdp 2"),
        ({"pp": 4, "fsdp": 2}, 6, "dp 3 x fsdp 2"),
        ({"dp": 8}, 1, ""),
    ],
)
def test_the_mesh_has_the_axes_of_the_run(flags, devices, layout):
    run = resolve("llama31_8b", **flags, mbs=1, gbs=64)
    one = numerics.toy(run, "llama31_8b", devices)
    assert one.layout.gpus == devices
    assert layout in one.layout.describe()
    assert one.model.embed == 128
    alone = numerics.toy(run, "llama31_8b", 1, gbs=one.layout.gbs)
    assert alone.layout.gbs == one.layout.gbs


def test_relative_errors():
    x = jnp.array([3.0, 4.0])
    assert float(numerics._relative(x * 1.1, x)) == pytest.approx(0.1)
    assert np.isinf(float(numerics._relative(x.at[0].set(jnp.nan), x)))


def test_a_reference_that_fails_says_why(run, monkeypatch):
    monkeypatch.setattr(numerics, "REFERENCE", "raise SystemExit('no memory')")
    with pytest.raises(UserError, match="no reference of a CPU: no memory"):
        numerics.of_cpu(run)
