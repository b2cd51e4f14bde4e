"""Causal grouped-query attention: one signature, a few kernels, and context parallelism.

No kernel holds an S x S tensor: cuDNN's flash attention never does, the XLA form works on blocks
of queries. All give (output, logsumexp) and take them back in the backward pass, which is all that
a ring over cp needs: partial results of different keys merge by their logsumexp, and the backward
of a part is exact when given the merged output and logsumexp. jax.nn.dot_product_attention would
be cuDNN's kernel by a public name, but its backward pass takes neither: it is that of a whole, and
drops the gradient of the logsumexp.

Shape letters: b batch, t query position, s key position, h heads, g KV heads, r = h / g,
k head_dim (a value's may be another).
"""

import functools
import math

import jax
import jax.numpy as jnp
from absl import logging
from jax.ad_checkpoint import checkpoint_name

from maxbench.config.errors import UserError
from maxbench.config.model import Model
from maxbench.config.run import DTYPES, Run
from maxbench.sharding import collectives, jax_compat, ordering

BLOCK = 256  # queries whose scores stand in memory at once, XLA form
HALF = 128  # dims of values that cuDNN's backward pass takes at once with keys of 192 on Blackwell


def select_kernel(run: Run, device) -> str:
    """The name in KERNELS of what run.train.attention asks for, on a device, here or not.

    cuDNN's rule is asked as numbers, and of a GPU that is here by compiling too: XLA has cuDNN plan
    this very shape.

    Raises:
      UserError: cuDNN is asked for by name, and takes no such attention.
    """
    m, wanted, dtype = run.model, run.train.attention, run.format.compute
    gpu = device.platform in ("gpu", "cuda")
    if wanted == "xla" or (wanted == "auto" and not gpu):
        return "xla"
    version = getattr(device, "compute_capability", "0.0")
    kind = kernel_for(m, dtype, tuple(int(n) for n in version.split(".")))
    why = _compile_error(kind, run) if kind != "xla" and device in jax.devices() else ""
    if kind != "xla" and not why:
        return kind
    none = (
        f"cuDNN has no attention for {device.device_kind}, {dtype}, heads of {m.head_dim} with "
        f"values of {m.value_width}" + f", capped at {m.softcap}" * bool(m.softcap) + why
    )
    if wanted != "auto":
        raise UserError(f"train.attention={wanted!r}: {none}; use train.attention=xla")
    logging.warning("attention takes XLA's own form, which is slower: %s", none)
    return "xla"


def kernel_for(m: Model, dtype: str, capability: tuple[int, int]) -> str:
    """The fastest of KERNELS for m computed in dtype, on GPUs of a compute capability.

    The rule is that of cuDNN's backward pass, from 9.12 on: its forward pass takes more.
    """
    keys, values = m.head_dim, m.value_width
    if dtype != "bf16" or m.softcap or capability < (8, 0) or keys % 8 or values % 8:
        return "xla"
    if max(keys, values) <= (256 if capability[0] == 9 else 128):
        return "cudnn"
    if capability[0] == 10 and keys == 192:
        return "cudnn" if values == HALF else "cudnn_split" if values > HALF else "xla"
    return "xla"


def _compile_error(kind: str, run: Run) -> str:
    """What the device that is here has against a kernel for the run's shapes, or ''."""
    m, a, tokens = run.model, run.layout, run.train.seq // run.layout.cp
    widths = (m.heads, m.head_dim), (m.kv_heads, m.head_dim), (m.kv_heads, m.value_width)
    shapes = [(a.mbs, tokens, heads // a.tp, width) for heads, width in widths]
    qkv = [jax.ShapeDtypeStruct(shape, DTYPES[run.format.compute]) for shape in shapes]
    grad = jax.grad(lambda *qkv: jnp.sum(attend(*qkv, kind=kind)), (0, 1, 2))
    try:
        jax.jit(grad).lower(*qkv).compile()
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        return f": {error}"
    return ""


def attend(q_bthk, k_bsgk, v_bsgk, *, kind: str, softcap: float = 0.0):
    """Attention of this GPU's queries to all earlier keys, over cp; returns o_bthk.

    Args:
      q_bthk, k_bsgk, v_bsgk: this GPU's tokens (axes.chunks order when cp > 1) and heads.
      kind: a name of KERNELS.
      softcap: logits are capped at this value by tanh; 0 is off.
    """
    return _attend(kind, softcap, q_bthk, k_bsgk, v_bsgk)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(kind, softcap, q, k, v):
    return _ring_forward(kind, softcap, q, k, v)[0]


def _attend_forward(kind, softcap, q, k, v):
    o, lse, last = _ring_forward(kind, softcap, q, k, v)
    o, lse = checkpoint_name((o, lse), "context")
    last = tuple(map(checkpoint_name, last, ("key", "value")))
    return o, (q, k, v, o, lse, last)


def _attend_backward(kind, softcap, saved, do):
    return _ring_backward(kind, softcap, *saved, do)


_attend.defvjp(_attend_forward, _attend_backward)


# The ring over cp. Each GPU holds chunks i and 2n-1-i of the sequence (axes.chunks), "first" and
# "second". Keys and values go round; from a GPU earlier in the sequence, both of our chunks see
# its first chunk; from a later one, only our second chunk sees both of its chunks. Either way two
# unmasked pairs of chunks, so every GPU has the same work at every hop. The backward pass goes the
# other way round: keys and values that came last are kept.


def _ring_forward(kind, softcap, q, k, v):
    n, kv = collectives.axis_size("cp"), (k, v)
    ahead = collectives.ppermute_shift(kv, "cp")
    o, lse = KERNELS[kind][0](q, k, v, True, softcap)
    if n == 1:
        return o, lse, ()
    kv = ordering.after(ahead, ordering.token(lse))
    o, q = o.astype(jnp.float32), jnp.split(q, 2, 1)
    for hop in range(1, n):
        last, ahead = ahead, collectives.ppermute_shift(kv, "cp") if hop < n - 1 else ahead
        earlier = collectives.axis_index("cp") >= hop
        pair = _pairs(earlier, q, *(jnp.split(x, 2, 1) for x in kv))
        o_pair, lse_pair = KERNELS[kind][0](*pair, False, softcap)
        kv = ordering.after(ahead, ordering.token(lse_pair))
        o, lse = _merge(earlier, o, lse, o_pair, lse_pair)
    return o.astype(k.dtype), lse, last


def _ring_backward(kind, softcap, q, k, v, o, lse, last, do):
    n, kv, backward = collectives.axis_size("cp"), last, KERNELS[kind][1]
    halves, others = lambda x: jnp.split(x, 2, 1), []
    for hop in reversed(range(1, n)):
        kv = kv if hop == n - 1 else collectives.ppermute_shift(kv, "cp", -1)
        earlier = collectives.axis_index("cp") >= hop
        ours = [_ours(earlier, x) for x in (halves(o), jnp.split(lse, 2, 2), halves(do))]
        grads = backward(*_pairs(earlier, halves(q), *map(halves, kv)), *ours, False, softcap)
        home = collectives.ppermute_shift(grads[1:], "cp", -hop)
        ours_are = (
            collectives.axis_index("cp") + hop < n
        )  # earlier than the queries of what comes home
        others.append((earlier, ours_are, grads[0], home))
        lse += ordering.token(grads[0])
    grads = backward(q, k, v, o, lse, do, True, softcap)
    if n == 1:
        return grads
    dq, *dkv = (x.astype(jnp.float32) for x in grads)
    for earlier, ours_are, dq_pair, home in others:
        dq += _unpair(earlier, dq_pair, 1)
        home = ordering.after(home, ordering.token(grads[0]))
        dkv = [d + _unpair(ours_are, x, 0) for d, x in zip(dkv, home, strict=True)]
    return tuple(d.astype(k.dtype) for d in (dq, *dkv))


def _ours(earlier, halves):
    """Our side of the two pairs of chunks, stacked along batch."""
    return jnp.concatenate([halves[1], jnp.where(earlier, halves[0], halves[1])])


def _pairs(earlier, q, k, v):
    """Queries, keys and values of the two pairs of chunks, stacked along batch; halves go in."""
    theirs = lambda x: jnp.concatenate([x[0], jnp.where(earlier, x[0], x[1])])
    return _ours(earlier, q), theirs(k), theirs(v)


def _unpair(earlier, grad, half):
    """The gradient of one side of the two pairs, at its halves; `half`: that of the first pair."""
    sure, either = jnp.split(grad.astype(jnp.float32), 2)
    halves = [jnp.where(earlier, either, 0.0), jnp.where(earlier, 0.0, either)]
    halves[half] += sure
    return jnp.concatenate(halves, 1)


def _merge(earlier, o, lse, o_pair, lse_pair):
    """Attention over the union of two sets of keys: all our queries' and that of the two pairs.

    Elementwise over all queries, each with what its half does not see at weight 0: XLA would write
    halves, and then put them together.
    """
    (sure, either), none = jnp.split(lse_pair, 2), jnp.full_like(lse_pair[: len(lse)], -jnp.inf)
    pairs = (none, sure), (jnp.where(earlier, either, none), jnp.where(earlier, none, either))
    lses = [lse, *(jnp.concatenate(halves, 2) for halves in pairs)]
    total = jnp.logaddexp(lse, jnp.logaddexp(*lses[1:]))
    both = lambda x: jnp.broadcast_to(x[:, None], (len(x), 2, *x.shape[1:])).reshape(o.shape)
    weight = lambda x: jnp.exp(x - total).swapaxes(1, 2)[..., None]
    parts = [o, *map(both, jnp.split(o_pair, 2))]
    return sum(x * weight(lse) for x, lse in zip(parts, lses, strict=True)), total


# Kernels: forward(q, k, v, causal, softcap) -> o_bthk, lse_bht
#          backward(q, k, v, o, lse, do, causal, softcap) -> dq, dk, dv


def _xla_forward(q_bthk, k_bsgk, v_bsgk, causal, softcap):
    outs, lses = [], []
    for t0, t1 in _blocks(q_bthk.shape[1]):
        s1 = t1 if causal else k_bsgk.shape[1]
        v = v_bsgk[:, :s1]
        logits_bgrts, _ = _logits(q_bthk[:, t0:t1], k_bsgk[:, :s1], causal, softcap)
        lse_bgrt = jax.nn.logsumexp(logits_bgrts, -1)
        p_bgrts = jnp.exp(logits_bgrts - lse_bgrt[..., None]).astype(v.dtype)
        outs.append(_merge_heads(_dot("bgrts,bsgk->btgrk", p_bgrts, v)).astype(q_bthk.dtype))
        lses.append(lse_bgrt.reshape(lse_bgrt.shape[0], -1, t1 - t0))
    return jnp.concatenate(outs, 1), jnp.concatenate(lses, 2)


def _xla_backward(q_bthk, k_bsgk, v_bsgk, o_bthk, lse_bht, do_bthk, causal, softcap):
    b, s, g, k = k_bsgk.shape
    dqs = []
    dk, dv = jnp.zeros(k_bsgk.shape, jnp.float32), jnp.zeros(v_bsgk.shape, jnp.float32)
    for t0, t1 in _blocks(q_bthk.shape[1]):
        s1 = t1 if causal else s
        q, keys, do = q_bthk[:, t0:t1], k_bsgk[:, :s1], do_bthk[:, t0:t1]
        delta_bth = jnp.sum(o_bthk[:, t0:t1].astype(jnp.float32) * do, -1)
        delta_bgrt = delta_bth.swapaxes(1, 2).reshape(b, g, -1, t1 - t0)
        logits_bgrts, slope = _logits(q, keys, causal, softcap)
        p = jnp.exp(logits_bgrts - lse_bht[:, :, t0:t1].reshape(delta_bgrt.shape)[..., None])
        do_btgrk = _split_heads(do, g)
        dp = _dot("btgrk,bsgk->bgrts", do_btgrk, v_bsgk[:, :s1])
        ds = (p * (dp - delta_bgrt[..., None]) * slope).astype(q.dtype)
        scale = 1 / math.sqrt(k)
        dqs.append((_merge_heads(_dot("bgrts,bsgk->btgrk", ds, keys)) * scale).astype(q.dtype))
        later = ((0, 0), (0, s - s1), (0, 0), (0, 0))  # keys that this block does not see
        dk += jnp.pad(_dot("bgrts,btgrk->bsgk", ds, _split_heads(q, g)) * scale, later)
        dv += jnp.pad(_dot("bgrts,btgrk->bsgk", p.astype(do.dtype), do_btgrk), later)
    return jnp.concatenate(dqs, 1), dk.astype(k_bsgk.dtype), dv.astype(v_bsgk.dtype)


def _logits(q_bthk, k_bsgk, causal, softcap):
    """Scaled, capped and masked logits_bgrts in fp32, and the slope of the cap.

    The last query is aligned with the last key.
    """
    t, s = q_bthk.shape[1], k_bsgk.shape[1]
    x = _dot("btgrk,bsgk->bgrts", _split_heads(q_bthk, k_bsgk.shape[2]), k_bsgk)
    x *= 1 / math.sqrt(q_bthk.shape[-1])
    slope = 1.0
    if softcap:
        x = jnp.tanh(x / softcap)
        slope = 1 - x * x
        x = softcap * x
    if causal:
        row = jax.lax.broadcasted_iota(jnp.int32, (t, s), 0) + (s - t)
        x = jnp.where(jax.lax.broadcasted_iota(jnp.int32, (t, s), 1) <= row, x, -1e30)
    return x, slope


_dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
_split_heads = lambda x_bthk, g: x_bthk.reshape(*x_bthk.shape[:2], g, -1, x_bthk.shape[3])
_merge_heads = lambda x_btgrk: x_btgrk.reshape(*x_btgrk.shape[:2], -1, x_btgrk.shape[4])


def _blocks(t: int) -> list[tuple[int, int]]:
    return [(start, min(start + BLOCK, t)) for start in range(0, t, BLOCK)]


def _cudnn_forward(q, k, v, causal, softcap):
    assert not softcap  # cuDNN through jax has no cap
    return jax_compat.cudnn_attention(q, k, v, causal)


def _cudnn_backward(q, k, v, o, lse, do, causal, softcap):
    return jax_compat.cudnn_attention_grad(q, k, v, o, lse, do, causal)


def _split_backward(q, k, v, o, lse, do, causal, softcap):
    """For some dims of the values at a time: do @ v, and so the gradients of q and k, are sums."""
    fill = ((0, 0), (0, 0), (0, 0), (0, -v.shape[-1] % HALF))
    parts = lambda x: jnp.split(jnp.pad(x, fill), -(-v.shape[-1] // HALF), -1)
    grads = [
        _cudnn_backward(q, k, v, o, lse, do, causal, softcap)
        for v, o, do in zip(parts(v), parts(o), parts(do), strict=True)
    ]
    dq, dk, dv = zip(*grads, strict=True)
    return sum(dq), sum(dk), jnp.concatenate(dv, -1)[..., : v.shape[-1]]


KERNELS = {
    "xla": (_xla_forward, _xla_backward),
    "cudnn": (_cudnn_forward, _cudnn_backward),
    "cudnn_split": (_cudnn_forward, _split_backward),
}
