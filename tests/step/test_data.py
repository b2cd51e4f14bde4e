"""Synthetic batches."""

import numpy as np

from maxbench.step import data
from tests.conftest import resolve


def test_tokens_differ_between_steps_sequences_and_seeds():
    run = resolve("llama31_8b", "tiny", mbs=4)
    batches = [np.asarray(data.batch(run, step, 0)[0]) for step in (0, 1)]
    tokens = np.concatenate(batches)
    assert len(np.unique(tokens, axis=0)) == 8
    assert tokens.min() >= 0
    assert tokens.max() < run.model.vocab
    tokens, targets = data.batch(run, 0, 0)  # targets are the next tokens
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    assert not np.array_equal(
        batches[0],
        data.batch(resolve("llama31_8b", "tiny", mbs=4, overrides={"train.seed": 1}), 0, 0)[0],
    )
