"""Live buffers of a step over time, from its scheduled program.

The compiler reports only a total. Here a buffer is a result with memory of its own, alive from the
op that writes it to the last op that reads it; the step's state is donated and always alive. A
loop's body represents all of its iterations. Its carry keeps its buffers, except between the last
op of the body that reads a carried array and the op that writes the array of the next iteration.
"""

import dataclasses
import itertools
import re

from maxbench.cost_model import hlo, simulate
from maxbench.cost_model.costs import Costs
from maxbench.cost_model.meaning import UNKNOWN, Meaning

ALIASES = {"bitcast", "opt-barrier", "add-dependency", "after-all", "domain"}  # of their operand


@dataclasses.dataclass(eq=False)
class Buffer:
    """A buffer, alive from step `start` to step `end` of the program, inclusive, except in `gaps`
    (first and last step of each); steps are indices of Liveness.seconds."""

    name: str
    bytes: int
    start: int
    end: int
    shape: str = ""  # 'bf16[80,8192]', of its first array
    gaps: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def is_alive(self, step: int) -> bool:
        in_gap = any(first <= step <= last for first, last in self.gaps)
        return self.start <= step <= self.end and not in_gap


Bound = dict[tuple[str, int], Buffer]  # (op, index of its result) -> the buffer it is written to


@dataclasses.dataclass(frozen=True)
class Liveness:
    """Buffers of a training step, and the seconds of each program step, one per kernel."""

    buffers: list[Buffer]
    seconds: list[float]

    def total(self) -> list[int]:
        """Live bytes at each program step."""
        change = [0] * (len(self.seconds) + 1)
        for b in self.buffers:
            for first, last in (
                (b.start, b.end),
                *((last + 1, first - 1) for first, last in b.gaps),
            ):
                change[first] += b.bytes
                change[last + 1] -= b.bytes
        return list(itertools.accumulate(change[:-1]))

    def peak(self) -> tuple[int, dict[str, int]]:
        """The program step with most live bytes, and its live buffers: name -> bytes, largest
        first."""
        total = self.total()
        at = max(range(len(total)), key=total.__getitem__)
        sizes: dict[str, int] = {}
        for b in self.buffers:
            if b.is_alive(at):
                sizes[b.name] = sizes.get(b.name, 0) + b.bytes
        return at, dict(sorted(sizes.items(), key=lambda item: -item[1]))


def liveness(program: hlo.Program, costs: Costs, meaning: Meaning = UNKNOWN) -> Liveness:
    """Traces the buffers of a program's entry, whose parameters Meaning.arguments names."""
    entry, walk = program.entry, _Walk(program, costs, meaning)
    names = ((_argument(op, meaning), op) for op in _parameters(entry))
    state = [walk.new(name, op.shape.bytes) for name, op in names]
    # The state is donated, so results are written to its buffers.
    walk.run(entry, state, 1, _bound(program, entry, state))
    for buffer in state:
        buffer.end, buffer.gaps = len(walk.seconds) - 1, []
    for buffer in walk.buffers:
        buffer.name = buffer.name or buffer.shape
    return Liveness(walk.buffers, walk.seconds)


def _parameters(where: hlo.Computation) -> list[hlo.Op]:
    parameters = (op for op in where.ops if op.opcode == "parameter")
    return sorted(parameters, key=lambda op: int(op.literal))


def _argument(parameter: hlo.Op, meaning: Meaning) -> str:
    """Name of the memory of a parameter of the program."""
    found = (name for at, name in meaning.arguments.items() if at.search(parameter.op_name))
    return next(found, "other")


class _Walk:
    """Buffers and program steps so far, and the buffers of each op in the current computation."""

    def __init__(self, program: hlo.Program, costs: Costs, meaning: Meaning):
        self.program, self.costs, self.meaning = program, costs, meaning
        self.buffers: list[Buffer] = []
        self.seconds = [0.0]
        self.no_buffer = Buffer("constants", 0, 0, 0)

    def new(self, name: str, size: int) -> Buffer:
        now = len(self.seconds) - 1
        self.buffers.append(Buffer(name, size, now, now))
        return self.buffers[-1]

    def run(
        self, where: hlo.Computation, arguments: list[Buffer], times: float, bound: Bound
    ) -> list[Buffer]:
        """Walks a computation; returns the buffers of its result.

        Args:
          arguments: buffers of its parameters' arrays, in order.
          times: how often it runs.
          bound: the buffers that results are written to.
        """
        buffers: dict[str, list[Buffer]] = {}
        starts, at = {}, 0
        for op in _parameters(where):
            starts[op.name], at = at, at + len(hlo.leaves(op.shape))
        for op in where.ops:
            operands = [buffers[name] for name in op.operands]
            if op.opcode == "parameter":
                first = starts[op.name]
                buffers[op.name] = arguments[first : first + len(hlo.leaves(op.shape))]
            elif op.opcode in ("tuple", "get-tuple-element") or op.opcode in ALIASES:
                buffers[op.name] = self._aliased(where, op, operands)
            elif op.opcode in hlo.FREE:
                buffers[op.name] = [self.no_buffer] * len(hlo.leaves(op.shape))
            else:
                self.seconds.append(self._seconds(where, op) * times)
                buffers[op.name] = self._results(where, op, operands, times, bound)
                for buffer in (*_flat(operands), *buffers[op.name]):
                    buffer.end = len(self.seconds) - 1
        return buffers[where.root.name]

    def _seconds(self, where, op) -> float:
        """Seconds of a kernel; 0 of control flow, whose ops count, and of asynchronous ops."""
        control_flow = op.opcode in ("while", "conditional", "call")
        if control_flow or op.base != op.opcode or op.base in hlo.COLLECTIVES:
            return 0.0
        return simulate.kernel_cost(self.program, where, op, self.costs)[1] + self.costs.launch

    def _results(self, where, op, operands, times, bound) -> list[Buffer]:
        """The buffers of an op's results."""
        program, frequency = self.program, self.meaning.frequencies.get(op.scope)
        times *= frequency[0] if frequency else 1
        if op.opcode == "while":
            body = program.called(op, "body")
            if frequency is None or program.counts(op):
                times *= self.meaning.trips(program, where, op) or 1
            self.run(body, operands[0], times, _bound(program, body, operands[0]))
            return operands[0]
        if op.opcode == "conditional":
            branches = [(len(program.computations[b].ops), i, b) for i, b in enumerate(op.branches)]
            _, i, name = max(branches)
            return self.run(program.computations[name], operands[1 + i], times, {})
        if op.opcode == "call":
            return self.run(program.called(op, "to_apply"), _flat(operands), times, {})
        if op.is_done:
            count, whole = len(hlo.leaves(op.shape)), operands[0]
            first = len(where.by_name[op.operands[0]].operands) if len(whole) > count else 0
            return whole[first : first + count]
        reused, sources = in_place(program, op), _flat(operands)
        if op.opcode.endswith("-start") and len(hlo.leaves(op.shape)) > len(op.operands):
            reused |= {i: i for i in range(len(op.operands))}
        results = []
        for i, shape in enumerate(hlo.leaves(op.shape)):
            buffer = bound.get((op.name, i))
            now = len(self.seconds) - 1
            if buffer and buffer not in sources and buffer.end < now - 1:
                buffer.gaps.append((buffer.end + 1, now - 1))
            if buffer is None and i in reused:
                buffer = operands[reused[i]][0]
            buffer = buffer or self.new("", 0 if shape.host else shape.bytes)
            buffer.name = buffer.name or self.meaning.label(op.op_name).strip()
            if not buffer.name and i in reused:  # named after the values written to it
                names = (b.name for b in sources if b.bytes and b is not buffer and b.name)
                buffer.name = next(names, "")
            dims = ",".join(map(str, shape.dims))
            buffer.shape = buffer.shape or f"{shape.dtype}[{dims}]"
            results.append(buffer)
        return results

    def _aliased(self, where, op, operands) -> list[Buffer]:
        """The buffers of an op that aliases its operands."""
        if op.opcode == "tuple":
            return _flat(operands)
        if op.opcode != "get-tuple-element":
            return operands[0] if operands else [self.no_buffer]
        first, count = _slice_of(where, op)
        return operands[0][first : first + count]


def _flat(operands: list[list[Buffer]]) -> list[Buffer]:
    return [buffer for buffers in operands for buffer in buffers]


def _slice_of(where: hlo.Computation, op: hlo.Op) -> tuple[int, int]:
    """First index and count of a tuple's arrays that a get-tuple-element selects."""
    parts = where.by_name[op.operands[0]].shape
    index = int(op.attr("index"))
    return sum(len(hlo.leaves(x)) for x in parts[:index]), len(hlo.leaves(parts[index]))


def in_place(program: hlo.Program, op: hlo.Op) -> dict[int, int]:
    """Index of each result that an op writes in place -> index of the operand."""
    if op.opcode == "dynamic-update-slice":
        return {0: 0}
    if aliases := re.search(r"output_to_operand_aliasing=\{(.*?\)),? ?\}", op.attrs):
        pairs = re.findall(r"\{(\d*)\}: \((\d+),", aliases[1])
        return {int(result or 0): int(operand) for result, operand in pairs}
    if op.base != "fusion":
        return {}
    # The result of a fusion-start has the operands in front.
    first = len(op.operands) if op.opcode == "fusion-start" else 0
    inside = program.called(op)
    roots = inside.operands(inside.root) if inside.root.opcode == "tuple" else [inside.root]
    found = {}
    for i, root in enumerate(roots, first):
        while root.opcode == "bitcast":
            root = inside.by_name[root.operands[0]]
        if root.opcode == "dynamic-update-slice":
            source = inside.by_name[root.operands[0]]
            while source.opcode == "bitcast":
                source = inside.by_name[source.operands[0]]
            if source.opcode == "parameter":
                found[i] = int(source.literal)
    return found


def _bound(program: hlo.Program, where: hlo.Computation, into: list[Buffer]) -> Bound:
    """The ops that write the arrays of a computation's result, bound to the buffers `into`."""
    count = min(len(into), len(hlo.leaves(where.root.shape)))
    origins = [_origin(program, where, where.root, i) for i in range(count)]
    return {origin: into[i] for i, origin in enumerate(origins) if origin}


def _origin(
    program: hlo.Program, where: hlo.Computation, op: hlo.Op, leaf: int
) -> tuple[str, int] | None:
    """The op that writes an array, and the index of its result; None for a parameter."""
    while True:
        source = lambda i=0, op=op: where.by_name[op.operands[i]]
        if op.opcode in ("parameter", "constant"):
            return None
        if op.opcode == "tuple":
            i = 0
            while leaf >= (size := len(hlo.leaves(source(i).shape))):
                leaf, i = leaf - size, i + 1
            op = source(i)
        elif op.opcode == "get-tuple-element":
            op, leaf = source(), leaf + _slice_of(where, op)[0]
        elif op.opcode in ALIASES or op.opcode == "while":
            op = source()
        elif op.is_done:
            start = source()
            skip = len(hlo.leaves(start.shape)) > len(hlo.leaves(op.shape))
            op, leaf = start, leaf + len(start.operands) * skip
        elif leaf in (reused := in_place(program, op)):
            op, leaf = source(reused[leaf]), 0
        else:
            return op.name, leaf
