"""Pipeline schedules as integer tables: GPipe, 1F1B and interleaved 1F1B.

A schedule says, for each tick and stage, which forward and which backward pass runs, and in which
buffer slots its data is. In a tick a stage runs at most one forward and one backward pass, each of
one microbatch through one of its chunks of layers (virtual stages). Results of a tick are available
in the next one, on this stage and on its neighbours. So the two passes of a tick do not depend on
each other: the communication of one overlaps the computation of the other.

Stage p has chunks 0 to vp - 1; chunk c of stage p is the (c x pp + p)-th part of the network
(layer_order.py).
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import numpy as np

from maxbench.config.run import SCHEDULES, Run

WAYS = ("fwd", "bwd")


class Row(NamedTuple):
    """The work of one stage in one tick: the columns of a schedule's tables. -1 is no work; slots
    are those of this stage's own buffers.
    """

    fwd_microbatch: int
    fwd_chunk: int
    fwd_chunk_switch: int  # the chunk whose weights are loaded
    fwd_stash_slot: int  # for the residuals of the forward pass
    fwd_input_slot: int  # of its input activation
    loss_grad_slot: (
        int  # first slot for the output gradients of the loss; the last stage reads them
    )
    loss_microbatch: int  # last microbatch of a loss; the same on all stages
    bwd_microbatch: int
    bwd_chunk: int
    bwd_chunk_switch: int  # the chunk whose weights and gradients are loaded
    bwd_chunk_writeback: int  # the chunk whose gradients are written back; at first the same
    bwd_stash_slot: int  # of the residuals, free afterwards
    bwd_grad_slot: int  # of the output gradient
    recv_fwd_slot: int  # for the activation that the stage before computed in the last tick
    recv_bwd_slot: int  # for the gradient that the stage after computed in the last tick
    # The same on all stages:
    embed_microbatch: int  # first of the microbatches that the tick before embeds
    embed_grad_microbatch: int  # first of those whose input gradients have arrived
    allgather_tick: int  # of the ZeRO slices of chunks 1 to vp - 1, in the warm-up
    reducescatter_tick: int  # of the ZeRO slices of chunks vp - 1 to 1, in the cool-down
    tick_in_phase: int


# The three tables of a schedule, and their columns.
WORK = ("fwd_microbatch", "fwd_chunk", "bwd_microbatch", "bwd_chunk")
BUFFERS = (
    "fwd_stash_slot", "bwd_stash_slot", "fwd_input_slot", "bwd_grad_slot", "loss_grad_slot",
    "recv_fwd_slot", "recv_bwd_slot",
)  # fmt: skip
EVENTS = (
    "fwd_chunk_switch", "bwd_chunk_switch", "bwd_chunk_writeback", "embed_microbatch",
    "embed_grad_microbatch", "loss_microbatch", "allgather_tick", "reducescatter_tick",
    "tick_in_phase",
)  # fmt: skip
TABLES = {"work": WORK, "buffers": BUFFERS, "events": EVENTS}

# Scopes of the executor's loops and branches in the compiled program.
PHASES = WARMUP, STEADY, COOLDOWN = "pipeline_warmup", "pipeline_steady", "pipeline_cooldown"
FORWARD_CHUNK_SWITCH = "pipeline_fwd_chunk_switch"
BACKWARD_CHUNK_SWITCH = "pipeline_bwd_chunk_switch"
EMBED, LOSS, EMBED_BACKWARD = "pipeline_embed", "pipeline_loss", "pipeline_embed_backward"
END_OF_TICK = "pipeline_end_of_tick"  # contains all branches except the forward chunk switch
SEND_X, SEND_DX = "pipeline_send_x", "pipeline_send_dx"
# Branches of a slot of chunks whose layers differ: any kind, in the forward pass; in the backward
# pass one for the most frequent kind, and one for each other kind.
FORWARD_KIND = "pipeline_forward_kind"
FREQUENT_KIND, OTHER_KIND = "pipeline_frequent_kind", "pipeline_other_kind"
STASH = "pipeline_stash"  # writes to the activation stash; cost_model/memory.py looks for it


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One schedule.

    Attributes:
      work, buffers, events: int32 [ticks, pp, columns], with the columns of TABLES.
      stash_slots, input_slots, grad_slots: how many slots the three buffers of a stage have: for
        residuals, input activations and output gradients.
      zero_overlap_ticks: ticks of the warm-up in which the weights of one chunk are all-gathered in
        slices, and of the cool-down in which its gradients are reduce-scattered; 0 if vp is 1.
      microbatches_per_loss: microbatches whose loss is computed together.
      microbatches_per_embedding: microbatches that are embedded together, before their forward
        pass; their input gradients arrive at the last stage. 0 without a pipeline.
    """

    name: str
    pp: int
    vp: int
    microbatches: int
    work: np.ndarray
    buffers: np.ndarray
    events: np.ndarray
    stash_slots: int
    input_slots: int
    grad_slots: int
    zero_overlap_ticks: int
    microbatches_per_loss: int
    microbatches_per_embedding: int

    @property
    def ticks(self) -> int:
        return len(self.work)

    def column(self, name: str) -> np.ndarray:
        """One column, [ticks, pp]; a view."""
        table = next(t for t, columns in TABLES.items() if name in columns)
        return getattr(self, table)[:, :, TABLES[table].index(name)]

    def rows(self) -> np.ndarray:
        """All columns, in the order of Row: int32 [ticks, pp, columns]."""
        return np.stack([self.column(name) for name in Row._fields], -1)

    @property
    def phases(self) -> dict[str, range]:
        """The ticks of the warm-up (forward passes alone), the steady state and the cool-down
        (backward passes alone). In a phase all stages run the same code in every tick, on zeros if
        there is nothing else: a tick takes as long as the busiest stage anyway."""
        busy = {way: np.flatnonzero((self.column(f"{way}_microbatch") >= 0).any(1)) for way in WAYS}
        first_backward, forward_end = int(busy["bwd"][0]), int(busy["fwd"][-1]) + 1
        steady = sorted((first_backward, forward_end))
        bounds = (0, *steady, self.ticks)
        return {name: range(*bounds[i : i + 2]) for i, name in enumerate(PHASES)}

    def bubble(self) -> float:
        """Share of the step in which a stage has no work; a backward pass counts as two forward."""
        warmup, steady, cooldown = map(len, self.phases.values())
        return 1 - 3 * self.microbatches * self.vp / (warmup + 3 * steady + 2 * cooldown)

    def render(self, width: int = 120) -> str:
        """Stages as rows, ticks as columns: forward above backward, as 'chunk:microbatch'; the
        first, the middle and the last ticks if not all fit the width."""
        lines = []
        cell = len(f"{self.vp - 1}:{self.microbatches - 1}") + 1
        third, ticks = max(1, (width - 19) // cell // 3), range(self.ticks)
        middle = (self.ticks - third) // 2  # in the steady state
        parts = [ticks[:third], ticks[middle : middle + third], ticks[-third:]]
        parts = parts if 3 * third < self.ticks else [ticks]
        for p in range(self.pp):
            for way in WAYS:
                microbatch = self.column(f"{way}_microbatch")[:, p]
                chunk = self.column(f"{way}_chunk")[:, p]
                text = lambda t, c=chunk, m=microbatch: f"{c[t]}:{m[t]}" if m[t] >= 0 else "."
                cells = ["".join(text(t).ljust(cell) for t in part) for part in parts]
                label = f"stage {p:<2}" if way == "fwd" else ""
                lines.append(f"{label:<9}{way[0].upper()} {'... '.join(cells).rstrip()}")
        spans = [f"{part[0]} to {part[-1]}" for part in parts]
        cut = f" ({', '.join(spans[:-1])} and {spans[-1]} are shown)" if len(parts) > 1 else ""
        head = f"{self.name}: {self.ticks} ticks, bubble {self.bubble():.1%}, slots "
        legend = "F forward, B backward, each chunk:microbatch; . the stage waits"
        return "\n".join([f"{head}{self.stash_slots}{cut}", legend, *lines])


def schedule_for(run: Run) -> Schedule:
    """The schedule of a run's pipeline; without one, of a pipeline of one stage."""
    a, t = run.layout, run.train
    name = t.schedule if a.pp > 1 else "1f1b"
    size, mtp = t.microbatch_group_size, run.model.mtp_layers > 0
    return build_schedule(name, a.pp, a.vp, a.microbatches, size, a.mbs, mtp)


def loss_group_size(
    name: str, pp: int, vp: int, microbatches: int, group: int, mbs: int, mtp: bool = False
) -> int:
    """The number of microbatches whose loss is computed together: two consecutive ones, or as many
    as have four sequences. All stages wait for each other for a loss, as two stages do in any tick.
    Many microbatches on many stages: eight, as the warm-up is that much longer, and the stages wait
    half as often. With multi-token prediction, one microbatch for each stage.
    """
    if mtp:
        return pp
    most = max(2, (8 if pp >= 8 and microbatches >= 64 else 4) // mbs)
    divides = lambda n: n <= most and microbatches % n == 0 and (vp == 1 or group % n == 0)
    return 1 if name == "gpipe" or pp <= 2 else next(filter(divides, (8, 4, 2)), 1)


@functools.cache
def build_schedule(
    name: str,
    pp: int,
    vp: int,
    microbatches: int,
    group: int = 0,
    mbs: int = 1,
    mtp: bool = False,
) -> Schedule:
    """Builds a schedule: 'gpipe', or '1f1b', which with vp > 1 is interleaved 1F1B.

    Args:
      group: microbatches per chunk switch (Megatron's microbatch_group_size_per_vp_stage); at least
        pp, which is the default and needs the least memory.
      mbs: sequences per microbatch.
      mtp: the loss has multi-token prediction.

    The 1F1B order is that of Megatron-LM (arXiv:2104.04473): a stage delays a forward pass until a
    backward pass has freed its slot. The limit is one pass higher here, as the gradient of the last
    stage's output is available one tick after its loss, and higher by one for each further
    microbatch of a loss. The bubble is (pp - 1) / (vp x microbatches) of the useful time if
    microbatches are a multiple of pp.

    With groups longer than pp, backward passes start so many ticks later that stages wait least for
    each other's chunk switches (planning.pipeline_timing.chunk_switch_delay).
    """
    assert name in SCHEDULES
    group = min(max(group, pp), microbatches) if vp > 1 else pp
    per_loss = loss_group_size(name, pp, vp, microbatches, group, mbs, mtp)
    per_embedding = group if pp > 1 else 0
    fwd_tick, bwd_tick = _assign_ticks(name, pp, vp, microbatches, group, per_loss)
    ticks = 1 + max(bwd_tick.values())
    tables = {t: np.full((ticks, pp, len(c)), -1, np.int32) for t, c in TABLES.items()}
    plan = Schedule(
        name, pp, vp, microbatches, **tables, stash_slots=0, input_slots=0, grad_slots=0,
        zero_overlap_ticks=0, microbatches_per_loss=per_loss,
        microbatches_per_embedding=per_embedding,
    )  # fmt: skip
    _assign_work(plan, fwd_tick, bwd_tick)
    _assign_events(plan, fwd_tick, bwd_tick)
    counts: dict[str, Any] = _assign_buffers(plan, fwd_tick, bwd_tick)
    plan = dataclasses.replace(plan, **counts, zero_overlap_ticks=_assign_zero_ticks(plan))
    for table in (plan.work, plan.buffers, plan.events):
        table.setflags(write=False)
    return plan


# (part of the network, microbatch) -> tick
Ticks = dict[tuple[int, int], int]


def _assign_ticks(name, pp, vp, microbatches, group, per_loss) -> tuple[Ticks, Ticks]:
    """The ticks of all forward and all backward passes."""
    forward = _order(group, vp, microbatches, range(vp))
    backward = _order(group, vp, microbatches, range(vp - 1, -1, -1))
    parts, total = pp * vp, len(forward)
    if name == "gpipe":
        delay, limit = 0, [total] * pp
    else:
        delay = max(group - pp + 1 - per_loss, 0)
        limit = [vp * group + pp - 1 + per_loss - 2 * p for p in range(pp)]
    fwd_tick: Ticks = {}
    bwd_tick: Ticks = {}
    fwd_next, bwd_next = [0] * pp, [0] * pp
    tick = 0
    while min(bwd_next) < total:
        for p in range(pp):
            if fwd_next[p] < total and fwd_next[p] - bwd_next[p] < limit[p]:
                m, c = forward[fwd_next[p]]
                part = c * pp + p
                if part == 0 or fwd_tick.get((part - 1, m), tick) < tick:
                    fwd_tick[part, m] = tick
                    fwd_next[p] += 1
        for p in range(pp):
            if bwd_next[p] == total or (name == "gpipe" and fwd_next[p] < total):
                continue
            m, c = backward[bwd_next[p]]
            part = c * pp + p
            if part == parts - 1:  # after the loss of its group
                ready = fwd_tick.get((part, m - m % per_loss + per_loss - 1), tick) + delay
            else:
                ready = bwd_tick.get((part + 1, m), tick)
            if ready < tick and (part, m) in fwd_tick:
                bwd_tick[part, m] = tick
                bwd_next[p] += 1
        tick += 1
        assert tick <= 4 * (total + parts), "deadlock"
    return fwd_tick, bwd_tick


def _order(group: int, vp: int, microbatches: int, chunks: range) -> list[tuple[int, int]]:
    """(microbatch, chunk) in the order of a stage: groups of microbatches, chunk by chunk."""
    return [
        (m, c)
        for start in range(0, microbatches, group)
        for c in chunks
        for m in range(start, min(start + group, microbatches))
    ]


def _assign_work(plan: Schedule, fwd_tick: Ticks, bwd_tick: Ticks) -> None:
    for way, ticks in (("fwd", fwd_tick), ("bwd", bwd_tick)):
        microbatches, chunks = plan.column(f"{way}_microbatch"), plan.column(f"{way}_chunk")
        for (part, m), tick in ticks.items():
            microbatches[tick, part % plan.pp] = m
            chunks[tick, part % plan.pp] = part // plan.pp


def _assign_events(plan: Schedule, fwd_tick: Ticks, bwd_tick: Ticks) -> None:
    """Chunk switches, losses, embeddings and their gradients. Those of ZeRO slices come later."""
    per_loss, per_embedding = plan.microbatches_per_loss, plan.microbatches_per_embedding
    last = plan.pp * plan.vp - 1
    for m in range(plan.microbatches):
        if m % per_loss == per_loss - 1:  # when the last microbatch of the group is complete
            tick = fwd_tick[last, m]
            plan.column("loss_microbatch")[tick] = m
            assert tick - fwd_tick[last, m + 1 - per_loss] == per_loss - 1
        if per_embedding:
            if m % per_embedding == 0:
                plan.column("embed_microbatch")[fwd_tick[0, m]] = m
            received = bwd_tick[0, m] + 1
            # The gradients of the last group are complete after the last tick.
            if m % per_embedding == per_embedding - 1 and received < plan.ticks:
                plan.column("embed_grad_microbatch")[received] = m - m % per_embedding
    for way, p in itertools.product(WAYS, range(plan.pp)):
        ticks = np.flatnonzero(plan.column(f"{way}_microbatch")[:, p] >= 0)
        chunks = plan.column(f"{way}_chunk")[ticks, p]
        before = np.concatenate([[-1], chunks[:-1]])
        switch = chunks != before
        plan.column(f"{way}_chunk_switch")[ticks[switch], p] = chunks[switch]
        if way == "bwd":
            old = np.where(before < 0, chunks, before)[switch]
            plan.column("bwd_chunk_writeback")[ticks[switch], p] = old
    for phase in plan.phases.values():
        plan.column("tick_in_phase")[phase] = np.arange(len(phase))[:, None]


class _Interval(NamedTuple):
    """A slot's use: from the tick that writes it to the tick that reads it last.

    Attributes:
      columns: column -> ticks in which it is this slot; the i-th tick has the i-th slot of several.
    """

    stage: int
    start: int
    end: int
    columns: dict[str, list[int]]


def _assign_buffers(plan: Schedule, fwd_tick: Ticks, bwd_tick: Ticks) -> dict[str, int]:
    """Assigns the slots of the three buffers; returns how many each has."""
    pp, per_loss, per_embedding = (
        plan.pp,
        plan.microbatches_per_loss,
        plan.microbatches_per_embedding,
    )
    last = pp * plan.vp - 1
    stash, inputs, grads, losses = ([] for _ in range(4))
    for (part, m), f in fwd_tick.items():
        p, b = part % pp, bwd_tick[part, m]
        stash.append(_Interval(p, f, b, {"fwd_stash_slot": [f], "bwd_stash_slot": [b]}))
        if part > 0:
            sent = fwd_tick[part - 1, m] + 1
            inputs.append(_Interval(p, sent, f, {"recv_fwd_slot": [sent], "fwd_input_slot": [f]}))
        elif per_embedding:  # embeddings and their gradients use the first slots
            slot = m % per_embedding
            plan.column("fwd_input_slot")[f, p] = slot
            if b + 1 < plan.ticks:
                plan.column("recv_bwd_slot")[b + 1, -1] = slot
        if part < last:
            sent = bwd_tick[part + 1, m] + 1
            grads.append(_Interval(p, sent, b, {"recv_bwd_slot": [sent], "bwd_grad_slot": [b]}))
        elif m % per_loss == per_loss - 1:
            reads = [bwd_tick[part, m + 1 - per_loss + i] for i in range(per_loss)]
            losses.append(_Interval(p, f, b, {"loss_grad_slot": [f], "bwd_grad_slot": reads}))
    # A tick without work writes its result, too: into a free slot.
    for intervals, column in (
        (stash, "fwd_stash_slot"),
        (inputs, "recv_fwd_slot"),
        (grads, "recv_bwd_slot"),
    ):
        written = {(interval.stage, interval.start) for interval in intervals}
        unset = map(tuple, np.argwhere(plan.column(column).T < 0).tolist())
        intervals += [
            _Interval(p, tick, tick, {column: [tick]})
            for p, tick in unset
            if (p, tick) not in written
        ]
    # The stash is written after the reads of a tick, and the loss comes after that; other slots are
    # written before a tick reads.
    losses_end = _allocate(plan, losses, 1, per_loss, first=per_embedding)
    counts = {
        "stash_slots": _allocate(plan, stash, 1),
        "input_slots": _allocate(plan, inputs, 0, first=per_embedding),
        "grad_slots": _allocate(plan, grads, 0, first=losses_end),
    }
    slots = plan.column("loss_grad_slot")
    slots[:] = slots[:, -1:]
    return counts


def _allocate(plan: Schedule, intervals, reuse: int, width: int = 1, first: int = 0) -> int:
    """Gives each interval the lowest `width` free slots from `first` on; with reuse=1 also those
    that are freed in its first tick. Returns the end of the slots."""
    free_from: dict[tuple[int, int], int] = {}
    end_of_slots = first + width
    for p, start, end, columns in sorted(intervals, key=lambda interval: interval[:3]):
        slot = first
        while free_from.get((p, slot), -1) >= start + reuse:
            slot += width
        free_from[p, slot] = end
        end_of_slots = max(end_of_slots, slot + width)
        for column, ticks in columns.items():
            for i, tick in enumerate(ticks):
                assert plan.column(column)[tick, p] == -1
                plan.column(column)[tick, p] = slot + i
    return end_of_slots


def _assign_zero_ticks(plan: Schedule) -> int:
    """Fills in the ticks of ZeRO slices: of weights before the first use of their chunk; of
    gradients from when they are written back, as the chunk below is loaded. Returns
    zero_overlap_ticks."""
    if plan.vp == 1:
        return 0
    all_ticks = np.arange(plan.ticks)[:, None]
    starts = lambda name, chunk: np.where(plan.column(name) == chunk, all_ticks, -1)
    first_use = [
        np.flatnonzero((plan.column("fwd_chunk_switch") == c).any(1))[0] for c in range(plan.vp)
    ]
    cooldown = plan.phases[COOLDOWN]
    written = [
        np.maximum(starts("bwd_chunk_switch", c).max(0), cooldown.start)
        for c in range(plan.vp - 2, -1, -1)
    ]
    written.append(np.full(plan.pp, plan.ticks))
    ticks = int(min(np.diff(first_use).min(), np.diff(written, axis=0).min()))
    gather, reduce = plan.column("allgather_tick"), plan.column("reducescatter_tick")
    gather[:] = np.minimum(all_ticks, ticks * (plan.vp - 1) - 1)
    for i, start in enumerate(written[:-1]):
        since = all_ticks - start
        reduce[:] = np.where((since >= 0) & (since < ticks), ticks * i + since, reduce)
    return max(ticks, 0)
