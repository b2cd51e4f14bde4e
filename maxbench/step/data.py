"""Batches of a step: an iterator of synthetic ones, and one of those of files.

A batch is int32 [microbatches, sequences of a microbatch, tokens]. In row-major order, sequences
have the same numbers on every mesh. A sequence has the tokens that the model reads and the targets,
which are the next tokens: train.seq + 1, and model.mtp_layers more. The data axes
split the second dim; the other axes have copies.

train.data=uniform draws tokens uniformly, for measuring speed: no model predicts them. train.data=
bigram draws each from the successors that a fixed random table gives the token before, so a model
learns it in a few steps: its loss falls to the entropy of the table, entropy(). Any other value is
the path of token files or texts (token_files.py).
"""

import functools
import math
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbench.config.run import Run
from maxbench.sharding import collectives, mesh
from maxbench.step import token_files

BIGRAM_TOKENS = 32  # of the vocabulary that bigram data use, at most
SUCCESSORS = 4  # of each of these tokens, equally likely
SPEC = P(None, mesh.DATA_AXES)  # of a batch
PREFETCHED = 4  # batches of files that are read ahead


def shape(run: Run) -> tuple[int, int, int]:
    """The shape of a global batch."""
    a = run.layout
    return a.microbatches, a.mbs * a.shards, run.train.seq + 1 + run.model.mtp_layers


def abstract(run: Run, devices: Mesh) -> jax.ShapeDtypeStruct:
    """A batch without its tokens."""
    return jax.ShapeDtypeStruct(shape(run), jnp.int32, sharding=NamedSharding(devices, SPEC))


def microbatch(run: Run, batch: jax.Array, micro: jax.Array | int) -> tuple[jax.Array, ...]:
    """Tokens and targets of one microbatch on this GPU, int32 [mbs, seq / cp] each; in shard_map.
    With multi-token prediction, also the tokens after the targets, of each of model.mtp_layers. A
    target in another document (train.document_end) is -1.

    Args:
      batch: this GPU's part of the batch.
    """
    tokens_bt = batch[micro]
    position_t = jnp.asarray(mesh.token_positions(run.train.seq))
    after = [tokens_bt[:, position_t + i] for i in range(2, 2 + run.model.mtp_layers)]
    tokens_bt, targets_bt = tokens_bt[:, position_t], tokens_bt[:, position_t + 1]
    if (end := run.train.document_end) is not None:
        targets_bt = jnp.where(tokens_bt == end, -1, targets_bt)
    return tokens_bt, targets_bt, *after


def documents(run: Run, tokens_bt: jax.Array) -> jax.Array | None:
    """Number of each token's document in its sequence, int32 [b, seq]; None without
    train.document_end, which belongs to the document that it ends."""
    if run.train.document_end is None:
        return None
    ends_bt = (tokens_bt == run.train.document_end).astype(jnp.int32)
    return jnp.cumsum(ends_bt, 1) - ends_bt


def targets(run: Run, batch: jax.Array) -> jax.Array:
    """The number of targets in a batch, or in this GPU's part of one, fp32."""
    tokens = batch[..., : run.train.seq]
    if run.train.document_end is None:
        return jnp.float32(tokens.size)
    return jnp.sum(tokens != run.train.document_end, dtype=jnp.float32)


def share(run: Run, batch: jax.Array) -> jax.Array | None:
    """1 / the number of targets in the global batch, from this GPU's part; in shard_map. None
    without train.document_end: it is a constant then."""
    if run.train.document_end is None:
        return None
    return 1 / jnp.maximum(collectives.psum(targets(run, batch), *mesh.DATA_AXES), 1)


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
        self._draw: Any = jax.jit(functools.partial(draw, run), out_shardings=sharding)

    def compile(self) -> None:
        """Compiles the program that draws a batch, before the first one is drawn."""
        self._draw = self._draw.lower(self.next_step).compile()

    def __next__(self) -> jax.Array:
        batch = self._draw(self.next_step)
        self.next_step += 1
        return batch

    def state(self) -> dict[str, Any]:
        """The state of the iterator, for a checkpoint."""
        return {"next_step": self.next_step}

    def restore(self, state: dict[str, Any]) -> str:
        """Continues from state(); returns '', or why it begins anew."""
        self.next_step = int(state.get("next_step", 0))
        return "" if "next_step" in state else "the checkpoint's were of files"


class FromFiles(Iterator[jax.Array]):
    """Batches of the sequences of files, which a process reads ahead for its own devices.

    The order of sequences is a function of the files, train.seq and train.seed alone, with another
    permutation in each epoch: the position in it is the whole state, on any mesh and for any gbs.

    Args:
      files: the sequences, token_files.of_run(run).
      shuffled: False for the order of the files.

    Attributes:
      position: number of sequences that all processes together have read.
    """

    def __init__(self, run: Run, devices: Mesh, files: token_files.Windows, shuffled: bool = True):
        import grain  # takes a second, and is needed for files alone

        self.files, self.seed = files, run.train.seed
        sequences = grain.MapDataset.source(files)
        sequences = sequences.shuffle(run.train.seed) if shuffled else sequences
        self.sequences = sequences.repeat()
        self.read_options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=PREFETCHED)
        self.shape, self.sharding = shape(run), NamedSharding(devices, SPEC)
        owned: Any = self.sharding.addressable_devices_indices_map(self.shape).values()
        # The sequences of a microbatch that the devices of this process need.
        self.rows = sorted({i for _, rows, _ in owned for i in range(*rows.indices(self.shape[1]))})
        self.position = 0
        self.batches: Iterator[np.ndarray] | None = None

    def _read_ahead(self) -> Iterator[np.ndarray]:
        """This process's parts of the batches from self.position on."""
        import grain

        microbatches, width, _ = self.shape
        numbers = self.position + np.arange(microbatches)[:, None] * width + self.rows
        of_step = lambda i: numbers + i * microbatches * width
        read = lambda i: np.stack([[self.sequences[int(n)] for n in row] for row in of_step(i)])
        steps = grain.MapDataset.range(sys.maxsize).map(read)
        return iter(steps.to_iter_dataset(self.read_options))

    def __next__(self) -> jax.Array:
        self.batches = self.batches or self._read_ahead()
        part = next(self.batches)

        def of_device(index: Any) -> np.ndarray:
            first, end, _ = index[1].indices(self.shape[1])
            start = self.rows.index(first)
            return part[:, start : start + end - first]

        self.position += self.shape[0] * self.shape[1]
        return jax.make_array_from_callback(self.shape, self.sharding, of_device)

    def rewind(self) -> None:
        """Continues with the first sequence."""
        self.position, self.batches = 0, None

    def state(self) -> dict[str, Any]:
        """The state of the iterator, for a checkpoint."""
        return {"position": self.position, "order": self.order()}

    def order(self) -> list[int]:
        """Numbers that are equal where the sequences and their order are."""
        return [*self.files.fingerprint(), self.seed]

    def restore(self, state: dict[str, Any]) -> str:
        """Continues from state(); returns '', or why it begins anew."""
        same = state.get("order") == self.order()
        self.position, self.batches = state["position"] if same else 0, None
        return "" if same else "the checkpoint's had other files, train.seq or train.seed"


Batches = Synthetic | FromFiles


def entropy(run: Run) -> float | None:
    """Entropy of the next token given all tokens before, in nats: the least mean loss. None for
    files."""
    if run.train.reads_files:
        return None
    return math.log(run.model.vocab if run.train.data == "uniform" else SUCCESSORS)


def _uniform(key, length: int, vocab: int):
    return jax.random.randint(key, (length,), 0, vocab)


def bigram_tokens(vocab: int) -> jax.Array:
    """The tokens that bigram data use, in the order of the walk."""
    return jax.random.permutation(jax.random.key(0), vocab)[:BIGRAM_TOKENS]


def _bigram(key, length: int, vocab: int):
    """Token i of a random order is followed by tokens i + 1 to i + SUCCESSORS of it, cyclically:
    a random walk, whose positions are sums of its steps, computed in parallel."""
    order = bigram_tokens(vocab)
    first, steps = jax.random.split(key)
    steps = jax.random.randint(steps, (length,), 1, SUCCESSORS + 1)
    start = jax.random.randint(first, (), 0, order.size)
    return order[(start + jnp.cumsum(steps)) % order.size].astype(jnp.int32)
