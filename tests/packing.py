"""cuDNN's sequence packing, as jnp: what its custom calls compute, from the operands that they get.

Document n has lengths[n] tokens, of which the first is at element offsets[n] of each array. Keys
and values have the same offsets, as in XLA's cuda_dnn.cc. What cuDNN does not write is NaN here.
"""

import types

import jax
import jax.numpy as jnp
import pytest

from maxbench.sharding import jax_compat


def use(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Packed attention calls these kernels; returns the documents of each traced call."""
    calls: list[int] = []
    for name, kernel in (("fwd", _forward), ("bwd", _backward)):
        bind = lambda *args, kernel=kernel, **options: kernel(calls, *args, **options)
        primitive = types.SimpleNamespace(bind=bind)
        monkeypatch.setattr(jax_compat._cudnn(), f"_dot_product_attention_{name}_p", primitive)
    return calls


def _rows(x_bthk, offsets, lengths):
    """Tokens of each document x_nthk, read at the offsets of elements, and whether they are its."""
    t, h, k = x_bthk.shape[1:]
    place_t = jnp.arange(t)
    at = offsets[:, None] + place_t * h * k
    at = jnp.clip(at[..., None] + jnp.arange(h * k), 0, x_bthk.size - 1)
    rows = x_bthk.reshape(-1)[at].reshape(*at.shape[:2], h, k)
    return rows, place_t < lengths[:, None]


def _written(rows_nthk, like_bthk, offsets, lengths):
    """The array that documents are written to."""
    t, h, k = like_bthk.shape[1:]
    place_t = jnp.arange(t)
    at = offsets[:, None] + place_t * h * k
    at = jnp.where(place_t < lengths[:, None], at, like_bthk.size)[..., None] + jnp.arange(h * k)
    empty = jnp.full(like_bthk.size, jnp.nan, like_bthk.dtype)
    values = rows_nthk.reshape(*at.shape).astype(like_bthk.dtype)
    return empty.at[at].set(values, mode="drop").reshape(like_bthk.shape)


def _packing(q, k, v, packing, options):
    b, documents = len(q), packing[0].size
    assert options["mask_type"].name == "PADDING_CAUSAL"
    assert options["variadic_args"] == (False, False)
    q_lengths, kv_lengths, q_offsets, kv_offsets = packing
    assert q_lengths.shape == kv_lengths.shape == (b, documents // b)
    assert q_offsets.shape == kv_offsets.shape == (b, documents // b + 1)
    assert {x.dtype for x in packing} == {jnp.dtype("int32")}
    assert documents > b
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    flat = lambda x: x.reshape(-1)[:documents]
    return flat(q_offsets), flat(kv_offsets), flat(q_lengths), flat(kv_lengths)


def _scores(q, k, lengths_n, options):
    """Scaled logits_nhts, and whether a pair of tokens is of the document and seen."""
    t = q.shape[1]
    k = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
    x = jnp.einsum("nthk,nshk->nhts", q, k, preferred_element_type=jnp.float32) * options["scale"]
    row, column = jnp.arange(t)[:, None], jnp.arange(t)
    seen = (column <= row) & (column > row - (options["sliding_window_length"] or t))
    return x, seen & (column < lengths_n[:, None, None])


def _forward(calls, q, k, v, bias, *rest, is_training, **options):
    *packing, _, _ = rest
    assert is_training
    q_at, kv_at, lengths, kv_lengths = _packing(q, k, v, packing, options)
    calls.append(lengths.size)
    (queries, mine), (keys, _) = _rows(q, q_at, lengths), _rows(k, kv_at, kv_lengths)
    values, _ = _rows(v, kv_at, kv_lengths)
    x, seen = _scores(queries, keys, kv_lengths, options)
    x = jnp.where(seen[:, None], x, -jnp.inf)
    lse = jax.nn.logsumexp(x, -1)
    p = jnp.where(seen[:, None], jnp.exp(x - lse[..., None]), 0)
    o = jnp.einsum("nhts,nshk->nthk", p, jnp.repeat(values, q.shape[2] // k.shape[2], 2))
    return _written(o, q, q_at, lengths), jnp.where(mine[:, None], lse, jnp.nan)


def _backward(calls, q, k, v, bias, *rest, **options):
    *packing, _, _, lse_nht, o, do = rest
    q_at, kv_at, lengths, kv_lengths = _packing(q, k, v, packing, options)
    calls.append(lengths.size)
    r = q.shape[2] // k.shape[2]
    queries, keys, values = (
        _rows(x, at, n)[0]
        for x, at, n in ((q, q_at, lengths), (k, kv_at, kv_lengths), (v, kv_at, kv_lengths))
    )
    outputs, cotangents = (_rows(x, q_at, lengths)[0] for x in (o, do))
    x, seen = _scores(queries, keys, kv_lengths, options)
    # Queries after the end of a document are other documents': only their logsumexp hides them.
    p = jnp.where(seen[:, None], jnp.exp(x - lse_nht[..., None]), 0)
    dp = jnp.einsum("nthk,nshk->nhts", cotangents, jnp.repeat(values, r, 2))
    delta = jnp.sum(outputs * cotangents, -1).swapaxes(1, 2)
    ds = p * (dp - delta[..., None]) * options["scale"]
    grouped = lambda x: x.reshape(*x.shape[:2], -1, r, x.shape[-1]).sum(3)
    dq = jnp.einsum("nhts,nshk->nthk", ds, jnp.repeat(keys, r, 2))
    dk = grouped(jnp.einsum("nhts,nthk->nshk", ds, queries))
    dv = grouped(jnp.einsum("nhts,nthk->nshk", p, cotangents))
    written = ((dq, q, q_at, lengths), (dk, k, kv_at, kv_lengths), (dv, v, kv_at, kv_lengths))
    return tuple(_written(*each) for each in written)
