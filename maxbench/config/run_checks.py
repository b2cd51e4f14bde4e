"""Checks of a Run that involve several of its sections. Each raises UserError."""

import itertools
import math
from typing import TYPE_CHECKING

from maxbench.config import pipeline_layout
from maxbench.config.errors import UserError, divisors, nearest

if TYPE_CHECKING:
    from maxbench.config.model import Model
    from maxbench.config.run import Run, RunConfig


def check(run: "Run") -> None:
    """All checks, in the order in which a user would want to know."""
    _check_checkpoints(run)
    _check_pipeline(run)
    _check_ring(run)
    _check_experts(run)
    _check_window(run)
    _check_sharded_dims(run)
    _check_sequence(run)
    if run.format.quantized:
        _check_backend(run)
        for _, kind in run.model.kinds:
            if kind.quantized:
                _check_gemm_dims(run, kind)
                _check_expert_slots(run, kind)


def _check_checkpoints(run: "Run") -> None:
    o = run.output
    if run.runtime.mock_gpus and (o.checkpoint or o.checkpoint_every or o.resume):
        raise UserError("mock_gpus has only one GPU's part of the state; leave checkpoints out")


def _check_pipeline(run: "Run") -> None:
    a = run.layout
    if a.pp == 1:
        return
    if run.train.offload:
        raise UserError(
            f"pp={a.pp} stashes activations in GPU memory, and train.offload={run.train.offload!r} "
            "moves them to host memory; leave one of them out"
        )
    if a.microbatches < a.pp:
        raise UserError(
            f"gbs={a.gbs} is {a.microbatches} microbatches, too few for the pp={a.pp} stages; "
            f"nearest that works: gbs={a.mbs * a.shards * a.pp}"
        )
    group = run.train.microbatch_group_size if a.vp > 1 else a.pp
    if run.model.mtp_layers and (a.microbatches % a.pp or group % a.pp):
        group_of = f" in groups of {group}" if a.vp > 1 else ""
        raise UserError(
            f"model.mtp_layers={run.model.mtp_layers} is computed for one microbatch on each of "
            f"the pp={a.pp} stages at a time, and gbs={a.gbs} is {a.microbatches} microbatches"
            f"{group_of}; multiples of pp work, as gbs={a.mbs * a.shards * a.pp}"
        )


def _check_ring(run: "Run") -> None:
    """No stage of a pipeline branches on the kind of its attention where that has a ring over cp:
    the permutes of the ring join all stages."""
    a, m = run.layout, run.model
    if a.pp == 1 or a.cp == 1:
        return
    attention_of = [(kind.quantized, kind.window) for kind in m.per_layer]
    # An empty slot has weights of zeros and no branch, but for a bias or where kinds differ.
    adds = m.attention_bias or (m.post_norm and m.norm == "layernorm1p")
    branches_if_empty = adds or len({quantized for quantized, _ in attention_of}) > 1
    for in_slot in zip(*pipeline_layout.slots(a.parts), strict=True):
        kinds = {attention_of[layer] for layer in in_slot if layer >= 0}
        if len(kinds) > 1 or (min(in_slot) < 0 and branches_if_empty):
            raise UserError(
                f"cp={a.cp}: attention differs, or a slot with a bias is empty, on chunks of the "
                f"pp={a.pp} x vp={a.vp} parts, and a branch cannot contain the ring over cp, which "
                "joins all stages; use cp=1, or parts that all have whole cycles of the layer "
                "groups"
            )


def _check_experts(run: "Run") -> None:
    m, ep = run.model, run.layout.ep
    if ep > 1 and not m.experts:
        raise UserError(
            f"ep={ep} needs experts, and {m.name} {m.size} has none; use fsdp or dp instead"
        )


def _check_sharded_dims(run: "Run") -> None:
    """Mesh axes divide the dims that they shard, of every layer group."""
    a, m = run.layout, run.model
    axes_of: dict[str, tuple[str, ...]]
    axes_of = dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), ("tp",))
    axes_of |= {"embed": ("fsdp",) if m.tied else ("tp", "fsdp"), "experts": ("ep",)}
    axes_of |= {"q_rank": ("fsdp",), "kv_rank": ("fsdp",)}
    for (_, layer), (dim, axes) in itertools.product(m.kinds, axes_of.items()):
        sizes = {axis: n for axis in axes if (n := getattr(a, axis)) > 1}
        if (value := getattr(layer, dim)) % math.prod(sizes.values()):
            product = " x ".join(f"{axis}={n}" for axis, n in sizes.items())
            raise UserError(
                f"{product} does not divide model.{dim}={value}; "
                f"{' x '.join(sizes)} that works: {divisors(value)}"
            )


def _check_sequence(run: "Run") -> None:
    """The sequence divides over tp, and over cp in two chunks per GPU, which balance attention."""
    a, seq = run.layout, run.train.seq
    chunks = (2 * a.cp if a.cp > 1 else 1) * a.tp
    if seq % chunks:
        factors = " x ".join(["2 x cp"] * (a.cp > 1) + ["tp"] * (a.tp > 1))
        raise UserError(
            f"train.seq={seq} does not divide into {factors} = {chunks} parts (cp={a.cp}, "
            f"tp={a.tp}); nearest that works: {nearest(seq, chunks)}"
        )


def _check_window(run: "Run") -> None:
    """Over cp, a window reaches into the chunk before a query's own, and no further."""
    a, seq = run.layout, run.train.seq
    window = max((layer.window for _, layer in run.model.kinds if layer.window < seq), default=0)
    most = seq // (2 * a.cp) + 1
    if a.cp > 1 and window > most:
        fits = max(seq // (2 * (window - 1)), 1)
        raise UserError(
            f"model.window={window} reaches over more than the 1 / (2 x cp={a.cp}) of "
            f"train.seq={seq} before a query's own, {most - 1} tokens: use a cp of at most {fits}, "
            f"or a window of at most {most} or at least {seq}"
        )


def _check_backend(run: "Run") -> None:
    p, backends = run.precision, run.format.backends
    if p.backend not in backends:
        raise UserError(
            f"precision.backend={p.backend!r} has no GEMMs of dtype={p.dtype!r}; "
            f"use precision.backend={' or '.join(backends)}"
        )


def check_bf16_layers(config: "RunConfig") -> None:
    """Some layers are quantized."""
    p, layers = config.precision, config.model.layers
    first, last = p.bf16_layers
    if first + last >= layers:
        raise UserError(
            f"precision.bf16_layers={first},{last} leaves none of the {layers} layers in "
            f"dtype={p.dtype!r}; give fewer than {layers} in total, or use dtype=bf16"
        )


def _check_gemm_dims(run: "Run", m: "Model") -> None:
    """All dims of a layer's quantized GEMMs are multiples of the format's, and no scaling block is
    cut."""
    a, seq, f = run.layout, run.train.seq, run.format
    dtype = run.precision.dtype
    fsdp = a.fsdp if f.blocks else 1
    # The down-projection of latent attention has the rows of this GPU's part of the sequence.
    tp = a.tp if f.blocks or m.kv_rank else 1
    rows = f"mbs={a.mbs} x seq / cp={a.cp}" + f" / tp={tp}" * (tp > 1)
    # setting, its value, its divisor, the dim in words, the dim
    for name, value, divisor, words, dim in (
        ("model.embed", m.embed, fsdp, f"embed / fsdp={fsdp}", m.embed // fsdp),
        ("model.mlp", m.mlp, a.tp, f"mlp / tp={a.tp}", m.mlp // a.tp),
        *_attention_gemm_dims(run, m, fsdp),
        ("train.seq", seq, a.cp * tp, f"seq / cp={a.cp} / tp={tp}", seq // a.cp // tp)
        if f.blocks
        else ("train.seq", seq, a.cp * tp, rows, a.mbs * seq // a.cp // tp),
    ):
        if dim % f.multiple:
            raise UserError(
                f"dtype={dtype!r} needs dims of GEMMs that are multiples of {f.multiple}: "
                f"{name}={value} makes {words} = {dim}; nearest that works: "
                f"{nearest(value, divisor * f.multiple)}"
            )


def _attention_gemm_dims(run: "Run", m: "Model", fsdp: int) -> list[tuple[str, int, int, str, int]]:
    """The rows of _check_gemm_dims for attention."""
    heads, kv_heads = m.heads // run.layout.tp, m.kv_heads // run.layout.tp
    qkv = f"({heads} heads + 2 x {kv_heads} kv_heads) x it"
    out = ("model.head_dim", m.head_dim)
    if m.value_width != m.head_dim:
        qkv = f"({heads} heads + {kv_heads} kv_heads) x it + {kv_heads} x value_dim={m.value_dim}"
        out = ("model.value_dim", m.value_dim)
    rows = [(*out, 1, f"{heads} heads x it", heads * m.value_width)]
    if not m.kv_rank:
        return [*rows, ("model.head_dim", m.head_dim, 1, qkv, kv_heads * m.group_width)]
    up = f"{heads} heads x (it - rope_head_dim={m.rope_head_dim} + values of {m.value_width})"
    return [
        *rows,
        ("model.q_rank", m.q_rank, fsdp, f"q_rank / fsdp={fsdp}", m.q_rank // fsdp),
        ("model.kv_rank", m.kv_rank, fsdp, f"kv_rank / fsdp={fsdp}", m.kv_rank // fsdp),
        ("model.rope_head_dim", m.rope_head_dim, 1, "q_rank + kv_rank + it", m.latents),
        ("model.head_dim", m.head_dim, 1, f"{heads} heads x it", heads * m.head_dim),
        ("model.head_dim", m.head_dim, 1, up, heads * m.kv_up_width),
    ]


def _check_expert_slots(run: "Run", m: "Model") -> None:
    """The rows of a layer's quantized GEMMs of experts are a multiple of the format's."""
    a, f, dtype = run.layout, run.format, run.precision.dtype
    if not m.experts or m.force_balance:  # whose slots are whole blocks
        return
    if not m.has_slots:
        raise UserError(
            f"dtype={dtype!r} needs a fixed number of slots for each expert, and model."
            "capacity_factor=0 has none; capacity_factor=experts / top_k="
            f"{m.experts / m.top_k:g} drops no token either, and model.force_balance=True needs "
            "no factor; or use dtype=bf16"
        )
    tokens = a.mbs * run.train.seq // (a.cp * a.tp)
    slots = m.capacity(tokens)
    gpus = 1 if f.blocks else a.ep * a.tp  # whose slots are rows of one GEMM, or of its blocks
    if slots * gpus % f.multiple:
        unit = f.multiple // math.gcd(gpus, f.multiple)
        # The factor for the next number of slots that works, minus a half slot: rounding up in
        # Model.capacity() must not exceed it.
        factor = (-(-slots // unit) * unit - 0.5) * m.experts / (tokens * m.top_k)
        raise UserError(
            f"dtype={dtype!r} needs dims of GEMMs that are multiples of {f.multiple}: model."
            f"capacity_factor={m.capacity_factor} gives an expert {gpus} x {slots} slots; "
            f"nearest that works: {factor:.6g}"
        )
