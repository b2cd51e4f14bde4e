"""Batches of a step, and the iterator of synthetic ones.

A batch is int32 [microbatches, sequences of a microbatch, tokens]. In row-major order, sequences
have the same numbers on every mesh. A sequence has the tokens that the model reads and the targets,
which are the next tokens: train.seq + 1, and one more for multi-token prediction. The data axes
split the second dim; the other axes have copies.

train.data=uniform draws tokens uniformly, for measuring speed: no model predicts them. train.data=
bigram draws each from the successors that a fixed random table gives the token before, so a model
learns it in a few steps: its loss falls to the entropy of the table, entropy().
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbench.config.run import Run
from maxbench.sharding import mesh

BIGRAM_TOKENS = 32  # of the vocabulary that bigram data use, at most
SUCCESSORS = 4  # of each of these tokens, equally likely
SPEC = P(None, mesh.DATA_AXES)  # of a batch


def shape(run: Run) -> tuple[int, int, int]:
    """The shape of a global batch."""
    a = run.layout
    return a.microbatches, a.mbs * a.shards, run.train.seq + 1 + run.model.mtp_layers


def abstract(run: Run, devices: Mesh) -> jax.ShapeDtypeStruct:
    """A batch without its tokens."""
    return jax.ShapeDtypeStruct(shape(run), jnp.int32, sharding=NamedSharding(devices, SPEC))


def microbatch(run: Run, batch: jax.Array, micro: jax.Array | int) -> tuple[jax.Array, ...]:
    """Tokens and targets of one microbatch on this GPU, int32 [mbs, seq / cp] each; in shard_map.
    With multi-token prediction, also the tokens after the targets.

    Args:
      batch: this GPU's part of the batch.
    """
    tokens_bt = batch[micro]
    position_t = jnp.asarray(mesh.token_positions(run.train.seq))
    after = (tokens_bt[:, position_t + 2],) if run.model.mtp_layers else ()
    return tokens_bt[:, position_t], tokens_bt[:, position_t + 1], *after


def draw(run: Run, step: jax.Array | int) -> jax.Array:
    """The synthetic global batch of a step. A sequence depends on (seed, step, its number) only."""
    key = jax.random.fold_in(jax.random.key(run.train.seed), step)
    source = {"uniform": _uniform, "bigram": _bigram}[run.train.data]
    microbatches, sequences, length = shape(run)
    one = lambda i: source(jax.random.fold_in(key, i), length, run.model.vocab)
    return jax.vmap(jax.vmap(one))(
        jnp.arange(microbatches * sequences).reshape(microbatches, sequences)
    )


class Synthetic(Iterator[jax.Array]):
    """Synthetic batches, generated on the devices: each GPU draws its own sequences.

    Attributes:
      next_step: the step whose batch comes next.
    """

    def __init__(self, run: Run, devices: Mesh):
        self.next_step = 0
        sharding = NamedSharding(devices, SPEC)
        self._draw = jax.jit(functools.partial(draw, run), out_shardings=sharding)

    def __next__(self) -> jax.Array:
        batch = self._draw(self.next_step)
        self.next_step += 1
        return batch

    def state(self) -> dict[str, Any]:
        """The state of the iterator, for a checkpoint."""
        return {"next_step": self.next_step}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from state()."""
        self.next_step = int(state["next_step"])


def entropy(run: Run) -> float:
    """Entropy of the next token given all tokens before, in nats: the least mean loss."""
    return math.log(run.model.vocab if run.train.data == "uniform" else SUCCESSORS)


def _uniform(key, length: int, vocab: int):
    return jax.random.randint(key, (length,), 0, vocab)


def _bigram(key, length: int, vocab: int):
    """Token i of a random order is followed by tokens i + 1 to i + SUCCESSORS of it, cyclically:
    a random walk, whose positions are sums of its steps, computed in parallel."""
    order = jax.random.permutation(jax.random.key(0), vocab)[:BIGRAM_TOKENS]
    first, steps = jax.random.split(key)
    steps = jax.random.randint(steps, (length,), 1, SUCCESSORS + 1)
    start = jax.random.randint(first, (), 0, order.size)
    return order[(start + jnp.cumsum(steps)) % order.size].astype(jnp.int32)
