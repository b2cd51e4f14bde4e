"""Whole training steps in FP8: against bf16, on several meshes, and across a checkpoint."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from maxbench.model import layer_stack
from maxbench.run import checkpoint, restore
from maxbench.step import data
from maxbench.step.train_step import Step
from tests.kinds import dense, routed
from tests.quantization.fp8_step import FAMILIES, build
from tests.step.test_parallelism import gradients, overlap_zero  # noqa: F401

# Of uniform tokens, whose loss falls slowly: a difference of losses is that of the formats.
FAST = {"optim.warmup": 2.0, "optim.lr": 3e-3, "train.data": "uniform"}


def losses(step: Step, steps: int) -> np.ndarray:
    compiled, state, values = step.lower().compile(), step.init(), []
    batches = data.Synthetic(step.run, step.mesh)
    for _ in range(steps):
        state, out = compiled(state, next(batches))
        values.append(float(out["loss"]))
    return np.array(values)


@functools.cache
def bf16_losses(family: str) -> np.ndarray:
    """Losses of three steps in bf16."""
    return losses(build(FAMILIES[family], "bf16", FAST), 3)


@functools.cache
def single_device(family: str):
    """Weights, FP8 gradients and loss on one device; their relative distances to bf16's."""
    step = build(FAMILIES[family])
    params = jax.device_get(step.init()["params"])
    grads, out = gradients(step, params)
    bf16_grads, bf16 = gradients(build(FAMILIES[family], "bf16"), params)
    return params, grads, out["loss"], distance(grads, bf16_grads), out["loss"] / bf16["loss"] - 1


def distance(actual, expected) -> float:
    """The largest over weights of |actual - expected| / |expected|, of their gradients."""
    norm = lambda x: np.linalg.norm(np.asarray(x, np.float64).ravel())
    distances = jax.tree.map(lambda a, b: norm(a - b) / norm(b), actual, expected)
    return max(jax.tree.leaves(distances))


exhaustive = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(name, marks=exhaustive) for name in ("nemotron", "grok"))],
)
def test_fp8_differs_from_bf16_by_rounding(family):
    """Operands have 3 or 2 bits of mantissa, so gradients differ by about an eighth."""
    *_, rounding, loss = single_device(family)
    assert 0 < abs(loss) < 3e-4
    assert 0 < rounding < 0.2


@exhaustive
def test_backward_pass_uses_the_slots_of_the_forward_pass():
    """Recomputed in bf16, x rounds differently, which would change the ranks of similar tokens."""
    overrides = {"model.top_k": 4, "model.capacity_factor": 1.0}
    single, pipeline = (
        build(FAMILIES["grok"], "bf16", overrides, **axes) for axes in ({}, dict(pp=2, mbs=1))
    )
    params = jax.device_get(single.init()["params"])
    actual, expected = (gradients(step, params)[0] for step in (pipeline, single))
    assert distance(actual, expected) < 0.05  # 0.33 if the slots differ


MESHES = [
    pytest.param("llama", dict(fsdp=2, cp=2, tp=2), marks=exhaustive),
    pytest.param("llama", dict(pp=2, vp=2, tp=2, mbs=1), marks=[pytest.mark.core, exhaustive]),
    pytest.param("nemotron", dict(fsdp=2, tp=2), marks=exhaustive),
    pytest.param("grok", dict(pp=2, ep=2, tp=2, mbs=1), marks=exhaustive),
]


@pytest.mark.parametrize(("family", "axes"), MESHES, ids=str)
def test_meshes_differ_by_rounding_only(family, axes):
    """With current scaling each GPU scales its own part of a tensor, so every mesh rounds
    differently: less than FP8 differs from bf16."""
    params, grads, loss, rounding, _ = single_device(family)
    actual, out = gradients(build(FAMILIES[family], **axes), params)
    np.testing.assert_allclose(out["loss"], loss, rtol=5e-4)
    assert distance(actual, grads) < rounding


# Scalings that do not depend on the mesh, and a GPU type that has them. Losses then differ between
# meshes only by the order of sums in bf16.
GPU_TYPE = {"delayed": "h100", "mxfp8": "gb200"}
PIPELINE = dict(pp=2, vp=2, cp=2, mbs=1)


@functools.cache
def program(family: str, scaling: str, unroll: int = 0, **axes):
    """The step and its compiled program."""
    overrides = FAST | {
        "precision.scaling": scaling,
        "precision.history": 4,
        "train.unroll_layers": unroll,
        "train.two_batch_overlap": "ep" in axes and axes["mbs"] > 1,
    }
    step = build(FAMILIES[family], "fp8", overrides, gpu_type=GPU_TYPE[scaling], **axes)
    return step, step.lower().compile()


def train(family: str, scaling: str, steps: int = 3, **axes):
    """Losses, the final state, and the step with its compiled program."""
    step, compiled = program(family, scaling, **axes)
    state, values, batches = step.init(), [], data.Synthetic(step.run, step.mesh)
    for _ in range(steps):
        state, out = compiled(state, next(batches))
        values.append(float(out["loss"]))
    return np.array(values), state, step, compiled


@functools.cache
def single_device_training(family: str, scaling: str):
    """Losses, the amax history or None, and the step with its compiled program."""
    values, state, *step = train(family, scaling)
    return values, amax_history(state, step[0]) if scaling == "delayed" else None, *step


def amax_history(state, step: Step) -> np.ndarray:
    """[layers, gemms, 3, steps], in the order of layers."""
    history = np.asarray(state["layer_state"]["layers"]["amax"])
    return history[np.argsort(step.stacks[0].slots)]


@exhaustive
@pytest.mark.parametrize(
    ("family", "scaling", "axes"),
    [
        # Two microbatches, unrolled layers.
        ("llama", "delayed", dict(dp=2, tp=2, mbs=1, unroll=4)),
        ("llama", "delayed", PIPELINE),
        ("llama", "mxfp8", dict(fsdp=4, tp=2)),
        ("grok", "mxfp8", dict(ep=2, mbs=1)),
        # The halves of a microbatch run in turn.
        ("grok", "mxfp8", dict(ep=2, mbs=2, unroll=4)),
        ("grok", "delayed", dict(ep=2, mbs=2, unroll=4)),
    ],
    ids=str,
)
def test_delayed_scaling_and_mxfp8_train_as_bf16_on_every_mesh(family, scaling, axes):
    values, state, step, _ = train(family, scaling, **axes)
    if family == "llama":
        expected, expected_history, *_ = single_device_training(family, scaling)
        np.testing.assert_allclose(values, expected, rtol=5e-4)
    bf16 = bf16_losses(family)
    assert (values != bf16).any()
    np.testing.assert_allclose(values, bf16, rtol=2e-3)
    if scaling == "delayed":
        history = amax_history(state, step)
        assert (history[..., 0] == 0).all()  # three steps in a history of four
        assert (history[..., 1:] > 0).all()
        if family == "llama":
            first, expected_first = history[..., 1], expected_history[..., 1]
            np.testing.assert_allclose(first, expected_first, rtol=0.2)
            np.testing.assert_array_equal(first[..., 2], expected_first[..., 2])  # of weights
            # The input of the first layer's first GEMM (attn/qkv) is the same on every mesh.
            np.testing.assert_array_equal(first[0, 1, 0], expected_first[0, 1, 0])


@exhaustive
@pytest.mark.xdist_group("test_fp8_training llama")  # shares the programs of the test above
def test_checkpoint_contains_the_amax_history(tmp_path):
    """Training continues on one device from a checkpoint of two stages, in another layer order."""
    _, state, step, compiled = train("llama", "delayed", 2, **PIPELINE)
    batches = data.Synthetic(step.run, step.mesh)
    batches.restore({"next_step": 2})
    with checkpoint.Saver(tmp_path, step.run, batches.state) as saver:
        saver.save(state)
    saved = amax_history(state, step)
    state, out = compiled(state, next(batches))
    *_, single, compiled = single_device_training("llama", "delayed")
    checkpoints = restore.find_checkpoints(str(tmp_path), single.run)
    table = lambda stacks: layer_stack.stacks_from_json(step.run.model, stacks)
    read = restore.read_onto(lambda stacks: single.with_stacks(table(stacks)))
    _, restored = restore.restore(checkpoints, read)
    restored = single.restack(restored, step.stacks)
    actual = amax_history(restored, single)
    np.testing.assert_array_equal(actual, saved)
    batches = data.Synthetic(single.run, single.mesh)
    batches.restore({"next_step": 2})
    restored, restored_out = compiled(restored, next(batches))
    np.testing.assert_allclose(restored_out["loss"], out["loss"], rtol=5e-4)
    actual, expected = amax_history(restored, single), amax_history(state, step)
    np.testing.assert_array_equal(actual[..., :3], expected[..., :3])
    current = dataclasses.replace(single.run.precision, scaling="current")
    with pytest.raises(ValueError, match=r"has 4 steps.*scaling=delayed.*history=4"):
        restore.find_checkpoints(str(tmp_path), dataclasses.replace(single.run, precision=current))


@exhaustive
def test_layers_that_differ_train_alike_in_a_pipeline(tmp_path):
    """A dense layer, then experts, the last layer in bf16: two steps with delayed scaling on one
    device and on two stages, whose checkpoint has the weights and amax histories of the former."""
    overrides = {
        "model.layer_groups": ((1, (dense(256),)), (3, (routed(128, 4),))),
        "model.top_k": 4,
        "precision.scaling": "delayed",
        "precision.history": 4,
        "precision.bf16_layers": (0, 1),
        "optim.lr": 1e-4,  # a weight whose gradient rounds to another sign stays within 2 %
    }
    states, steps = [], []
    for axes in ({}, dict(pp=2, mbs=1)):
        step = build(FAMILIES["grok"], "fp8", overrides, gpu_type="h100", **axes)
        compiled, state = step.lower().compile(), step.init()
        batches = data.Synthetic(step.run, step.mesh)
        for _ in range(2):
            state, out = compiled(state, next(batches))
        states.append((state, out["loss"]))
        steps.append(step)
    (expected, loss), (state, pipeline_loss) = states
    np.testing.assert_allclose(pipeline_loss, loss, rtol=5e-4)
    single, pipeline = steps
    with checkpoint.Saver(tmp_path, pipeline.run, dict) as saver:
        saver.save(state)
    table = lambda stacks: layer_stack.stacks_from_json(pipeline.run.model, stacks)
    read = restore.read_onto(lambda stacks: single.with_stacks(table(stacks)))
    _, restored = restore.restore(restore.find_checkpoints(str(tmp_path), single.run), read)
    restored = single.restack(restored, pipeline.stacks)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=0.02 * np.abs(b).max())
    for part in ("params", "layer_state"):
        jax.tree.map(close, *jax.device_get((restored[part], expected[part])))
