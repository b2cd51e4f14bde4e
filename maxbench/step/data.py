"""Synthetic batches, generated on the device from (seed, step, sequence), new in every step.

train.data=random draws tokens uniformly, for measuring speed. train.data=markov draws them from a
fixed Markov chain, which a model can learn: its loss shows the effect of a number format on
training (benchmarks/fp8_loss.py).
"""

import jax
import jax.numpy as jnp

from maxbench.config.run import Run
from maxbench.sharding import mesh

SUCCESSORS = 4  # of each token in the Markov chain, equally likely: the minimum loss is ln 4


def batch(run: Run, step: jax.Array, micro: jax.Array | int) -> tuple[jax.Array, ...]:
    """This GPU's tokens and targets in one microbatch, int32 [mbs, seq / cp] each; in shard_map.
    With multi-token prediction, also the tokens after the targets.

    A sequence depends on (seed, step, its index in the global batch) only, so that every mesh
    trains on the same tokens. Over cp each GPU has the positions of mesh.token_positions().
    """
    key = jax.random.fold_in(jax.random.key(run.train.seed), step)
    source = {"random": _random, "markov": _markov}[run.train.data]
    length = run.train.seq + 1 + run.model.mtp_layers
    draw = lambda i: source(jax.random.fold_in(key, i), length, run.model.vocab)
    tokens_bt = jax.vmap(draw)(mesh.sequence_ids(run.layout, micro))
    position_t = jnp.asarray(mesh.token_positions(run.train.seq))
    after = (tokens_bt[:, position_t + 2],) if run.model.mtp_layers else ()
    return tokens_bt[:, position_t], tokens_bt[:, position_t + 1], *after


def _random(key, length: int, vocab: int):
    return jax.random.randint(key, (length,), 0, vocab)


def _markov(key, length: int, vocab: int):
    table = jax.random.randint(jax.random.key(0), (vocab, SUCCESSORS), 0, vocab)
    first, picks = jax.random.split(key)
    step = lambda token, pick: (table[token, pick], token)
    picks = jax.random.randint(picks, (length,), 0, SUCCESSORS)
    return jax.lax.scan(step, jax.random.randint(first, (), 0, vocab), picks)[1]
