"""A timeline of one training step, played from the compiled program.

One stream computes, in the program's order. All collectives run on one stream beside it, as in XLA
(its ExecutionStreamAssignment has one for communication, and no option for more; the limit on
parallel collectives is the scheduler's): from their start op on, as soon as the stream is free. A
done op waits. What the compute stream waits is exposed communication. A kernel and a collective
beside each other both take longer, by the contention of the GPU type. Copies and slices that the
compiler made asynchronous have a stream each; to the host's memory and from it there is one each.

A loop's iterations are all the same unless a collective from before the loop still runs, so one is
played and counted as often as the loop runs. Of a pipeline's ticks it is an average one.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping

from maxbench.cost_model import hlo, pipeline_timing
from maxbench.cost_model.costs import Costs, Link, bytes_moved, gemm_sizes, is_gemm, kernel_kind

STREAMS = ("compute", "communication", "copies")
MOVES = {"copy", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "transpose"}
MOVES |= {"reshape", "broadcast", "pad", "convert"}  # kernels of these alone are pure copies
EXPANDED = 3  # iterations of a loop that a recorded timeline shows one by one


@dataclasses.dataclass(frozen=True)
class TraceEvent:
    """A bar of the timeline: on a stream, from start on, in seconds; and what it works on."""

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
    """All collectives of one kind over one set of axes."""

    kind: str
    link: Link
    count: float = 0
    bytes: float = 0  # on one GPU: the larger of operands and results
    busy_s: float = 0
    exposed_s: float = 0


@dataclasses.dataclass
class Timeline:
    """The step that was played.

    Attributes:
      seconds: its length.
      compute: seconds of the compute stream by kind: gemm, attention, memory, amax (a pass over
        a tensor for the scale of its format), copy, offload (waiting for the host's memory),
        launch, host, contention, slowest (waiting for the slowest GPU).
      traffic: communication by (kind, axes).
      idle_s: time in which other stages have work (pipeline bubble).
      flops: of matrix products and attention on one GPU, what the hardware executes.
      spans: bars, when they were asked for.
      early: of collectives, by the name of their start, how many seconds later they could be over
        and nothing queued behind them be waited for; of a loop over ticks, in the commonest one.
      branches: of conditionals, by name(), seconds of the longest branch.
    """

    seconds: float = 0
    compute: dict[str, float] = dataclasses.field(default_factory=collections.Counter)
    traffic: dict[tuple[str, str], CollectiveStats] = dataclasses.field(default_factory=dict)
    idle_s: float = 0
    flops: float = 0
    spans: list[TraceEvent] = dataclasses.field(default_factory=list)
    slack_s: dict[str, float] = dataclasses.field(default_factory=dict)
    branches: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def exposed_s(self) -> float:
        """Seconds that the compute stream waits for communication."""
        return sum(t.exposed_s for t in self.traffic.values())


@dataclasses.dataclass
class InFlight:
    """Something beside the compute stream: from begin to end, in seconds."""

    name: str
    kind: str
    begin: float
    end: float
    bytes: int = 0
    traffic: CollectiveStats | None = None  # None: a kernel
    # Names of what must be over before this is, itself among them -> idle time between.
    queued: dict[str, float] = dataclasses.field(default_factory=dict)


BranchFrequencies = Mapping[str, tuple[float, float]]  # of play()
NO_BRANCHES: BranchFrequencies = {}
EVERY_TICK = (1.0, 0.0)  # the longest branch, every time


def simulate(
    program: hlo.Program, costs: Costs, shares: BranchFrequencies = NO_BRANCHES, record=False
) -> Timeline:
    """Plays the program's entry once.

    Args:
      shares: the name that a pipeline's executor gave a conditional, or a loop that stands for one
        -> how often its longest branch runs, and how often it is waited for, else the shortest
        runs; and of a loop over ticks, how much of its work is for something, and how much is
        waiting. A schedule knows, the text is the same for all stages; others run ALWAYS.
      record: keep the bars, for drawing.
    """
    player = _Player(program, costs, shares, record)
    seconds = player.run(program.entry, 0.0, 1)
    slowest = costs.straggler_s(seconds, 1, costs.gpus)  # once a step, for the gradients of all
    player.timeline.compute["slowest"] = slowest
    player.timeline.seconds = seconds + slowest
    return player.timeline


def name(op: hlo.Op) -> str:
    """Of a conditional or loop, by which shares know it: of '.../pipeline_loss/cond' the last but
    one. Of one inside another they say how often the outer's runs have it."""
    return re.sub("/(cond|while)$", "", op.op_name).rpartition("/")[2]


class _Player:
    def __init__(self, program, costs, shares, record=False):
        self.program, self.costs, self.shares, self.record = program, costs, shares, record
        self.timeline = Timeline()
        self.free = 0.0  # when the communication stream is free again
        self.host = {True: 0.0, False: 0.0}  # and those to the host and from it
        self.queue: list[InFlight] = []  # collectives that may not be over
        self.prices: dict[hlo.Op, tuple[str, float, float]] = {}

    def run(self, where: hlo.Computation, now: float, times: float) -> float:
        """Plays a computation that starts at `now` and runs `times` times; returns its end."""
        pending: dict[str, InFlight] = {}
        for op in where.ops:
            base = op.base
            if op.opcode in hlo.FREE or op.target == "AllocateBuffer":
                continue
            if op.opcode == "while":
                now = self._loop(where, op, now, times)
            elif op.opcode == "conditional":
                branches = [self.program.computations[name] for name in op.branches]
                now = self._conditional(op, branches, now, times)
            elif op.opcode == "call":
                now = self.run(self.program.called(op, "to_apply"), now, times)
            elif op.is_done:
                running, early = pending.pop(op.operands[0], None), self.timeline.slack_s
                for each, idle in running.queued.items() if running else ():
                    early[each] = min(early[each], max(now - running.end, 0) + idle)
                now = self._wait(running, now, times)
            elif base in hlo.COLLECTIVES or base != op.opcode:
                now = self._communicate(where, op, base, now, times, pending)
            else:
                now = self._kernel(where, op, now, times)
        return now

    def _loop(self, where, op, now, times):
        body, part = self.program.called(op, "body"), self.shares.get(name(op))
        if part and not self.program.counts(op):
            return self._conditional(op, [body], now, times)
        doing, waiting = part or EVERY_TICK
        left = trips = self.program.trips(where, op)
        begin, done = now, times * doing
        # While something from outside still runs, or bars are wanted, iterations differ.
        while left and (self.free > now or (self.record and trips - left < EXPANDED)):
            now, left = self._iteration(body, now, done), left - 1
        if left:
            recorded, self.record = self.record, False
            seconds = (self._iteration(body, now, done * left) - now) * left
            self.record = recorded
            self._bar("compute", f"{left} more iterations of {op.name}", "loop", now, seconds)
            self.free = min(self.free, now)
            now += seconds
        self.timeline.idle_s += (now - begin) * times * waiting
        return now

    def _iteration(self, body, now, times):
        """Of a loop over ticks, an average one. What few of them have, a turn or the loss, is
        played in ticks of its own: what hides behind it there does not hide in others. Returns its
        end."""
        shares, free, queue, recorded = self.shares, self.free, self.queue, self.record
        known = {name(op) for op in body.ops} & shares.keys()
        often = {which: shares[which][0] for which in sorted(known) if shares[which][0] < 1}
        if not often:
            return self.run(body, now, times)
        none, seconds, self.record = dict.fromkeys(often, (0.0, 0.0)), 0.0, False
        *some, (part, least) = pipeline_timing.tick_mix(often)
        for many, having in some:
            self.shares = shares | none | dict.fromkeys(having, EVERY_TICK)
            self.free, self.queue = free, [dataclasses.replace(running) for running in queue]
            seconds += (self.run(body, now, times * many) - now) * many
        self.shares = shares | none | dict.fromkeys(least, EVERY_TICK)
        self.free, self.queue, self.record = free, queue, recorded
        end = self.run(body, now, times * part)
        self.shares = shares
        seconds += (end - now) * part
        bar = "a tick's share of " + ", ".join(often).replace("pipeline_", "").replace("_", " ")
        self._bar("compute", bar, "loop", end, now + seconds - end)
        return now + seconds

    def _conditional(self, op, branches, now, times):
        alone = lambda branch: _Player(self.program, self.costs, self.shares).run(branch, 0.0, 1)
        *others, longest = sorted(branches, key=alone)
        done, waited = self.shares.get(name(op)) or EVERY_TICK
        decided = (1 + done * (op.opcode == "while")) * self.costs.efficiency.host_sync_us * 1e-6
        self.timeline.compute["host"] += decided * times
        now += decided
        before = self.free
        seconds = self.run(longest, now, times * done) - now
        self.timeline.branches[name(op)] = seconds
        self.timeline.idle_s += seconds * waited * times
        end = now + seconds * (done + waited)
        if others and (rest := 1 - done - waited) > 0:
            end += (self.run(others[0], end, times * rest) - end) * rest
        # What ran inside is over on average by then.
        self.free = min(self.free, max(end, before))
        return end

    def _wait(self, running, now, times):
        if running is None:
            return now
        stream = "communication" if running.traffic else "copies"
        begin, end = running.begin, running.end
        self._bar(stream, running.name, running.kind, begin, end - begin, running.bytes)
        waited = max(end - now, 0.0)
        if waited and running.traffic:
            running.traffic.exposed_s += waited * times
            self._bar("compute", f"wait for {running.traffic.kind}", "wait", now, waited)
        elif waited:
            self.timeline.compute[running.kind] += waited * times
        return now + waited

    def _communicate(self, where, op, base, now, times, pending):
        inner, place = op, where
        if base == "async":  # a wrapper: what runs is the root of what it calls
            place = self.program.called(op)
            inner = place.root
        kind = hlo.COLLECTIVES.get(inner.base)
        if kind is None:
            kind, seconds, _ = kernel_cost(self.program, place, inner, self.costs)
            begin = now
            if kind == "offload":
                away = any(s.host for user in where.users[op.name] for s in hlo.leaves(user.shape))
                begin = max(now, self.host[away])
                self.host[away] = begin + seconds
            pending[op.name] = InFlight(op.name, kind, begin, begin + seconds)
            return now
        sent = sum(hlo.size(o.shape) for o in place.operands(inner))
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
        self.free = begin + seconds
        name = f"{kind} over {link.axes} ({link.name})"
        running = InFlight(name, kind, begin, self.free, max(sent, received), traffic)
        if op.sync or not op.opcode.endswith("-start"):
            return self._wait(running, now, times)
        before = (name for name, one in pending.items() if one.traffic)
        running.queued = dict.fromkeys(before, idle) | {op.name: 0.0}
        self.timeline.slack_s[op.name], pending[op.name] = math.inf, running
        self.queue.append(running)
        return now

    def _kernel(self, where, op, now, times):
        if op not in self.prices:
            self.prices[op] = kernel_cost(self.program, where, op, self.costs)
        kind, alone, flops = self.prices[op]
        t, launch = self.timeline, self.costs.launch
        seconds = self._beside(now, alone)
        t.compute[kind] += alone * times
        t.compute["contention"] += (seconds - alone) * times
        t.compute["launch"] += launch * times
        t.flops += flops * times
        if self.record:
            name = f"{module_of(op.op_name)} {op.name}".strip()
            self._bar(
                "compute", name, kind, now, seconds, bytes_moved(self.program, where, op), flops
            )
        return now + seconds + launch

    def _beside(self, now: float, alone: float) -> float:
        """Seconds of a kernel that starts at now; it and the collectives beside it are slower."""
        self.queue = [running for running in self.queue if running.end > now]
        together = min(alone, self.free - now)
        if together <= 0 or self.costs.gpus == 1:
            return alone
        more = together * self.costs.efficiency.contention
        self.free += more
        for running in self.queue:
            running.end += more
            running.begin += more if running.begin > now else 0
        return alone + more

    def _bar(self, *about):
        if self.record:
            self.timeline.spans.append(TraceEvent(*about))


def module_of(op_name: str) -> str:
    """Where in the model an op stands, and in which pass: 'backward mlp/up'.

    `op_name` as jax writes it: '.../transpose(jvp(jit(layer)))/checkpoint/Block/mlp/up/mul'.
    """
    if "Block/" not in op_name:
        return ""
    passes = {"rematted": "recomputed", "transpose(": "backward", "": "forward"}
    which = next(name for mark, name in passes.items() if mark in op_name)
    return f"{which} {op_name.rpartition('Block/')[2].rpartition('/')[0]}"


def kernel_cost(
    program: hlo.Program, where: hlo.Computation, op: hlo.Op, costs: Costs
) -> tuple[str, float, float]:
    """Kind, seconds alone, and FLOPs of a kernel."""
    fused = op.base == "fusion"
    place = program.called(op) if fused else where
    ops = place.ops if fused else [op]
    kind, seconds, flops = "memory", 0.0, 0.0
    if products := [each for each in ops if is_gemm(each)]:
        kind = "gemm"
        for product in products:
            m, n, k, batch, *how = gemm_sizes(place, product)
            seconds += costs.gemm(m, n, k, batch, *how)
            flops += 2.0 * m * n * k * batch
    elif op.target.startswith("__cudnn$fmha"):  # 2 products forward, 5 backward
        kind, backward = "attention", op.target.endswith("Backward")
        keys, _, values = (o.shape.dims[-1] for o in where.operands(op)[:3])
        flops = 2.0 * (3 * keys + 2 * values if backward else keys + values)
        flops *= math.prod(op.dims("dimensions"))
        flops *= 0.5 if '"mask_type": "CAUSAL"' in op.attrs else 1
        seconds = costs.attention(flops, backward)
    elif op.base in MOVES or (fused and all(map(_moves, ops))):
        kind = "copy"
    size = bytes_moved(program, where, op)
    given = [operand.shape for operand in where.operands(op)]
    if any(s.host for shape in (op.shape, *given) for s in hlo.leaves(shape)):
        return "offload", costs.offload(size / 2), 0.0
    if kind == "memory" and module_of(op.op_name) and op.op_name.endswith("reduce_max"):
        kind = "amax" if hlo.size(op.shape) < size / 100 else kind
    if not seconds:
        return kind, costs.kernel(size, kernel_kind(ops)), flops
    # A product that was measured has read and written.
    least = 0.0 if products and costs.gpu.products else costs.memory(size)
    return kind, max(seconds, least), flops


def _moves(op: hlo.Op) -> bool:
    """Whether an op computes nothing: indices aside, data only changes place or precision."""
    free = op.opcode in MOVES or op.opcode in hlo.FREE
    return free or max(part.elements for part in hlo.leaves(op.shape)) <= 1
