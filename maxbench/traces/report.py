"""What a trace says about its steps: `maxbench trace`."""

import collections
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from maxbench.config import command_line, options
from maxbench.config.errors import check_choice
from maxbench.cost_model import hlo_files
from maxbench.hardware.gpus import Gpu, GpuTypes
from maxbench.metrics import records
from maxbench.terminal import console
from maxbench.traces import accounts, causes, collectives, files, steps
from maxbench.traces.events import (
    ATTENTION,
    COMMUNICATION,
    COPY,
    GEMM,
    KERNEL,
    RankTrace,
    short,
)
from maxbench.traces.steps import Step

LABELS = {
    GEMM: "GEMMs",
    ATTENTION: "attention",
    KERNEL: "other kernels",
    COPY: "copies",
    COMMUNICATION: "communication, exposed",
    accounts.LATE: "idle, launched late",
    accounts.IDLE: "idle, other",
}
KERNELS, GAPS, RANKS = 15, 8, 16  # rows of the tables on a terminal
NAME, PLACE, WIDE = 42, 27, 100  # columns of names and of text
Table = tuple[list[str], list[list[str]], tuple[int, ...]]  # heads, rows, columns of text


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Runs of one kernel with one shape, on a mean step of a mean rank.

    Attributes:
      count: of runs.
      seconds: that count for it; runs that other work hides do not.
      busy_s: of its runs, hidden or not.
      tflops, gbytes_per_s: while it runs; of a collective bus bandwidth; 0 where not known.
      share: of the datasheet's peak or memory bandwidth; 0 where not known.
    """

    name: str
    kind: str
    shape: str
    count: float
    seconds: float
    busy_s: float
    tflops: float
    gbytes_per_s: float
    share: float


@dataclasses.dataclass(frozen=True)
class Rank:
    """The steps of one rank."""

    trace: RankTrace
    accounts: Sequence[accounts.Account]
    waits: collectives.Waits

    @property
    def step_s(self) -> float:
        return statistics.mean(a.step.seconds for a in self.accounts)

    def mean_s(self, part: str) -> float:
        return statistics.mean(a.parts[part] for a in self.accounts) / 1e9

    @property
    def hidden_s(self) -> float:
        return statistics.mean(a.hidden for a in self.accounts) / 1e9

    @property
    def clock_mhz(self) -> float:
        """Mean clock in the steps; 0 where it was not sampled."""
        inside = [
            mhz
            for time, mhz in self.trace.clocks
            if any(a.step.start <= time < a.step.end for a in self.accounts)
        ]
        return statistics.mean(inside) if inside else 0.0

    def waits_text(self, text_s: Callable[[float], str], of: int) -> list[str]:
        """Waits of a step as cells of a table, if collectives are compared."""
        w, steps = self.waits, len(self.accounts) * 1e9
        if not of:
            return []
        return [text_s(w.waits / steps), text_s(w.waited_for / steps), f"{w.last}/{of}"]

    def mean_of(self, field: str) -> dict[str, float]:
        """Mean seconds of the entries of `streams` or `host`."""
        found: collections.Counter[str] = collections.Counter()
        for a in self.accounts:
            found.update(getattr(a, field))
        return {name: ns / len(self.accounts) / 1e9 for name, ns in found.items()}


@dataclasses.dataclass(frozen=True, repr=False)
class TraceReport(records.Records):
    """Where the measured steps went. Prints as one screen; in a notebook as tables.

    Attributes:
      ranks: in their order.
      gpu_type, gpu: of the datasheet; '' and None where the GPU is not known.
      collectives: number of those of which several ranks are compared.
      notes: what is wrong with the traces or left out.
      plan: measured beside predicted operations, or None.
    """

    ranks: tuple[Rank, ...]
    gpu_type: str
    gpu: Gpu | None
    collectives: int
    notes: tuple[str, ...]
    plan: Any = None

    @property
    def step_s(self) -> float:
        """Seconds of a mean step of a mean rank."""
        return statistics.mean(rank.step_s for rank in self.ranks)

    @functools.cached_property
    def kernels(self) -> list[Kernel]:
        """All kernels, the dearest first."""
        groups: dict[tuple[str, str, str], list[tuple[Any, int]]] = collections.defaultdict(list)
        for rank in self.ranks:
            for a in rank.accounts:
                for event, own in a.own:
                    groups[event.name, event.kind, event.work.shape].append((event, own))
        of = sum(len(rank.accounts) for rank in self.ranks)
        found = (self._kernel(*key, runs, of) for key, runs in groups.items())
        return sorted(found, key=lambda k: (-k.seconds, k.name))

    def _kernel(self, name: str, kind: str, shape: str, runs: Sequence, of: int) -> Kernel:
        busy = sum(event.end - event.start for event, _ in runs)
        known = [event for event, _ in runs if event.work.flops or event.work.bytes]
        ns = sum(event.end - event.start for event in known) or 1
        tflops = sum(event.work.flops for event in known) / ns / 1e3
        gbytes = sum(event.work.bytes for event in known) / ns
        share = 0.0
        if self.gpu and tflops and (peak := known[0].work.peak):
            share = tflops / (self.gpu.peak_tflops(peak) or float("inf"))
        own = sum(own for _, own in runs)
        return Kernel(
            name,
            kind,
            shape,
            len(runs) / of,
            own / of / 1e9,
            busy / of / 1e9,
            tflops,
            gbytes,
            share,
        )

    def records(self) -> list[dict[str, Any]]:
        """A row per rank and step, with the seconds of its parts."""
        return [
            {"rank": rank.trace.rank, "step": a.step.number, "seconds": a.step.seconds}
            | {part: ns / 1e9 for part, ns in a.parts.items()}
            | {"communication_hidden": a.hidden / 1e9}
            for rank in self.ranks
            for a in rank.accounts
        ]

    def data(self) -> dict[str, Any]:
        """The report as plain data."""
        found: dict[str, Any] = {
            "step_s": self.step_s,
            "gpu_type": self.gpu_type,
            "ranks": [self._rank_data(rank) for rank in self.ranks],
            "kernels": [dataclasses.asdict(kernel) for kernel in self.kernels],
            "collectives_compared": self.collectives,
            "causes": self.causes(),
            "notes": list(self.notes),
        }
        return found | ({"plan": self.plan.data()} if self.plan else {})

    def _rank_data(self, rank: Rank) -> dict[str, Any]:
        w = rank.waits
        return {
            "rank": rank.trace.rank, "source": rank.trace.source, "device": rank.trace.device,
            "steps": [row for row in self.records() if row["rank"] == rank.trace.rank],
            "streams_s": rank.mean_of("streams"), "host_s": rank.mean_of("host"),
            "clock_mhz": rank.clock_mhz,
            "waits_s": w.waits / 1e9, "waited_for_s": w.waited_for / 1e9, "last": w.last,
            "gaps": [dataclasses.asdict(gap) for a in rank.accounts for gap in a.gaps[:GAPS]],
        }  # fmt: skip

    def text_s(self, seconds: float) -> str:
        """Seconds as text, with three digits more where the step is short."""
        return f"{seconds:.{4 if self.step_s >= 0.1 else 6}f}"

    def head(self) -> list[str]:
        """What was read: steps, ranks, device."""
        first, count = self.ranks[0], len(self.ranks)
        seconds = sorted(a.step.seconds for rank in self.ranks for a in rank.accounts)
        numbers = [a.step.number for a in first.accounts]
        named = f"steps {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"step {numbers[0]}"
        where = f"{count} ranks" if count > 1 else f"rank {first.trace.rank}"
        where += f" on {first.trace.device or 'a GPU without name'}"
        if numbers == [-1]:
            return [f"the whole trace of {where}, {self.text_s(self.step_s)} s: no step is found"]
        least, most = (self.text_s(seconds[i]) for i in (0, -1))
        span = f", {least} to {most}" if len(seconds) > 1 else ""
        lines = [f"{named} of {where}: {self.text_s(self.step_s)} s a step{span}"]
        return lines + ([self.plan.head()] if self.plan else []) + causes.causes(self)

    def causes(self) -> list[str]:
        """Why the step takes as long as it does, as sentences; the plan's first."""
        return causes.with_plan(self)

    @property
    def parts_s(self) -> dict[str, float]:
        """Seconds of a mean step of a mean rank by label of LABELS; they sum to step_s."""
        means = {
            label: statistics.mean(rank.mean_s(part) for rank in self.ranks)
            for part, label in LABELS.items()
        }
        return {label: seconds for label, seconds in means.items() if seconds}

    def svg(self) -> str:
        """A measured step of the first rank as an SVG document, at scale, and below it the planned
        one if there is a plan."""
        from maxbench.traces import drawing  # late: numpy

        return drawing.draw(self)

    def tables(self) -> list[Table]:
        """Heads, rows and text columns of each table."""
        tables = [self._parts(), self._streams()]
        if len(self.ranks) > 1:
            tables.append(self._ranks())
        tables.append(self._kernels())
        if gaps := self._gaps():
            tables.append(gaps)
        return tables + (self.plan.tables() if self.plan else [])

    def _share(self, seconds: float) -> list[str]:
        return [self.text_s(seconds), f"{seconds / self.step_s:.1%}"]

    def _parts(self) -> Table:
        several = len(self.ranks) > 1
        rows = []
        for part, label in LABELS.items():
            each = [rank.mean_s(part) for rank in self.ranks]
            span = [self.text_s(min(each)), self.text_s(max(each))] if several else []
            if any(each):
                rows.append([label, *self._share(statistics.mean(each)), *span])
        each = [rank.step_s for rank in self.ranks]
        span = [self.text_s(min(each)), self.text_s(max(each))] if several else []
        rows.append(["step", *self._share(self.step_s), *span])
        if hidden := statistics.mean(rank.hidden_s for rank in self.ranks):
            rows.append(["communication, hidden", *self._share(hidden)])
        host: collections.Counter[str] = collections.Counter()
        for rank in self.ranks:
            host.update(rank.mean_of("host"))
        labels = {"works": "host works", "waits": "host waits", "idle": "host, nothing recorded"}
        rows += [[labels[k], *self._share(host[k] / len(self.ranks))] for k in labels if host]
        return ["part", "s", "share", *(["least rank", "most"] * several)], rows, (0,)

    def _streams(self) -> Table:
        streams = self.ranks[0].mean_of("streams")
        rows = [[name, *self._share(s)] for name, s in sorted(streams.items(), key=lambda x: -x[1])]
        return [f"busy, rank {self.ranks[0].trace.rank}", "s", "share"], rows[:GAPS], (0,)

    def _ranks(self) -> Table:
        shown = sorted(self.ranks, key=lambda rank: -rank.waits.waited_for)[:RANKS]
        parts = (GEMM, ATTENTION, KERNEL, COMMUNICATION)
        heads = ["rank", "step s", "GEMMs", "attention", "kernels", "exposed", "idle"]
        heads += ["waits", "waited for", "last"] if self.collectives else []
        rows = [
            [
                str(rank.trace.rank), self.text_s(rank.step_s),
                *(self.text_s(rank.mean_s(part)) for part in parts),
                self.text_s(rank.mean_s(accounts.LATE) + rank.mean_s(accounts.IDLE)),
                *rank.waits_text(self.text_s, self.collectives),
            ]
            for rank in shown
        ]  # fmt: skip
        if len(self.ranks) > len(shown):
            rows.append([f"{len(self.ranks) - len(shown)} others"])
        return heads, rows, (0,)

    def _kernels(self) -> Table:
        rows = [
            [
                f"{k.shape} {short(k.name, NAME)}".strip()[:NAME],
                LABELS[k.kind].partition(",")[0],
                _count(k.count),
                *self._share(k.seconds),
                self._rate(k),
            ]
            for k in self.kernels[:KERNELS]
        ]
        if rest := self.kernels[KERNELS:]:
            rows.append([f"{len(rest)} others", "", "", *self._share(sum(k.seconds for k in rest))])
        return ["kernel", "kind", "runs", "s", "share", "rate"], rows, (0, 1)

    def _rate(self, kernel: Kernel) -> str:
        text = lambda x: f"{x:.0f}" if x >= 10 else f"{x:.2g}"
        if kernel.tflops:
            share = f", {kernel.share:.0%}" if kernel.share else ""
            return f"{text(kernel.tflops)} TFLOP/s{share}"
        return f"{text(kernel.gbytes_per_s)} GB/s" if kernel.gbytes_per_s else ""

    def _gaps(self) -> Table | None:
        """Gaps between the same kernels with the same host call, on all ranks."""
        groups: dict[tuple[str, str, str], list[int]] = collections.defaultdict(list)
        for rank in self.ranks:
            for a in rank.accounts:
                for gap in a.gaps:
                    groups[gap.after, gap.before, gap.host].append(gap.ns)
        if not groups:
            return None
        of = sum(len(rank.accounts) for rank in self.ranks) * 1e9
        largest = sorted(groups.items(), key=lambda item: -sum(item[1]))
        rows = [
            [short(after, PLACE), short(before, PLACE), short(host, PLACE) or "nothing recorded",
             _count(len(ns) * 1e9 / of), self.text_s(sum(ns) / of)]
            for (after, before, host), ns in largest[:GAPS]
        ]  # fmt: skip
        if rest := largest[GAPS:]:
            total = sum(sum(ns) for _, ns in rest) / of
            rows.append([f"{len(rest)} other gaps", "", "", "", self.text_s(total)])
        return ["idle after", "before", "host", "runs", "s"], rows, (0, 1, 2)

    def __str__(self) -> str:
        width = console.terminal_width()
        tables = (console.table(h, rows, text=text, width=width) for h, rows, text in self.tables())
        fold = lambda line: console.fold(line, width or WIDE, "  ")
        head = [line for text in self.head() for line in fold(text)]
        notes = [line for note in self.notes for line in fold(f"note: {note}")]
        parts = [head, *tables, notes]
        return "\n\n".join("\n".join(lines) for lines in parts if lines)

    def _repr_html_(self) -> str:
        tables = (
            records.html_table(heads, _filled(heads, rows)) for heads, rows, _ in self.tables()
        )
        return records.html_lines([*self.head(), *self.notes]) + "".join(tables)


def _count(count: float) -> str:
    return f"{count:.0f}" if count >= 10 or count == int(count) else f"{count:.1f}"


def _filled(heads: Sequence[str], rows: Iterable[list[str]]) -> list[list[str]]:
    return [row + [""] * (len(heads) - len(row)) for row in rows]


def trace(asked: options.TraceOptions, gpu_types: GpuTypes | None = None) -> TraceReport:
    """The report on the profiles at the paths.

    Args:
      gpu_types: those of `hardware` if None.

    Raises:
      UserError: an option is invalid, or no profile can be read.
    """
    gpu_types = gpu_types or command_line.gpu_types(asked.hardware)
    if asked.gpu_type:
        check_choice("gpu_type", asked.gpu_type, gpu_types)
    traces, notes = files.read(asked.paths)
    gpu_type = asked.gpu_type or _type_of(traces, gpu_types)
    program, plan, more = _program(asked, gpu_type, gpu_types)
    notes += more
    for one in traces if program else ():
        program.name_events(one)
    found: dict[int, list[Step]] = {}
    for one in traces:
        found[one.rank], more = steps.find(one)
        notes += more
    arrived = collectives.arrivals({one.rank: (one.events, found[one.rank]) for one in traces})
    ranks = []
    for one in traces:
        of = accounts.Accounts(one)
        each = [of.of(step) for step in found[one.rank]]
        ranks.append(Rank(one, each, arrived.ranks[one.rank]))
    compared = None
    if program and plan:
        from maxbench.traces import beside  # late: numpy

        compared = beside.compare(plan, program, [a for rank in ranks for a in rank.accounts])
    gpu = gpu_types[gpu_type] if gpu_type else None
    return TraceReport(
        tuple(ranks),
        gpu_type,
        gpu,
        arrived.collectives,
        (*_summary(notes), *arrived.notes),
        compared,
    )


def _program(
    asked: options.TraceOptions, gpu_type: str, gpu_types: GpuTypes
) -> tuple[Any, Any, list[str]]:
    """The program of the trace, and its plan, as far as there are any; and notes."""
    from maxbench.traces import beside  # late: numpy

    file = hlo_files.find(asked.hlo) if asked.hlo else beside.program_of(asked.paths)
    if file is None:
        return None, None, []
    program, plan, why = beside.plan_of(file, gpu_type, gpu_types)
    return program, plan, [f"no prediction beside the measured step: {why}"] * (plan is None)


def _type_of(traces: Sequence[RankTrace], gpu_types: GpuTypes) -> str:
    return gpu_types.type_of(traces[0].device) if traces[0].device else ""


def _summary(notes: Sequence[str]) -> list[str]:
    """Notes, of which those that differ in the rank alone are one."""
    groups: Mapping[str, list[str]] = collections.defaultdict(list)
    for note in notes:
        rank, _, rest = note.partition(": ")
        groups[rest if rest and rank.startswith("rank ") else note].append(note)
    return [
        same[0] if len(same) == 1 else f"{len(same)} ranks: {text}" for text, same in groups.items()
    ]
