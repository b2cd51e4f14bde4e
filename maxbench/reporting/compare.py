"""Figures of runs that are over: windows, verdicts, scaling, repeats, cost, energy, checkpoints.

Every figure names its convention. Times are seconds, rates per second, power watts, money dollars.
"""

import dataclasses
import functools
import itertools
import math
import re
import statistics
from collections.abc import Iterable, Sequence

from maxbench.config import number_formats, recipes
from maxbench.config.errors import escape_control
from maxbench.config.model import Model
from maxbench.config.run import WINDOW
from maxbench.config.validation import field, validate
from maxbench.hardware import published
from maxbench.hardware.gpus import GPU_TYPES, GpuTypes
from maxbench.metrics import flops, step_stats
from maxbench.run_logs.record import RunRecord, dig

PASS, WARN = 0.95, 0.85  # shares of the published tokens/s
DRIFT, SPLIT = 0.02, 0.02  # shares of the median that are worth an alarm
SPREAD = 0.05  # between repeats of a run
POINTS = 200  # of a run's steps that are looked at for a drift


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What the reader chose."""

    # steps that count, inclusive
    window: tuple[int, int] = field((35, 44), at_least=0, check=WINDOW)
    cost: float = field(0.0, at_least=0)  # dollars per GPU hour
    gpu_type: str = ""  # of logs that do not name it
    gpu_types: GpuTypes = GPU_TYPES
    # minutes between checkpoints; 0 = the best by Young and Daly
    interval: float = field(0.0, at_least=0, at_most=1e9)
    mtbf: float = field(24.0, above=0, at_most=1e9)  # mean hours between failures of the job
    paths: tuple[str, ...] = ()  # where the runs were looked for
    full_names: bool = False  # paths instead of names
    width: int = field(0, at_least=0)  # columns of a terminal; 0 = as many as it takes
    title: str = "maxbench report"  # of the page
    suite: str = ""  # file of the runs that were launched together, and what is expected of them

    def __post_init__(self):
        validate(self)


@dataclasses.dataclass(kw_only=True)
class RunSummary:
    """One run with its figures. None where the run does not tell."""

    record: RunRecord
    ok: bool
    verdict: str  # PASS | WARN | FAIL | - | DIED
    why: str
    window: tuple[int, int] | None = None
    step: dict[str, float] | None = None  # mean, std, median, p10, p90
    tflops: dict[str, float] | None = None  # mean, std; as the run logged it
    tokens_s: float | None = None
    mfu: dict[str, float] | None = None  # by convention
    days: float | None = None
    peak_gib: float | None = None
    cost: float | None = None  # dollars per 1e12 tokens
    joules: float | None = None  # per token
    baseline: published.Published | None = None
    share: float | None = None  # of the published tokens/s
    planned: dict | None = None  # plan.figures() of the same step: predicted, never measured
    unplanned: str = ""  # why there is no such prediction
    trace: dict | None = None  # NCCL's calls: steps, damaged_lines, calls, step_beside_plan
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def said(self) -> str:
        """The reason and the notes as one line."""
        return "; ".join(filter(None, [self.why, *self.notes]))

    @property
    def loss(self) -> tuple[float | None, float | None]:
        """Of the first and of the last step that was logged; None where it is none."""
        steps = sorted(self.record.loss)
        ends = [self.record.loss[i] for i in (steps[:1] + steps[-1:])] or [math.nan, math.nan]
        return tuple(x if math.isfinite(x) else None for x in ends)

    @property
    def on_cpu(self) -> bool:
        """Whether rates per GPU and days of training mean nothing for this run."""
        return bool(self.record.device and not self.record.gpu_type)

    @property
    def tuning(self) -> tuple:
        """What makes two runs repeats of each other."""
        r = self.record
        told = (r.model, r.size, r.dtype, r.gpus, r.gbs)  # a log's name may hold a job's number
        named = r.name if r.source == "maxbench" or not (r.model and r.gpus) else told
        return named, r.device or r.gpu_type


@functools.cache
def model_of(name: str, size: str) -> Model | None:
    """The Model of a workload file, or None."""
    path = next(iter(recipes.find_workloads(name, size)), None)
    return Model(**recipes.workloads()[path].model) if path else None


def _model(r: RunRecord) -> Model | None:
    """The run's own numbers, else those of the workload it is named after."""
    try:
        if numbers := dig(r.result, "config.model", {}):
            known = numbers.keys() & {f.name for f in dataclasses.fields(Model)}
            return Model(**{name: numbers[name] for name in known})
        model = model_of(r.model, r.size)
        return dataclasses.replace(model, layers=r.layers) if model and r.layers else model
    except (TypeError, ValueError, ZeroDivisionError):
        return None


def summarize(r: RunRecord, s: ReportOptions) -> RunSummary:
    """A run's figures."""
    if r.source != "maxbench":
        r.gpu_type = r.gpu_type or s.gpu_type
    cut = r.status == "stopped" and r.last < r.planned - 1
    died = r.status in ("died", "failed") or cut or not r.step_s
    made = RunSummary(record=r, ok=not died, verdict="DIED" if died else "-", why=r.reason)
    if bad := [i for i, x in r.loss.items() if not math.isfinite(x)]:
        first = min(bad)
        made.ok, made.verdict, made.why = False, "DIED", f"loss is {r.loss[first]} at step {first}"
    if r.status in ("running", "skipped"):
        made.ok, made.verdict = False, "-"
        made.why = "still running" if r.status == "running" else r.reason
    if r.damaged > 0:
        made.notes.append(f"lines about steps that are damaged: {r.damaged}")
    made.notes += r.unread
    made.notes += gaps(r.step_s)
    if r.status == "done" and 0 <= r.last < r.planned - 1:
        made.notes.append(f"the log ends at step {r.last}, the run at {r.planned - 1}")
    kept, times = step_stats.measured_window(s.window, r.step_s)
    if not kept or not (made.ok or (kept[0], kept[-1]) == s.window):
        return made
    made.window = (kept[0], kept[-1])
    if made.window != s.window:
        early, late = min(r.step_s) > s.window[0], r.last < s.window[1]
        why = "the run starts later" if early else "the run was shorter" if late else "a gap"
        made.notes.append(f"steps {kept[0]} to {kept[-1]} count: {why}")
    made.step = step_stats.statistics_of(times)
    made.peak_gib = r.peak_bytes / 2**30 or None
    _figures(made, kept, s)
    if made.ok:
        made.verdict, made.why = _verdict(made, s.gpu_types)
        made.notes += alarms(times)
        if slow := dig(r.result, "slow_hosts", []):
            made.notes.append(f"slow hosts: EXCLUDE_NODES={','.join(map(str, slow))}")
    return made


def gaps(steps: Iterable[int]) -> list[str]:
    """What is missing between the first and the last step of a log, in words.

    A program may log every tenth step: a gap is wider than most.
    """
    pairs = [*itertools.pairwise(sorted(steps))]
    usual = statistics.mode(b - a for a, b in pairs) if pairs else 1
    found = [f"{a + usual} to {b - usual}" for a, b in pairs if b - a > usual]
    more = f" and in {len(found) - 1} more places" if len(found) > 1 else ""
    return [f"no steps in the log from {found[0]}{more}"] if found else []


def _figures(made: RunSummary, kept: list[int], s: ReportOptions) -> None:
    r, step_s = made.record, made.step["mean"]
    if logged := [r.tflops[i] for i in kept if r.tflops.get(i)]:
        made.tflops = step_stats.statistics_of(logged)
    if not (r.gbs and r.seq):
        return
    model = _model(r) if r.gpus else None
    known = model and r.gpu_type in s.gpu_types and r.dtype in number_formats.PEAKS
    peak = s.gpu_types[r.gpu_type].peak_tflops(number_formats.PEAKS[r.dtype]) if known else 0
    figures = functools.partial(flops.figures, model, r.seq, r.gbs, r.gpus, peak_tflops=peak)
    found = figures(step_s)
    made.tokens_s, made.days = found["tokens_per_s"], found["days_to_1t_tokens"]
    made.mfu = found["mfu"] if peak else None
    if model and not logged:
        each = [figures(r.step_s[i])["tflops_per_gpu"]["full"] for i in kept]
        made.tflops = step_stats.statistics_of(each)
    if r.gpus and s.cost and not made.on_cpu:  # virtual CPU devices cost nothing
        made.cost = made.days * 24 * r.gpus * s.cost
    if r.gpus and r.power_w:
        made.joules = r.power_w * r.gpus / made.tokens_s


def _verdict(made: RunSummary, gpu_types: GpuTypes) -> tuple[str, str]:
    """PASS, WARN, FAIL or '-', and the reason."""
    r = made.record
    if r.profiled:
        return "-", f"not comparable: under {r.profiled}"
    if r.mocked:
        return "-", "not comparable: the network was mocked"
    if r.gpu_type not in gpu_types:
        where = f"ran on {r.device}" if r.device else "GPU type not in the log, give --gpu_type"
        return "-", f"not comparable: {where}"
    needed = {"workload": r.model, "precision": r.dtype, "GPUs": r.gpus, "batch": r.gbs}
    if lacking := [name for name, value in needed.items() if not value]:
        return "-", f"not comparable: no {', '.join(lacking)} in the log or its name"
    beside = published.compare(
        r.model, r.size, r.dtype, r.gpu_type, gpus=r.gpus, gbs=r.gbs, seq=r.seq, layers=r.layers
    )
    made.baseline, made.share = beside.row, beside.share(made.step["mean"])
    if beside.refusal:
        return "-", beside.refusal
    text = f"{made.share:.1%} of published {beside.row.step_s:g} s"
    return ("PASS" if made.share >= PASS else "WARN" if made.share >= WARN else "FAIL"), text


def alarms(times: Sequence[float]) -> list[str]:
    """What is odd about the steps of one run: two modes, or a drift."""
    if len(times) < 8:
        return []
    times = times[:: -(-len(times) // POINTS)]  # pairs of them are many
    notes, middle = [], statistics.median(times)
    if (split := two_modes(times)) and split[1] - split[0] > SPLIT * middle:
        notes.append(f"step times have two modes, {split[0]:.4g} and {split[1]:.4g} s")
    moved, order = drift(times)
    if abs(moved) > DRIFT and abs(order) > 0.6:
        notes.append(f"step time drifts by {moved:+.1%} over the window")
    return notes


def drift(times: Sequence[float]) -> tuple[float, float]:
    """By what share of the median the steps of a run grow over all of them, and how steadily
    (Kendall's tau, -1 to 1); takes time as the square of their number."""
    # Median of the slopes between all pairs (Theil-Sen): one slow step does not move it.
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in itertools.combinations(enumerate(times), 2)]
    if not slopes:
        return 0.0, 0.0
    order = sum((s > 0) - (s < 0) for s in slopes) / len(slopes)
    return statistics.median(slopes) * (len(times) - 1) / statistics.median(times), order


def two_modes(values: Sequence[float]) -> tuple[float, float] | None:
    """Means of two groups that a gap divides, each with a fifth of the values; or None."""
    ordered = sorted(values)
    least = max(2, round(0.2 * len(ordered)))
    cuts = range(least, len(ordered) - least + 1)
    cut = max(cuts, key=lambda i: ordered[i] - ordered[i - 1], default=0)
    if not cut:
        return None
    low, high = ordered[:cut], ordered[cut:]
    within = max(low[-1] - low[0], high[-1] - high[0])
    gap = high[0] - low[-1]
    return (statistics.fmean(low), statistics.fmean(high)) if gap > max(2 * within, 1e-9) else None


@dataclasses.dataclass(frozen=True)
class RepeatGroup:
    """Runs of the same thing."""

    name: str
    runs: int
    spread: float  # (slowest - fastest) / median of their medians
    notes: list[str]


def repeats(rows: Iterable[RunSummary]) -> list[RepeatGroup]:
    """Groups of two runs or more that should be equal, with what is odd about them."""
    groups: dict[tuple, list[RunSummary]] = {}
    for one in rows:
        if one.ok and one.step and not one.record.profiled:
            groups.setdefault(one.tuning, []).append(one)
    made = []
    for group in (g for g in groups.values() if len(g) > 1):
        group.sort(key=lambda x: x.record.started)
        medians = [x.step["median"] for x in group]
        middle = statistics.median(medians)
        spread = (max(medians) - min(medians)) / middle
        notes = [f"runs differ by more than {SPREAD:.0%}"] if spread > SPREAD else []
        notes += [re.sub("step times?", "runs", n) for n in alarms(medians)]
        made.append(RepeatGroup(group[0].record.name, len(group), spread, notes))
    return made


@dataclasses.dataclass(frozen=True)
class Point:
    """One scale of a curve: the best run there, against the smallest scale."""

    gpus: int
    tokens_s: float
    efficiency: float  # tokens/s per GPU, as a share of the smallest scale's
    published: float | None  # the same of the published rows


@dataclasses.dataclass(frozen=True)
class Curve:
    """Runs of one workload over scales: weak (batch grows along) or strong (batch stays)."""

    name: str
    kind: str
    points: tuple[Point, ...]


def curves(rows: Iterable[RunSummary]) -> list[Curve]:
    """Scaling curves of at least two scales."""
    best: dict[
        tuple, dict[int, RunSummary]
    ] = {}  # workload, kind, batch -> GPUs -> the fastest run
    for one in rows:
        r = one.record
        if not (one.ok and one.tokens_s and r.gpus) or r.profiled:
            continue
        key = (r.model, r.size, r.dtype, r.gpu_type or r.device, r.seq, r.layers)
        for kind, batch in (("weak", r.gbs / r.gpus), ("strong", r.gbs)):
            scales = best.setdefault((*key, kind == "strong", batch), {})
            scales[r.gpus] = max(scales.get(r.gpus, one), one, key=lambda x: x.tokens_s)
    made = []
    for (*key, strong, batch), scales in sorted(best.items(), key=lambda x: x[0]):
        if len(scales) > 1:
            name = " ".join(filter(None, map(str, key[:4])))
            name += " (virtual devices share the cores)" if key[3] == "cpu" else ""
            name += f", {batch} in all" if strong else f", {batch:g} per GPU"
            kind = "strong" if strong else "weak"
            made.append(Curve(name, kind, _points(scales, kind)))
    return made


def _points(scales: dict[int, RunSummary], kind: str) -> tuple[Point, ...]:
    base = min(scales)
    r = scales[base].record
    rows = {
        p.gpus: p.tokens_per_s / p.gpus
        for p in published.rows()
        if (p.model, p.size, p.dtype, p.gpu_type, p.scaling, p.layers)
        == (r.model, r.size, r.dtype, r.gpu_type, kind, r.layers)
    }
    points = []
    for n, one in sorted(scales.items()):
        theirs = rows[n] / rows[base] if {n, base} <= rows.keys() else None
        share = one.tokens_s / n / (scales[base].tokens_s / base)
        points.append(Point(n, one.tokens_s, share, theirs))
    return tuple(points)


@dataclasses.dataclass(frozen=True)
class CheckpointOverhead:
    """What saving checkpoints and failing would cost: a projection from one timing."""

    save_s: float
    interval_s: float
    best_s: float  # sqrt(2 x save x time between failures): Young 1974
    share: float  # of the time, lost


def overhead(r: RunRecord, s: ReportOptions) -> CheckpointOverhead | None:
    """Projected overhead of checkpoints, to first order (Young 1974, Daly 2006), or None.

    Lost are the saves, half an interval per failure, and a load per failure:
    save / interval + (interval / 2 + load) / mtbf.
    """
    if not r.saves:
        return None
    save = statistics.fmean(r.saves)
    load = statistics.fmean(r.loads) if r.loads else save
    mtbf_s = s.mtbf * 3600
    best = math.sqrt(2 * save * mtbf_s)
    interval = s.interval * 60 or best
    share = save / interval + (interval / 2 + load) / mtbf_s
    return CheckpointOverhead(save, interval, best, share)


def names(rows: Sequence[RunSummary], s: ReportOptions) -> list[str]:
    """Names as the seeds' parser shortens them; a stamp or number keeps repeats apart."""
    found = []
    for r in (x.record for x in rows):
        stamp = r.path.name.removeprefix(r.name) if r.source == "maxbench" else ""
        found.append(escape_control(str(r.path) if s.full_names else r.name + stamp))
    return found
