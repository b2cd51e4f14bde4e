"""Simulation of one training step from its compiled program: a timeline of streams.

The compute stream runs kernels in program order. All collectives share one communication stream, as
in XLA: its ExecutionStreamAssignment has one by default, the limit on parallel collectives is the
scheduler's. A collective starts at its start op or when the stream is free, whichever is later; its
done op blocks the compute stream, and that wait is exposed communication. A kernel and a concurrent
collective slow each other down by the GPU type's contention. Asynchronous kernels (copies, slices
and, since jax 0.12, fusions) take as long as on the compute stream, as they share the cores and the
memory with it; transfers to and from host memory have a stream per direction.

Iterations of a loop are equal unless a collective from before the loop is still in flight, so one
iteration is simulated and multiplied by the trip count. If branches run in some iterations alone,
it is an average iteration.
"""

import collections
import dataclasses
import itertools
import math
import re
from typing import Any

from maxbench.cost_model import hlo
from maxbench.cost_model.costs import (
    CUDNN_ATTENTION,
    Costs,
    Link,
    bytes_moved,
    gemm_sizes,
    has_price,
    is_attention,
    is_gemm,
    kernel_kind,
)
from maxbench.cost_model.meaning import UNKNOWN, Meaning, by_name, matches

STREAMS = ("compute", "communication", "copies")
MOVES = {"copy", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "transpose"}
MOVES |= {"reshape", "broadcast", "pad", "convert"}  # kernels of these alone are pure copies
EXPANDED = 3  # iterations of a loop that a recorded timeline draws one by one
TE_CAUSAL = (2, 3, 4, 5)  # Transformer Engine's masks: causal, with padding, aligned to the end
ATTENTION_TILE = 128  # keys of a tile of cuDNN's attention, assumed: a window ends inside of one


@dataclasses.dataclass(frozen=True)
class TraceEvent:
    """One event on a stream. `start` and `seconds` in seconds from the start of the step."""

    stream: str
    name: str
    kind: str
    start: float
    seconds: float
    bytes: int = 0
    flops: float = 0

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclasses.dataclass
class CollectiveStats:
    """Totals of all collectives of one kind over one set of mesh axes, on one GPU."""

    kind: str
    link: Link
    count: float = 0
    bytes: float = 0  # the larger of operands and results
    busy_s: float = 0
    exposed_s: float = 0


@dataclasses.dataclass
class OpTime:
    """Seconds of a step that one op takes on one GPU's compute stream.

    Attributes:
      where, op: the op and its computation; for the wait for the slowest GPU, the entry and None.
      kind: key of Timeline.compute, a kind of collective whose end blocks the stream, or 'idle'.
      count: how often the op runs in a step.
      seconds: of all runs, with contention and the gap to the next kernel.
      flops, bytes: of one run.
      traffic: of a collective.
      busy_s, queued_s: seconds of all runs of a collective, and before them in the queue.
    """

    where: hlo.Computation
    op: hlo.Op | None
    kind: str
    count: float = 0
    seconds: float = 0
    flops: float = 0
    bytes: float = 0
    traffic: CollectiveStats | None = None
    busy_s: float = 0
    queued_s: float = 0


@dataclasses.dataclass
class Unknown:
    """Something that the program does not say, with the seconds of a step that are counted for it.

    Attributes:
      name: by which Meaning's trip_counts, branches or prices can give it.
      op_name: of the op, for people.
      counted: 'one trip', 'the longest branch' or 'its bytes'.
      alternatives: branches of a conditional; 0 of others.
    """

    name: str
    op_name: str
    counted: str
    seconds: float = 0
    count: float = 0
    alternatives: int = 0


@dataclasses.dataclass
class Timeline:
    """A simulated step.

    Attributes:
      seconds: length of the step.
      compute: seconds of the compute stream by kind: gemm, attention, memory (memory-bound
        kernels), amax (a pass over a tensor for its FP8 scale), copy, unpriced (kernels of unknown
        work, by their bytes), priced (by Meaning.prices), offload (waiting for host memory), launch
        (gaps), host (host-side branches), contention, slowest (waiting for the slowest GPU).
      traffic: totals of collectives by (kind, axes).
      idle_s: pipeline bubble: time in which only other stages have work.
      flops: GEMM and attention FLOPs that one GPU executes, recomputation included.
      events: the recorded timeline; empty unless `record` was set.
      slack_s: start op of a collective -> seconds by which its end could slip before a done op of
        it, or of a collective queued behind it, would block. Within a loop: of the most frequent
        kind of iteration.
      branch_s: scope of a conditional -> seconds of its longest branch.
      ops: (name of an op, kind) -> its OpTime. Their seconds sum to `seconds`.
      unknown: name of an op -> loops, conditionals and kernels of which the step may take another
        time than is counted.
    """

    seconds: float = 0
    compute: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    traffic: dict[tuple[str, str], CollectiveStats] = dataclasses.field(default_factory=dict)
    idle_s: float = 0
    flops: float = 0
    events: list[TraceEvent] = dataclasses.field(default_factory=list)
    slack_s: dict[str, float] = dataclasses.field(default_factory=dict)
    branch_s: dict[str, float] = dataclasses.field(default_factory=dict)
    ops: dict[tuple[str, str], OpTime] = dataclasses.field(default_factory=dict)
    unknown: dict[str, Unknown] = dataclasses.field(default_factory=dict)

    def add_unknown(
        self, op: hlo.Op, counted: str, seconds: float, times: float, alternatives: int = 0
    ) -> None:
        """Adds `times` runs of `seconds` each."""
        name = next(filter(None, op.names))
        known = self.unknown.setdefault(
            op.name, Unknown(name, op.op_name, counted, alternatives=alternatives)
        )
        known.seconds, known.count = known.seconds + seconds * times, known.count + times

    def time_of(self, where: Any, op: Any, kind: str) -> OpTime:
        """The OpTime of an op, to add to."""
        key = op.name if op else "", kind
        if key not in self.ops:
            self.ops[key] = OpTime(where, op, kind)
        return self.ops[key]

    @property
    def exposed_s(self) -> float:
        """Seconds for which collectives block the compute stream."""
        return sum(t.exposed_s for t in self.traffic.values())


@dataclasses.dataclass
class InFlight:
    """An asynchronous op in flight, from `begin` to `end` in seconds."""

    name: str
    kind: str
    begin: float
    end: float
    bytes: int = 0
    traffic: CollectiveStats | None = None  # None: a copy or another kernel
    op_time: OpTime | None = None
    # Collectives that end before this one or with it -> idle time of the stream in between.
    queued: dict[str, float] = dataclasses.field(default_factory=dict)


ALWAYS = (1.0, 0.0)  # of Meaning.frequencies


def simulate(
    program: hlo.Program,
    costs: Costs,
    meaning: Meaning = UNKNOWN,
    record: bool = False,
) -> Timeline:
    """Simulates one execution of the program's entry.

    Args:
      meaning: of the program's names, for what the program does not say (Timeline.unknown).
      record: keep the events, for drawing.
    """
    simulator = Simulator(program, costs, meaning, record)
    seconds = simulator.run(program.entry, 0.0, 1)
    slowest = costs.straggler_s(seconds, 1, costs.gpus)  # gradients synchronize once per step
    simulator.timeline.compute["slowest"] = slowest
    simulator.timeline.time_of(program.entry, None, "slowest").seconds += slowest
    simulator.timeline.seconds = seconds + slowest
    return simulator.timeline


class Simulator:
    """State of a simulation: the streams, and the timeline so far. Args as of simulate()."""

    def __init__(self, program, costs, meaning, record=False):
        self.program, self.costs, self.record = program, costs, record
        self.meaning, self.frequencies = meaning, meaning.frequencies
        self.timeline = Timeline()
        self.free = 0.0  # time at which the communication stream is free
        self.host = {True: 0.0, False: 0.0}  # likewise of transfers to the host, and from it
        self.queue: list[InFlight] = []  # collectives that may be in flight
        self.kernel_costs: dict[hlo.Op, tuple[str, float, float]] = {}

    def run(self, where: hlo.Computation, now: float, times: float) -> float:
        """Simulates a computation from `now` on; returns its end. It counts `times` times."""
        pending: dict[str, InFlight] = {}
        for op in where.ops:
            base = op.base
            if op.opcode in hlo.FREE or op.target == "AllocateBuffer":
                continue
            if op.opcode == "while":
                now = self._loop(where, op, now, times)
            elif op.opcode == "conditional":
                branches = [self.program.computations[name] for name in op.branches]
                now = self._conditional(where, op, branches, now, times)
            elif op.opcode == "call":
                now = self.run(self.program.called(op, "to_apply"), now, times)
            elif op.is_done:
                if running := pending.pop(op.operands[0], None):
                    slack = self.timeline.slack_s
                    for name, idle in running.queued.items():
                        slack[name] = min(slack[name], max(now - running.end, 0) + idle)
                    now = self._wait(running, now, times)
            elif base in hlo.COLLECTIVES or base != op.opcode:
                now = self._communicate(where, op, base, now, times, pending)
            else:
                now = self._kernel(where, op, now, times)
        return now

    def _loop(self, where, op, now, times):
        body, frequency = self.program.called(op, "body"), self.frequencies.get(op.scope)
        if frequency and not self.program.counts(op):
            return self._conditional(where, op, [body], now, times)
        work, bubble = frequency or ALWAYS
        trips = self.meaning.trips(self.program, where, op)
        known, trips = trips is not None, 1 if trips is None else trips
        left = trips
        begin, busy_times = now, times * work
        # Iterations differ while a collective from before the loop is in flight.
        while left and (self.free > now or (self.record and trips - left < EXPANDED)):
            now, left = self._iteration(body, now, busy_times), left - 1
        if left:
            record, self.record = self.record, False
            seconds = (self._iteration(body, now, busy_times * left) - now) * left
            self.record = record
            self._add_event("compute", f"{left} more iterations of {op.name}", "loop", now, seconds)
            self.free = min(self.free, now)
            now += seconds
        if not known:
            self.timeline.add_unknown(op, "one trip", now - begin, busy_times)
        self._idle(where, op, (now - begin) * times * bubble)
        return now

    def _idle(self, where, op, seconds):
        self.timeline.idle_s += seconds
        if seconds:
            self.timeline.time_of(where, op, "idle").seconds += seconds

    def _iteration(self, body, now, times):
        """Simulates an average iteration; returns its end.

        Branches that run in some iterations alone are simulated in iterations of their own: they
        hide communication in those only. The most frequent kind of iteration runs last, so that its
        slack is the one recorded.
        """
        frequencies, free, queue, record = self.frequencies, self.free, self.queue, self.record
        known = {op.scope for op in body.ops} & frequencies.keys()
        rare = {name: frequencies[name][0] for name in sorted(known) if frequencies[name][0] < 1}
        if not rare:
            return self.run(body, now, times)
        never, seconds, self.record = dict.fromkeys(rare, (0.0, 0.0)), 0.0, False
        *others, (last_share, last_branches) = iteration_kinds(rare)
        for share, branches in others:
            self.frequencies = {**frequencies, **never, **dict.fromkeys(branches, ALWAYS)}
            self.free, self.queue = free, [dataclasses.replace(running) for running in queue]
            seconds += (self.run(body, now, times * share) - now) * share
        self.frequencies = {**frequencies, **never, **dict.fromkeys(last_branches, ALWAYS)}
        self.free, self.queue, self.record = free, queue, record
        end = self.run(body, now, times * last_share)
        self.frequencies = frequencies
        seconds += (end - now) * last_share
        label = f"an iteration's share of {', '.join(rare)}"
        self._add_event("compute", label, "loop", end, now + seconds - end)
        return now + seconds

    def _conditional(self, where, op, branches, now, times):
        """A conditional, or a while loop with 0 or 1 trips, on a predicate that the host reads.

        A conditional costs one device-to-host sync, a loop one more per trip.
        """
        meaning = dataclasses.replace(self.meaning, frequencies=self.frequencies)
        frequency, shares = self.frequencies.get(op.scope), by_name(self.meaning.branches, op)
        if shares and len(shares) == len(branches):
            return self._shared(where, op, branches, shares, now, times)
        alone = lambda branch: Simulator(self.program, self.costs, meaning).run(branch, 0.0, 1)
        *others, longest = sorted(branches, key=alone)
        taken, waited = frequency or ALWAYS
        syncs = 1 + taken * (op.opcode == "while")
        host_s = syncs * self.costs.efficiency.host_sync_us * 1e-6
        now = self._host(where, op, host_s, now, times)
        free_before = self.free
        seconds = self.run(longest, now, times * taken) - now
        self.timeline.branch_s[op.scope] = seconds
        if frequency is None and len(branches) > 1:
            count = len(branches)
            self.timeline.add_unknown(op, "the longest branch", seconds, times, count)
        self._idle(where, op, seconds * waited * times)
        end = now + seconds * (taken + waited)
        if others and (rest := 1 - taken - waited) > 0:
            end += (self.run(others[0], end, times * rest) - end) * rest
        # On average, collectives of the branch have ended by `end`.
        self.free = min(self.free, max(end, free_before))
        return end

    def _shared(self, where, op, branches, shares, now, times):
        """A conditional whose branches run in known shares of its runs."""
        host_s = self.costs.efficiency.host_sync_us * 1e-6
        end = self._host(where, op, host_s, now, times)
        for branch, share in zip(branches, shares, strict=True):
            if share:
                end += (self.run(branch, end, times * share) - end) * share
        return end

    def _host(self, where, op, seconds, now, times):
        """The wait until the host has read a predicate; returns the time after it."""
        self.timeline.compute["host"] += seconds * times
        host = self.timeline.time_of(where, op, "host")
        host.count, host.seconds = host.count + times, host.seconds + seconds * times
        return now + seconds

    def _wait(self, running, now, times):
        stream = "communication" if running.traffic else "copies"
        begin, end = running.begin, running.end
        self._add_event(stream, running.name, running.kind, begin, end - begin, running.bytes)
        waited = max(end - now, 0.0)
        running.op_time.seconds += waited * times
        if waited and running.traffic:
            running.traffic.exposed_s += waited * times
            self._add_event("compute", f"wait for {running.traffic.kind}", "wait", now, waited)
        elif waited:
            self.timeline.compute[running.kind] += waited * times
        return now + waited

    def _communicate(self, where, op, base, now, times, pending):
        """Starts a collective or a transfer, or runs a kernel; returns the time after it."""
        inner, scope = op, where
        if base == "async":  # wraps the root of the computation that it calls
            scope = self.program.called(op)
            inner = scope.root
        kind = hlo.COLLECTIVES.get(inner.base)
        if kind is None:
            kind, seconds, _ = kernel_cost(self.program, scope, inner, self.costs, self.meaning)
            if kind != "offload":
                # An asynchronous kernel takes the cores and the memory bandwidth from the kernels
                # that run beside it: as long as it would take alone.
                return self._kernel(scope, inner, now, times)
            out = any(s.host for user in where.users[op.name] for s in hlo.leaves(user.shape))
            begin = max(now, self.host[out])
            self.host[out] = begin + seconds
            op_time = self.timeline.time_of(where, op, kind)
            op_time.count += times
            pending[op.name] = InFlight(op.name, kind, begin, begin + seconds, op_time=op_time)
            return now
        sent = sum(hlo.size(o.shape) for o in scope.operands(inner))
        done = next((user for user in where.users[op.name] if user.is_done), op)
        received = hlo.size(done.shape)
        link = self.costs.permute_link(inner.pairs) if kind == "permute" else None
        link = link or self.costs.link_of(inner.groups)
        traffic = self.timeline.traffic.setdefault((kind, link.axes), CollectiveStats(kind, link))
        seconds = self.costs.collective(kind, link, sent, received)
        traffic.count += times
        traffic.bytes += max(sent, received) * times
        traffic.busy_s += seconds * times
        begin, idle = max(now, self.free), max(now - self.free, 0)
        op_time = self.timeline.time_of(where, op, kind)
        op_time.traffic, op_time.bytes = traffic, max(sent, received)
        op_time.count += times
        op_time.busy_s += seconds * times
        op_time.queued_s += (begin - now) * times
        self.free = begin + seconds
        name = f"{kind} over {link.axes} ({link.name})"
        running = InFlight(name, kind, begin, self.free, max(sent, received), traffic, op_time)
        if op.sync or not op.opcode.endswith("-start"):
            return self._wait(running, now, times)
        earlier = (name for name, other in pending.items() if other.traffic)
        running.queued = dict.fromkeys(earlier, idle) | {op.name: 0.0}
        self.timeline.slack_s[op.name], pending[op.name] = math.inf, running
        self.queue.append(running)
        return now

    def _kernel(self, where, op, now, times):
        if op not in self.kernel_costs:
            cost = kernel_cost(self.program, where, op, self.costs, self.meaning)
            self.kernel_costs[op] = cost
        kind, alone, flops = self.kernel_costs[op]
        t, launch = self.timeline, self.costs.launch
        if kind == "unpriced":
            t.add_unknown(op, "its bytes", alone, times)
        seconds = self._with_contention(now, alone)
        op_time = t.time_of(where, op, kind)
        op_time.count, op_time.flops = op_time.count + times, flops
        op_time.seconds += (seconds + launch) * times
        t.compute[kind] += alone * times
        t.compute["contention"] += (seconds - alone) * times
        t.compute["launch"] += launch * times
        t.flops += flops * times
        if self.record:
            name, size = (
                f"{self.meaning.label(op.op_name)} {op.name}",
                bytes_moved(self.program, where, op),
            )
            self._add_event("compute", name.strip(), kind, now, seconds, size, flops)
        return now + seconds + launch

    def _with_contention(self, now: float, alone: float) -> float:
        """Seconds of a kernel that starts at `now`. Delays concurrent collectives likewise."""
        self.queue = [running for running in self.queue if running.end > now]
        overlap = min(alone, self.free - now)
        if overlap <= 0 or self.costs.gpus == 1:
            return alone
        delay = overlap * self.costs.efficiency.contention
        self.free += delay
        for running in self.queue:
            running.end += delay
            running.begin += delay if running.begin > now else 0
        return alone + delay

    def _add_event(self, *fields):
        if self.record:
            self.timeline.events.append(TraceEvent(*fields))


def iteration_kinds(frequencies: dict[str, float]) -> list[tuple[float, set[str]]]:
    """Kinds of iterations of a loop: (share of all iterations, branches that run in them), fewest
    branches last.

    Branches are spread as evenly as possible: each occupies the iterations after those of the one
    before, wrapping around at the end.
    """
    ends = list(itertools.accumulate(frequencies.values(), initial=0.0))
    spans = dict(zip(frequencies, itertools.pairwise(ends), strict=True))
    kinds = []
    for begin, end in itertools.pairwise(sorted({0.0, 1.0} | {end % 1 for end in ends})):
        laps = [begin + lap for lap in range(math.ceil(ends[-1]))]
        branches = {name for name, (a, b) in spans.items() if any(a <= at < b for at in laps)}
        kinds.append((end - begin, branches))
    return sorted(kinds, key=lambda kind: -len(kind[1]))


def kernel_cost(
    program: hlo.Program,
    where: hlo.Computation,
    op: hlo.Op,
    costs: Costs,
    meaning: Meaning = UNKNOWN,
) -> tuple[str, float, float]:
    """Kind (as in Timeline.compute), seconds without contention, and FLOPs of a kernel."""
    fused = op.base == "fusion"
    scope = program.called(op) if fused else where
    ops = scope.ops if fused else [op]
    kind, seconds, flops = "memory", 0.0, 0.0
    if (price := by_name(meaning.prices, op)) is not None:
        return "priced", price, 0.0
    if gemms := [inner for inner in ops if is_gemm(inner)]:
        kind = "gemm"
        for gemm in gemms:
            m, n, k, batch, *dtype_layout = gemm_sizes(scope, gemm)
            seconds += costs.gemm(m, n, k, batch, *dtype_layout)
            flops += 2.0 * m * n * k * batch
    elif is_attention(op):  # 2 GEMMs forward, 5 backward
        kind, backward = "attention", "backward" in op.target.lower()
        keys, values, scores = attention_sizes(where, op)
        flops = 2.0 * (3 * keys + 2 * values if backward else keys + values)
        flops *= scores
        fraction, computed = score_fractions(op)
        seconds = costs.attention(flops * computed, backward)
        flops *= fraction
    elif op.base in MOVES or (fused and all(map(_moves, ops))):
        kind = "copy"
    size = bytes_moved(program, where, op)
    operands = [operand.shape for operand in where.operands(op)]
    if any(s.host for shape in (op.shape, *operands) for s in hlo.leaves(shape)):
        return "offload", costs.offload(size / 2), 0.0
    if kind == "memory" and matches(meaning.amax, op):
        kind = "amax" if hlo.size(op.shape) < size / 100 else kind
    if kind == "memory" and not all(map(has_price, ops)):
        kind = "unpriced"
    if not seconds:
        return kind, costs.kernel(size, kernel_kind(ops)), flops
    # Measured GEMM times include reads and writes.
    memory_s = 0.0 if gemms and costs.gpu.products else costs.memory(size)
    return kind, max(seconds, memory_s), flops


def attention_sizes(where: hlo.Computation, op: hlo.Op) -> tuple[int, int, int]:
    """Elements of a head's keys and of its values, and the scores of all heads, of attention."""
    if op.target.startswith(CUDNN_ATTENTION):
        keys, _, values = (o.shape.dims[-1] for o in where.operands(op)[:3])
        return keys, values, math.prod(op.dims("dimensions"))
    names = ("input_batch", "attn_heads", "q_max_seqlen", "kv_max_seqlen")
    scores = math.prod(op.integer(name, 1) for name in names)
    return op.integer("qk_head_dim", 1), op.integer("v_head_dim", 1), scores


def score_fractions(op: hlo.Op) -> tuple[float, float]:
    """Fractions of the scores of cuDNN's attention that its mask leaves, and that it computes.

    They differ for a window: it computes whole tiles. A causal mask's half tiles are in the
    measured rate. What a mask of padding leaves depends on data: all of it. Of packed documents
    only the whole sequence is known, which has more scores.
    """
    if op.target.startswith(CUDNN_ATTENTION):
        # XLA writes the config with spaces where it was not autotuned, without where it was.
        causal = bool(re.search(r'"mask_type": ?"(PADDING_)?CAUSAL"', op.attrs))
        found = re.search(r'"sliding_window_length": ?(\d+)', op.attrs)
        tokens, window = op.dims("dimensions")[-1], int(found[1]) if found else 0
    else:  # Transformer Engine's window leaves out the query's own token
        causal = op.integer("mask_type", 0) in TE_CAUSAL
        tokens, window = op.integer("kv_max_seqlen", 1), op.integer("window_size_left", -1) + 1
    if not causal:
        return 1, 1
    if not 0 < window < tokens:
        return 0.5, 0.5
    inside = lambda window: window / tokens - window * window / tokens**2 / 2
    return inside(window), inside(min(window + ATTENTION_TILE, tokens))


def _moves(op: hlo.Op) -> bool:
    """Whether an op only moves or converts data. Scalars are indices and do not count."""
    free = op.opcode in MOVES or op.opcode in hlo.FREE
    return free or max(part.elements for part in hlo.leaves(op.shape)) <= 1
