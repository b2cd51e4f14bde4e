"""Synthetic batches."""

import math

import numpy as np
import pytest

from maxbench.sharding import mesh
from maxbench.step import data
from tests.conftest import resolve


def test_tokens_differ_between_steps_sequences_and_seeds():
    run = resolve("llama31_8b", "tiny", mbs=4)
    batches = [np.asarray(data.microbatch(run, data.draw(run, i), 0)[0]) for i in (0, 1)]
    tokens = np.concatenate(batches)
    assert len(np.unique(tokens, axis=0)) == 8
    assert tokens.min() >= 0
    assert tokens.max() < run.model.vocab
    tokens, targets = data.microbatch(run, data.draw(run, 0), 0)  # targets are the next tokens
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    other = resolve("llama31_8b", "tiny", mbs=4, overrides={"train.seed": 1})
    assert not np.array_equal(data.draw(run, 0), data.draw(other, 0))


def test_every_mesh_draws_the_same_batch_and_the_iterator_continues():
    axes = dict(dp=2, fsdp=2, cp=2, tp=2, mbs=2, gbs=16)
    run = resolve("llama31_8b", "tiny", **axes)
    batches = data.Synthetic(run, mesh.make_mesh(run.layout))
    first, second = next(batches), next(batches)
    assert first.shape == (2, 8, run.train.seq + 1)
    assert first.addressable_shards[0].data.shape == (2, 2, run.train.seq + 1)
    one = resolve("llama31_8b", "tiny", mbs=16)
    for step, batch in enumerate((first, second)):
        alone = np.asarray(data.draw(one, step)).reshape(first.shape)
        np.testing.assert_array_equal(batch, alone)
    again = data.Synthetic(run, mesh.make_mesh(run.layout))
    again.restore({"next_step": 1})
    np.testing.assert_array_equal(next(again), second)
    assert again.state() == {"next_step": 2} == batches.state()


@pytest.mark.parametrize(("kind", "tokens", "successors"), [("bigram", 32, 4), ("uniform", 64, 64)])
def test_loss_floor_is_the_entropy_of_the_data(kind, tokens, successors):
    settings = {"train.data": kind, "model.vocab": 64}
    run = resolve("llama31_8b", "tiny", settings, seq=4096, mbs=16)
    (batch,) = np.asarray(data.draw(run, 0))
    counts = np.zeros((64, 64))
    np.add.at(counts, (batch[:, :-1], batch[:, 1:]), 1)
    counts = counts[counts.any(1)]
    assert (len(counts), *set((counts > 0).sum(1))) == (tokens, successors)
    shares = counts / counts.sum(1, keepdims=True)
    measured = -(counts * np.log(shares, where=shares > 0, out=shares * 0)).sum() / counts.sum()
    assert measured == pytest.approx(data.entropy(run), rel=0.01)
    assert data.entropy(run) == math.log(successors)
