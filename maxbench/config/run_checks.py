"""Checks of a Run that involve several of its sections. Each raises UserError."""

import functools
import math
from typing import TYPE_CHECKING, Any

from maxbench.config import pipeline_layout
from maxbench.config.errors import UserError, divisors, nearest
from maxbench.config.mixers import Attention
from maxbench.config.sublayers import RULES, Sublayer, mesh_axes

if TYPE_CHECKING:
    from maxbench.config.model import Model
    from maxbench.config.run import Layout, Run, RunConfig

MAX_OFFSET = 2**31 - 1
MAX_MICROBATCHES = 10_000  # of a pipeline: a schedule of 8 x 8 parts takes 6 ms for each


def check(run: "Run") -> None:
    """All checks, in the order in which a user would want to know."""
    _check_checkpoints(run)
    _check_pipeline(run)
    _check_ring(run)
    _check_experts(run)
    _check_sharded_dims(run)
    _check_sequence(run)
    _check_documents(run)
    if run.format.quantized:
        _check_backend(run)
    for layer in run.model.all_layers:
        for _, sublayer in layer.parts():
            if run.format.quantized and sublayer.quantized:
                _check_gemm_dims(run, sublayer)
            if refusal := sublayer.refusal(run):
                raise UserError(refusal)


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
    if a.microbatches > MAX_MICROBATCHES:
        raise UserError(
            f"gbs={a.gbs} is {a.microbatches} microbatches, and a pipeline's schedule is built for "
            f"at most {MAX_MICROBATCHES}; use a larger mbs, dp or fsdp, or a smaller gbs"
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
    kinds = {layer.mixer for _, layer in m.kinds}
    # An empty slot has weights of zeros and no branch, but for a bias or where kinds differ.
    adds = m.post_norm and m.norm == "layernorm1p"
    adds = adds or not all(mixer and mixer.zeros_stay for mixer in kinds)
    branches_if_empty = adds or len({mixer.form for mixer in kinds if mixer}) > 1
    if len(kinds) == 1 and not branches_if_empty:
        return
    mixers = [layer.mixer for layer in m.per_layer]
    for in_slot in zip(*pipeline_layout.slots(a.parts), strict=True):
        kinds = {mixers[layer] for layer in in_slot if layer >= 0}
        if len(kinds) > 1 or (min(in_slot) < 0 and branches_if_empty):
            raise UserError(
                f"cp={a.cp}: mixers differ, or a slot with a bias is empty, on chunks of the "
                f"pp={a.pp} x vp={a.vp} parts, and a branch cannot contain the ring over cp, which "
                "joins all stages; use cp=1, or parts that all have whole cycles of the layer "
                "groups"
            )


def _check_experts(run: "Run") -> None:
    m, ep = run.model, run.layout.ep
    if ep > 1 and not m.has_experts:
        raise UserError(
            f"ep={ep} needs experts, and {m.name} {m.size} has none; use fsdp or dp instead"
        )


def _check_sharded_dims(run: "Run") -> None:
    """Mesh axes divide the dims of weights that they split."""
    degree = functools.partial(_degree, run.layout)
    for setting, value, rule in _split_dims(run.model):
        sizes = {axis: degree(axis) for axis in mesh_axes(rule, degree)}
        if value % math.prod(sizes.values()):
            product = " x ".join(f"{axis}={n}" for axis, n in sizes.items())
            raise UserError(
                f"{product} does not divide {setting}={value}; "
                f"{' x '.join(sizes)} that works: {divisors(value)}"
            )


@functools.lru_cache(64)  # a search asks of thousands of layouts
def _split_dims(m: "Model") -> tuple[tuple[str, int, tuple[str, ...]], ...]:
    """(setting, size, rule) of the logical axes of a model's weights."""
    weights = [w for layer in m.all_layers for w in m.layer_weights(layer).values()]
    weights += [*m.end_weights.values()]
    found = dict.fromkeys(
        (w.owner.setting(name), getattr(w.owner, name), RULES[name])
        for w in weights
        for name in w.names
    )
    return tuple(dims for dims in found if dims[2])


def _degree(a: "Layout", axis: str) -> int:
    """GPUs along a mesh axis, with all of expert parallelism along ep."""
    return 1 if axis == "ep_nodes" else getattr(a, axis)


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


def _check_documents(run: "Run") -> None:
    """Every mixer keeps documents apart, in this layout."""
    end, m, cp = run.train.document_end, run.model, run.layout.cp
    if end is None:
        return
    setting = f"train.document_end={end}"
    if end >= m.vocab:
        raise UserError(f"{setting} is no token: model.vocab={m.vocab} has ids below it")
    mixers = [layer.mixer for _, layer in m.kinds if layer.mixer]
    if others := sorted({mixer.kind for mixer in mixers if not mixer.masks_documents}):
        raise UserError(
            f"{setting}: mixers of kind {', '.join(others)} carry a state from each document to "
            "the next; leave train.document_end out"
        )
    if cp > 1:
        raise UserError(
            f"{setting}: the attention between GPUs of cp={cp} does not keep documents apart; use "
            "cp=1, and tp or fsdp for memory, or leave train.document_end out"
        )
    if m.mtp_layers:
        raise UserError(
            f"{setting}: multi-token prediction does not keep documents apart; use "
            "model.mtp_layers=0, or leave train.document_end out"
        )
    if run.train.attention != "xla":
        _check_offsets(run, [mixer for mixer in mixers if isinstance(mixer, Attention)])


def _check_offsets(run: "Run", mixers: list[Attention]) -> None:
    """XLA's cuDNN has offsets of documents in 32 bits (model/packed_attention.py)."""
    a, t = run.layout, run.train
    elements = a.mbs * t.seq * max(m.heads * max(m.head_dim, m.value_width) for m in mixers)
    if elements // a.tp > MAX_OFFSET:
        raise UserError(
            f"train.document_end={t.document_end}: the queries of mbs={a.mbs} sequences of "
            f"{t.seq:,} tokens are {elements // a.tp:,} elements, and cuDNN's offsets of documents "
            "have 32 bits; use a smaller mbs, a larger tp, or train.attention=xla"
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


def _check_gemm_dims(run: "Run", sublayer: Sublayer) -> None:
    """All dims of a sublayer's GEMMs are multiples of the format's, and no scaling block is cut."""
    a, seq, f = run.layout, run.train.seq, run.format
    degrees = (a.fsdp, a.ep) if f.blocks else (1, 1)
    for of_gemm in _gemm_dims(sublayer, *degrees, a.tp):
        _check_multiple(run, *of_gemm)
    tp = a.tp if f.blocks or sublayer.first_rows_are_split else 1
    divisor = a.cp * tp
    words, dim = f"seq / cp={a.cp} / tp={tp}", seq // divisor
    if not f.blocks:
        per_gpu = f" / tp={tp}" if tp > 1 else ""
        words, dim = f"mbs={a.mbs} x seq / cp={a.cp}{per_gpu}", a.mbs * dim
    _check_multiple(run, dim, "train.seq", seq, divisor, words)


@functools.lru_cache(4096)  # a search asks of thousands of layouts
def _gemm_dims(sublayer: Sublayer, fsdp: int, ep: int, tp: int) -> tuple[tuple[Any, ...], ...]:
    """The dims of a sublayer's quantized GEMMs on one GPU, and the further arguments of
    _check_multiple() for each."""
    found = []
    for w in sublayer.weights.values():
        for side in w.sides[1:] if w.is_gemm and not w.plain else ():
            size = lambda name, w=w: getattr(w.owner, name)
            degree = lambda axis: {"fsdp": fsdp, "ep": ep, "tp": tp}.get(axis, 1)
            cut = {x: {axis: degree(axis) for axis in mesh_axes(RULES[x], degree)} for x in side}
            shard = {x: math.prod(cut[x].values()) for x in side}
            dim = math.prod(size(x) // shard[x] for x in side)
            over = {x: "".join(f" / {a}={n}" for a, n in cut[x].items() if n > 1) for x in side}
            words = " x ".join(x + over[x] for x in side)
            last = side[-1]
            setting = w.owner.setting(last)
            value = getattr(w.owner, setting.partition(".")[2], size(last))
            found.append((dim, setting, value, shard[last] if len(side) == 1 else 1, words))
    return tuple(dict.fromkeys(found))


def _check_multiple(
    run: "Run", dim: int, setting: str, value: int, divisor: int, words: str
) -> None:
    """Raises UserError if a dim of a GEMM is no multiple of the format's.

    Args:
      words: the dim in words.
      setting, value, divisor: what to change, so that value / divisor is a multiple.
    """
    multiple = run.format.multiple
    if dim % multiple:
        raise UserError(
            f"dtype={run.precision.dtype!r} needs dims of GEMMs that are multiples of {multiple}: "
            f"{setting}={value} makes {words} = {dim}; nearest that works: "
            f"{nearest(value, divisor * multiple)}"
        )
