"""Batches: synthetic ones, and those of files."""

import math

import numpy as np
import pytest

from maxbench.sharding import mesh
from maxbench.step import data, token_files
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


@pytest.fixture
def files(tmp_path):
    """A file of 40 sequences of 16 tokens, each of which begins with its number."""
    tokens = np.arange(40 * 16 + 1, dtype=np.uint16)
    np.save(tmp_path / "x.npy", np.where(tokens % 16, 100, tokens // 16 % 40))
    return {"train.data": str(tmp_path / "x.npy")}


def of_files(overrides, **flags):
    run = resolve("llama31_8b", "tiny", overrides, seq=16, **flags)
    return data.FromFiles(run, mesh.make_mesh(run.layout), token_files.of_run(run))


def numbers(batches, steps):
    """The sequences of some batches, by their first tokens."""
    return [int(n) for _ in range(steps) for n in np.asarray(next(batches))[..., 0].ravel()]


def test_an_epoch_has_each_sequence_once_in_an_order_of_its_own(files):
    first, second = np.split(np.array(numbers(of_files(files, mbs=8), 10)), 2)
    assert sorted(first) == sorted(second) == [*range(40)]
    assert [*first] != [*second] != [*range(40)]
    assert numbers(of_files(files | {"train.seed": 3}, mbs=8), 5) != [*first]
    assert numbers(of_files(files, mbs=8), 10) == [*first, *second]


@pytest.mark.parametrize(
    "layout",
    [dict(mbs=8), dict(dp=2, fsdp=2, cp=2, tp=2, gbs=8), dict(pp=2, fsdp=2, mbs=2, gbs=8)],
)
def test_every_mesh_reads_the_same_sequences_and_continues_those_of_another(files, layout):
    alone = of_files(files, mbs=4)
    expected = numbers(alone, 3)
    state = alone.state()
    expected += numbers(alone, 16)
    batches = of_files(files, **layout)
    assert numbers(batches, 5) == expected[:40]
    assert batches.restore(state) == ""
    assert numbers(batches, 8) == expected[12:]
    assert batches.state() == {"position": 76, "order": state["order"]}
    batch = next(batches)
    rows = {axis: n for axis, n in layout.items() if axis in ("dp", "fsdp")}
    width = batch.shape[1] // math.prod(rows.values())
    assert {shard.data.shape for shard in batch.addressable_shards} == {(len(batch), width, 17)}


def test_other_files_or_seeds_begin_anew(files, tmp_path):
    state = of_files(files, mbs=4).state() | {"position": 8}
    batches = of_files(files | {"train.seed": 1}, mbs=4)
    assert batches.restore(state) == "the checkpoint's had other files, train.seq or train.seed"
    assert batches.restore({"next_step": 3}) != ""
    assert batches.position == 0
    run = resolve("llama31_8b", "tiny")
    synthetic = data.Synthetic(run, mesh.make_mesh(run.layout))
    assert synthetic.restore(state) == "the checkpoint's were of files"
