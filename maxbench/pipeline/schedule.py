"""Pipeline schedules as plain integer tables.

A schedule says, for each tick and stage, which forward and which backward piece of work is done,
and in which buffer slots its data lives. In one tick a stage does at most one forward and one
backward, each of one microbatch through one of its chunks of layers. Neither needs what the other
makes in the same tick: what comes out of a tick is there for the next one, here and at neighbours.
So the two can be one piece of code, in which one computes while the other communicates.

Stage p holds chunks 0 .. vp-1; chunk c of stage p is the (c x pp + p)-th part of the network
(slots.py).
"""

import dataclasses
import functools
import itertools

import numpy as np

from maxbench.config.run import SCHEDULES, Run

WAYS = ("fwd", "bwd")

# Columns of Schedule.table; -1 is nothing. Slots are of this stage's own buffers.
COLUMNS = (
    "fwd_microbatch",  # forward: microbatch
    "fwd_chunk",
    "fwd_chunk_switch",  # the chunk whose turn begins, or -1
    "fwd_stash_slot",  # residual slot that the forward fills
    "fwd_input_slot",  # inbox slot of its input
    "loss_grad_slot",  # first of the gradient slots that the loss fills, which the last stage reads
    "loss_microbatch",  # of which microbatch and those before; the same on all stages
    "bwd_microbatch",  # backward
    "bwd_chunk",
    "bwd_chunk_switch",  # the chunk whose turn begins, or -1
    "bwd_chunk_writeback",  # and the one whose turn is over; the first time the same
    "bwd_stash_slot",  # residual slot that the backward reads and frees
    "bwd_grad_slot",  # gradient slot of what it is given
    "recv_fwd_slot",  # inbox slot for what the stage before made in the last tick
    "recv_bwd_slot",  # gradient slot for what the stage after made in the last tick
    # The same on all stages, of which the first reads the former and the last has the latter:
    "embed_microbatch",  # first of the microbatches that are embedded before, into the first inbox slots
    "embed_grad_microbatch",  # first of those whose embedding's gradients are whole, in the first of grads
    "allgather_tick",  # in the fill, where the weights of chunks 1 .. are (pieces.py), 0 .. spread x (vp-1)
    "reducescatter_tick",  # in the drain, where the gradients of chunks vp-1 .. 1 are, likewise
    "tick_in_phase",  # ticks since the phase began
)

# Names of the executor's loops and conditionals in the compiled program.
PHASES = WARMUP, STEADY, COOLDOWN = "pipeline_warmup", "pipeline_steady", "pipeline_cooldown"
FORWARD_CHUNK_SWITCH, BACKWARD_CHUNK_SWITCH = (
    "pipeline_fwd_chunk_switch",
    "pipeline_bwd_chunk_switch",
)
EMBED, LOSS, EMBED_BACKWARD = "pipeline_embed", "pipeline_loss", "pipeline_embed_backward"
END_OF_TICK = (
    "pipeline_end_of_tick"  # what few ticks have is in it: all of these but the forward turn
)
SEND_X, SEND_DX = "pipeline_send_x", "pipeline_send_dx"
STASH = "pipeline_stash"  # writes to the activation stash; cost_model/memory.py looks for it


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One schedule.

    Attributes:
      table: int32 [ticks, pp, columns].
      keep, inbox, grads: how many slots the three buffers of a stage need.
      spread: ticks of the fill, and of the drain, in which the weights of a chunk can come, and its
        gradients go; 0 where there is but one chunk.
      together: microbatches of which a loss is.
      ahead: microbatches that are embedded together, before their turn of the first chunk; what
        goes back of these comes round to the last stage. 0 without a pipeline.
    """

    name: str
    pp: int
    vp: int
    microbatches: int
    table: np.ndarray
    stash_slots: int
    input_slots: int
    grad_slots: int
    zero_overlap_ticks: int
    microbatches_per_loss: int
    microbatches_per_embedding: int

    @property
    def ticks(self) -> int:
        return len(self.table)

    def column(self, name: str) -> np.ndarray:
        """One column of the table, [ticks, pp]."""
        return self.table[:, :, COLUMNS.index(name)]

    @property
    def phases(self) -> dict[str, range]:
        """The ticks in which there is forward work alone, those with backward work too, and those
        with backward work alone. In a phase each stage does the same in every tick, if need be for
        nothing: ticks are as long as the busiest stage's anyway."""
        busy = {way: np.flatnonzero((self.column(f"{way}_microbatch") >= 0).any(1)) for way in WAYS}
        first, last = (
            min(busy["bwd"][0], busy["fwd"][-1] + 1),
            max(busy["bwd"][0], busy["fwd"][-1] + 1),
        )
        ends = (0, int(first), int(last), self.ticks)
        return {name: range(*ends[i : i + 2]) for i, name in enumerate(PHASES)}

    def bubble(self) -> float:
        """Share of the step in which a stage waits; backward work takes as long as two forward."""
        fill, both, drain = map(len, self.phases.values())
        return 1 - 3 * self.microbatches * self.vp / (fill + 3 * both + 2 * drain)

    def render(self, width: int = 120) -> str:
        """Stages as rows, ticks as columns: forward above backward, as 'chunk:microbatch'; where
        not all have room, the first and the last."""
        rows = []
        cell = len(f"{self.vp - 1}:{self.microbatches - 1}") + 1
        shown, whole = max(2, (width - 16) // cell), range(self.ticks)
        ends = [whole[: shown // 2], whole[-(shown // 2) :]] if shown < self.ticks else [whole]
        for p in range(self.pp):
            for way in WAYS:
                micro, chunk = (
                    self.column(f"{way}_microbatch")[:, p],
                    self.column(f"{way}_chunk")[:, p],
                )
                said = lambda t, c=chunk, m=micro: f"{c[t]}:{m[t]}" if m[t] >= 0 else "."
                text = ["".join(said(t).ljust(cell) for t in end) for end in ends]
                label = f"stage {p:<2}" if way == "fwd" else ""
                rows.append(f"{label:<9}{way[0].upper()} {'... '.join(text).rstrip()}")
        more = f" (first and last {shown // 2} shown)" if shown < self.ticks else ""
        head = (
            f"{self.name}: {self.ticks} ticks, bubble {self.bubble():.1%}, slots {self.stash_slots}"
        )
        legend = "F forward, B backward, each chunk:microbatch; . the stage waits"
        return "\n".join([head + more, legend, *rows])


def schedule_for(run: Run) -> Schedule:
    """The schedule of a run's pipeline; without one, of a pipeline of one stage."""
    a, t = run.layout, run.train
    return build_schedule(
        t.schedule if a.pp > 1 else "1f1b",
        a.pp,
        a.vp,
        a.microbatches,
        t.microbatch_group_size,
        a.mbs,
    )


def _order(turn: int, vp: int, microbatches: int, backward: bool) -> list[tuple[int, int]]:
    """(microbatch, chunk) in the order a stage takes them: groups of microbatches, by chunk."""
    chunks = range(vp - 1, -1, -1) if backward else range(vp)
    return [
        (m, c)
        for start in range(0, microbatches, turn)
        for c in chunks
        for m in range(start, min(start + turn, microbatches))
    ]


def loss_group_size(name: str, pp: int, vp: int, microbatches: int, turn: int, mbs: int) -> int:
    """Of how many microbatches a loss is: of two that come one after the other, or as many as have
    four sequences. For a loss all stages wait for all, as two stages do in any tick. Of many on
    many stages it is of eight: the fill is so much longer, and half as many are waited for."""
    most = max(2, (8 if pp >= 8 and microbatches >= 64 else 4) // mbs)
    fits = lambda n: n <= most and microbatches % n == 0 and (vp == 1 or turn % n == 0)
    return 1 if name == "gpipe" or pp <= 2 else next(filter(fits, (8, 4, 2)), 1)


@functools.cache
def build_schedule(name: str, pp: int, vp: int, microbatches: int, turn=0, mbs=1) -> Schedule:
    """Makes a schedule: 'gpipe', or '1f1b', which with vp > 1 is the interleaved one.

    A chunk's turn is `turn` microbatches long, pp at least, which is the default and holds least.

    The 1F1B order is that of Megatron-LM (arXiv:2104.04473): a stage holds back forward work until
    backward work has freed what it may hold, here one piece more, as the last stage's gradient is
    there a tick after its loss, and one for each further microbatch that this is of. Its bubble is
    (pp - 1) / (vp x microbatches) of the useful time whenever microbatches are a multiple of pp.

    Where turns are longer than stages are many, backward work starts so many ticks later that
    stages wait least for each other's turns (predict.ticks.turn_delay).
    """
    assert name in SCHEDULES
    turn = min(max(turn, pp), microbatches) if vp > 1 else pp
    of = loss_group_size(name, pp, vp, microbatches, turn, mbs)
    forward = _order(turn, vp, microbatches, backward=False)
    backward = _order(turn, vp, microbatches, backward=True)
    parts, total = pp * vp, len(forward)
    if name == "gpipe":
        later, limit = 0, [total] * pp
    else:
        later = max(turn - pp + 1 - of, 0)
        limit = [vp * turn + pp - 1 + of - 2 * p for p in range(pp)]
    f_tick, b_tick = {}, {}  # (part of the network, microbatch) -> tick
    f_next, b_next = [0] * pp, [0] * pp
    tick = 0
    while min(b_next) < total:
        for p in range(pp):
            if f_next[p] < total and f_next[p] - b_next[p] < limit[p]:
                m, c = forward[f_next[p]]
                part = c * pp + p
                if part == 0 or f_tick.get((part - 1, m), tick) < tick:
                    f_tick[part, m] = tick
                    f_next[p] += 1
        for p in range(pp):
            if b_next[p] == total or (name == "gpipe" and f_next[p] < total):
                continue
            m, c = backward[b_next[p]]
            part = c * pp + p
            after = f_tick if part == parts - 1 else b_tick
            needed = (part, m - m % of + of - 1) if part == parts - 1 else (part + 1, m)
            ready = after.get(needed, tick) + later * (part == parts - 1)
            if ready < tick and (part, m) in f_tick:
                b_tick[part, m] = tick
                b_next[p] += 1
        tick += 1
        assert tick <= 4 * (total + parts), "the schedule stands still"
    ahead = turn if pp > 1 else 0
    return _assign_buffers(name, pp, vp, microbatches, f_tick, b_tick, tick, of, ahead)


def _assign_buffers(name, pp, vp, microbatches, f_tick, b_tick, ticks, of, ahead) -> Schedule:
    """Fills the table: work where it was put, and the lowest free slot for all that waits."""
    table = np.full((ticks, pp, len(COLUMNS)), -1, np.int32)
    at = {c: i for i, c in enumerate(COLUMNS)}
    last = pp * vp - 1
    keep, inbox, grads, losses = ([] for _ in range(4))  # (stage, first tick, last tick, columns)
    for (part, m), f in f_tick.items():
        p, c, b = part % pp, part // pp, b_tick[part, m]
        table[f, p, at["fwd_microbatch"]], table[f, p, at["fwd_chunk"]] = m, c
        table[b, p, at["bwd_microbatch"]], table[b, p, at["bwd_chunk"]] = m, c
        keep.append((p, f, b, {"fwd_stash_slot": [f], "bwd_stash_slot": [b]}))
        if part > 0:
            sent = f_tick[part - 1, m] + 1
            inbox.append((p, sent, f, {"recv_fwd_slot": [sent], "fwd_input_slot": [f]}))
        if part < last:
            sent = b_tick[part + 1, m] + 1
            grads.append((p, sent, b, {"recv_bwd_slot": [sent], "bwd_grad_slot": [b]}))
        elif m % of == of - 1:  # the loss, when the last microbatch that it is of is done
            table[f, :, at["loss_microbatch"]] = m
            assert f - f_tick[part, m + 1 - of] == of - 1
            read = [b_tick[part, m + 1 - of + i] for i in range(of)]
            losses.append((p, f, b, {"loss_grad_slot": [f], "bwd_grad_slot": read}))
        if part == 0 and ahead:
            table[f, p, at["fwd_input_slot"]] = slot = m % ahead
            if slot == 0:
                table[f, :, at["embed_microbatch"]] = m
            if b + 1 < ticks:  # of the last microbatches all is whole after the last tick
                table[b + 1, -1, at["recv_bwd_slot"]] = slot
                if slot == ahead - 1:
                    table[b + 1, :, at["embed_grad_microbatch"]] = m - slot
    for way, p in itertools.product(WAYS, range(pp)):
        ticks = np.flatnonzero(table[:, p, at[f"{way}_microbatch"]] >= 0)
        chunks = table[ticks, p, at[f"{way}_chunk"]]
        before = np.concatenate([[-1], chunks[:-1]])
        turns = chunks != before
        table[ticks[turns], p, at[f"{way}_chunk_switch"]] = chunks[turns]
        if way == "bwd":
            table[ticks[turns], p, at["bwd_chunk_writeback"]] = np.where(
                before < 0, chunks, before
            )[turns]
    # What a tick has done for nothing it puts into a slot all the same, one that is free.
    for stays, column in (
        (keep, "fwd_stash_slot"),
        (inbox, "recv_fwd_slot"),
        (grads, "recv_bwd_slot"),
    ):
        full = {stay[:2] for stay in stays}
        free = map(tuple, np.argwhere(table[..., at[column]].T < 0).tolist())
        stays += [(p, tick, tick, {column: [tick]}) for p, tick in free if (p, tick) not in full]
    # What a tick keeps is put away when it has read what it frees, and its loss comes after that;
    # other slots it fills first.
    fill = functools.partial(_allocate_intervals, table)
    losses_end = fill(losses, 1, of, first=ahead)
    counts = fill(keep, 1), fill(inbox, 0, first=ahead), fill(grads, 0, first=losses_end)
    table[:, :, at["loss_grad_slot"]] = table[:, -1:, at["loss_grad_slot"]]
    made = Schedule(name, pp, vp, microbatches, table, *counts, 0, of, ahead)
    made = dataclasses.replace(made, zero_overlap_ticks=_assign_zero_ticks(made))
    for phase in made.phases.values():
        table[phase, :, at["tick_in_phase"]] = np.arange(len(phase))[:, None]
    table.setflags(write=False)
    return made


def _allocate_intervals(table, stays, again: int, width: int = 1, first: int = 0) -> int:
    """Gives each stay the lowest `width` slots from `first` on that are free, those freed in its
    first tick too where `again` is 1: a column's i-th tick has the i-th. Returns the slots' end."""
    free_from, most = {}, first + width
    for p, start, end, uses in sorted(stays, key=lambda stay: stay[:3]):
        slot = first
        while free_from.get((p, slot), -1) >= start + again:
            slot += width
        free_from[p, slot] = end
        most = max(most, slot + width)
        for column, ticks in uses.items():
            for i, tick in enumerate(ticks):
                assert table[tick, p, COLUMNS.index(column)] == -1
                table[tick, p, COLUMNS.index(column)] = slot + i
    return most


def _assign_zero_ticks(plan: Schedule) -> int:
    """Fills in when weights and gradients travel: these from when a chunk's sums are put away, as
    the turn of the one below begins. Returns spread."""
    if plan.vp == 1:
        return 0
    begins = lambda name, chunk: np.where(
        plan.column(name) == chunk, np.arange(plan.ticks)[:, None], -1
    )
    used = [
        np.flatnonzero((plan.column("fwd_chunk_switch") == c).any(1))[0] for c in range(plan.vp)
    ]
    drain = plan.phases[COOLDOWN]
    away = [
        np.maximum(begins("bwd_chunk_switch", c).max(0), drain.start)
        for c in range(plan.vp - 2, -1, -1)
    ]
    away.append(np.full(plan.pp, plan.ticks))
    spread = int(min(np.diff(used).min(), np.diff(away, axis=0).min()))
    gather, reduce = (plan.column(name) for name in ("allgather_tick", "reducescatter_tick"))
    last = spread * (plan.vp - 1) - 1
    gather[:] = np.minimum(np.arange(plan.ticks), last)[:, None]
    for i, start in enumerate(away[:-1]):
        since = np.arange(plan.ticks)[:, None] - start
        reduce[:] = np.where((since >= 0) & (since < spread), spread * i + since, reduce)
    return max(spread, 0)
