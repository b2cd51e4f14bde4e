"""Measured beside predicted seconds of each operation of a step."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from maxbench.config.errors import UserError
from maxbench.cost_model import hlo, hlo_files
from maxbench.cost_model.meaning import Meaning
from maxbench.cost_model.simulate import OpTime
from maxbench.hardware.gpus import GpuTypes
from maxbench.planning import explain, planner, programs
from maxbench.planning.prediction import Prediction
from maxbench.planning.programs import Cluster
from maxbench.run_logs import run_folder
from maxbench.traces.accounts import IDLE, LATE, Account
from maxbench.traces.events import Event
from maxbench.traces.program import Program

PROGRAM = "step.hlo.txt.gz"  # the program of a run, as run/profile.py writes it
SHOWN = 20  # rows on a terminal
NAME, SHAPE, SOURCE = 26, 21, 16  # columns


class Key(NamedTuple):
    """Operations that come from one source line and have one shape, as in explain.Operation.

    Attributes:
      kind: 'idle' or 'unmatched' of what is no operation.
    """

    name: str
    kind: str
    shape: str = ""
    source: str = ""


@dataclasses.dataclass
class Side:
    """What is measured or predicted of the operations of a Key, on a mean step of a mean rank.

    Attributes:
      runs: of operations; measured ones are kernels.
      seconds: of the step; they sum to it.
      busy_s: of all runs, hidden or not.
    """

    runs: float = 0
    seconds: float = 0
    busy_s: float = 0

    def add(self, runs: float, seconds: float, busy_s: float) -> None:
        self.runs, self.seconds = self.runs + runs, self.seconds + seconds
        self.busy_s += busy_s


@dataclasses.dataclass
class Row:
    """Measured beside predicted operations.

    Attributes:
      flops, bytes: of a predicted step; bytes of collectives alone.
    """

    key: Key
    measured: Side = dataclasses.field(default_factory=Side)
    predicted: Side = dataclasses.field(default_factory=Side)
    flops: float = 0
    bytes: float = 0

    @property
    def more_s(self) -> float:
        return self.measured.seconds - self.predicted.seconds

    @property
    def rates(self) -> str:
        """'728 TFLOP/s measured, 640 expected'; '' where the work is not known."""
        work, unit, scale = (
            (self.flops, "TFLOP/s", 1e12) if self.flops else (self.bytes, "GB/s", 1e9)
        )
        if not (work and self.measured.busy_s and self.predicted.busy_s):
            return ""
        rates = (work / side.busy_s / scale for side in (self.measured, self.predicted))
        return f"{next(rates):.0f} {unit} measured, {next(rates):.0f} expected"

    def data(self) -> dict[str, Any]:
        """The row as plain data."""
        sides = {"measured": vars(self.measured), "predicted": vars(self.predicted)}
        return self.key._asdict() | sides | {"flops": self.flops, "bytes": self.bytes}


@dataclasses.dataclass(frozen=True)
class Beside:
    """Rows by what explains the difference of the two steps, the largest first."""

    plan: Prediction
    rows: tuple[Row, ...]

    @property
    def measured_s(self) -> float:
        return sum(row.measured.seconds for row in self.rows)

    @property
    def predicted_s(self) -> float:
        return sum(row.predicted.seconds for row in self.rows)

    def data(self) -> dict[str, Any]:
        """The rows as plain data."""
        return {
            "gpu_type": self.plan.gpu_type, "measured_s": self.measured_s,
            "predicted_s": self.predicted_s, "operations": [row.data() for row in self.rows],
        }  # fmt: skip

    def head(self) -> str:
        """The two steps, and what explains most of their difference."""
        more, digits = self.measured_s - self.predicted_s, self.digits
        first = max(self.rows, key=lambda row: row.more_s * (1 if more > 0 else -1))
        about = [f"{first.key.name} {first.key.shape}".strip(), first.rates]
        about.append(f"{first.measured.runs:.0f} runs" if first.measured.runs else "")
        return (
            f"plan {self.predicted_s:.{digits}f} s; {first.more_s:+.{digits}f} of "
            f"{more:+.{digits}f} s: {', '.join(filter(None, about))}"
        )

    @property
    def digits(self) -> int:
        return 4 if self.measured_s >= 0.1 else 6

    def tables(self) -> list[tuple[list[str], list[list[str]], tuple[int, ...]]]:
        """Heads, rows and text columns of the table."""
        heads = ["measured beside predicted", "shape", "source", "runs", "s", "plan s", "s more"]
        short = lambda text, width: text if len(text) <= width else f"{text[: width - 1]}…"
        rows = [
            [short(r.key.name, NAME), short(r.key.shape, SHAPE),
             short(r.key.source.rpartition("/")[2], SOURCE), f"{r.measured.runs:.0f}",
             *self._cells(r.measured.seconds, r.predicted.seconds)]
            for r in self.rows[:SHOWN]
        ]  # fmt: skip
        if rest := self.rows[SHOWN:]:
            sums = (
                sum(getattr(r, side).seconds for r in rest) for side in ("measured", "predicted")
            )
            rows.append([f"{len(rest)} others", "", "", "", *self._cells(*sums)])
        rows.append(["step", "", "", "", *self._cells(self.measured_s, self.predicted_s)])
        return [(heads, rows, (0, 1, 2))]

    def _cells(self, measured: float, predicted: float) -> list[str]:
        digits, more = self.digits, measured - predicted
        return [f"{measured:.{digits}f}", f"{predicted:.{digits}f}", f"{more:+.{digits}f}"]


def program_of(paths: Sequence[str]) -> pathlib.Path | None:
    """The newest program of a run that lies with the profiles at the paths, or None."""
    found: list[pathlib.Path] = []
    for path in map(pathlib.Path, paths):
        folders = [path] if path.is_dir() else [*path.absolute().parents][:4]
        inside = path.rglob(PROGRAM) if path.is_dir() else (x / PROGRAM for x in folders)
        found += filter(pathlib.Path.is_file, inside)
    return max(found, key=lambda file: file.stat().st_mtime, default=None)


def plan_of(
    file: pathlib.Path, gpu_type: str, gpu_types: GpuTypes
) -> tuple[Program, Prediction | None, str]:
    """The program of a file, its plan, and why there is none.

    A run's folder around the file gives the mesh and the schedule of the program.

    Raises:
      UserError: the file has no program.
    """
    compiled, _ = hlo_files.read(file)
    program = hlo.parse(compiled.text)
    gpu = gpu_types[gpu_type or "h100"]  # kinds of operations are the same on all
    cluster, given, why = Cluster(gpu_type, gpu, {"": program.devices}), Meaning(), ""
    folder = file.parent.parent
    if file.name == PROGRAM and (folder / "result.json").is_file():
        try:
            run = run_folder.read_state(folder).to_run(gpu_types)
            given = planner.scheduled_meaning(run, program, planner.costs_of(run))
            loops = {name for where in program.computations.values() for op in where.ops
                     if op.opcode == "while" for name in op.names}  # fmt: skip
            trips = {name: n for name, n in given.trip_counts.items() if name in loops}
            given = dataclasses.replace(given, trip_counts=trips)
            cluster = Cluster(run.layout.gpu_type, run.gpu, run.layout.mesh_shape)
            gpu_type = run.layout.gpu_type
        except UserError as e:
            why = str(e)
    named = Program(program, cluster.costs())
    if not gpu_type:
        return named, None, why or "its GPU is of no known type: give --gpu_type"
    plan = programs.plan_program(file.name, compiled, cluster, given)
    return named, plan, ""


def compare(plan: Prediction, program: Program, accounts: Sequence[Account]) -> Beside:
    """Measured beside predicted operations.

    Args:
      accounts: of all steps of all ranks, whose events name operations (Program.name_events()).
    """
    explainer = explain.Explainer(program.program, plan)
    rows: dict[Key, Row] = {}
    of_op: dict[str, Key] = {}
    for t in plan.simulate(program.program).ops.values():
        key = _key(explainer, t)
        row = rows.setdefault(key, Row(key))
        row.predicted.add(t.count, t.seconds, t.busy_s or t.seconds)
        row.flops += t.flops * t.count
        row.bytes += t.bytes * t.count
        if t.op:
            of_op.setdefault(t.op.name, key)
    of = len(accounts)
    for a in accounts:
        for event, ns in a.own:
            key = of_op.get(_start(program, event.op)) or _unmatched(event)
            row = rows.setdefault(key, Row(key))
            row.measured.add(1 / of, ns / of / 1e9, (event.end - event.start) / of / 1e9)
        key = Key("idle, of the device", "idle")
        idle = (a.parts[LATE] + a.parts[IDLE]) / of / 1e9
        rows.setdefault(key, Row(key)).measured.add(0, idle, idle)
    found = (row for row in rows.values() if row.measured.seconds or row.predicted.seconds)
    return Beside(plan, tuple(sorted(found, key=lambda row: -abs(row.more_s))))


def _key(explainer: explain.Explainer, t: OpTime) -> Key:
    if t.seconds:
        o = explainer.operation(t)
        return Key(o.name, o.kind, o.shape, o.source)
    if not t.op:
        return Key(t.kind, t.kind)
    name, source = explainer.name_and_source(t.where, t.op)  # hidden
    shape = explainer.shape_and_bound(t, t.op)[0] if t.count else ""
    return Key(f"{t.traffic.kind}, {name}" if t.traffic else name, t.kind, shape, source)


def _unmatched(event: Event) -> Key:
    return Key(f"not matched: {event.name.partition('(')[0]:.60}", "unmatched")


def _start(program: Program, name: str) -> str:
    """The operation that starts what another one ends; the same for others."""
    if name not in program.places:
        return name
    where, i = program.places[name]
    op = where.ops[i]
    return op.operands[0] if op.is_done and op.operands else name
