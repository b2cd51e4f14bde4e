"""Checks of a Run that involve several of its sections. Each raises UserError."""

import functools
import math
from typing import TYPE_CHECKING, Any

from maxbench.config import pipeline_layout
from maxbench.config.errors import UserError, divisors, nearest
from maxbench.config.sublayers import RULES, Sublayer

if TYPE_CHECKING:
    from maxbench.config.model import Model
    from maxbench.config.run import Run


def check(run: "Run") -> None:
    """All checks, in the order in which a user would want to know."""
    _check_checkpoints(run)
    _check_pipeline(run)
    _check_experts(run)
    _check_sharded_dims(run)
    _check_sequence(run)
    if run.format.quantized:
        _check_backend(run)
        _check_bf16_layers(run)
    for _, layer in run.network.kinds:
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
    a, layers, chunks = run.layout, run.model.layers, run.layout.pp * run.layout.vp
    if a.pp == 1:
        return
    if run.train.offload:
        raise UserError(
            f"pp={a.pp} stashes activations in GPU memory, and train.offload={run.train.offload!r} "
            "moves them to host memory; leave one of them out"
        )
    if a.stages:
        if (given := sum(pipeline_layout.layers_of_parts(a.stages))) != layers:
            raise UserError(
                f"layout.stages={a.stages[:60]!r} has {given} layers, and model.layers={layers}; "
                f"give {layers}"
            )
    elif not pipeline_layout.even(layers, chunks):
        below, above = layers // chunks * chunks, -(-layers // chunks) * chunks
        near = sorted({n for n in (below, above - 2, above) if n > 0})
        raise UserError(
            f"layers={layers} does not divide into pp={a.pp} x vp={a.vp} = {chunks} chunks, nor "
            f"does {layers} + 2 (one slot each for embedding and loss); nearest layers that "
            f"work: {' or '.join(map(str, near))}, or give the layers of each part in "
            "layout.stages"
        )
    if a.microbatches < a.pp:
        raise UserError(
            f"gbs={a.gbs} is {a.microbatches} microbatches, too few for the pp={a.pp} stages; "
            f"nearest that works: gbs={a.mbs * a.shards * a.pp}"
        )
    group = run.train.microbatch_group_size if a.vp > 1 else 0
    if run.model.mtp_layers and (a.microbatches % a.pp or group % a.pp):
        group_of = f" in groups of {group}" * (group > 0)
        raise UserError(
            f"model.mtp_layers={run.model.mtp_layers} is computed for one microbatch on each of "
            f"the pp={a.pp} stages at a time, and gbs={a.gbs} is {a.microbatches} microbatches"
            f"{group_of}; multiples of pp work, as gbs={a.mbs * a.shards * a.pp}"
        )


def _check_experts(run: "Run") -> None:
    m, ep = run.model, run.layout.ep
    if ep > 1 and not m.has_experts:
        raise UserError(
            f"ep={ep} needs experts, and {m.name} {m.size} has none; use fsdp or dp instead"
        )


def _check_sharded_dims(run: "Run") -> None:
    """Mesh axes divide the dims of weights that they split."""
    a = run.layout
    for setting, value, axes in _split_dims(run.model):
        sizes = {axis: n for axis in axes if (n := getattr(a, axis)) > 1}
        if value % math.prod(sizes.values()):
            product = " x ".join(f"{axis}={n}" for axis, n in sizes.items())
            raise UserError(
                f"{product} does not divide {setting}={value}; "
                f"{' x '.join(sizes)} that works: {divisors(value)}"
            )


@functools.lru_cache(64)  # a search asks of thousands of layouts
def _split_dims(m: "Model") -> tuple[tuple[str, int, tuple[str, ...]], ...]:
    """(setting, size, mesh axes that split it) of the logical axes of a model's weights."""
    weights = [w for _, layer in m.kinds for w in m.layer_weights(layer).values()]
    weights += [*m.end_weights.values()]
    found = dict.fromkeys(
        (w.owner.setting(name), getattr(w.owner, name), _degrees_of(name))
        for w in weights
        for name in w.names
    )
    return tuple(dims for dims in found if dims[2])


def _degrees_of(logical_axis: str) -> tuple[str, ...]:
    """The fields of Layout with the degrees of the mesh axes that split a logical axis."""
    return tuple(axis for axis in RULES[logical_axis] if axis != "ep_nodes")  # which ep includes


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


def _check_backend(run: "Run") -> None:
    p, backends = run.precision, run.format.backends
    if p.backend not in ("auto", *backends):
        raise UserError(
            f"precision.backend={p.backend!r} has no GEMMs of dtype={p.dtype!r}; "
            f"use precision.backend={' or '.join(backends)}"
        )


def _check_bf16_layers(run: "Run") -> None:
    first, last = run.precision.bf16_layers
    if first + last >= run.model.layers:
        raise UserError(
            f"precision.bf16_layers={first},{last} leaves none of the {run.model.layers} layers in "
            f"dtype={run.precision.dtype!r}; give fewer than {run.model.layers} in total, or use "
            "dtype=bf16"
        )


def _check_gemm_dims(run: "Run", sublayer: Sublayer) -> None:
    """All dims of a sublayer's GEMMs are multiples of the format's, and no scaling block is cut."""
    a, seq, f = run.layout, run.train.seq, run.format
    for of_gemm in _gemm_dims(sublayer, a.fsdp if f.blocks else 1, a.tp):
        _check_multiple(run, *of_gemm)
    tp = a.tp if f.blocks or sublayer.first_rows_are_split else 1
    divisor = a.cp * tp
    words, dim = f"seq / cp={a.cp} / tp={tp}", seq // divisor
    if not f.blocks:
        per_gpu = f" / tp={tp}" if tp > 1 else ""
        words, dim = f"mbs={a.mbs} x seq / cp={a.cp}{per_gpu}", a.mbs * dim
    _check_multiple(run, dim, "train.seq", seq, divisor, words)


@functools.lru_cache(4096)  # a search asks of thousands of layouts
def _gemm_dims(sublayer: Sublayer, fsdp: int, tp: int) -> tuple[tuple[Any, ...], ...]:
    """The dims of a sublayer's quantized GEMMs on one GPU, and the further arguments of
    _check_multiple() for each."""
    found = []
    for w in sublayer.weights.values():
        for side in w.sides[1:] if w.is_gemm and not w.plain else ():
            size = lambda name, w=w: getattr(w.owner, name)
            degrees = {"fsdp": fsdp, "tp": tp}
            cut = {x: {axis: degrees.get(axis, 1) for axis in RULES[x]} for x in side}
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
