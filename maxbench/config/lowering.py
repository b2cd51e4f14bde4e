"""Choices of a run's program: unrolled layers, overlap of passes, recompute. Needs no jax.

Decided here alone, for the step, the cost model and the memory estimate.
"""

from maxbench.config import environment
from maxbench.config.number_formats import FORMATS
from maxbench.config.run import Run

LAYERS = "layers"  # named scope of the scan over layers in the compiled program
# Transformer Engine 2.17: the first whose attention runs inside shard_map. 2.14: the first that
# supports JAX > 0.9.1.
TE_OLDEST = (2, 17)
MAX_OVERLAPPED_LAYERS = 16  # of a chunk outside of a pipeline: more take too long to compile
MAX_UNROLLED_LAYERS = 40  # on a GPU; a CPU unrolls none. train.unroll_layers replaces both


def backend(run: Run, gpu: bool = True) -> str:
    """The library of quantized GEMMs: precision.backend with 'auto' resolved to Transformer Engine
    on a GPU where it is installed, new enough, and has the GEMMs of the format; else to XLA.

    XLA where no GEMM is quantized, so that such a program has one key in the compile cache.
    """
    if not run.format.quantized:
        return "xla"
    if run.precision.backend != "auto":
        return run.precision.backend
    version = environment.version("transformer-engine")
    new_enough = version and tuple(map(int, version.split(".")[:2])) >= TE_OLDEST
    return "te" if gpu and new_enough and "te" in run.format.backends else "xla"


def layers_unrolled(run: Run) -> bool:
    """Whether the program has code for every layer (on a GPU) instead of a scan over layers.

    Never with fsdp: XLA would all-gather the weights of many layers ahead of their use. Nor with
    offload, which XLA supports in loops only, nor in a pipeline, which selects the layers of a
    chunk when its stage switches to it.
    """
    a, t = run.layout, run.train
    most = t.unroll_layers if t.unroll_layers >= 0 else MAX_UNROLLED_LAYERS
    one_policy = remat_layer_count(run) == run.model.layers
    return a.pp == a.fsdp == 1 and run.model.layers <= most and not t.offload and one_policy


def remat_layer_count(run: Run) -> int:
    """Number of first layers with the policy train.remat: all, in a pipeline."""
    all_layers = not run.train.remat_layers or run.layout.pp > 1
    return run.model.layers if all_layers else min(run.train.remat_layers, run.model.layers)


def overlaps_fwd_bwd(run: Run) -> bool:
    """Whether the forward pass of a microbatch and the backward pass of another are interleaved, so
    that the TP collectives of each overlap GEMMs of the other (pipeline/executor.py).

    Always in a pipeline. Elsewhere if layers are unrolled, few enough to compile for three phases,
    and tp has collectives to overlap. Not with experts, whose all-to-alls would be in the way.
    """
    a, m = run.layout, run.model
    overlappable = a.tp > 1 and a.microbatches > 1 and m.layers <= MAX_OVERLAPPED_LAYERS
    return a.pp > 1 or (overlappable and not m.has_experts and layers_unrolled(run))


def embedding_sharded_over_pp(run: Run) -> bool:
    """Whether the embedding table's columns are sharded over pp too.

    Embedded tokens are then all-gathered over pp. It is done where that is less than the table: if
    a GPU has fewer tokens in a step than the vocabulary has rows.
    """
    a, m = run.layout, run.model
    fewer = a.microbatches * a.mbs * run.train.seq // a.cp < m.vocab
    return a.pp > 1 and fewer and not m.tied and m.embed % (a.tp * a.fsdp * a.pp) == 0


def bounds_rows(run: Run) -> bool:
    """Whether dropless experts receive tokens in buffers of model.dispatch_factor."""
    m = run.model
    return m.dispatch_factor > 0 and run.layout.ep > 1 and not m.has_slots


def saved_on_device(run: Run, saved: tuple[str, ...]) -> set[str]:
    """The tensors of a remat policy that are saved in GPU memory.

    In a pipeline a saved tensor is copied into its stash slot and out of it: two reads, two writes.
    An MLP's activation is recomputed where that moves fewer bytes: it reads the outputs of all
    up-projections and writes one tensor.
    """
    names, width = {*saved} - {*run.train.offloaded}, run.format.bytes
    recompute = run.model.mlp_inputs * FORMATS[run.format.compute].bytes + width < 4 * width
    in_pipeline = run.layout.pp > 1 and recompute and "mlp_up" in names
    return names - {"mlp_act"} if in_pipeline else names


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
