"""Figures of runs that are over: windows, verdicts, scaling, repeats, cost, energy, checkpoints.

Every figure names its convention. Times are seconds, rates per second, power watts, money dollars.
"""

import dataclasses
import functools
import math
import pathlib
import statistics
from collections.abc import Iterable, Sequence

from maxbench import flops, published
from maxbench.config import Model
from maxbench.hardware import GPUS
from maxbench.metrics import statistics_of
from maxbench.runlogs import Record
from maxbench.variables import ROOT

PASS, WARN = 0.95, 0.85  # shares of the published tokens/s
DRIFT, SPLIT = 0.02, 0.02  # shares of the median that are worth an alarm
SPREAD = 0.05  # between repeats of a run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the reader chose."""

    window: tuple[int, int] = (35, 44)  # steps that count, inclusive
    cost: float = 0.0  # dollars per GPU hour
    gpu_type: str = ""  # of logs that do not name it
    interval_s: float = 0.0  # between checkpoints; 0 = the best by Young and Daly
    mtbf_s: float = 24 * 3600.0  # mean time between failures of the whole job


@dataclasses.dataclass(kw_only=True)
class Row:
    """One run with its figures. None where the run does not tell."""

    record: Record
    ok: bool
    verdict: str  # PASS | WARN | FAIL | - | DIED
    why: str
    window: tuple[int, int] | None = None
    step: dict[str, float] | None = None  # mean, std, median, p10, p90
    tflops: dict[str, float] | None = None  # mean, std; as the run logged it
    tflops_from: str = ""  # 'full', or 'logged' where only the log knows
    tokens_s: float | None = None
    mfu: dict[str, float] | None = None  # by convention
    days: float | None = None
    peak_gib: float | None = None
    cost: float | None = None  # dollars per 1e12 tokens
    joules: float | None = None  # per token
    baseline: published.Published | None = None
    share: float | None = None  # of the published tokens/s
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def per_gpu(self) -> float | None:
        """Tokens per second and GPU."""
        r = self.record
        return self.tokens_s / r.gpus if self.tokens_s and r.gpus else None

    @property
    def tuning(self) -> tuple:
        """What makes two runs repeats of each other."""
        r = self.record
        return (r.name if r.source == "maxbench" else _stem(r), r.device or r.gpu_type)


def _stem(r: Record) -> str:
    known = f"{r.model}_{r.size}_{r.dtype}_gpus{r.gpus}_gbs{r.gbs}"
    return known if r.model and r.gpus else r.name


@functools.cache
def model_of(name: str, size: str) -> Model | None:
    """The Model of a workload file, or None."""
    import importlib.util

    path = ROOT / "configs" / f"{name}_{size}.py"
    if not name.isalnum() or not size.isalnum() or not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location(f"workload_{name}_{size}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Model(**module.get_config().model)


def _model(r: Record) -> Model | None:
    """The run's own numbers, else those of the workload it is named after."""
    config = r.result.get("config")
    numbers = config.get("model") if isinstance(config, dict) else None
    try:
        if isinstance(numbers, dict):
            known = {f.name for f in dataclasses.fields(Model)}
            return Model(**{k: v for k, v in numbers.items() if k in known})
        model = model_of(r.model, r.size)
        return dataclasses.replace(model, layers=r.layers) if model and r.layers else model
    except (TypeError, ValueError, ZeroDivisionError):
        return None


def steps_of(r: Record, window: tuple[int, int]) -> list[int]:
    """Steps that count: those of the window, or the last half of a shorter run that is over."""
    first, last = window
    steps = sorted(r.step_s)
    if not steps or steps[-1] < last or steps[0] > first:
        first, last = (steps[len(steps) // 2], steps[-1]) if steps else (0, -1)
    return [i for i in steps if first <= i <= last]


def row(r: Record, s: Settings) -> Row:
    """A run's figures."""
    if r.source != "maxbench":
        r.gpu_type = r.gpu_type or s.gpu_type
    cut = r.status == "stopped" and r.last < r.planned - 1
    died = r.status in ("died", "failed") or cut or not r.step_s
    made = Row(record=r, ok=not died, verdict="DIED" if died else "-", why=r.reason)
    bad = next((i for i, x in sorted(r.loss.items()) if not math.isfinite(x)), None)
    if bad is not None:
        made.ok, made.verdict, made.why = False, "DIED", f"loss is {r.loss[bad]} at step {bad}"
    if r.status == "running":
        made.ok, made.verdict, made.why = False, "-", "still running"
    kept = steps_of(r, s.window)
    if not kept:
        return made
    if not made.ok and (kept[0], kept[-1]) != s.window:
        return made
    made.window = (kept[0], kept[-1])
    made.step = statistics_of([r.step_s[i] for i in kept])
    made.peak_gib = r.peak_bytes / 2**30 or None
    _figures(made, kept, s)
    if made.ok:
        made.verdict, made.why = _verdict(made)
        made.notes += alarms([r.step_s[i] for i in kept])
        slow = r.result.get("slow_hosts")
        if isinstance(slow, list) and slow:
            made.notes.append(f"slow hosts: EXCLUDE_NODES={','.join(map(str, slow))}")
    return made


def _figures(made: Row, kept: list[int], s: Settings) -> None:
    r, step_s = made.record, made.step["mean"]
    logged = [r.tflops[i] for i in kept if r.tflops.get(i)]
    if logged:
        made.tflops = {"mean": statistics.fmean(logged), "std": statistics.pstdev(logged)}
        made.tflops_from = "logged"
    if not (r.gbs and r.seq):
        return
    made.tokens_s = flops.tokens_per_s(r.seq, r.gbs, step_s)
    made.days = flops.days_to_1t(made.tokens_s)
    if r.gpus and s.cost and not (r.device and not r.gpu_type):  # virtual CPU devices cost nothing
        made.cost = made.days * 24 * r.gpus * s.cost
    if r.gpus and r.power_w:
        made.joules = r.power_w * r.gpus / made.tokens_s
    model = _model(r)
    if not model or not r.gpus:
        return
    rates = {c: flops.per_sequence(model, r.seq, c) for c in flops.CONVENTIONS}
    if not logged:
        each = [flops.tflops_per_gpu(rates["full"], r.gbs, r.step_s[i], r.gpus) for i in kept]
        made.tflops = {"mean": statistics.fmean(each), "std": statistics.pstdev(each)}
        made.tflops_from = "full"
    if r.gpu_type in GPUS and r.dtype:
        peak = GPUS[r.gpu_type].peak_tflops(r.dtype)
        made.mfu = {
            c: flops.mfu(flops.tflops_per_gpu(x, r.gbs, step_s, r.gpus), peak)
            for c, x in rates.items()
        }


def _verdict(made: Row) -> tuple[str, str]:
    """PASS, WARN, FAIL or '-', and the reason."""
    r = made.record
    gpu = r.gpu_type
    if r.profiled:
        return "-", f"not comparable: under {r.profiled}"
    if r.mocked:
        return "-", "not comparable: the network was mocked"
    if gpu not in GPUS:
        where = f"ran on {r.device}" if r.device else "GPU type not in the log, give --gpu_type"
        return "-", f"not comparable: {where}"
    needed = {"workload": r.model, "precision": r.dtype, "GPUs": r.gpus, "batch": r.gbs}
    if lacking := [name for name, value in needed.items() if not value]:
        return "-", f"not comparable: no {', '.join(lacking)} in the log or its name"
    found = published.nearest(r.model, r.size, r.dtype, gpu, r.gpus)
    if found is None:
        return "-", f"nothing published for {r.model} {r.size} {r.dtype} on {gpu}"
    made.baseline = found
    differs = published.differences(found, gpus=r.gpus, gbs=r.gbs, seq=r.seq, layers=r.layers)
    if differs:
        return "-", f"not comparable: {'; '.join(differs)}"
    made.share = found.step_s / made.step["mean"]
    text = f"{made.share:.1%} of published {found.step_s:g} s"
    return ("PASS" if made.share >= PASS else "WARN" if made.share >= WARN else "FAIL"), text


def alarms(times: Sequence[float]) -> list[str]:
    """What is odd about the steps of one run: two modes, or a drift."""
    if len(times) < 8:
        return []
    notes, middle = [], statistics.median(times)
    if (split := two_modes(times)) and split[1] - split[0] > SPLIT * middle:
        notes.append(f"step times have two modes, {split[0]:.4g} and {split[1]:.4g} s")
    drift = _slope(times) * (len(times) - 1)
    pairs = [(a, b) for i, a in enumerate(times) for b in times[i + 1 :]]
    order = sum((b > a) - (b < a) for a, b in pairs) / len(pairs)  # Kendall's tau
    if abs(drift) > DRIFT * middle and abs(order) > 0.6:
        notes.append(f"step time drifts by {drift / middle:+.1%} over the window")
    return notes


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


def _slope(times: Sequence[float]) -> float:
    """Median of the slopes between all pairs (Theil-Sen): one slow step does not move it."""
    pairs = range(len(times))
    return statistics.median((times[j] - times[i]) / (j - i) for i in pairs for j in pairs if i < j)


@dataclasses.dataclass(frozen=True)
class Repeat:
    """Runs of the same thing."""

    name: str
    rows: tuple[Row, ...]
    spread: float  # (slowest - fastest) / median of their medians
    notes: tuple[str, ...]


def repeats(rows: Iterable[Row]) -> list[Repeat]:
    """Groups of two runs or more that should be equal, with what is odd about them."""
    groups: dict[tuple, list[Row]] = {}
    for one in rows:
        if one.ok and one.step and not one.record.profiled:
            groups.setdefault(one.tuning, []).append(one)
    made = []
    for group in groups.values():
        if len(group) < 2:
            continue
        group.sort(key=lambda x: x.record.started)
        medians = [x.step["median"] for x in group]
        middle = statistics.median(medians)
        spread = (max(medians) - min(medians)) / middle
        notes = [f"runs differ by {spread:.1%}"] if spread > SPREAD else []
        notes += [
            n.replace("step times", "runs").replace("step time", "runs") for n in alarms(medians)
        ]
        made.append(Repeat(group[0].record.name, tuple(group), spread, tuple(notes)))
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


def curves(rows: Iterable[Row]) -> list[Curve]:
    """Scaling curves of at least two scales."""
    families: dict[tuple, list[Row]] = {}
    for one in rows:
        r = one.record
        if one.ok and one.tokens_s and r.gpus and not r.profiled:
            key = (r.model, r.size, r.dtype, r.gpu_type or r.device, r.seq, r.layers)
            families.setdefault(key, []).append(one)
    made = []
    for key, family in sorted(families.items()):
        name = " ".join(filter(None, map(str, key[:4])))
        name += " (virtual devices share the cores)" if key[3] == "cpu" else ""
        per_gpu: dict[float, list[Row]] = {}
        whole: dict[int, list[Row]] = {}
        for one in family:
            per_gpu.setdefault(one.record.gbs / one.record.gpus, []).append(one)
            whole.setdefault(one.record.gbs, []).append(one)
        for kind, groups in (("weak", per_gpu), ("strong", whole)):
            for batch, group in sorted(groups.items()):
                best: dict[int, float] = {}
                for one in group:
                    n = one.record.gpus
                    best[n] = max(best.get(n, 0.0), one.tokens_s)
                if len(best) > 1:
                    text = f"{batch:g} per GPU" if kind == "weak" else f"{batch} in all"
                    points = _points(best, group[0].record, kind)
                    made.append(Curve(f"{name}, {text}", kind, points))
    return made


def _points(best: dict[int, float], r: Record, kind: str) -> tuple[Point, ...]:
    rows = {
        p.gpus: p.tokens_per_s / p.gpus
        for p in published.rows()
        if (p.model, p.size, p.dtype, p.gpu_type, p.scaling, p.layers)
        == (r.model, r.size, r.dtype, r.gpu_type, kind, r.layers)
    }
    base = min(best)
    known = rows.get(base)
    points = []
    for n in sorted(best):
        theirs = rows[n] / known if known and n in rows else None
        points.append(Point(n, best[n], best[n] / n / (best[base] / base), theirs))
    return tuple(points)


@dataclasses.dataclass(frozen=True)
class Overhead:
    """What saving checkpoints and failing would cost: a projection from one timing."""

    save_s: float
    load_s: float
    interval_s: float
    best_s: float  # sqrt(2 x save x time between failures): Young 1974
    mtbf_s: float
    share: float  # of the time, lost


def overhead(r: Record, s: Settings) -> Overhead | None:
    """Projected overhead of checkpoints, to first order (Young 1974, Daly 2006), or None.

    Lost are the saves, half an interval per failure, and a load per failure:
    save / interval + (interval / 2 + load) / mtbf.
    """
    if not r.saves:
        return None
    save = statistics.fmean(x for x, _ in r.saves)
    load = statistics.fmean(x for x, _ in r.loads) if r.loads else save
    best = math.sqrt(2 * save * s.mtbf_s)
    interval = s.interval_s or best
    share = save / interval + (interval / 2 + load) / s.mtbf_s
    return Overhead(save, load, interval, best, s.mtbf_s, share)


def short_names(rows: Sequence[Row]) -> list[str]:
    """Names as the seeds' parser shortens them; a stamp or number keeps repeats apart."""
    names = []
    for one in rows:
        r = one.record
        stem = r.name
        if r.source == "maxbench":
            stem += r.path.name.removeprefix(r.name)
        names.append(stem)
    return names


def full_name(one: Row, below: pathlib.Path | None = None) -> str:
    """The path of the run's folder or log."""
    path = one.record.path
    try:
        return str(path.relative_to(below)) if below else str(path)
    except ValueError:
        return str(path)
