"""Packed documents: loss and gradients are those of the documents alone, on every mesh."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbench.config.errors import UserError
from maxbench.model import attention, layer_stack
from maxbench.model.transformer import Transformer
from maxbench.sharding import mesh
from maxbench.step import data
from maxbench.step.train_step import Step
from tests import packing
from tests.conftest import resolve
from tests.kinds import dense
from tests.step.test_parallelism import assert_grads_close

END, GBS, SEQ = 7, 8, 32
FAMILIES = {
    "llama": {},
    # A window and sinks, and full attention, in turn.
    "windows": {
        "model.layer_groups": ((2, (dense(192, window=5, sinks=True), dense(192))),),
    },
}


def draw() -> np.ndarray:
    """Sequences of documents of 1 to 33 tokens, [GBS, SEQ + 1]."""
    random = np.random.default_rng(0)
    tokens = random.integers(8, 64, (GBS, SEQ + 1))
    ends = random.random(tokens.shape) < 0.12
    ends[3] = False  # a part of one document
    ends[5, [0, 1, SEQ]] = True  # a document without text; the last target is an end
    return np.where(ends, END, tokens).astype(np.int32)


def build(family: str, **axes) -> Step:
    shards = math.prod(axes.get(a, 1) for a in ("dp", "fsdp"))
    axes = {"gbs": GBS, "mbs": GBS // shards, **axes}
    settings = {"precision.grads": "fp32", "train.document_end": END, "train.loss_chunk": 24}
    settings |= FAMILIES[family] | {"layout.stages": axes.pop("stages", "")}
    run = resolve("llama31_405b", "tiny", settings, dtype="fp32", seq=SEQ, layers=4, **axes)
    return Step(run, mesh.make_mesh(run.layout))


def loss_of_documents_alone(run, params):
    """Each document is a sequence of its own, from position 0: the mean over their targets."""
    documents, targets = [], []
    for tokens in draw():
        read, following = tokens[:-1], np.where(tokens[:-1] == END, -1, tokens[1:])
        borders = np.flatnonzero(read == END) + 1
        documents += np.split(read, borders)
        targets += np.split(following, borders)
    padded = lambda x, fill: np.stack(
        [np.pad(d, (0, SEQ - len(d)), constant_values=fill) for d in x if len(d)]
    )
    tokens_bt, targets_bt = padded(documents, 0), padded(targets, -1)
    logits_btv = Transformer(run.model).apply({"params": params}, tokens_bt)
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits_btv), targets_bt[..., None], -1)[..., 0]
    return -jnp.sum(jnp.where(targets_bt >= 0, log_p, 0)) / np.sum(targets_bt >= 0)


@functools.cache
def alone(family: str):
    """Weights, and loss and gradients of the documents alone."""
    step = build(family)
    params = jax.device_get(step.init()["params"])
    loss = functools.partial(loss_of_documents_alone, step.run)
    return params, *jax.device_get(jax.jit(jax.value_and_grad(loss))(params))


@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("windows", dict(fsdp=2, tp=2, mbs=2)),
        pytest.param("windows", dict(pp=2, fsdp=2, mbs=1), marks=pytest.mark.exhaustive),
        pytest.param("llama", dict(dp=2, mbs=1), marks=pytest.mark.exhaustive),
        pytest.param("llama", dict(pp=2, vp=2, tp=2, mbs=1), marks=pytest.mark.exhaustive),
        # Kinds of layers that differ in a slot: branches, and recomputation from the input.
        pytest.param("windows", dict(pp=2, mbs=2, stages="1,3"), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_the_documents_alone(family, axes):
    assert_those_of_the_documents_alone(family, axes)


@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("windows", dict(fsdp=2, tp=2, mbs=2)),
        pytest.param("llama", dict(pp=2, vp=2, tp=2, mbs=1), marks=pytest.mark.exhaustive),
        pytest.param("windows", dict(pp=2, mbs=2, stages="1,3"), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_loss_and_gradients_of_cudnn_are_those_of_the_documents_alone(family, axes, monkeypatch):
    """With a CPU's form of cuDNN's sequence packing, in several calls."""
    alone(family)
    calls = packing.use(monkeypatch)
    monkeypatch.setitem(attention.KERNELS, "xla", attention.KERNELS["cudnn"])
    jax.clear_caches()  # layers that are traced have the other kernel
    try:
        assert_those_of_the_documents_alone(family, axes)
    finally:
        jax.clear_caches()
    assert {*calls} == {2 * axes["mbs"]}


def assert_those_of_the_documents_alone(family, axes):
    params, expected, grads = alone(family)
    step = build(family, **axes)
    stacks, canonical = step.stacks, layer_stack.stacks(step.run.model)
    shardings = jax.tree.map(lambda x: x.sharding, step.abstract["params"])
    params = params | {"layers": layer_stack.permute(params["layers"], stacks, canonical)}
    params = jax.device_put(params, shardings)
    batch = jax.device_put(draw().reshape(data.shape(step.run)))
    found, out, _ = jax.device_get(jax.jit(step.gradients)(params, batch))
    layers = layer_stack.permute(found["layers"], canonical, stacks)
    np.testing.assert_allclose(out["loss"], expected, rtol=2e-6)
    assert_grads_close(found | {"layers": jax.device_get(layers)}, grads)
    if step.run.layout.pp == 1:
        loss, targets = jax.jit(lambda *x: (step.loss(*x), data.targets(step.run, batch)))(
            params, batch
        )
        np.testing.assert_allclose(loss, expected, rtol=2e-6)
        assert targets == np.sum(draw()[:, :-1] != END)


REFUSED = {
    "train.document_end=512 is no token: model.vocab=512": ("llama31_8b", 512, {}),
    "mixers of kind mamba2 carry a state": ("nemotron_3_nano", 7, {}),
    "the attention between GPUs of cp=2 does not keep documents apart": (
        "llama31_8b",
        7,
        {"cp": 2},
    ),
    "multi-token prediction does not keep documents apart": ("deepseek_v3", 7, {}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_does_not_keep_documents_apart_is_refused(reason):
    workload, end, axes = REFUSED[reason]
    with pytest.raises(UserError, match=reason):
        resolve(workload, "tiny", {"train.document_end": end}, **axes)
