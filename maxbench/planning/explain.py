"""Where the seconds of a predicted step go, op by op: `maxbench plan --explain`."""

import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterable, Mapping

from maxbench.cost_model import costs, hlo, simulate
from maxbench.cost_model.memory import GIB
from maxbench.cost_model.simulate import OpTime
from maxbench.metrics import records
from maxbench.planning import op_names
from maxbench.planning.prediction import Prediction
from maxbench.terminal import console

SHOWN = 20  # rows of the table of operations
NAME, SHAPE, SOURCE = 22, 21, 14  # columns of names; the tables fit 100 columns
COLLECTIVE, END = 28, 17
ABBREVIATED = {"forward": "fwd", "backward": "bwd", "recomputed": "remat"}
START = re.compile(r"([\w-]+, )?((fwd|bwd|remat) )?")  # of a name, which stays
LARGE = 0.003  # of the step, that a segment of a bar has
LEAST = 5e-4  # of the step, that a row of the other tables has
FUNCTION = r"\.?<\w+>|\.__call__"  # parts of a function's name that say nothing
# Parts of a GEMM's shape that tables leave out: the layout of its operands, the kind of FP8.
DETAILS = re.compile(r" [nt]{2}(?= x|$)|(?<=^f8)e\w+")
NO_WORK = {"idle": "pipeline idle", "slowest": "waiting for the slowest GPU"}


Table = tuple[list[str], list[list[str]], tuple[int, ...]]  # heads, rows, columns of text


@dataclasses.dataclass(frozen=True)
class Operation:
    """Ops of the program that come from one source line and have one shape.

    Attributes:
      name: pass and module ('backward mlp/up'), event of a tick, or function.
      kind: key of Timeline.compute, kind of a collective, or 'idle'.
      shape: 'dtype mxnxk layout xbatch' of a GEMM, 'GiB over axes' of a collective, shape of the
        result of others.
      source: 'model/layers.py:243', or ''.
      bound: what limits it: compute, memory, latency (of kernels or links), link, host, schedule.
      count: runs in a step.
      seconds: of the step, on one GPU's compute stream.
      tflops, gbytes_per_s: rates while it runs; 0 where it has no FLOPs or moves no bytes.
      intensity: FLOPs per byte.
    """

    name: str
    kind: str
    shape: str
    source: str
    bound: str
    count: float
    seconds: float
    tflops: float = 0
    gbytes_per_s: float = 0
    intensity: float = 0

    @property
    def rate(self) -> str:
        """The rate that is bounded, '612 TFLOP/s'; '' where it is no rate."""
        if self.bound == "compute" and self.tflops:
            return f"{self.tflops:.0f} TFLOP/s"
        return f"{self.gbytes_per_s:.0f} GB/s" if self.bound == "memory" else ""


@dataclasses.dataclass(frozen=True)
class Exposed:
    """Collectives that the compute stream waits for.

    Attributes:
      name, kind, shape, source: as in Operation.
      seconds: for which the compute stream waits, in a step.
      busy_s: of the collectives, hidden or not.
      queued_s: for which they wait for earlier collectives of the same stream.
      after: the operation that computes their operand.
      before: the operation that needs their result.
    """

    name: str
    kind: str
    shape: str
    source: str
    seconds: float
    busy_s: float
    queued_s: float
    after: str
    before: str


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(records.Records):
    """The seconds of a step by operation. Prints as text; in a notebook as tables and a drawing.

    Attributes:
      operations: all, the longest first; their seconds sum to the step.
      exposed: collectives with exposed seconds, the longest first.
      tick_events: event of a pipeline's tick -> seconds of a step; empty without a pipeline.
      parts: pass ('forward', 'backward', 'recomputed', and what is in none) -> part -> seconds.
    """

    plan: Prediction
    operations: tuple[Operation, ...]
    exposed: tuple[Exposed, ...]
    tick_events: Mapping[str, float]
    parts: Mapping[str, Mapping[str, float]]

    @property
    def step_s(self) -> float:
        return sum(o.seconds for o in self.operations)

    def records(self) -> list[dict]:
        """A row per operation, the longest first."""
        return [dataclasses.asdict(o) for o in self.operations]

    def data(self) -> dict:
        """The explanation as plain data."""
        return {
            "operations": self.records(),
            "exposed": [dataclasses.asdict(x) for x in self.exposed],
            "tick_events_s": dict(self.tick_events),
            "parts_s": {name: dict(parts) for name, parts in self.parts.items()},
        }

    def tables(self) -> list[Table]:
        """Heads, rows and text columns of each table."""
        heads = ["operation", "shape", "source", "bound", "runs", "s", "share"]
        shown, others = self.operations[:SHOWN], self.operations[SHOWN:]
        rows = [
            [_end(o.name, NAME), _start(DETAILS.sub("", o.shape), SHAPE),
             _end(_file_name(o.source), SOURCE), o.rate or o.bound, f"{o.count:.0f}",
             *self._share(o.seconds)]
            for o in shown
        ]  # fmt: skip
        if others:
            rest = sum(o.seconds for o in others)
            rows.append([f"{len(others)} others", *[""] * 4, *self._share(rest)])
        rows.append(["step", *[""] * 4, *self._share(self.step_s)])
        tables: list[Table] = [(heads, rows, (0, 1, 2, 3))]
        if self.exposed:
            heads = ["exposed", "shape", "after", "before", "s"]
            large = [x for x in self.exposed if x.seconds > LEAST * self.step_s]
            rows = [
                [_end(f"{x.kind}, {x.name}", COLLECTIVE), _start(x.shape, SHAPE),
                 _end(x.after, END), _end(x.before, END), self.plan.text_s(x.seconds)]
                for x in large
            ]  # fmt: skip
            if small := self.exposed[len(large) :]:
                total = sum(x.seconds for x in small)
                rows.append([f"{len(small)} others", *[""] * 3, self.plan.text_s(total)])
            tables.append((heads, rows, (0, 1, 2, 3)))
        if self.tick_events:
            ticks = self.plan.ticks
            rows = [
                [name, f"{s / ticks * 1e6:.1f}", *self._share(s)]
                for name, s in self.tick_events.items()
            ]
            heads = [f"events of {ticks} ticks", "us per tick", "s", "share"]
            tables.append((heads, rows, (0,)))
        rows = [
            [f"{which} {part}", *self._share(s)]
            for which, parts in self.parts.items()
            for part, s in _large(parts, LEAST * self.step_s).items()
        ]
        tables.append((["part of the network", "s", "share"], rows, (0,)))
        return tables

    def _share(self, seconds: float) -> list[str]:
        return [self.plan.text_s(seconds), console.share(seconds / self.step_s)]

    def __str__(self) -> str:
        width = console.terminal_width()
        tables = (console.table(h, rows, text=text, width=width) for h, rows, text in self.tables())
        return "\n\n".join("\n".join(lines) for lines in tables)

    def _repr_html_(self) -> str:
        tables = (records.html_table(heads, rows) for heads, rows, _ in self.tables())
        return self.svg() + "".join(tables)

    def svg(self) -> str:
        """The drawing: a stacked bar per pass, and a roofline."""
        from maxbench.planning import svg

        peaks = self.plan.gpu
        peak = peaks.peak_tflops(self.plan.peak)
        parts = {w: _large(x, LARGE * self.step_s) for w, x in self.parts.items()}
        points = [
            (o.intensity, o.tflops, o.seconds, f"{o.name} {o.shape}: {o.seconds:.3f} s")
            for o in self.operations
            if o.intensity and o.seconds > LEAST * self.step_s
        ]
        roof = peaks.memory_gbytes_per_s
        return svg.bars_and_roofline(self.plan.name, parts, points, peak, roof)


def explain(p: Prediction) -> Explanation:
    """Explains the predicted step of a plan."""
    program = hlo.parse(p.compiled.text)
    timeline = p.simulate(program)
    x = Explainer(program, p)
    ops = list(timeline.ops.values())
    operations = _merged(x.operation(t) for t in ops if t.seconds)
    exposed = [x.exposed(t, t.op, t.traffic) for t in ops if t.op and t.traffic and t.seconds]
    events = x.tick_events(ops) if p.ticks else {}
    return Explanation(p, operations, _merged_exposed(exposed), events, x.parts(ops))


def _merged(rows: Iterable[Operation]) -> tuple[Operation, ...]:
    """One Operation for equal rows, the longest first. Rates are means over the runs."""
    groups: dict[tuple, list[Operation]] = collections.defaultdict(list)
    for o in rows:
        groups[o.name, o.kind, o.shape, o.source].append(o)
    merged = []
    for same in groups.values():
        total = sum(o.seconds for o in same)
        mean = lambda name, same=same, total=total: (
            sum(getattr(o, name) * o.seconds for o in same) / total
        )
        merged.append(
            dataclasses.replace(
                same[0],
                count=sum(o.count for o in same),
                seconds=total,
                tflops=mean("tflops"),
                gbytes_per_s=mean("gbytes_per_s"),
            )
        )
    return tuple(sorted(merged, key=lambda o: -o.seconds))


def _merged_exposed(rows: Iterable[Exposed]) -> tuple[Exposed, ...]:
    groups: dict[tuple, Exposed] = {}
    for x in rows:
        key = x.name, x.kind, x.shape, x.after, x.before
        if other := groups.get(key):
            add = {n: getattr(x, n) + getattr(other, n) for n in ("seconds", "busy_s", "queued_s")}
            x = dataclasses.replace(x, **add)
        groups[key] = x
    return tuple(sorted(groups.values(), key=lambda x: -x.seconds))


def _in_package(file: str) -> str:
    """Path of a source file in its package: 'model/layers.py', or 'optax/_src/transform.py'."""
    return re.sub(r".*/(?:maxbench|site-packages)/", "", file)


def _function(frame: hlo.Frame) -> str:
    """'loss/chunk': module and function of a frame, without classes, lambdas and underscores."""
    function = re.sub(FUNCTION, "", frame.function).rpartition(".")[2].lstrip("_")
    return "/".join(filter(None, [pathlib.PurePath(frame.file).stem, function]))


def _file_name(source: str) -> str:
    """'layers.py:243' of a source line; the folder of an __init__.py stays."""
    return re.sub(r".*/(?!__init__)", "", source)


def _start(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _end(text: str, width: int) -> str:
    """A name as a cell: if it is too long, its pass is abbreviated; then its middle is left out,
    because the collective and the pass that it begins with, and its end, tell most."""
    if len(text) <= width:
        return text
    for which, short in ABBREVIATED.items():
        text = text.replace(f"{which} ", f"{short} ")
    start = START.match(text)[0]  # type: ignore[index]  # it matches any text
    start = start if len(start) < width - 5 else ""
    return text if len(text) <= width else f"{start}…{text[len(start) + 1 - width :]}"


def _longest_first(seconds: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _large(parts: Mapping[str, float], least: float) -> dict[str, float]:
    """Parts of at least `least` seconds, and 'others'."""
    large = {name: s for name, s in parts.items() if s >= least}
    rest = sum(parts.values()) - sum(large.values())
    return large | ({"others": rest} if len(large) < len(parts) else {})


class Explainer:
    """Names, shapes and bounds of the ops of one program."""

    def __init__(self, program: hlo.Program, p: Prediction):
        self.program, self.costs = program, p.costs()
        self.meaning, self.names = p.meaning(program), p.op_names(program)

    def tick_events(self, ops: Iterable[OpTime]) -> dict[str, float]:
        """Event of a tick -> seconds of a step, the longest first."""
        seconds: dict[str, float] = collections.defaultdict(float)
        for t in ops:
            if t.op and (event := self.names.event(t.op.op_name)):
                seconds[event] += t.seconds
        return _longest_first(seconds)

    def operation(self, t: OpTime) -> Operation:
        if t.op is None or t.kind in NO_WORK:
            name = NO_WORK[t.kind]
            return Operation(name, t.kind, "", "", "schedule", t.count, t.seconds)
        name, source = self.name_and_source(t.where, t.op)
        if t.traffic:
            name = f"{t.traffic.kind}, {name}"
        shape, bound, flops, size = self.shape_and_bound(t, t.op)
        rate = t.count / t.seconds
        return Operation(
            name, t.kind, shape, source, bound, t.count, t.seconds, tflops=flops * rate / 1e12,
            gbytes_per_s=size * rate / 1e9, intensity=flops / max(size, 1),
        )  # fmt: skip

    def exposed(self, t: OpTime, op: hlo.Op, traffic: simulate.CollectiveStats) -> Exposed:
        name, source = self.name_and_source(t.where, op)
        shape, *_ = self.shape_and_bound(t, op)
        return Exposed(
            name, traffic.kind, shape, source, t.seconds, t.busy_s, t.queued_s,
            self._label(t.where, self._producer(t.where, op)),
            self._label(t.where, self._consumer(t.where, op)),
        )  # fmt: skip

    def name_and_source(self, where: hlo.Computation, op: hlo.Op) -> tuple[str, str]:
        """The name and source line of an op (Operation)."""
        frame = op_names.source_of(self.program.stack(op), self.names)
        source = f"{_in_package(frame.file)}:{frame.line}" if frame else ""
        name = self.names.module(self._full_name(where, op))
        if not name and frame:
            which = op_names.pass_of(self._full_name(where, op))
            name = f"{which} {_function(frame)}".strip()
        return name or op.opcode, source

    def _full_name(self, where: hlo.Computation, op: hlo.Op) -> str:
        """op_name of an op; without one, of the root of a fusion, or of what it reads first."""
        if op.op_name:
            return op.op_name
        if op.base == "fusion" and not op.is_done:
            return self.program.called(op).root.op_name
        while not op.op_name and op.operands:
            op = where.by_name[op.operands[0]]
        return op.op_name

    def _label(self, where: hlo.Computation, op: hlo.Op | None) -> str:
        if op is None:
            return "start of step"
        base = op.base if op.base in hlo.COLLECTIVES else ""
        return f"{base} {self.name_and_source(where, op)[0]}".strip()

    def _producer(self, where: hlo.Computation, op: hlo.Op) -> hlo.Op | None:
        """The op that computes a collective's first operand; None if it is an input."""
        while op.operands:
            op = where.by_name[op.operands[0]]
            if op.opcode not in hlo.FREE:
                return None if op.opcode == "while" else op
        return None

    def _consumer(self, where: hlo.Computation, start: hlo.Op) -> hlo.Op | None:
        """The first op that reads a collective's result; None if none does in its computation."""
        done = next((user for user in where.users[start.name] if user.is_done), start)
        names = {done.name}
        for op in where.ops[where.ops.index(done) + 1 :]:
            if names & set(op.operands):
                if op.opcode not in hlo.FREE and op.opcode != "while":
                    return op
                names.add(op.name)
        return None

    def shape_and_bound(self, t: OpTime, op: hlo.Op) -> tuple[str, str, float, float]:
        """Shape and bound (Operation), FLOPs and bytes of one run."""
        if t.traffic:
            latency = self.costs.collective(t.traffic.kind, t.traffic.link, 0, 0)
            bound = "latency" if latency > t.busy_s / t.count / 2 else "link"
            return f"{t.bytes / GIB:.3f} GiB over {t.traffic.link.axes}", bound, 0.0, 0.0
        if t.kind == "host":
            return "", "host", 0.0, 0.0
        inner, scope = op, t.where
        if op.base == "async":
            scope = self.program.called(op)
            inner = scope.root
        kind, alone, flops = simulate.kernel_cost(
            self.program, scope, inner, self.costs, self.meaning
        )
        size = costs.bytes_moved(self.program, scope, inner)
        fused = self.program.called(inner) if inner.base == "fusion" else scope
        gemms = [x for x in (fused.ops if inner.base == "fusion" else [inner]) if costs.is_gemm(x)]
        first = hlo.leaves(inner.shape)[0]
        shape = f"{first.dtype}[{','.join(map(str, first.dims))}]"
        if gemms:
            m, n, k, batch, dtype, layout = costs.gemm_sizes(fused, gemms[0])
            shape = f"{dtype} {m}x{n}x{k} {layout}" + (f" x{batch}" if batch > 1 else "")
        if kind == "offload":
            return shape, "link", flops, size
        if kind in ("priced", "unpriced"):
            return shape, kind, flops, size
        if alone < self.costs.launch:
            return shape, "latency", flops, size
        memory_s = self.costs.memory(size)
        if not flops or memory_s >= alone * 0.999:
            return shape, "memory", flops, size
        return shape, "compute", flops, size

    def parts(self, ops: Iterable[OpTime]) -> dict[str, dict[str, float]]:
        """Explanation.parts."""
        parts: dict[str, dict[str, float]] = {}
        for t in ops:
            if not t.seconds:
                continue
            which, part = self._part(t)
            of_pass = parts.setdefault(which, collections.defaultdict(float))
            of_pass[part] += t.seconds
        order = ("forward", "backward", "recomputed", self.names.OUTSIDE)
        return {which: _longest_first(parts[which]) for which in order if which in parts}

    def _part(self, t: OpTime) -> tuple[str, str]:
        if t.op is None or t.kind in NO_WORK:
            return self.names.OUTSIDE, NO_WORK[t.kind]
        which, part = self.names.part(self._full_name(t.where, t.op))
        exposed = "exposed communication of " if t.traffic else ""
        return which, exposed + (part or self._file(t.where, t.op))

    def _file(self, where: hlo.Computation, op: hlo.Op) -> str:
        """Name of the module that emitted an op: 'loss', 'zero overlap', 'optimizer'."""
        source = self.name_and_source(where, op)[1]
        if source.startswith("optax/"):
            return "optimizer"
        stem = re.sub(r".*/|\.py:\d+$", "", source.replace("/__init__", ""))
        return stem.replace("_", " ").strip() or op.opcode
