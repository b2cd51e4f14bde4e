"""Pipeline schedules as plain integer tables.

A schedule says, for each tick and stage, which forward and which backward piece of work is done,
and in which buffer slots its data lives. In one tick a stage does at most one forward and then one
backward, of one microbatch through one of its chunks of layers. What a stage sends in a tick is
there for its neighbour's next one, so transfers run behind the other half of the tick.

Stage p holds chunks 0 .. vp-1; chunk c of stage p is the (c x pp + p)-th part of the network
(slots.py).
"""

import dataclasses
import functools

import numpy as np

from maxbench.spec.run import SCHEDULES, Run

# Columns of Schedule.table; -1 is nothing. Slots are of this stage's own buffers.
COLUMNS = (
    "f_micro",  # forward: microbatch
    "f_chunk",
    "f_keep",  # residual slot that the forward fills
    "f_from",  # inbox slot of its input; -1 on the network's first chunk, which embeds tokens
    "f_grad",  # gradient slot that the loss fills; -1 but on the network's last chunk
    "b_micro",  # backward
    "b_chunk",
    "b_keep",  # residual slot that the backward reads and frees
    "b_from",  # gradient slot of what it is given
    "x_put",  # inbox slot for what arrives at the end of this tick from the stage before
    "g_put",  # gradient slot for what arrives at the start of this tick from the stage after
)

# Names of the executor's conditionals in the compiled program.
FORWARD, BACKWARD = "pipeline_forward", "pipeline_backward"
EMBED, LOSS, EMBED_BACKWARD = "pipeline_embed", "pipeline_loss", "pipeline_embed_backward"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One schedule.

    Attributes:
      table: int32 [ticks, pp, columns].
      keep, inbox, grads: how many slots the three buffers of a stage need.
    """

    name: str
    pp: int
    vp: int
    microbatches: int
    table: np.ndarray
    keep: int
    inbox: int
    grads: int

    @property
    def ticks(self) -> int:
        return len(self.table)

    def column(self, name: str) -> np.ndarray:
        """One column of the table, [ticks, pp]."""
        return self.table[:, :, COLUMNS.index(name)]

    def step_cost(self, forward: float = 1.0, backward: float = 2.0) -> float:
        """Time of all ticks, each as long as its busiest stage; in units of the arguments."""
        each = (self.column("f_micro") >= 0) * forward + (self.column("b_micro") >= 0) * backward
        return float(each.max(1).sum())

    def bubble(self, forward: float = 1.0, backward: float = 2.0) -> float:
        """Share of the step in which a stage waits, between 0 and 1."""
        useful = self.microbatches * self.vp * (forward + backward)
        return 1 - useful / self.step_cost(forward, backward)

    def shares(self) -> dict[str, tuple[float, float]]:
        """For each conditional of the executor: how often a tick has work, and how often it waits.

        Both are shares of the ticks. A tick is as long as its busiest stage, so a stage waits for
        the forward or backward piece of another; the ends' work is one stage's, and all wait.
        """
        work = self.microbatches * self.vp
        busy = {way: (self.column(f"{way}_micro") >= 0).any(1).sum() for way in "fb"}
        share = lambda n: float(n / self.ticks)
        ends = dict.fromkeys((EMBED, LOSS, EMBED_BACKWARD), (share(self.microbatches), 0.0))
        return {
            FORWARD: (share(work), share(busy["f"] - work)),
            BACKWARD: (share(work) / self.vp, share(busy["b"] - work) / self.vp),  # each chunk's
            **ends,
        }

    def picture(self, width: int = 120) -> str:
        """Stages as rows, ticks as columns: forward above backward, as 'chunk:microbatch'; where
        not all have room, the first and the last."""
        rows = []
        cell = len(f"{self.vp - 1}:{self.microbatches - 1}") + 1
        shown, whole = max(2, (width - 16) // cell), range(self.ticks)
        ends = [whole[: shown // 2], whole[-(shown // 2) :]] if shown < self.ticks else [whole]
        for p in range(self.pp):
            for way in "fb":
                micro, chunk = self.column(f"{way}_micro")[:, p], self.column(f"{way}_chunk")[:, p]
                said = lambda t, c=chunk, m=micro: f"{c[t]}:{m[t]}" if m[t] >= 0 else "."
                text = ["".join(said(t).ljust(cell) for t in end) for end in ends]
                label = f"stage {p:<2}" if way == "f" else ""
                rows.append(f"{label:<9}{way.upper()} {'... '.join(text).rstrip()}")
        more = f" (first and last {shown // 2} shown)" if shown < self.ticks else ""
        head = f"{self.name}: {self.ticks} ticks, bubble {self.bubble():.1%}, slots {self.keep}"
        legend = "F forward, B backward, each chunk:microbatch; . the stage waits"
        return "\n".join([head + more, legend, *rows])


def schedule_of(run: Run) -> Schedule:
    """The schedule of a run's pipeline; without one, of a pipeline of one stage."""
    a = run.layout
    return schedule(run.train.schedule, a.pp, a.vp, a.microbatches)


def _order(pp: int, vp: int, microbatches: int, backward: bool) -> list[tuple[int, int]]:
    """(microbatch, chunk) in the order a stage takes them: groups of pp microbatches, by chunk."""
    chunks = range(vp - 1, -1, -1) if backward else range(vp)
    return [
        (m, c)
        for start in range(0, microbatches, pp)
        for c in chunks
        for m in range(start, min(start + pp, microbatches))
    ]


@functools.cache
def schedule(name: str, pp: int, vp: int, microbatches: int) -> Schedule:
    """Makes a schedule: 'gpipe', or '1f1b', which with vp > 1 is the interleaved one.

    The 1F1B order is that of Megatron-LM (arXiv:2104.04473): a stage holds back forward work until
    backward work has freed what it may hold. Its bubble is (pp - 1) / (vp x microbatches) of the
    useful time whenever microbatches are a multiple of pp.
    """
    assert name in SCHEDULES
    forward = _order(pp, vp, microbatches, backward=False)
    backward = _order(pp, vp, microbatches, backward=True)
    parts, total = pp * vp, len(forward)
    if name == "gpipe":
        limit = [total] * pp
    else:
        limit = [(vp - 1) * min(pp, microbatches) + 2 * (pp - 1 - p) + 1 for p in range(pp)]
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
            needed = (part, m) if part == parts - 1 else (part + 1, m)
            ready = after.get(needed, tick + 1) + (part < parts - 1)
            if ready <= tick and (part, m) in f_tick:
                b_tick[part, m] = tick
                b_next[p] += 1
        tick += 1
        assert tick <= 4 * (total + parts), "the schedule stands still"
    return _with_slots(name, pp, vp, microbatches, f_tick, b_tick, tick)


def _with_slots(name, pp, vp, microbatches, f_tick, b_tick, ticks) -> Schedule:
    """Fills the table: work where it was put, and the lowest free slot for all that waits."""
    table = np.full((ticks, pp, len(COLUMNS)), -1, np.int32)
    at = {c: i for i, c in enumerate(COLUMNS)}
    last = pp * vp - 1
    keep, inbox, grads = ([] for _ in range(3))  # per stage: (first tick, last tick, columns)
    for (part, m), f in f_tick.items():
        p, c, b = part % pp, part // pp, b_tick[part, m]
        table[f, p, at["f_micro"]], table[f, p, at["f_chunk"]] = m, c
        table[b, p, at["b_micro"]], table[b, p, at["b_chunk"]] = m, c
        keep.append((p, f, b, [(f, "f_keep"), (b, "b_keep")]))
        if part > 0:
            # Arrives at the end of the sender's tick.
            sent = f_tick[part - 1, m]
            inbox.append((p, sent, f, [(sent, "x_put"), (f, "f_from")]))
        if part < last:
            sent = b_tick[part + 1, m] + 1  # arrives at the start of the tick after the sender's
            grads.append((p, sent, b, [(sent, "g_put"), (b, "b_from")]))
        else:
            grads.append((p, f, b, [(f, "f_grad"), (b, "b_from")]))
    counts = []
    for stays in (keep, inbox, grads):
        free_from: dict[tuple[int, int], int] = {}
        most = 1
        for p, start, end, uses in sorted(stays, key=lambda s: (s[0], s[1], s[2])):
            slot = 0
            while free_from.get((p, slot), -1) >= start:
                slot += 1
            free_from[p, slot] = end
            most = max(most, slot + 1)
            for tick, column in uses:
                assert table[tick, p, at[column]] == -1
                table[tick, p, at[column]] = slot
        counts.append(most)
    table.setflags(write=False)
    return Schedule(name, pp, vp, microbatches, table, *counts)
