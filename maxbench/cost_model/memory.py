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
from collections.abc import Iterator, Sequence

from maxbench.config.model import Model
from maxbench.config.number_formats import FORMATS
from maxbench.config.run import REMATS, Run
from maxbench.cost_model import hlo
from maxbench.cost_model.compile_cache import Compiled
from maxbench.cost_model.meaning import Meaning, matches
from maxbench.hardware.gpus import Gpu
from maxbench.host.environment import GPU_MEMORY_FRACTION
from maxbench.metrics import flops
from maxbench.pipeline.schedule import loss_group_size

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    weights: int  # master weights, and their copy in compute precision where it is another array
    optimizer: int
    gradients: int
    activations: int
    workspace: int  # the rest: gathered weights, logits, kernel scratch
    capacity: int  # that a step may use

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.gradients + self.activations + self.workspace

    @property
    def spare(self) -> int:
        """Unused bytes; negative when the step does not fit."""
        return self.capacity - self.total


def capacity(gpu: Gpu) -> int:
    """Bytes that a step may use."""
    return int(gpu.chip.memory_bytes * (GPU_MEMORY_FRACTION - gpu.memory_margin))


def breakdown(run: Run, compiled: Compiled, program: hlo.Program, meaning: Meaning) -> Memory:
    """The compiler's total, by purpose."""
    # Unrolled layers are in no loop, so their stash is estimated.
    stash = stashed_bytes(program, meaning) or activation_bytes(run)
    activations = min(stash, compiled.temporaries)
    gradients = min(compiled.gradients, compiled.temporaries - activations)
    rest = compiled.temporaries - activations - gradients
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
    a, saved = run.layout, REMATS[remat] if remat else run.train.saved
    on_device = run.saved_on_device(saved)
    width = FORMATS[run.format.compute].bytes
    tokens = a.mbs * run.train.seq // a.cp
    narrow = run.format.bytes / width  # tensors that only a GEMM's backward pass reads

    def per_token(m, names=on_device) -> float:
        """Elements per token and layer."""
        routed = m.rows(a.ep) * slot_padding(run)
        mlp = routed * m.mlp + (m.shared_mlp if m.experts else 0)
        slots = routed if m.experts and m.has_slots else 0
        output_is_read = m.post_norm or (m.experts and not m.force_balance)
        # With context parallelism also keys and values of another GPU, or those within a window of
        # this GPU's two chunks.
        window = min(m.window or run.train.seq, run.train.seq)
        received = min(1, 2 * a.cp * window / run.train.seq) * (a.cp > 1)
        key_dims = m.head_dim - m.rope_head_dim + received * m.head_dim
        elements = {
            "latent": m.latents / a.tp,
            "query": m.heads * m.head_dim / a.tp,
            "key": m.kv_heads * key_dims / a.tp,
            "value": (1 + received) * m.kv_heads * m.value_width / a.tp,
            "context": m.heads * (m.value_width + 4 / width) / a.tp,  # and fp32 log-sum-exp
            "attn_out": m.embed / a.tp,
            "slots": slots * m.embed / a.tp * narrow,
            "mlp_up": m.mlp_inputs * mlp / a.tp,
            "mlp_act": mlp / a.tp * narrow,
            # For a second norm or the gradient of the router's weights; dropless it is summed.
            "mlp_down": (slots or 1) * m.embed / a.tp if output_is_read else 0,
        }
        return m.embed / a.tp + sum(elements[name] for name in names)

    if a.pp == 1:
        # train.remat applies to the first layers alone; the others recompute norms and activation.
        first = run.model.layers if remat else run.train.remat_layers
        last = functools.partial(per_token, names=REMATS["save_gemms_recompute_act"])
        if first == run.model.layers:
            elements = sum(n * per_token(kind) for n, kind in run.model.kinds)
        else:
            kinds = run.model.per_layer
            elements = sum(map(per_token, kinds[:first])) + sum(map(last, kinds[first:]))
        return int(tokens * width * elements)
    _, kind = max(run.model.kinds, key=lambda kind: kind[0])  # others stash their input alone
    return int(tokens * width * per_token(kind) * (stash_slots(run) + 1) * max(a.parts))


def slot_padding(run: Run) -> float:
    """Slots of an expert that a GPU reserves with model.force_balance, over those that it fills."""
    m, a = run.model, run.layout
    if not (m.experts and m.force_balance):
        return 1.0
    tokens = run.train.seq // (a.cp * a.tp)
    reserved = m.balanced_slots(a.mbs, tokens, a.tp, a.cp, run.format.slot_multiple)
    return reserved * m.balanced_window / (a.mbs * tokens)


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
    p, a, (weights, ends) = run.precision, run.layout, stage_weights(run)
    width = lambda dtype: FORMATS[dtype].bytes
    state = master_weights(run) * (width(p.weights) + 2 * width(p.moments))
    gradients = (weights + ends) * width(p.grads) * (a.microbatches > 1 or a.pp > 1)
    return state + (compute_weight_bytes(run, weights, ends) + gradients) / a.fsdp


def master_weights(run: Run) -> float:
    """Master weights on one GPU, as sharding.rules.shard_weight splits them: by the largest dims of
    MLP, experts and embedding. An axis that divides none of them (dp 3) leaves a copy on each GPU.
    """
    a, m = run.layout, run.model
    (layers, ends), (_, kind) = stage_weights(run), m.kinds[-1]
    experts = expert_weights(run)
    embed, mlp = m.embed // a.fsdp, max(1, kind.mlp // a.tp)
    dense = _split([embed, mlp], a.dp, a.ep, a.cp)
    routed = _split([max(1, kind.experts // a.ep), embed, mlp], a.dp, a.cp)
    table = _split([m.vocab // a.tp, embed], a.pp, a.dp, a.ep, a.cp)
    return ((layers - experts) / dense + experts / routed + ends / table) / a.fsdp


def _split(dims: list[int], *axes: int) -> int:
    """GPUs along mesh axes over which an array is split, each axis along a dim that it divides."""
    shards = 1
    for n in axes:
        fits = [i for i, dim in enumerate(dims) if dim % n == 0]
        if n > 1 and fits:
            dims[fits[0]] //= n
            shards *= n
    return shards


def stage_slots(run: Run) -> tuple[int, Sequence[tuple[int, Model]]]:
    """Slots for layers on one stage, which all stages have, whether a layer is in them or not: of
    attention, and of each kind of MLP or experts, with a Model that has it."""
    a = run.layout
    if a.pp == 1:
        return run.model.layers, run.model.kinds
    return _stage_slots(run.model, a.pp, a.vp, a.parts)


@functools.lru_cache(1024)
def _stage_slots(
    m: Model, pp: int, vp: int, parts: tuple[int, ...]
) -> tuple[int, list[tuple[int, Model]]]:
    slots = vp * max(parts)
    shape = lambda kind: (kind.experts, kind.mlp)
    of_shape = {shape(kind): kind for _, kind in m.kinds}
    if len(of_shape) == 1:
        return slots, [(slots, m.kinds[0][1])]
    on_stage = [collections.Counter[tuple]() for _ in range(pp)]
    layers = iter(m.per_layer)
    for part, count in enumerate(parts):
        on_stage[part % pp].update(map(shape, itertools.islice(layers, count)))
    return slots, [(max(s[x] for s in on_stage), kind) for x, kind in of_shape.items()]


def _mlp_weights(kind: Model) -> int:
    """Weights of the MLP of one layer, or of all of its routed experts."""
    return max(kind.experts, 1) * kind.embed * kind.mlp * (kind.mlp_inputs + 1)


def expert_weights(run: Run) -> float:
    """Weights of routed experts on one GPU, gathered over fsdp, in the slots of its stage."""
    a = run.layout
    experts = sum(n * _mlp_weights(kind) for n, kind in stage_slots(run)[1] if kind.experts)
    return experts / (a.ep * a.tp)


def stage_weights(run: Run) -> tuple[float, float]:
    """Weights on one GPU, gathered over fsdp: of a stage's slots, and of embedding and LM head.
    Every stage has the layer of multi-token prediction."""
    a, m = run.layout, run.model
    table, ends = m.vocab * m.embed, m.vocab * m.embed * (1 if m.tied else 2)
    slots, kinds = stage_slots(run)
    # Attention, norms, routers and shared experts: the mean of the layers.
    rest = flops.params(m) - ends - flops.mtp_params(m)
    rest -= sum(n * _mlp_weights(kind) for n, kind in m.kinds)
    dense = rest / m.layers * slots
    dense += sum(n * _mlp_weights(kind) for n, kind in kinds if not kind.experts)
    last = m.per_layer[-1]
    mtp_experts = m.mtp_layers * (last.experts > 0) * _mlp_weights(last)
    dense += flops.mtp_params(m) - mtp_experts * (1 - 1 / a.ep)
    elsewhere = table * (1 - 1 / a.pp) if a.embedding_over_pp else 0
    return dense / a.tp + expert_weights(run), (ends - elsewhere) / a.tp
