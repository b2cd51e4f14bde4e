"""What a step occupies on one GPU, by purpose, and what recomputation would save.

The total is the compiler's buffer assignment. Its parts: the state's are exact; activations are
what the loop over layers, or over a pipeline's ticks, carries from the forward to the backward
pass; gradients and the compute copy of the weights are their shapes; workspace is the rest.
"""

import dataclasses
import math

from maxbench.config import lowering
from maxbench.config.number_formats import FORMATS
from maxbench.config.run import REMATS, TENSORS, Run
from maxbench.cost_model import hlo
from maxbench.cost_model.compile_cache import Compiled
from maxbench.hardware.gpus import Gpu
from maxbench.metrics import flops
from maxbench.pipeline.schedule import loss_group_size, schedule_for

FRACTION = 0.94  # of the GPU's memory that the step may take, as runtime.prepare sets it
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    weights: int  # master weights and, where it is another array, their copy in compute precision
    optimizer: int
    gradients: int
    activations: int
    workspace: int  # everything else: gathered weights, logits, scratch of kernels
    capacity: int  # that the step may take

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.gradients + self.activations + self.workspace

    @property
    def spare(self) -> int:
        """Bytes left; negative when it does not fit."""
        return self.capacity - self.total


def capacity(gpu: Gpu) -> int:
    """Bytes that a step may take."""
    return int(gpu.chip.memory_bytes * (FRACTION - gpu.memory_margin))


def breakdown(run: Run, compiled: Compiled, program: hlo.Program) -> Memory:
    """The parts of the compiler's total."""
    rows = schedule_for(run).stash_slots if run.layout.pp > 1 else run.model.layers
    carried, counted = stashed_bytes(program, compiled.layer_shapes, rows), activation_bytes(run)
    # Where layers are code no loop carries them: arithmetic.
    kept = carried if carried > counted / 2 else counted
    same = run.format.compute == run.precision.weights and compiled.copy <= compiled.weights
    activations = min(kept, compiled.temporaries)
    gradients = min(compiled.gradients, compiled.temporaries - activations)
    left = compiled.temporaries - activations - gradients
    copy = 0 if same else min(compiled.copy, left)
    return Memory(
        weights=compiled.weights + copy,
        optimizer=compiled.optimizer,
        gradients=gradients,
        activations=activations,
        workspace=left - copy + compiled.arguments - compiled.weights - compiled.optimizer,
        capacity=capacity(run.gpu),
    )


def stashed_bytes(program: hlo.Program, weights: tuple[tuple[int, ...], ...], rows: int) -> int:
    """Bytes that a loop carries with one row per layer, or per slot of a pipeline's residuals, and
    that are no weight or gradient."""
    known = {tuple(sorted(dims)) for dims in weights}
    kept = lambda shape: (
        shape.dims[:1] == (rows,) and not (shape.host or tuple(sorted(shape.dims)) in known)
    )
    loops = [(c, op) for c in program.computations.values() for op in c.ops if op.opcode == "while"]
    return max((sum(s.bytes for s in _carried(*loop) if kept(s)) for loop in loops), default=0)


def _carried(computation: hlo.Computation, loop: hlo.Op) -> list[hlo.Shape]:
    """The arrays that a loop is given, each once."""
    source = computation.by_name[loop.operands[0]]
    names = source.operands if source.opcode == "tuple" else range(len(loop.shape))
    return [*dict(zip(names, loop.shape, strict=True)).values()]


def activation_bytes(run: Run, remat: str = "") -> int:
    """Arithmetic: bytes that a remat policy, the run's own or another, keeps on one GPU over all
    its layers, or over all that its stage of a pipeline has in flight."""
    a, given = (
        run.layout,
        lowering.saved_on_device(run, REMATS[remat] if remat else run.train.saved),
    )
    width = FORMATS[run.format.compute].bytes
    tokens = a.mbs * run.train.seq // a.cp
    narrow = run.format.bytes / width  # what only a GEMM's backward pass needs
    sets = 1 + (a.cp > 1)  # of keys and values: another GPU's too

    def kept(m, saved=given):
        routed = m.rows(a.ep)
        slots = routed if m.experts and m.capacity_factor else 0
        per_token = {
            "query": m.heads * m.head_dim / a.tp,
            "key": sets * m.kv_heads * m.head_dim / a.tp,
            "value": sets * m.kv_heads * m.value_width / a.tp,
            "context": m.heads * (m.value_width + 4 / width) / a.tp,
            "attn_out": m.embed / a.tp,
            "slots": slots * m.embed / a.tp * narrow,
            "mlp_up": routed * m.mlp_inputs * m.mlp / a.tp,
            "mlp_act": routed * m.mlp / a.tp * narrow,
            # For a second norm, the experts' weights. Dropless, it comes back summed.
            "mlp_down": (slots or 1) * m.embed / a.tp if m.post_norm or m.experts else 0,
        }
        return m.embed / a.tp + sum(per_token[name] for name in saved)

    if a.pp == 1:
        more = 0 if remat else run.model.layers - lowering.remat_layer_count(run)
        more *= kept(run.model, REMATS["save_gemms_recompute_act"]) - kept(run.model)
        return int(tokens * width * (sum(kept(kind) * n for n, kind in run.model.stacks) + more))
    layers = -(-run.model.layers // (a.pp * a.vp))
    return int(tokens * width * kept(run.model) * (stash_slots(run) + 1) * layers)


def stash_slots(run: Run) -> int:
    """Slots for residuals of pieces of work (a microbatch in a chunk of layers) that a pipeline's
    stage has: schedule()'s `keep`, without making the table."""
    a = run.layout
    work = a.microbatches * a.vp
    turn = min(max(run.train.microbatch_group_size, a.pp), a.microbatches) if a.vp > 1 else a.pp
    of = loss_group_size(run.train.schedule, a.pp, a.vp, a.microbatches, turn, a.mbs)
    most = a.vp * turn + a.pp - 2 + max(of + a.pp - turn, 1)  # longer ones wait for a loss anyway
    return min(work, most) if run.train.schedule == "1f1b" else work + 1


def lower_bound(run: Run) -> float:
    """Arithmetic: bytes of a GPU that no compiler saves: the state, the weights to compute with,
    and their gradients."""
    p, (weights, ends) = run.precision, stage_weights(run)
    width = lambda dtype: FORMATS[dtype].bytes
    state = flops.params(run.model) * (width(p.weights) + 2 * width(p.moments))
    local = lowering.compute_weight_bytes(run, weights, ends) + (weights + ends) * width(p.grads)
    return state / run.layout.gpus + local / run.layout.fsdp


def stage_weights(run: Run) -> tuple[float, float]:
    """Weights of one stage's layers, fsdp gathered, and of embedding and head, on one GPU."""
    a, m = run.layout, run.model
    table, ends = m.vocab * m.embed, m.vocab * m.embed * (1 if m.tied else 2)
    experts = sum(n * k.experts * k.embed * k.mlp * (k.mlp_inputs + 1) for n, k in m.stacks)
    layers = flops.params(m) - ends - experts + experts / a.ep
    elsewhere = table * (1 - 1 / a.pp) if lowering.embedding_sharded_over_pp(run) else 0
    return layers / (a.pp * a.tp), (ends - elsewhere) / a.tp


def recomputed(run: Run, remat: str = "") -> float:
    """Share of a layer's forward FLOPs that the backward pass computes again, by the run's policy
    or another."""
    m, saved = run.model, REMATS[remat] if remat else run.train.saved
    active = sum(n * kind.mlp * (kind.top_k if kind.experts else 1) for n, kind in m.stacks)
    active /= m.layers
    parts = {
        "query": m.embed * m.heads * m.head_dim,
        "key": m.embed * m.kv_heads * m.head_dim,
        "value": m.embed * m.kv_heads * m.value_width,
        # Two products, half of the scores.
        "context": run.train.seq * m.heads * (m.head_dim + m.value_width) / 2,
        "attn_out": m.embed * m.heads * m.value_width,
        "mlp_up": m.embed * m.mlp_inputs * active,
    }
    total = sum(parts.values()) + m.embed * active
    share = 1 if remat else lowering.remat_layer_count(run) / m.layers
    return share * sum(part for name, part in parts.items() if name not in saved) / total


def policies(run: Run, room: float = math.inf) -> list[Run]:
    """The run with each remat policy that keeps at most so many bytes, most of them first."""
    apart = {
        "save_gemms_only": lowering.layers_unrolled(run),
        "save_gemms_recompute_act": "mlp_act" in lowering.saved_on_device(run, TENSORS),
    }
    names = [remat for remat in REMATS if apart.get(remat, True)]  # elsewhere they are 'none'
    size = {remat: activation_bytes(run, remat) for remat in names}
    fit = [remat for remat in size if size[remat] <= room]
    return [with_remat(run, one) for one in sorted(fit, key=size.__getitem__, reverse=True)]


def least_recomputed(run: Run, room: float) -> Run | None:
    """The run with the policy that recomputes least of those that keep at most so many bytes, and
    of several such the one that keeps most."""
    return min(policies(run, room), key=recomputed, default=None)


def with_more(run: Run, room: float) -> Run:
    """The run with its policy for so many layers fewer as take at most so many bytes."""
    layers, policy = run.model.layers, run.train.remat
    fewer = with_remat(run, policy, layers=layers - 1)
    each = activation_bytes(fewer) - activation_bytes(run)
    less = int(room / each) if each > 0 else 0
    return with_remat(run, policy, layers=max(1, layers - less)) if less else run


def with_remat(run: Run, remat: str, offload: str = "", layers: int = 0) -> Run:
    """The run with another remat policy, and what of it waits in the host's memory; or for so many
    layers alone."""
    train = dataclasses.replace(run.train, remat=remat, offload=offload, remat_layers=layers)
    return run if train == run.train else dataclasses.replace(run, train=train)


def offloaded(run: Run, room: float) -> Run | None:
    """The run that computes nothing again, and has as few tensors in the host's memory as leave at
    most so many bytes here; None in a pipeline, or where the rest is too much."""
    if run.layout.pp > 1:
        return None
    whole = lambda names: with_remat(run, "none", ",".join(names))
    names = sorted(REMATS["none"], key=lambda name: activation_bytes(whole([name])))
    ways = (whole(names[: i + 1]) for i in range(len(names)))  # the largest first
    return next((one for one in ways if activation_bytes(one) <= room), None)
