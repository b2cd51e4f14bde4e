"""Attention within packed documents by cuDNN's sequence packing.

cuDNN computes each document by itself, from its first token and its length, and stores no mask. The
number of documents that a call takes is fixed when it is compiled, so a batch with more of them is
computed in several calls, each of which writes the tokens of its own documents: the result is exact
for any number. XLA does not tell cuDNN the number of tokens: the scratch memory of the backward
pass is that of a batch with a sequence for each document of the call, so a call takes few of them
(WORKSPACE).

cuDNN's logsumexp is [document, head, token of the document]. It is rearranged to that of the
tokens, lse_bht, as sinks, saved activations and the other kernels have it.

Shape letters as in attention.py, and n document of a call.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxbench.config import loop_lengths
from maxbench.sharding import jax_compat

WORKSPACE = 2 << 30  # bytes of a backward pass's scratch memory, at most if 2 documents fit
TILE = 128  # tokens per document, on average, for which a call reserves memory
NO_TOKEN = 1e30  # logsumexp after the end of a document: probabilities of 0


def documents_per_sequence(tokens: int, sequences: int, heads: int, width: int) -> int:
    """Documents that a call takes, for each sequence of the batch; cuDNN needs 2."""
    # An fp32 sum of dq, and dk and dv of all heads in 16 bits.
    fitting = WORKSPACE // (8 * sequences * heads * tokens * width)
    return max(2, min(fitting, tokens // TILE))


class Documents(NamedTuple):
    """The documents of a batch in groups, one for each call.

    Attributes:
      number_bt: of each token's document among all of the batch.
      per_sequence: documents of a group for each sequence.
    """

    number_bt: jax.Array
    per_sequence: int

    @classmethod
    def of(cls, documents_bt: jax.Array, heads: int, width: int) -> "Documents":
        """
        Args:
          documents_bt: number of each token's document in its sequence, from 0 on.
        """
        b, t = documents_bt.shape
        count_b = documents_bt[:, -1] + 1
        number_bt = documents_bt + (jnp.cumsum(count_b) - count_b)[:, None]
        return cls(number_bt, documents_per_sequence(t, b, heads, width))

    @property
    def size(self) -> int:
        """Documents of a group."""
        return len(self.number_bt) * self.per_sequence

    @property
    def groups(self) -> jax.Array:
        return self.number_bt[-1, -1] // self.size + 1

    def starts(self, group: jax.Array | int) -> jax.Array:
        """First token of each document of a group, among all of the batch, and the token after the
        group; documents that are not there are empty. int32 [size + 1]."""
        first = group * self.size
        numbers_n = first + jnp.arange(self.size + 1, dtype=jnp.int32)
        # Numbers ascend, so that the smaller ones are those of the tokens before.
        before = self.number_bt.reshape(-1) < numbers_n[:, None]
        return jnp.sum(before, 1, dtype=jnp.int32)

    def select(self, group: jax.Array, own: jax.Array, others: jax.Array, axis: int) -> jax.Array:
        """`own` in the tokens of a group, and `others` elsewhere; tokens are dim `axis`."""
        is_own_bt = self.number_bt // self.size == group
        shape = [1] * own.ndim
        shape[0], shape[axis] = is_own_bt.shape
        return jnp.where(is_own_bt.reshape(shape), own, others)


def forward(
    q_bthk: jax.Array, k_bsgk: jax.Array, v_bsgk: jax.Array, documents_bt: jax.Array,
    scale: float, window: int,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """o_bthk and lse_bht."""
    width = v_bsgk.shape[-1]
    q, k, v = _of_one_width(q_bthk, k_bsgk, v_bsgk)
    documents = Documents.of(documents_bt, *q.shape[2:])

    def call(group):
        starts = documents.starts(group)
        mask = starts, documents.per_sequence, scale, window
        o, lse_nht = jax_compat.cudnn_attention_packed(q, k, v, *mask)
        return o[..., :width], _by_token(lse_nht, documents, starts, group)

    def add(group, sums):
        pairs = zip(call(group), sums, (1, 2), strict=True)
        return tuple(documents.select(group, *pair) for pair in pairs)

    return _for_groups(documents, call, add)


def backward(
    q_bthk: jax.Array, k_bsgk: jax.Array, v_bsgk: jax.Array, o_bthk: jax.Array,
    lse_bht: jax.Array, do_bthk: jax.Array, documents_bt: jax.Array, scale: float, window: int,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """dq, dk and dv."""
    widths = q_bthk.shape[-1], k_bsgk.shape[-1], v_bsgk.shape[-1]
    q, k, v, o, do = _of_one_width(q_bthk, k_bsgk, v_bsgk, o_bthk, do_bthk)
    documents = Documents.of(documents_bt, *q.shape[2:])

    def call(group):
        starts = documents.starts(group)
        lse_nht = _by_document(lse_bht, starts)
        mask = starts, documents.per_sequence, scale, window
        grads = jax_compat.cudnn_attention_packed_grad(q, k, v, o, lse_nht, do, *mask)
        return tuple(x[..., :width] for x, width in zip(grads, widths, strict=True))

    def add(group, sums):
        pairs = zip(call(group), sums, strict=True)
        return tuple(documents.select(group, *pair, 1) for pair in pairs)

    return _for_groups(documents, call, add)


def _of_one_width(*arrays):
    """Padded to the largest width of a head: zeros change no product."""
    width = max(x.shape[-1] for x in arrays)
    return [jnp.pad(x, ((0, 0),) * 3 + ((0, width - x.shape[-1]),)) for x in arrays]


def _for_groups(documents: Documents, call, add):
    """The first call is outside of the loop: mostly it is the only one, and nothing is selected."""
    first = call(0)
    with jax.named_scope(loop_lengths.DOCUMENT_GROUPS):
        return jax.lax.fori_loop(1, documents.groups, add, first)


def _by_token(lse_nht, documents: Documents, starts, group):
    """lse_bht; in tokens of other groups, any value."""
    shape = documents.number_bt.shape
    n_bt = jnp.clip(documents.number_bt - group * documents.size, 0, documents.size - 1)
    token_bt = jnp.arange(math.prod(shape), dtype=jnp.int32).reshape(shape)
    place_bt = jnp.clip(token_bt - starts[n_bt], 0, shape[1] - 1)
    return lse_nht[n_bt, :, place_bt].swapaxes(1, 2)


def _by_document(lse_bht, starts):
    """lse_nht of a group."""
    b, h, t = lse_bht.shape
    place_t = jnp.arange(t, dtype=jnp.int32)
    token_nt = jnp.minimum(starts[:-1, None] + place_t, b * t - 1)
    lse_nht = lse_bht.swapaxes(0, 1).reshape(h, b * t)[:, token_nt].swapaxes(0, 1)
    inside_nt = place_t < jnp.diff(starts)[:, None]
    return jnp.where(inside_nt[:, None], lse_nht, NO_TOKEN)
