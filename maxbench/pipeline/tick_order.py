"""Which collective of a tick waits for which GEMM.

One layer of a steady-state tick issues, in this order: the backward pass of a channel (its last
GEMM, then its first), the forward pass of a mixer (first, last), the backward pass of a mixer
(last, first), the forward pass of a channel (first, last). A row 'event: events' holds the event
back until the others are done, so that XLA runs its collective concurrently with their GEMMs.

Events are '<pass>.<role>.<GEMM>.<operation>'. all_gather and reduce_scatter are over tp and order
the use of the result; a backward all_gather is that of the output gradient where the forward pass
reduce-scatters (last), and of the input, again, where it all-gathers (first).

Experts without tp have all-to-alls over ep in their place, which take longer than a GEMM. There the
channels of both passes stand between the mixers of both, so that each all-to-all overlaps the GEMMs
of the other pass:

  all-to-all of          overlaps
  the output gradient    the forward mixer
  the tokens             the experts' backward GEMMs
  the input gradient     the experts' forward GEMMs, and the wgrad of 'up'
  the experts' results   the backward mixer
"""

from maxbench.config.run import Run
from maxbench.pipeline.schedule import COOLDOWN, STEADY, WARMUP
from maxbench.terminal import console

# Rows of any kind of layer.
COMMON = {
    # The output gradient that a sublayer's last GEMM needs.
    "bwd.channel.last.all_gather": ("bwd.mixer.last.wgrad", "fwd.channel.last.gemm"),
    "bwd.mixer.last.all_gather": ("bwd.channel.last.wgrad", "fwd.mixer.output"),
    # Once per tick, after the backward channel of its first layer. A chunk switch that came before
    # the send would make the neighbour wait for it.
    "fwd.recv": ("bwd.channel.last.all_gather",),
    "fwd.chunk_switch": ("bwd.channel.last.all_gather",),
    "fwd.recv.write": ("stash.write", "bwd.channel.first.dgrad", "fwd.chunk_switch"),
    # At the end of a tick: all reads of what is replaced.
    "bwd.chunk_switch": ("bwd.mixer.last.wgrad", "fwd.channel.last.gemm"),
}
# The first layer of a tick: the stash is written while the output gradient is all-gathered.
FIRST_LAYER = {"bwd.channel.last.all_gather": ("stash.write",)}
DENSE = COMMON | {
    "fwd.mixer.first.all_gather": ("bwd.channel.first.wgrad",),
    "fwd.mixer.last.reduce_scatter": ("bwd.channel.last.wgrad",),
    "fwd.channel.first.all_gather": ("bwd.mixer.last.dgrad",),
}
# The all-to-alls of the experts alternate with these.
EXPERTS = COMMON | {
    "fwd.mixer.first.all_gather": ("bwd.channel.last.dgrad",),
    "fwd.mixer.last.reduce_scatter": ("bwd.channel.first.wgrad",),
    "fwd.channel.first.all_gather": ("bwd.mixer.last.dgrad",),
}
# Without tp.
ALL_TO_ALLS = {
    "bwd.channel.last.all_gather": ("fwd.mixer.output",),
    "fwd.channel.first.all_gather": ("bwd.channel.first.dgrad",),
    "bwd.mixer.input": ("fwd.channel.last.gemm", "bwd.channel.first.wgrad"),
    "fwd.mixer.input": ("bwd.mixer.first.dgrad",),
    "fwd.output": ("bwd.mixer.first.dgrad",),
    "fwd.recv.write": ("stash.write",),
    "bwd.chunk_switch": COMMON["bwd.chunk_switch"],
}
# Later layers in BF16: the reduce-scatter of the layer before overlaps the last dgrad of a channel,
# so that its all-gather has the last GEMMs of the layer before for itself.
AFTER_DGRAD = {"fwd.mixer.input": ("bwd.channel.last.dgrad",)}
# In FP8 GEMMs take half as long. With few tokens the output gradient, which is needed first, is
# all-gathered first.
AFTER_ALL_GATHER, MANY_TOKENS = {"fwd.mixer.input": ("bwd.channel.last.all_gather",)}, 8192
# ZeRO slices, in the warm-up and in the cool-down, and the layer that follows them.
WARMUP_ONLY = {
    "zero.all_gather": ("fwd.channel.first.all_gather",),
    "fwd.next_layer": ("zero.all_gather",),
}
COOLDOWN_ONLY = {
    "zero.reduce_scatter": ("bwd.channel.last.dgrad", "bwd.channel.first.all_gather"),
    "bwd.next_layer": ("zero.reduce_scatter",),
    "bwd.chunk_switch": (),
}
# Dense layers have no forward pass in the cool-down that would order the last wgrad.
COOLDOWN_DENSE = COOLDOWN_ONLY | {"bwd.mixer.output": ("bwd.mixer.first.wgrad",)}

# In any linear() with tp, inside a pipeline or not (model/linear.py). These rows are code there.
EVERY_GEMM = {
    "bwd.channel.first.dgrad": ("bwd.channel.first.all_gather",),
    "bwd.mixer.first.dgrad": ("bwd.mixer.first.all_gather",),
    "bwd.channel.first.reduce_scatter": ("bwd.channel.first.wgrad",),
    "bwd.mixer.first.reduce_scatter": ("bwd.mixer.first.wgrad",),
}


def sublayers(run: Run) -> tuple[tuple[str, str], ...]:
    """(pass, role) of the sublayers of a layer of a tick, in the order in which they are issued."""
    if _has_all_to_alls(run):
        return ("fwd", "mixer"), ("bwd", "channel"), ("fwd", "channel"), ("bwd", "mixer")
    return ("bwd", "channel"), ("fwd", "mixer"), ("bwd", "mixer"), ("fwd", "channel")


def _has_all_to_alls(run: Run) -> bool:
    return run.model.has_experts and run.layout.tp == 1


def tick_order(run: Run, phase: str, layer: int) -> dict[str, tuple[str, ...]]:
    """The rows for the layer-th layer of a tick of a phase (schedule.PHASES)."""
    if run.train.order == "off":
        return {}
    rows = EXPERTS if run.model.has_experts else DENSE
    if _has_all_to_alls(run):
        rows = ALL_TO_ALLS
    elif layer == 0:
        rows = rows | FIRST_LAYER
    elif not run.model.has_experts:
        many = run.layout.mbs * run.train.seq // run.layout.cp >= MANY_TOKENS
        rows = rows | (
            AFTER_DGRAD if not run.format.quantized else {} if many else AFTER_ALL_GATHER
        )
    if phase == WARMUP:
        return rows | WARMUP_ONLY
    if phase == COOLDOWN:
        return rows | (COOLDOWN_ONLY if run.model.has_experts else COOLDOWN_DENSE)
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
    if run.layout.tp > 1:
        rows += [[event, words(events), ""] for event, events in EVERY_GEMM.items()]
    heads = ["event", "waits for (steady state)", "in the first layer of a tick"]
    lines = console.table(heads, rows, text=(0, 1, 2))
    for phase in (WARMUP, COOLDOWN):
        order = tick_order(run, phase, 1)
        changed = [[e, words(order[e])] for e in order if order[e] != steady[1].get(e)]
        lines += ["", f"{phase.removeprefix('pipeline_')}:"]
        lines += console.table((), changed, text=(0, 1), indent="  ")
    return "\n".join(lines)
