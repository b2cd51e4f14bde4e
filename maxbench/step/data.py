"""Synthetic tokens, made on the device from (seed, step, row): never the same batch twice.

They are random, so that there is nothing to learn and nothing but speed to measure; or text of a
fixed Markov source, on which a loss can show what a number format does to training.
"""

import jax
import jax.numpy as jnp

from maxbench.config.run import Run
from maxbench.sharding import mesh

SUCCESSORS = 4  # of each token in the Markov source, all as likely: no loss is below its logarithm


def batch(run: Run, step: jax.Array, micro: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """tokens_bt and targets_bt of this GPU for one microbatch.

    A row of the global batch depends on (seed, step, row) alone, so every mesh trains on the same
    tokens. Over cp each GPU keeps its part of the row, in the order of axes.chunks.
    """
    key = jax.random.fold_in(jax.random.key(run.train.seed), step)
    source = {"random": _random, "markov": _markov}[run.train.data]
    draw = lambda row: source(jax.random.fold_in(key, row), run.train.seq + 1, run.model.vocab)
    tokens_bt = jax.vmap(draw)(mesh.sequence_ids(run.layout, micro))
    here = jnp.asarray(mesh.token_positions(run.train.seq))
    return tokens_bt[:, here], tokens_bt[:, here + 1]


def _random(key, length: int, vocab: int):
    return jax.random.randint(key, (length,), 0, vocab)


def _markov(key, length: int, vocab: int):
    table = jax.random.randint(jax.random.key(0), (vocab, SUCCESSORS), 0, vocab)
    first, picks = jax.random.split(key)
    step = lambda token, pick: (table[token, pick], token)
    picks = jax.random.randint(picks, (length,), 0, SUCCESSORS)
    return jax.lax.scan(step, jax.random.randint(first, (), 0, vocab), picks)[1]
