"""Which collective of a tick waits for which GEMM.

One layer of a steady-state tick issues, in this order: backward MLP (down, up), forward attention
(qkv, out), backward attention (out, qkv), forward MLP (up, down). A row 'event: events' holds the
event back until the others are done, so that XLA runs its collective concurrently with their GEMMs.

Events are '<pass>.<GEMM>.<operation>'. all_gather and reduce_scatter are over tp and order the use
of the result; a backward all_gather is that of the output gradient where the forward pass
reduce-scatters (out, down), and of the input, again, where it all-gathers (qkv, up).
"""

from maxbench.config.run import Run
from maxbench.pipeline.schedule import COOLDOWN, STEADY, WARMUP
from maxbench.terminal import console

# Rows of any kind of layer.
COMMON = {
    # The output gradient that a sublayer's last GEMM needs.
    "bwd.down.all_gather": ("bwd.out.wgrad", "fwd.down.gemm"),
    "bwd.out.all_gather": ("bwd.down.wgrad", "fwd.attn.output"),
    # Once per tick, after the backward MLP of its first layer. A chunk switch that came before the
    # send would make the neighbour wait for it.
    "fwd.recv": ("bwd.down.all_gather",),
    "fwd.chunk_switch": ("bwd.down.all_gather",),
    "fwd.recv.write": ("stash.write", "bwd.up.dgrad", "fwd.chunk_switch"),
    # At the end of a tick: all reads of what is replaced.
    "bwd.chunk_switch": ("bwd.out.wgrad", "fwd.down.gemm"),
}
# The first layer of a tick: the stash is written while the output gradient is all-gathered.
FIRST_LAYER = {"bwd.down.all_gather": ("stash.write",)}
DENSE = COMMON | {
    "fwd.qkv.all_gather": ("bwd.up.wgrad",),
    "fwd.out.reduce_scatter": ("bwd.down.wgrad",),
    "fwd.up.all_gather": ("bwd.out.dgrad",),
}
# The all-to-alls of the experts alternate with these.
EXPERTS = COMMON | {
    "fwd.qkv.all_gather": ("bwd.down.dgrad",),
    "fwd.out.reduce_scatter": ("bwd.up.wgrad",),
    "fwd.up.all_gather": ("bwd.out.dgrad",),
}
# Later layers in BF16: the reduce-scatter of the layer before overlaps the dgrad of 'down', so that
# its all-gather has the last GEMMs of the layer before for itself.
AFTER_DGRAD = {"fwd.attn.input": ("bwd.down.dgrad",)}
# In FP8 GEMMs take half as long. With few tokens the output gradient, which is needed first, is
# all-gathered first.
AFTER_ALL_GATHER, MANY_TOKENS = {"fwd.attn.input": ("bwd.down.all_gather",)}, 8192
# ZeRO slices, in the warm-up and in the cool-down, and the layer that follows them.
WARMUP_ONLY = {
    "zero.all_gather": ("fwd.up.all_gather",),
    "fwd.next_layer": ("zero.all_gather",),
}
COOLDOWN_ONLY = {
    "zero.reduce_scatter": ("bwd.down.dgrad", "bwd.up.all_gather"),
    "bwd.next_layer": ("zero.reduce_scatter",),
    "bwd.chunk_switch": (),
}
# Dense layers have no forward pass in the cool-down that would order the last wgrad.
COOLDOWN_DENSE = COOLDOWN_ONLY | {"bwd.attn.output": ("bwd.qkv.wgrad",)}

# In any linear() with tp, inside a pipeline or not (model/linear.py). These rows are code there.
EVERY_GEMM = {
    "bwd.up.dgrad": ("bwd.up.all_gather",),
    "bwd.qkv.dgrad": ("bwd.qkv.all_gather",),
    "bwd.up.reduce_scatter": ("bwd.up.wgrad",),
    "bwd.qkv.reduce_scatter": ("bwd.qkv.wgrad",),
}


def tick_order(run: Run, phase: str, layer: int) -> dict[str, tuple[str, ...]]:
    """The rows for the layer-th layer of a tick of a phase (schedule.PHASES)."""
    if run.train.order == "off":
        return {}
    rows = EXPERTS if run.model.experts else DENSE
    if layer == 0:
        rows = rows | FIRST_LAYER
    elif not run.model.experts:
        many = run.layout.mbs * run.train.seq // run.layout.cp >= MANY_TOKENS
        rows = rows | (
            AFTER_DGRAD if not run.format.quantized else {} if many else AFTER_ALL_GATHER
        )
    if phase == WARMUP:
        return rows | WARMUP_ONLY
    if phase == COOLDOWN:
        return rows | (COOLDOWN_ONLY if run.model.experts else COOLDOWN_DENSE)
    return rows


def render(run: Run) -> str:
    """The table of a run as text: event, and what it waits for, in the first and in later layers of
    a tick of the steady state, and in the other phases where it differs."""
    if run.train.order == "off":
        return "train.order=off: no event waits for another one"
    steady = [tick_order(run, STEADY, layer) for layer in (0, 1)]
    words = lambda events: ", ".join(events) or "nothing"
    rows = []
    for event in {**steady[0], **steady[1]}:
        first, later = (order.get(event, ()) for order in steady)
        rows.append([event, words(later), words(first) if first != later else ""])
    rows += [[event, words(events), ""] for event, events in EVERY_GEMM.items()]
    heads = ["event", "waits for (steady state)", "in the first layer of a tick"]
    lines = console.table(heads, rows, text=(0, 1, 2))
    for phase in (WARMUP, COOLDOWN):
        order = tick_order(run, phase, 1)
        changed = [[e, words(order[e])] for e in order if order[e] != steady[1].get(e)]
        lines += ["", f"{phase.removeprefix('pipeline_')}:"]
        lines += console.table((), changed, text=(0, 1), indent="  ")
    return "\n".join(lines)
