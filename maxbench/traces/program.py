"""The compiled program of a trace: which operation each event runs, and its work."""

import re
from collections.abc import Iterator, Sequence

from maxbench.cost_model import costs, hlo, simulate
from maxbench.cost_model.costs import PEAKS, Costs
from maxbench.traces.events import (
    ATTENTION,
    COMMUNICATION,
    COPY,
    GEMM,
    KERNEL,
    NOTHING,
    Event,
    RankTrace,
    Work,
    kind_of,
)

KINDS = {"gemm": GEMM, "attention": ATTENTION, "copy": COPY, "offload": COPY}  # of the cost model
# Kernels beside the one that an operation of a library is: sums of its parts, conversions.
BESIDE = re.compile(r"(?i)splitk|dot_do_o|convert_dq")
WIDER = 4  # matched kernels within which the order of the program may be another
Place = tuple[hlo.Computation, int]  # and an operation's index in it


class Program:
    """Operations of a scheduled HLO module, by the names of events.

    Args:
      prices: their FLOPs and kinds depend on no GPU.
    """

    def __init__(self, program: hlo.Program, prices: Costs):
        self.program, self.prices = program, prices
        every = [*program.computations.values()]
        fusions = [op for x in every for op in x.ops if op.base == "fusion" and not op.is_done]
        fused = {program.called(op).name: op for op in fusions}
        self.places: dict[str, Place] = {
            op.name: (where, i)
            for where in every
            if where.name not in fused
            for i, op in enumerate(where.ops)
        }
        self.kernels = {re.sub(r"[.-]", "_", name): name for name in self.places}
        # An event is named after the routine of a library inside a fusion, not after the fusion.
        self.inside = {
            op.name: fusion.name
            for name, fusion in fused.items()
            for op in program.computations[name].ops
            if fusion.name in self.places
        }
        self.callers: dict[str, Place] = {
            name: self.places[op.name]
            for where in every
            if where.name not in fused
            for op in where.ops
            if op.opcode in ("while", "call", "conditional")
            for name in re.findall(r"(?:body|to_apply)=%?([\w.\-]+)", op.attrs) + op.branches
        }
        self.works: dict[str, tuple[str, Work]] = {}

    def name_events(self, trace: RankTrace) -> None:
        """Sets the operation of each event, '' where none matches, and its kind and work."""
        names = [self._named(event) for event in trace.events]
        order = [i for i, event in enumerate(trace.events) if event.kind != COMMUNICATION]
        by_stream: dict[str, list[int]] = {}
        for i in order:
            by_stream.setdefault(trace.events[i].stream, []).append(i)
        for own in by_stream.values():
            for i, name in self._by_order([(i, names[i], trace.events[i]) for i in own]):
                names[i] = name
        trace.events[:] = map(self._with_work, trace.events, names)

    def _named(self, event: Event) -> str:
        """The operation that an event, or its kernel, is named after; or ''."""
        if event.op in self.places:
            return event.op
        return self.inside.get(event.op, "") or self.kernels.get(event.name, "")

    def _by_order(self, events: Sequence[tuple[int, str, Event]]) -> Iterator[tuple[int, str]]:
        """Kernels of libraries that no name matches, which stand in the program's order between two
        that are matched: as many operations of the same kinds must stand there."""
        last, waiting, failed = "", [], 0
        for i, name, event in events:
            if not name:
                main = event.kind in (GEMM, ATTENTION) and not BESIDE.search(event.name)
                waiting += [(i, event.kind)] * main
                continue
            if waiting and last:
                ops = [*filter(self._kind_of_library, self._between(last, name))]
                if [kind for _, kind in waiting] == [*map(self._kind_of_library, ops)]:
                    yield from ((i, op.name) for (i, _), op in zip(waiting, ops, strict=True))
                elif failed < WIDER:  # graphs run operations in another order than the program's
                    failed += 1
                    continue
            last, waiting, failed = name, [], 0

    def _between(self, first: str, second: str) -> list[hlo.Op]:
        """Operations that run after one and before another, if those are neighbours."""
        (where, i), (other, j) = self.places[first], self.places[second]
        if where is other and i < j:
            return where.ops[i + 1 : j]
        inner, outer = self.callers.get(other.name), self.callers.get(where.name)
        if inner and inner[0] is where and i < inner[1]:  # into a loop
            return where.ops[i + 1 : inner[1]] + other.ops[:j]
        if outer and outer[0] is other and outer[1] < j:  # out of a loop
            return where.ops[i + 1 :] + other.ops[outer[1] + 1 : j]
        return where.ops[i + 1 :] + other.ops[:j]  # the next iteration

    def _kind_of_library(self, op: hlo.Op) -> str:
        if op.base == "fusion" and not op.is_done:
            kinds = [*filter(None, map(self._kind_of_library, self.program.called(op).ops))]
            return kinds[0] if kinds else ""
        if costs.is_gemm(op):
            return GEMM
        return ATTENTION if op.target.startswith("__cudnn$fmha") else ""

    def _with_work(self, event: Event, name: str) -> Event:
        if not name or event.kind == COMMUNICATION:
            return event._replace(op=name)
        kind, work = self._work(name)
        own = event.kind if kind_of(event.name) != KERNEL else kind
        main = own == kind and not BESIDE.search(event.name)
        return event._replace(op=name, kind=own, work=work if main else NOTHING)

    def _work(self, name: str) -> tuple[str, Work]:
        """Kind and work of one run of an operation."""
        if name not in self.works:
            where, i = self.places[name]
            self.works[name] = self._computed(where, where.ops[i])
        return self.works[name]

    def _computed(self, where: hlo.Computation, op: hlo.Op) -> tuple[str, Work]:
        if op.base in hlo.COLLECTIVES or op.is_done or op.base != op.opcode:
            return KERNEL, NOTHING
        kind, _, flops = simulate.kernel_cost(self.program, where, op, self.prices)
        moved = float(costs.bytes_moved(self.program, where, op))
        scope = self.program.called(op) if op.base == "fusion" else where
        ops = scope.ops if op.base == "fusion" else [op]
        gemm = next((x for x in ops if costs.is_gemm(x)), None)
        if not gemm:
            return KINDS.get(kind, KERNEL), Work("", "bf16" if flops else "", flops, moved)
        m, n, k, batch, dtype, _ = costs.gemm_sizes(scope, gemm)
        shape = f"{dtype} {m}x{n}x{k}" + (f" x{batch}" if batch > 1 else "")
        return KINDS.get(kind, KERNEL), Work(shape, PEAKS.get(dtype, ""), flops, moved)
