"""What is alive in a GPU's memory while a step runs, buffer by buffer, from the scheduled program.

The compiler's own assignment is a total. Here a buffer is a result that is no other's part, from
the op that makes it to the last that reads it; the step's state, which is donated, is always there.
A loop's body stands for all of its iterations: what it carries keeps its place.
"""

import dataclasses
import itertools
import re

from maxbench.cost_model import hlo, simulate
from maxbench.cost_model.costs import Costs

SAME = {"bitcast", "opt-barrier", "add-dependency", "after-all", "domain"}  # as their operand
STATE = {"params": "weights", "opt": "optimizer"}  # of the step's arguments


@dataclasses.dataclass(eq=False)
class Buffer:
    """Bytes that live from one moment to another, numbers of Memory.seconds, both included."""

    name: str
    bytes: int
    start: int
    end: int
    shape: str = ""  # 'bf16[80,8192]', of the first array in it


Bound = dict[tuple[str, int], Buffer]  # by op and number of its result


@dataclasses.dataclass(frozen=True)
class Liveness:
    """A step's buffers, and the seconds of each moment: of the ops in their order."""

    buffers: list[Buffer]
    seconds: list[float]

    def total(self) -> list[int]:
        """Bytes at each moment."""
        change = [0] * (len(self.seconds) + 1)
        for b in self.buffers:
            change[b.start] += b.bytes
            change[b.end + 1] -= b.bytes
        return list(itertools.accumulate(change[:-1]))

    def peak(self) -> tuple[int, dict[str, int]]:
        """The moment with most bytes, and what is alive then: name -> bytes, the largest first."""
        total = self.total()
        at = max(range(len(total)), key=total.__getitem__)
        found: dict[str, int] = {}
        for b in self.buffers:
            if b.start <= at <= b.end:
                found[b.name] = found.get(b.name, 0) + b.bytes
        return at, dict(sorted(found.items(), key=lambda item: -item[1]))


def liveness(program: hlo.Program, costs: Costs, shares=simulate.NO_BRANCHES) -> Liveness:
    """Follows the buffers of a program's entry; `shares` as of simulate.play."""
    entry, walk = program.entry, _Walk(program, costs, shares)
    given = _parameters(entry)
    state = [walk.new(STATE.get(_part(op), "other"), op.shape.bytes) for op in given]
    # Donated: the state that is returned takes the place of the one that was given.
    walk.run(entry, state, 1, _bound(program, entry, state))
    for buffer in state:
        buffer.end = len(walk.seconds) - 1
    for buffer in walk.buffers:
        buffer.name = buffer.name or buffer.shape
    return Liveness(walk.buffers, walk.seconds)


def _parameters(where: hlo.Computation) -> list[hlo.Op]:
    found = (op for op in where.ops if op.opcode == "parameter")
    return sorted(found, key=lambda op: int(op.literal))


def _part(op: hlo.Op) -> str:
    """Of the step's state: "state['params']['embed']" -> 'params'."""
    found = re.match(r"state\W+(\w+)", op.op_name)
    return found[1] if found else ""


class _Walk:
    def __init__(self, program: hlo.Program, costs: Costs, shares: simulate.BranchFrequencies):
        self.program, self.costs, self.shares = program, costs, shares
        self.buffers: list[Buffer] = []
        self.seconds = [0.0]

    def new(self, name: str, size: int) -> Buffer:
        now = len(self.seconds) - 1
        self.buffers.append(Buffer(name, size, now, now))
        return self.buffers[-1]

    def run(
        self, where: hlo.Computation, given: list[Buffer], times: float, bound: Bound
    ) -> list[Buffer]:
        """Walks a computation; returns the buffers of its result.

        Args:
          given: of its parameters, one after the other.
          times: that it runs.
          bound: the buffers that results are made in.
        """
        held: dict[str, list[Buffer]] = {}
        starts, at = {}, 0
        for op in _parameters(where):
            starts[op.name], at = at, at + len(hlo.leaves(op.shape))
        for op in where.ops:
            operands = [held[name] for name in op.operands]
            if op.opcode == "parameter":
                first = starts[op.name]
                held[op.name] = given[first : first + len(hlo.leaves(op.shape))]
            elif op.opcode in ("tuple", "get-tuple-element") or op.opcode in SAME:
                held[op.name] = _renamed(where, op, operands)
            elif op.opcode in hlo.FREE:
                held[op.name] = [NOTHING] * len(hlo.leaves(op.shape))
            else:
                self.seconds.append(self._seconds(where, op) * times)
                held[op.name] = self._made(where, op, operands, times, bound)
                for buffer in (*_flat(operands), *held[op.name]):
                    buffer.end = len(self.seconds) - 1
        return held[where.root.name]

    def _seconds(self, where, op) -> float:
        """Of a kernel. What is in line only stands for others, and communication runs beside."""
        inside = op.opcode in ("while", "conditional", "call")
        if inside or op.base != op.opcode or op.base in hlo.COLLECTIVES:
            return 0.0
        return simulate.kernel_cost(self.program, where, op, self.costs)[1] + self.costs.launch

    def _made(self, where, op, operands, times, bound) -> list[Buffer]:
        """The buffers of an op's results."""
        program, part = self.program, self.shares.get(simulate.name(op))
        times *= part[0] if part else 1
        if op.opcode == "while":
            body = program.called(op, "body")
            if part is None or program.counts(op):
                times *= program.trips(where, op)
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
        reused, given = in_place(program, op), _flat(operands)
        if op.opcode.endswith("-start") and len(hlo.leaves(op.shape)) > len(op.operands):
            reused |= {i: i for i in range(len(op.operands))}
        found = []
        for i, shape in enumerate(hlo.leaves(op.shape)):
            buffer = bound.get((op.name, i))
            if buffer is None and i in reused:
                buffer = operands[reused[i]][0]
            buffer = buffer or self.new("", 0 if shape.host else shape.bytes)
            buffer.name = buffer.name or simulate.module_of(op.op_name).strip()
            if not buffer.name and i in reused:  # what is put into it
                names = (b.name for b in given if b.bytes and b is not buffer and b.name)
                buffer.name = next(names, "")
            dims = ",".join(map(str, shape.dims))
            buffer.shape = buffer.shape or f"{shape.dtype}[{dims}]"
            found.append(buffer)
        return found


NOTHING = Buffer("constants", 0, 0, 0)


def _flat(operands: list[list[Buffer]]) -> list[Buffer]:
    return [buffer for each in operands for buffer in each]


def _renamed(where: hlo.Computation, op: hlo.Op, operands: list[list[Buffer]]) -> list[Buffer]:
    """The buffers of an op that only gives others a name."""
    if op.opcode == "tuple":
        return _flat(operands)
    if op.opcode != "get-tuple-element":
        return operands[0] if operands else [NOTHING]
    first, count = _slice_of(where, op)
    return operands[0][first : first + count]


def _slice_of(where: hlo.Computation, op: hlo.Op) -> tuple[int, int]:
    """Which of a tuple's arrays a get-tuple-element takes: the first, and how many."""
    parts = where.by_name[op.operands[0]].shape
    index = int(op.attr("index"))
    return sum(len(hlo.leaves(x)) for x in parts[:index]), len(hlo.leaves(parts[index]))


def in_place(program: hlo.Program, op: hlo.Op) -> dict[int, int]:
    """Results that an op writes into an operand: number of the result -> of the operand."""
    if op.opcode == "dynamic-update-slice":
        return {0: 0}
    if found := re.search(r"output_to_operand_aliasing=\{(.*?\)),? ?\}", op.attrs):
        pairs = re.findall(r"\{(\d*)\}: \((\d+),", found[1])
        return {int(result or 0): int(operand) for result, operand in pairs}
    if op.base != "fusion":
        return {}
    inside = program.called(op)
    roots = inside.operands(inside.root) if inside.root.opcode == "tuple" else [inside.root]
    found = {}
    for i, root in enumerate(roots):
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
    """Which op makes each array of a computation's result, for a result that has its place."""
    count = min(len(into), len(hlo.leaves(where.root.shape)))
    origins = [_origin(program, where, where.root, i) for i in range(count)]
    return {origin: into[i] for i, origin in enumerate(origins) if origin}


def _origin(
    program: hlo.Program, where: hlo.Computation, op: hlo.Op, leaf: int
) -> tuple[str, int] | None:
    """The op that makes an array, and which of its results it is; None for a parameter."""
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
        elif op.opcode in SAME or op.opcode == "while":
            op = source()
        elif op.is_done:
            start = source()
            skip = len(hlo.leaves(start.shape)) > len(hlo.leaves(op.shape))
            op, leaf = start, leaf + len(start.operands) * skip
        elif leaf in (reused := in_place(program, op)):
            op, leaf = source(reused[leaf]), 0
        else:
            return op.name, leaf
