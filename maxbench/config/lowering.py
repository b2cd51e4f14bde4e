"""Which program a run compiles: the one place that decides, without jax.

Layers are a loop or code (model/layer_stack.py), microbatches go one after the other, or forward and
backward pass of two at once (pipeline/executor.py), and of what could be kept some is made again.
"""

from maxbench.config.number_formats import FORMATS
from maxbench.config.run import Run

LAYERS = "layers"  # named scope of the scan over layers in the compiled program
MAX_OVERLAPPED_LAYERS = 16  # layers of a chunk, at most, outside of a pipeline
MAX_UNROLLED_LAYERS = (
    40  # layers that a GPU's program has as code, unless train.unroll_layers says; a CPU's has none
)


def layers_unrolled(run: Run) -> bool:
    """Whether layers are code, on a GPU unless train.unroll_layers says.

    Over fsdp never: XLA would gather the weights of many layers ahead of their use; nor where
    activations wait in the host's memory, which XLA keeps for a loop; nor in a pipeline, which
    takes the layers of a chunk from the stack when its turn begins.
    """
    a, t = run.layout, run.train
    most = t.unroll_layers if t.unroll_layers >= 0 else MAX_UNROLLED_LAYERS
    whole = remat_layer_count(run) == run.model.layers
    return a.pp == a.fsdp == 1 and run.model.layers <= most and not t.offload and whole


def remat_layer_count(run: Run) -> int:
    """How many layers, the first, train.remat is for: all in a pipeline, or of several kinds."""
    whole = not run.train.remat_layers or run.layout.pp > 1 or run.model.layer_groups
    return run.model.layers if whole else min(run.train.remat_layers, run.model.layers)


def overlaps_fwd_bwd(run: Run) -> bool:
    """Whether the forward pass of a microbatch is one piece of code with the backward pass of
    another, so that each communicates beside the other's products (pipeline/executor.py).

    In a pipeline always. Elsewhere where layers are code, not too many to be compiled for three
    phases, and tp has something to hide. Not with experts: their exchanges stand in the way.
    """
    a, m = run.layout, run.model
    work = (
        a.tp > 1
        and a.microbatches > 1
        and m.layers <= MAX_OVERLAPPED_LAYERS
        and not m.experts
        and not m.layer_groups
    )
    return a.pp > 1 or (work and layers_unrolled(run))


def embedding_sharded_over_pp(run: Run) -> bool:
    """Whether stages have parts of the embedding's columns: its tokens then travel over pp, and not
    the table, which has more rows than a GPU has tokens in a step."""
    a, m = run.layout, run.model
    fewer = a.microbatches * a.mbs * run.train.seq // a.cp < m.vocab
    return a.pp > 1 and fewer and not m.tied and m.embed % (a.tp * a.fsdp * a.pp) == 0


def saved_on_device(run: Run, saved: tuple[str, ...]) -> set[str]:
    """Of the tensors that a remat policy saves, those that the GPU keeps.

    In a pipeline a tensor is copied into its slot and out of it, read and written twice. An MLP's
    activation is made again where that moves less: it reads all gates and writes one.
    """
    names, width = {*saved} - {*run.train.offloaded}, run.format.bytes
    again = run.model.mlp_inputs * FORMATS[run.format.compute].bytes + width < 4 * width
    return names - {"mlp_act"} if run.layout.pp > 1 and again and "mlp_up" in names else names


def compute_weight_bytes(run: Run, layers: float, ends: float) -> float:
    """Bytes of the weights to compute with, of so many numbers in layers and at the network's ends.
    Quantized they stand in two forms, in a pipeline in one (formats.Weight); of blocks in two."""
    f, compute = run.format, FORMATS[run.format.compute].bytes
    one = run.layout.pp > 1 and f.quantized and not f.blocks
    return layers * (f.bytes if one else compute) + ends * compute
