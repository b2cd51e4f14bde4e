"""Memory of a step on one GPU, by purpose.

The total is the compiler's buffer assignment. Weights and optimizer state are exact. The activation
stash is read off the compiled loops that carry it from the forward to the backward pass; without
such a loop it is an estimate. Gradients and the compute copy of the weights are computed from their
shapes. The workspace is the rest.
"""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from maxbench.config.model import Model
from maxbench.config.number_formats import FORMATS
from maxbench.config.run import REMATS, Run
from maxbench.config.sublayers import EP, ROLES, RULES, Layer, Weight, mesh_axes
from maxbench.cost_model import hlo
from maxbench.cost_model.compile_cache import CompiledStep
from maxbench.cost_model.meaning import Meaning, matches
from maxbench.hardware.gpus import Gpu
from maxbench.host.environment import GPU_MEMORY_FRACTION
from maxbench.pipeline.schedule import loss_group_size

GIB = 2**30


class Sizes:
    """Bytes on one GPU by purpose: the fields of a dataclass, besides `capacity`, the bytes that a
    step may use."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]
    capacity: int

    @property
    def parts(self) -> dict[str, int]:
        names = (name for name in self.__dataclass_fields__ if name != "capacity")
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def spare(self) -> int:
        """Unused bytes; negative when the step does not fit."""
        return self.capacity - self.total


@dataclasses.dataclass(frozen=True)
class Memory(Sizes):
    """Sizes for a run."""

    weights: int  # master weights, and their copy in compute precision where it is another array
    optimizer: int
    gradients: int
    activations: int
    workspace: int  # the rest: gathered weights, logits, kernel scratch
    capacity: int


@dataclasses.dataclass(frozen=True)
class ProgramMemory(Sizes):
    """Sizes for any program, as the compiler assigns buffers."""

    arguments: int
    results: int  # in memory of their own; those of donated arguments have theirs
    temporaries: int
    capacity: int


def capacity(gpu: Gpu) -> int:
    """Bytes that a step may use."""
    return int(gpu.chip.memory_bytes * (GPU_MEMORY_FRACTION - gpu.memory_margin))


def breakdown(run: Run, compiled: CompiledStep, program: hlo.Program, meaning: Meaning) -> Memory:
    """The compiler's total, by purpose."""
    # Unrolled layers are in no loop, so their stash is estimated.
    stash = stashed_bytes(program, meaning) or activation_bytes(run)
    activations = min(stash, compiled.temporaries)
    gradients = min(compiled.gradients, compiled.temporaries - activations)
    rest = compiled.temporaries - activations - gradients + packed_attention_bytes(program)
    same = run.format.compute == run.precision.weights and compiled.copy <= compiled.weights
    copy = 0 if same else min(compiled.copy, rest)
    return Memory(
        weights=compiled.weights + copy,
        optimizer=compiled.optimizer,
        gradients=gradients,
        activations=activations,
        workspace=rest - copy + compiled.arguments - compiled.weights - compiled.optimizer,
        capacity=capacity(run.gpu),
    )


def packed_attention_bytes(program: hlo.Program) -> int:
    """Scratch memory of cuDNN's attention to packed documents, which a compiler without cuDNN's
    device does not know: the largest of a backward pass.

    It is that of a sequence for each document of a call: an fp32 sum of dq, and with grouped
    queries dk and dv of every head in 16 bits. Without packing, a call had as much for each
    sequence on an H200.
    """
    sizes = [0]
    for where in program.computations.values():
        for op in where.ops:
            packed = re.search(r'"max_seg_per_batch": ?(\d+)', op.attrs)
            if not op.target.endswith("fmhaSoftmaxBackward") or not packed:
                continue
            known = sum(x.bytes for x in hlo.leaves(op.shape) if x.dtype == "u8")
            documents = int(packed[1])
            if documents > 1 and not known:
                batch, heads, tokens, _ = op.dims("dimensions")
                query, key = (x.shape.dims for x in where.operands(op)[:2])
                width = 4 * query[-1] + (4 * query[-1] if key[2] < heads else 0)
                sizes.append(batch * documents * heads * tokens * (width + 4))
    return max(sizes)


def stashed_bytes(program: hlo.Program, meaning: Meaning) -> int:
    """Bytes of the activation stash on the GPU: the carried arrays of a loop that it writes under
    a name of Meaning.stash or shared_stash. 0 without such a loop.

    A pipeline carries one stash through the loops of its phases. Each scan over layers has its own,
    and all are alive at the end of the forward pass.
    """
    shared, own = 0, 0
    for where in program.computations.values():
        for op in where.ops:
            if op.opcode != "while":
                continue
            updates = (
                op
                for op in _ops(program, program.called(op, "body"))
                if op.opcode == "dynamic-update-slice"
            )
            is_shared = {op: matches(meaning.shared_stash, op) for op in updates}
            writes = [op for op in is_shared if is_shared[op] or matches(meaning.stash, op)]
            stash = _written_arrays(_carried_arrays(where, op), writes)
            size = sum(shape.bytes for shape in stash if not shape.host)
            if any(is_shared.values()):
                shared = max(shared, size)
            else:
                own += size
    return shared or own


def _ops(program: hlo.Program, where: hlo.Computation) -> Iterator[hlo.Op]:
    """Ops of a computation and of its fusions."""
    for op in where.ops:
        yield op
        if op.base == "fusion" and not op.is_done:
            yield from program.called(op).ops


def _written_arrays(carried: list[hlo.Shape], writes: list[hlo.Op]) -> list[hlo.Shape]:
    """The carried arrays that have the shape of a write.

    A fusion may write a transposed bitcast of an array. Order is ignored only if no array has the
    dims in the order of the write, because weights may have the same dims as activations.
    """
    dims = lambda shape: (shape.dtype, [dim for dim in shape.dims if dim > 1])
    unordered = lambda shape: (shape.dtype, sorted(dim for dim in shape.dims if dim > 1))
    written: set[int] = set()
    for write in writes:
        same = [i for i, shape in enumerate(carried) if dims(shape) == dims(write.shape)]
        transposed = (
            i for i, shape in enumerate(carried) if unordered(shape) == unordered(write.shape)
        )
        written.update(same or transposed)
    return [carried[i] for i in sorted(written)]


def _carried_arrays(where: hlo.Computation, loop: hlo.Op) -> list[hlo.Shape]:
    """The arrays of a loop's initial carry; one that is passed twice counts once."""
    source = where.by_name[loop.operands[0]]
    names = source.operands if source.opcode == "tuple" else range(len(loop.shape))
    return [*dict(zip(names, loop.shape, strict=True)).values()]


# Estimates, without a compiled program.


def activation_bytes(run: Run, remat: str = "") -> int:
    """Estimated bytes of the activation stash on one GPU: of all layers, or of the microbatches in
    flight on a pipeline stage.

    Args:
      remat: a remat policy in place of the run's own.
    """
    a, m, saved = run.layout, run.model, REMATS[remat] if remat else run.train.saved
    on_device = run.saved_on_device(saved)
    width = FORMATS[run.format.compute].bytes
    tokens = a.mbs * run.train.seq // a.cp
    per_token = functools.partial(_stashed_elements, run)
    if a.pp == 1:
        # train.remat applies to the first layers alone; the others recompute norms and activation.
        first = m.layers if remat else run.train.remat_layers
        if first == m.layers:
            elements = sum(n * per_token(layer, on_device) for n, layer in m.kinds)
        else:
            last = REMATS["save_gemms_recompute_act"]
            elements = sum(per_token(layer, on_device) for layer in m.per_layer[:first])
            elements += sum(per_token(layer, last) for layer in m.per_layer[first:])
        return int(tokens * width * elements)
    _, layer = max(m.kinds, key=lambda kind: kind[0])  # others stash their input alone
    slots = (stash_slots(run) + 1) * max(a.parts)
    return int(tokens * width * per_token(layer, on_device) * slots)


def _stashed_elements(run: Run, layer: Layer, names: Collection[str]) -> float:
    """Elements that a layer stashes per token on one GPU, of the width of Format.compute: its
    input, and the tensors of these names. A pipeline stashes the input of each sublayer, and no
    attn_out, from which another layer recomputes the second input."""
    tp, gemm_only = run.layout.tp, run.format.bytes / FORMATS[run.format.compute].bytes
    inputs = 1
    if run.layout.pp > 1:
        inputs, names = len([*layer.parts()]), {*names} - {"attn_out"}
    tensors = [t for _, x in layer.parts() for t in layer.saved(x, run) if t.name in names]
    elements = [t.elements * (gemm_only if t.gemm_only else 1) for t in tensors]
    return (inputs * run.model.embed + sum(elements)) / tp


def stash_slots(run: Run) -> int:
    """Schedule.stash_slots of a run, without building the schedule: the (microbatch, chunk) pairs
    of a stage whose backward pass is pending."""
    a = run.layout
    work = a.microbatches * a.vp
    group = min(run.train.microbatch_group_size, a.microbatches) if a.vp > 1 else a.pp
    mtp = run.model.mtp_layers > 0
    per_loss = loss_group_size(run.train.schedule, a.pp, a.vp, a.microbatches, group, a.mbs, mtp)
    # A group longer than pp waits for a loss in any case.
    most = a.vp * group + a.pp - 2 + max(per_loss + a.pp - group, 1)
    return min(work, most) if run.train.schedule == "1f1b" else work + 1


def compute_weight_bytes(run: Run, layers: float, ends: float) -> float:
    """Bytes of the compute weights.

    Quantized per tensor, a weight has two operands, for fprop and dgrad, in a pipeline one
    (quantization.Weight); quantized in blocks it has both everywhere.

    Args:
      layers: elements of the weights in layers.
      ends: elements of embedding and LM head.
    """
    f, compute = run.format, FORMATS[run.format.compute].bytes
    one_operand = run.layout.pp > 1 and f.quantized and not f.blocks
    per_element = f.bytes * (1 if one_operand else 2) if f.quantized else compute
    return layers * per_element + ends * compute


def lower_bound(run: Run) -> float:
    """Bytes on one GPU that every program needs: state, compute weights, and gradients. Those of
    the only microbatch are reduced and used layer by layer."""
    p, a, shards = run.precision, run.layout, stage_weights(run, gathered=False)
    width = lambda dtype: FORMATS[dtype].bytes
    of_layers, of_ends = master_weights(run)
    moments = 1 if run.optim.name == "muon" else 2  # norms and routers, which have two, are small
    state = (of_layers + of_ends) * width(p.weights)
    state += (moments * of_layers + 2 * of_ends) * width(p.moments)
    gradients = (shards.layers + shards.ends) * width(p.grads)
    gradients *= a.microbatches > 1 or a.pp > 1
    return state + compute_weight_bytes(run, shards.layers, shards.ends) + gradients


def master_weights(run: Run) -> tuple[float, float]:
    """Master weights on one GPU, of layers, and of embedding and LM head, about as
    sharding.rules.shard_weight splits them: those of layers as the largest weight of the last kind
    of layer that has one. An axis that divides none of its dims (dp 3) leaves a copy on each GPU.
    """
    a, m = run.layout, run.model
    shards = stage_weights(run, gathered=False)
    dense, routed = _largest_weights(m)
    ep = a.ep if a.fsdp == 1 else 1  # with fsdp, ep shards compute weights already
    embed = m.embed // _shards(RULES["embed"], a.fsdp, a.ep)
    table = _split([m.vocab // a.tp, embed], a.pp, a.dp, ep, a.cp)
    found = shards.dense / (_split(_local_dims(run, dense), a.dp, ep, a.cp) if dense else 1)
    if routed:
        found += shards.routed / _split(_local_dims(run, routed), a.dp, a.cp)
    return found, shards.ends / table


@functools.lru_cache(1024)
def _largest_weights(m: Model) -> tuple[Weight | None, Weight | None]:
    """The largest weight that ep does not split, and the largest one that it splits: each of the
    last kind of layer that has one."""

    def largest(routed):
        for _, layer in reversed(m.kinds):
            weights = (w for _, s in layer.parts() for w in s.weights.values())
            if found := [w for w in weights if w.is_gemm and bool(w.sides[0]) == routed]:
                return max(found, key=lambda w: w.size)
        return None

    return largest(False), largest(True)


def _local_dims(run: Run, weight: Weight) -> list[int]:
    """The dims of one GPU's part of a compute weight."""
    sizes = run.layout.mesh_shape
    axes = (mesh_axes(RULES[name], sizes.__getitem__) for name in weight.names)
    shards = (math.prod(map(sizes.__getitem__, of_dim)) for of_dim in axes)
    return [max(1, size // n) for size, n in zip(weight.shape, shards, strict=True)]


def _split(dims: list[int], *axes: int) -> int:
    """GPUs along mesh axes over which an array is split, each axis along a dim that it divides."""
    shards = 1
    for n in axes:
        fits = [i for i, dim in enumerate(dims) if dim % n == 0]
        if n > 1 and fits:
            dims[fits[0]] //= n
            shards *= n
    return shards


def stage_slots(run: Run) -> Sequence[tuple[int, Layer]]:
    """Slots for sublayers on one stage, which all stages have, whether a sublayer is in them or
    not: how many, and a Layer of the sublayer alone."""
    a = run.layout
    return _stage_slots(run.model, a.pp, a.vp, a.parts)


@functools.lru_cache(1024)
def _stage_slots(m: Model, pp: int, vp: int, parts: tuple[int, ...]) -> list[tuple[int, Layer]]:
    if pp == 1:
        return [
            (n, Layer.alone(role, part)) for n, layer in m.kinds for role, part in layer.parts()
        ]
    found = []
    for role in ROLES:
        sublayers = [layer.part(role) for layer in m.per_layer]
        of_form = {part.form: part for part in sublayers if part}
        on_stage = [collections.Counter[Any]() for _ in range(pp)]
        left = iter(sublayers)
        for i, count in enumerate(parts):
            on_stage[i % pp].update(x.form for x in itertools.islice(left, count) if x)
        alike = len(of_form) == 1 and all(sublayers)
        for form, part in of_form.items():
            slots = vp * max(parts) if alike else max(s[form] for s in on_stage)
            found.append((slots, Layer.alone(role, part)))
    return found


class StageWeights(NamedTuple):
    """Weights on one GPU, in elements: of layers that ep does not split (dense) and that it splits
    (routed), and of embedding and LM head (ends)."""

    dense: float
    routed: float
    ends: float

    @property
    def layers(self) -> float:
        return self.dense + self.routed


def stage_weights(run: Run, gathered: bool = True) -> StageWeights:
    """Weights on one GPU, in the slots of its stage: gathered over fsdp, or its shards. Every stage
    has the layer of multi-token prediction."""
    a, m = run.layout, run.model
    fsdp = 1 if gathered else a.fsdp
    table, ends = m.vocab * m.embed, m.vocab * m.embed * (1 if m.tied else 2)
    elsewhere = table * (1 - 1 / a.pp) if a.embedding_over_pp else 0
    shards = _shards(RULES["embed"], fsdp, a.ep)
    dense, routed = _weights_of_slots(m, fsdp, a.ep, a.pp, a.vp, a.parts)
    return StageWeights(dense / a.tp, routed / a.tp, (ends - elsewhere) / a.tp / shards)


def _shards(rule: tuple[str, ...], fsdp: int, ep: int) -> int:
    """GPUs along the mesh axes of a rule, those of fsdp and ep alone."""
    sizes = {"fsdp": fsdp, "ep": ep}
    size = lambda axis: sizes.get(axis, 1)
    return math.prod(map(size, mesh_axes(rule, size)))


@functools.lru_cache(1024)
def _weights_of_slots(m: Model, fsdp: int, ep: int, *layout: Any) -> tuple[float, float]:
    """StageWeights.dense and routed, with tp 1."""
    found = [0.0, 0.0]
    slots = [(n, m.layer_weights(layer)) for n, layer in _stage_slots(m, *layout)]
    for n, weights in [*slots, (1, m.mtp_weights)]:
        for w in weights.values():
            rules = [RULES[name] for name in w.names]
            shards = math.prod(_shards(rule, fsdp, ep) for rule in rules)
            found[EP in rules] += n * w.size / shards
    return found[0] + m.embed, found[1]  # the last norm
