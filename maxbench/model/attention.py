"""Causal grouped-query attention: one signature, several kernels, and context parallelism (ring).

No kernel stores a [seq, seq] tensor: cuDNN's flash attention never does, and the XLA kernel works
on blocks of queries. Each kernel returns (output, logsumexp), and its backward pass takes both as
inputs. This is all that ring attention over cp (arXiv:2310.01889) needs: outputs over disjoint sets
of keys merge by their logsumexps, and the gradients of each part are exact if computed from the
merged output and logsumexp. jax.nn.dot_product_attention calls the same cuDNN kernel, but its VJP
takes neither.

Shape letters: b batch, t query position, s key position, h heads, g KV heads, r = h / g,
k head_dim (that of the values may differ).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxbench.config.mixers import Attention
from maxbench.config.resolve import VALUE_SLICE
from maxbench.config.run import DTYPES, Run
from maxbench.model import packed_attention
from maxbench.sharding import collectives, jax_compat, ordering

BLOCK = 256  # queries whose scores are in memory at once in the XLA kernel
HALO_MULTIPLE = 64  # tokens that a window receives over cp, rounded up for the kernels


class Logits(NamedTuple):
    """Logits of attention, from the products of queries and keys.

    Attributes:
      scale: of the products.
      softcap: logits are capped by softcap x tanh(logits / softcap); 0 is off.
      window: tokens that a query attends to, itself included; 0 is all before it.
    """

    scale: float
    softcap: float = 0.0
    window: int = 0


def compile_error(run: Run) -> str:
    """Why the present device cannot compile the attention of a run; '' if it can."""
    kind, a, tokens = run.train.attention, run.layout, run.train.seq // run.layout.cp
    for m in [x.mixer for x in run.model.all_layers if isinstance(x.mixer, Attention)]:
        widths = (m.heads, m.head_dim), (m.kv_heads, m.head_dim), (m.kv_heads, m.value_width)
        shapes = [(a.mbs, tokens, heads // a.tp, width) for heads, width in widths]
        dtype = DTYPES[run.format.compute]
        qkv: list[Any] = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        if run.train.document_end is not None:
            qkv += [None, jax.ShapeDtypeStruct((a.mbs, tokens), jnp.int32)]
        attention = lambda *x, m=m: jnp.sum(attend(*x, kind=kind, window=m.window))
        try:
            jax.jit(jax.grad(attention, (0, 1, 2))).lower(*qkv).compile()
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            return f": {error}"
        # Transformer Engine does not use it for windows with a padding mask.
        if len(qkv) > 3 and m.window and jax_compat.cudnn_version() == (9, 14, 0):
            return ": cuDNN 9.14.0 is not used for windows within documents"
    return ""


def attend(
    q_bthk: jax.Array,
    k_bsgk: jax.Array,
    v_bsgk: jax.Array,
    sinks_h: jax.Array | None = None,
    documents_bt: jax.Array | None = None,
    *,
    kind: str,
    softcap: float = 0.0,
    scale: float = 0.0,
    window: int = 0,
) -> jax.Array:
    """Causal attention of this GPU's queries to the keys of all GPUs of cp.

    Args:
      q_bthk, k_bsgk, v_bsgk: this GPU's heads and tokens, at mesh.token_positions().
      sinks_h: a logit per head whose exponential joins the softmax's denominator, or None.
      documents_bt: number of each token's document in its sequence, from 0 on, to which attention
        is confined, or None; without cp, and not of kind 'cudnn_split'.
      kind: a key of KERNELS.
      softcap, window: as in Logits.
      scale: of logits; 0 is 1 / sqrt(head_dim).

    Returns:
      o_bthk, with the width of the values.
    """
    tokens, cp = k_bsgk.shape[1], collectives.axis_size("cp")
    window = 0 if window >= tokens * cp else window
    logits = Logits(scale or 1 / math.sqrt(q_bthk.shape[-1]), softcap, window)
    if window and cp > 1:
        return _attend_halo(kind, logits, q_bthk, k_bsgk, v_bsgk, sinks_h)
    return _attend(kind, logits, q_bthk, k_bsgk, v_bsgk, sinks_h, documents_bt)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(kind, logits, q, k, v, sinks, documents):
    return _attend_forward(kind, logits, q, k, v, sinks, documents)[0]


def _attend_forward(kind, logits, q, k, v, sinks, documents):
    o, lse, last = _ring_forward(kind, logits, q, k, v, documents)
    if sinks is not None:
        o, lse = _add_sinks(o, lse, sinks)
    o, lse = checkpoint_name((o.astype(k.dtype), lse), "context")
    last = tuple(map(checkpoint_name, last, ("key", "value")))
    return o, (q, k, v, sinks, documents, o, lse, last)


def _attend_backward(kind, logits, saved, do):
    q, k, v, sinks, documents, o, lse, last = saved
    dqkv = _ring_backward(kind, logits, q, k, v, documents, o, lse, last, do)
    return *dqkv, None if sinks is None else _sinks_grad(sinks, o, lse, do), None


_attend.defvjp(_attend_forward, _attend_backward)


# Sinks. A sink adds exp(sink) to the denominator of every query's softmax: o and the logsumexp of
# the keys alone are corrected for it. From the corrected ones, each kernel's backward pass gives
# the exact gradients of q, k and v.


def _add_sinks(o_bthk, lse_bht, sinks_h):
    total_bht = jnp.logaddexp(lse_bht, sinks_h.astype(jnp.float32)[:, None])
    weight_bth = jnp.exp(lse_bht - total_bht).swapaxes(1, 2)
    return o_bthk.astype(jnp.float32) * weight_bth[..., None], total_bht


def _sinks_grad(sinks_h, o_bthk, lse_bht, do_bthk):
    """The sink's probability times 0 - do . o, since its value is 0."""
    p_bht = jnp.exp(sinks_h.astype(jnp.float32)[:, None] - lse_bht)
    delta_bth = jnp.sum(o_bthk.astype(jnp.float32) * do_bthk, -1)
    return -jnp.sum(p_bht * delta_bth.swapaxes(1, 2), (0, 2)).astype(sinks_h.dtype)


# A window over cp. Each GPU has chunks i and 2 cp - 1 - i of the sequence (mesh.token_positions),
# "early" and "late". A window of at most a chunk and one token reaches into the chunk before: that
# of the early chunk is the early one of GPU i - 1, that of the late chunk is the late one of GPU
# i + 1, and its own early one on the last GPU. Two shifts by one GPU replace the ring.


def _attend_halo(kind, logits, q, k, v, sinks):
    """Attention within a window over cp: of each chunk, with the end of the chunk before."""
    index, cp, size = collectives.axis_index("cp"), collectives.axis_size("cp"), q.shape[1] // 2
    assert logits.window <= size + 1  # run_checks.check
    halo = min(size, -(-max(logits.window - 1, 1) // HALO_MULTIPLE) * HALO_MULTIPLE)
    is_first, is_last = index == 0, index == cp - 1
    # Nothing precedes the first chunk. There the halo follows, where the causal mask hides it.
    join = lambda halo, chunk: jnp.concatenate([halo, chunk], 1)
    joined = lambda halo, chunk: jnp.where(is_first, join(chunk, halo), join(halo, chunk))

    def with_halo(x, name):
        early, late = jnp.split(x, 2, 1)
        ends = early[:, -halo:], late[:, -halo:]
        before_early = collectives.ppermute_shift(ends[0], "cp")
        before_late = collectives.ppermute_shift(ends[1], "cp", -1)
        halos = before_early, jnp.where(is_last, ends[0], before_late)
        before_early, before_late = checkpoint_name(halos, name)
        return jnp.concatenate([joined(before_early, early), join(before_late, late)])

    # The halo's queries are padding, so that kernels have as many queries as keys.
    early, late = jnp.split(q, 2, 1)
    padding = jnp.zeros_like(early[:, :halo])
    q = jnp.concatenate([joined(padding, early), join(padding, late)])
    o = _attend(kind, logits, q, with_halo(k, "key"), with_halo(v, "value"), sinks, None)
    early, late = jnp.split(o, 2)
    early = jnp.where(is_first, early[:, :size], early[:, halo:])
    return jnp.concatenate([early, late[:, halo:]], 1)


# The ring over cp. Each GPU has chunks i and 2 cp - 1 - i of the sequence (mesh.token_positions),
# below "early" and "late". Keys and values are sent around the ring. For keys from a GPU that
# precedes this one, both of our chunks attend to that GPU's early chunk; for keys from a GPU that
# follows, our late chunk attends to both of its chunks. Either way these are two unmasked pairs of
# chunks, so all GPUs have the same work at each hop. The backward pass sends around the ring in the
# opposite direction, because the keys and values that arrived last are saved.


def _ring_size(logits: Logits) -> int:
    return 1 if logits.window else collectives.axis_size("cp")


def _ring_forward(kind, logits, q, k, v, documents):
    cp, kv = _ring_size(logits), (k, v)
    if cp == 1:
        return *KERNELS[kind][0](q, k, v, True, logits, documents), ()
    assert documents is None  # run_checks.check
    received = collectives.ppermute_shift(kv, "cp")
    o, lse = KERNELS[kind][0](q, k, v, True, logits)
    kv = ordering.after(received, ordering.token(lse))
    o, q = o.astype(jnp.float32), jnp.split(q, 2, 1)
    for hop in range(1, cp):
        last = received
        if hop < cp - 1:
            received = collectives.ppermute_shift(kv, "cp")
        precedes = collectives.axis_index("cp") >= hop  # the keys' GPU precedes this one
        pairs = _pairs(precedes, q, *(jnp.split(x, 2, 1) for x in kv))
        o_pairs, lse_pairs = KERNELS[kind][0](*pairs, False, logits)
        kv = ordering.after(received, ordering.token(lse_pairs))
        o, lse = _merge(precedes, o, lse, o_pairs, lse_pairs)
    return o, lse, last


def _ring_backward(kind, logits, q, k, v, documents, o, lse, last, do):
    cp, kv, backward = _ring_size(logits), last, KERNELS[kind][1]
    chunks, hops = lambda x: jnp.split(x, 2, 1), []
    for hop in reversed(range(1, cp)):
        kv = kv if hop == cp - 1 else collectives.ppermute_shift(kv, "cp", -1)
        precedes = collectives.axis_index("cp") >= hop
        saved = [_query_side(precedes, x) for x in (chunks(o), jnp.split(lse, 2, 2), chunks(do))]
        grads = backward(*_pairs(precedes, chunks(q), *map(chunks, kv)), *saved, False, logits)
        dkv_pairs = collectives.ppermute_shift(grads[1:], "cp", -hop)
        # Whether this GPU precedes the one whose queries gave the gradients that it receives.
        we_precede = collectives.axis_index("cp") + hop < cp
        hops.append((precedes, we_precede, grads[0], dkv_pairs))
        lse += ordering.token(grads[0])
    grads = backward(q, k, v, o, lse, do, True, logits, documents)
    if cp == 1:
        return grads
    dq, *dkv = (x.astype(jnp.float32) for x in grads)
    for precedes, we_precede, dq_pairs, dkv_pairs in hops:
        dq += _unpair(precedes, dq_pairs, 1)
        dkv_pairs = ordering.after(dkv_pairs, ordering.token(grads[0]))
        dkv = [d + _unpair(we_precede, x, 0) for d, x in zip(dkv, dkv_pairs, strict=True)]
    return tuple(d.astype(k.dtype) for d in (dq, *dkv))


def _query_side(precedes, chunks):
    """Our query chunks of the two pairs, stacked along batch: (late, early) or (late, late)."""
    early, late = chunks
    return jnp.concatenate([late, jnp.where(precedes, early, late)])


def _key_side(precedes, chunks):
    """The received key chunks of the two pairs: (early, early) or (early, late)."""
    early, late = chunks
    return jnp.concatenate([early, jnp.where(precedes, early, late)])


def _pairs(precedes, q, k, v):
    """Queries, keys and values of the two pairs of chunks, from (early, late) of each."""
    return _query_side(precedes, q), _key_side(precedes, k), _key_side(precedes, v)


def _unpair(precedes, grads, first: int):
    """The gradient of a whole tensor, fp32, from that of one side of the two pairs.

    first: index of the chunk in the first pair, 1 (late) for queries and 0 (early) for keys. The
    chunk of the second pair is early if `precedes`, else late.
    """
    first_pair, second_pair = jnp.split(grads.astype(jnp.float32), 2)
    chunks = [jnp.where(precedes, second_pair, 0.0), jnp.where(precedes, 0.0, second_pair)]
    chunks[first] += first_pair
    return jnp.concatenate(chunks, 1)


def _merge(precedes, o, lse, o_pairs, lse_pairs):
    """Attention over the union of two sets of keys, from (o, lse) of each: of all our queries, and
    of the two pairs of chunks.

    Elementwise over all queries, with weight 0 where a pair does not contain a query: of separate
    chunks XLA would write each result, and then concatenate them.
    """
    (first, second), none = jnp.split(lse_pairs, 2), jnp.full_like(lse_pairs[: len(lse)], -jnp.inf)
    pairs = (none, first), (jnp.where(precedes, second, none), jnp.where(precedes, none, second))
    lses = [lse, *(jnp.concatenate(chunks, 2) for chunks in pairs)]
    total = jnp.logaddexp(lse, jnp.logaddexp(*lses[1:]))
    twice = lambda x: jnp.broadcast_to(x[:, None], (len(x), 2, *x.shape[1:])).reshape(o.shape)
    weight = lambda x: jnp.exp(x - total).swapaxes(1, 2)[..., None]
    parts = [o, *map(twice, jnp.split(o_pairs, 2))]
    return sum(x * weight(lse) for x, lse in zip(parts, lses, strict=True)), total


# Kernels: forward(q, k, v, causal, logits, documents) -> o_bthk, lse_bht
#          backward(q, k, v, o, lse, do, causal, logits, documents) -> dq, dk, dv
# With a causal mask there are as many queries as keys; a window is causal. documents_bt (of queries
# and keys, with a causal mask) or None.


def _xla_forward(q_bthk, k_bsgk, v_bsgk, causal, logits, documents_bt=None):
    outs, lses = [], []
    for t0, t1 in _blocks(q_bthk.shape[1]):
        s0, s1 = _key_range(t0, t1, k_bsgk.shape[1], causal, logits)
        v = v_bsgk[:, s0:s1]
        same = _same_document(documents_bt, t0, t1, s0, s1)
        logits_bgrts, _ = _logits(q_bthk[:, t0:t1], k_bsgk[:, s0:s1], causal, logits, same)
        lse_bgrt = jax.nn.logsumexp(logits_bgrts, -1)
        p_bgrts = jnp.exp(logits_bgrts - lse_bgrt[..., None]).astype(v.dtype)
        outs.append(_merge_heads(_dot("bgrts,bsgk->btgrk", p_bgrts, v)).astype(q_bthk.dtype))
        lses.append(lse_bgrt.reshape(lse_bgrt.shape[0], -1, t1 - t0))
    return jnp.concatenate(outs, 1), jnp.concatenate(lses, 2)


def _xla_backward(
    q_bthk, k_bsgk, v_bsgk, o_bthk, lse_bht, do_bthk, causal, logits, documents_bt=None
):
    """FlashAttention-2's backward pass (arXiv:2307.08691), by blocks of queries."""
    b, s, g, _ = k_bsgk.shape
    dqs = []
    dk_bsgk = jnp.zeros(k_bsgk.shape, jnp.float32)
    dv_bsgk = jnp.zeros(v_bsgk.shape, jnp.float32)
    for t0, t1 in _blocks(q_bthk.shape[1]):
        s0, s1 = _key_range(t0, t1, s, causal, logits)
        q, keys, do = q_bthk[:, t0:t1], k_bsgk[:, s0:s1], do_bthk[:, t0:t1]
        delta_bth = jnp.sum(o_bthk[:, t0:t1].astype(jnp.float32) * do, -1)
        delta_bgrt = delta_bth.swapaxes(1, 2).reshape(b, g, -1, t1 - t0)
        same = _same_document(documents_bt, t0, t1, s0, s1)
        logits_bgrts, slope = _logits(q, keys, causal, logits, same)
        lse_bgrt = lse_bht[:, :, t0:t1].reshape(delta_bgrt.shape)
        p_bgrts = jnp.exp(logits_bgrts - lse_bgrt[..., None])
        do_btgrk = _split_heads(do, g)
        dp_bgrts = _dot("btgrk,bsgk->bgrts", do_btgrk, v_bsgk[:, s0:s1])
        ds_bgrts = (p_bgrts * (dp_bgrts - delta_bgrt[..., None]) * slope).astype(q.dtype)
        dq_btgrk = _dot("bgrts,bsgk->btgrk", ds_bgrts, keys)
        dqs.append((_merge_heads(dq_btgrk) * logits.scale).astype(q.dtype))
        others = ((0, 0), (s0, s - s1), (0, 0), (0, 0))  # other keys have no gradient
        dk = _dot("bgrts,btgrk->bsgk", ds_bgrts, _split_heads(q, g)) * logits.scale
        dk_bsgk += jnp.pad(dk, others)
        dv = _dot("bgrts,btgrk->bsgk", p_bgrts.astype(do.dtype), do_btgrk)
        dv_bsgk += jnp.pad(dv, others)
    return jnp.concatenate(dqs, 1), dk_bsgk.astype(k_bsgk.dtype), dv_bsgk.astype(v_bsgk.dtype)


def _same_document(documents_bt, t0: int, t1: int, s0: int, s1: int):
    """Whether queries t0 to t1 and keys s0 to s1 are of the same document, [b, t, s]; or None."""
    if documents_bt is None:
        return None
    return documents_bt[:, t0:t1, None] == documents_bt[:, None, s0:s1]


def _logits(q_bthk, k_bsgk, causal, logits, same_bts=None):
    """Scaled, capped and masked logits_bgrts in fp32, and the derivative of the cap.

    The causal mask and the window align the last query with the last key. Only pairs of same_bts
    are seen, if it is given.
    """
    t, s = q_bthk.shape[1], k_bsgk.shape[1]
    x = _dot("btgrk,bsgk->bgrts", _split_heads(q_bthk, k_bsgk.shape[2]), k_bsgk)
    x *= logits.scale
    slope = 1.0
    if logits.softcap:
        x = jnp.tanh(x / logits.softcap)
        slope = 1 - x * x
        x = logits.softcap * x
    if causal:
        row = jax.lax.broadcasted_iota(jnp.int32, (t, s), 0) + (s - t)
        column = jax.lax.broadcasted_iota(jnp.int32, (t, s), 1)
        seen = column <= row
        if logits.window:
            seen &= column > row - logits.window
        if same_bts is not None:
            seen = (seen & same_bts)[:, None, None]
        x = jnp.where(seen, x, -1e30)
    return x, slope


def _key_range(t0: int, t1: int, keys: int, causal: bool, logits: Logits) -> tuple[int, int]:
    """First key that a block of queries attends to, and the one after the last."""
    first = max(0, t0 + 1 - logits.window) if logits.window else 0
    return (first, t1) if causal else (0, keys)


_dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
_split_heads = lambda x_bthk, g: x_bthk.reshape(*x_bthk.shape[:2], g, -1, x_bthk.shape[3])
_merge_heads = lambda x_btgrk: x_btgrk.reshape(*x_btgrk.shape[:2], -1, x_btgrk.shape[4])


def _blocks(t: int) -> list[tuple[int, int]]:
    return [(start, min(start + BLOCK, t)) for start in range(0, t, BLOCK)]


def _cudnn_forward(q, k, v, causal, logits, documents=None):
    assert not logits.softcap  # jax's binding of cuDNN has no softcap
    if documents is not None:
        return packed_attention.forward(q, k, v, documents, logits.scale, logits.window)
    return jax_compat.cudnn_attention(q, k, v, causal, logits.scale, logits.window)


def _cudnn_backward(q, k, v, o, lse, do, causal, logits, documents=None):
    if documents is not None:
        mask = documents, logits.scale, logits.window
        return packed_attention.backward(q, k, v, o, lse, do, *mask)
    mask = causal, logits.scale, logits.window
    return jax_compat.cudnn_attention_grad(q, k, v, o, lse, do, *mask)


def _split_backward(q, k, v, o, lse, do, causal, logits, documents=None):
    """cuDNN's backward pass once per VALUE_SLICE dims of the values.

    do @ v^T, and with it dq and dk, are sums over the dims of the values.
    """
    assert documents is None  # resolve.attention_kernel
    padding = ((0, 0), (0, 0), (0, 0), (0, -v.shape[-1] % VALUE_SLICE))
    slices = lambda x: jnp.split(jnp.pad(x, padding), -(-v.shape[-1] // VALUE_SLICE), -1)
    grads = [
        _cudnn_backward(q, k, v, o, lse, do, causal, logits)
        for v, o, do in zip(slices(v), slices(o), slices(do), strict=True)
    ]
    dq, dk, dv = zip(*grads, strict=True)
    return sum(dq), sum(dk), jnp.concatenate(dv, -1)[..., : v.shape[-1]]


KERNELS = {
    "xla": (_xla_forward, _xla_backward),
    "cudnn": (_cudnn_forward, _cudnn_backward),
    "cudnn_split": (_cudnn_forward, _split_backward),
}
