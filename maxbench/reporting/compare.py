"""Figures of finished runs: windows, verdicts, scaling, repeats, cost, energy, checkpoints.

Every figure names its convention. Times are seconds, rates per second, power watts, money dollars.
"""

import collections
import dataclasses
import functools
import itertools
import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from maxbench.config import number_formats, options, recipes
from maxbench.config.errors import escape_control
from maxbench.config.model import Model
from maxbench.evidence import mlperf, published
from maxbench.hardware.gpus import GPU_TYPES, GpuTypes
from maxbench.metrics import checkpoint_interval, flops, step_stats
from maxbench.reporting import fast_steps
from maxbench.run_logs import formats
from maxbench.run_logs.record import SETTINGS, Given, Origin, RunRecord, dig

if TYPE_CHECKING:  # it loads numpy
    from maxbench.traces.report import TraceReport

DRIFT, SPLIT = 0.02, 0.02  # shares of the median step time that are worth an alarm
SPREAD = 0.05  # between repeats of a run that is worth an alarm
SPIKE = 1.5  # times of the median step time from which a step is named
OTHER = 0.03  # relative difference of FLOPs or MFU that a convention does not explain
SAME = 0.015  # relative difference of TFLOP/s within which they are of one convention
POINTS = 200  # at most so many steps of a run are checked for a drift


class ReportOptions(options.ReportOptions):
    """Options of a report, with the GPU types and the terminal that they lead to."""

    gpu_types: GpuTypes = GPU_TYPES
    table: formats.FormatTable = formats.FORMATS
    width: int = 0  # columns of the terminal; 0 = any

    @property
    def limits(self) -> mlperf.Criterion:
        """Least shares of the published tokens/s of PASS and WARN."""
        return mlperf.EXEMPLAR if self.criterion == "exemplar" else mlperf.noise_criterion()

    @functools.cached_property
    def given(self) -> Given:
        """Settings that the options give for all logs.

        Raises:
          UserError: there is no such workload, or its file is invalid.
        """
        settings = {name: getattr(self, name) for name in SETTINGS if name != "model"}
        if self.config:
            config = recipes.load_workload(self.config, self.gpu_types)
            model = Model(**config.model)
            settings |= {"model": model.name, "size": model.size, "layers": model.layers}
            settings["network"] = model
        return Given(self.gpu_types, settings, self.table)


@dataclasses.dataclass(kw_only=True)
class RunSummary:
    """One run with its figures; None if its log does not have one."""

    record: RunRecord
    ok: bool
    verdict: str  # PASS | WARN | FAIL | - | DIED
    why: str
    window: tuple[int, int] | None = None
    step: dict[str, float] | None = None  # mean, std, median, p10, p90
    tflops: dict[str, float] | None = None  # mean, std; as logged, else calculated
    convention: str = "full"  # of tflops: full, causal, or "of its own" of the run's program
    tokens_s: float | None = None
    mfu: dict[str, float] | None = None  # by convention
    days: float | None = None
    peak_gib: float | None = None
    cost: float | None = None  # dollars per 1e12 tokens
    joules: float | None = None  # per token
    baseline: published.Published | None = None
    share: float | None = None  # of the published tokens/s, or of the median MLPerf system's
    limits: mlperf.Criterion = dataclasses.field(default_factory=mlperf.noise_criterion)
    planned: dict | None = None  # planner.figures() of the same step: a prediction
    unplanned: str = ""  # why there is no prediction
    possible: bool = True  # whether its steps are slower than the peak of its GPUs
    profile: "TraceReport | None" = None  # what the profile in its folder shows
    trace: dict | None = None  # NCCL: steps, damaged_lines, calls, step_compared_with_plan
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def explanation(self) -> str:
        """The reason of the verdict and the notes, as one line."""
        return "; ".join(filter(None, [self.why, *self.notes]))

    @property
    def loss(self) -> tuple[float | None, float | None]:
        """Loss of the first and of the last logged step; None if it is not finite."""
        steps = sorted(self.record.loss)
        ends = [self.record.loss[i] for i in (steps[:1] + steps[-1:])] or [math.nan, math.nan]
        first, last = (x if math.isfinite(x) else None for x in ends)
        return first, last

    @property
    def on_cpu(self) -> bool:
        """Whether the run used virtual devices: its rates per GPU are meaningless."""
        return self.record.device == "cpu"

    @property
    def repeat_key(self) -> tuple:
        """Runs with equal keys are repeats of each other."""
        r = self.record
        # The name of another program's log may contain a job number.
        work = (r.source, r.size, *(getattr(r, name) for name in SETTINGS))
        named = r.name if r.source == "maxbench" or not all(work) else work
        return named, r.device or r.gpu_type


@functools.cache
def model_of(name: str, size: str) -> Model | None:
    """The Model of a workload file; None if there is no such file."""
    path = next(iter(recipes.find_workloads(name, size)), None)
    return Model(**recipes.workloads()[path].model) if path else None


@functools.cache
def _model_of_json(text: str) -> Model:
    """The model of result.json: many runs have the same."""
    numbers = json.loads(text)
    known = numbers.keys() & {f.name for f in dataclasses.fields(Model)}
    return Model(**{name: numbers[name] for name in known})


def _model(r: RunRecord) -> Model | None:
    """The run's own model settings, else those of the workload that it is named after."""
    try:
        if numbers := dig(r.result, "run.model", {}):
            return _model_of_json(json.dumps(numbers))
        if r.network and r.origin("model") is Origin.USER:
            return r.network
        model = model_of(r.model, r.size)
        return dataclasses.replace(model, layers=r.layers) if model and r.layers else model
    except (TypeError, ValueError, ZeroDivisionError):
        return None


def summarize(r: RunRecord, options: ReportOptions) -> RunSummary:
    """Figures of a run."""
    cut = r.status == "stopped" and r.last < r.total_steps - 1
    died = r.status in ("died", "failed") or cut or not r.step_s
    summary = RunSummary(
        record=r, ok=not died, verdict="DIED" if died else "-", why=r.reason, limits=options.limits
    )
    _check_loss_and_status(summary)
    least_s = _least_times(r, options.gpu_types)
    steps = _same_work(r, _measured(r, r.step_s, options))
    if impossible := _faster_than_peak(r, steps, least_s):
        summary.possible = False
        summary.notes.append(impossible)
    elif least_s or not (r.batches or r.source in ("", "maxbench")):
        fast = fast_steps.find(r.step_s, least_s, _devices(r))
        summary.notes += [fast.note] if fast.note else []
        work = {i: s for i, s in r.step_s.items() if i not in fast.steps}
        steps = _same_work(r, _measured(r, work, options))
    if not steps or not (summary.ok or _may_count(r, steps, options.window)):
        return summary
    times = [r.step_s[i] for i in steps]
    summary.window = (max(0, steps[0] - r.interval + 1), steps[-1])
    if summary.window != options.window:
        why = _why_other_window(r, options.window)
        summary.notes.append(f"steps {summary.window[0]} to {steps[-1]} count: {why}")
    r = summary.record = _with_work_of(r, steps[-1])
    summary.step = step_stats.statistics_of(times)
    summary.peak_gib = r.peak_bytes / 2**30 or None
    _add_figures(summary, steps, options)
    summary.notes += _spike_note(times, steps)
    if summary.ok:
        summary.verdict, summary.why = _verdict(summary, times, options.gpu_types)
        summary.notes += alarms(times)
        if slow := dig(r.result, "slow_hosts", []):
            summary.notes.append(f"slow hosts: EXCLUDE_NODES={','.join(map(str, slow))}")
    return summary


def _measured(r: RunRecord, times: Mapping[int, float], options: ReportOptions) -> list[int]:
    """The steps of the window, or those that stand for it."""
    return step_stats.measured_window(options.window, times, r.interval)[0]


def _same_work(r: RunRecord, steps: Sequence[int]) -> list[int]:
    """The longest part of the steps, the last one of these, with one batch and one sequence length.

    Parts of unknown work count only if there is no other. Tokens of a step show a change too.
    """
    work_of = lambda step: (r.work(step), r.tokens.get(step))
    parts = [(all(work), [*part]) for (work, _), part in itertools.groupby(steps, key=work_of)]
    known = [part for is_known, part in parts if is_known] or [part for _, part in parts]
    return max(reversed(known), key=len, default=[])


def _with_work_of(r: RunRecord, step: int) -> RunRecord:
    """The record, with the batch and the sequence length of a step."""
    gbs, seq = r.work(step)
    return r if (gbs, seq) == (r.gbs, r.seq) else dataclasses.replace(r, gbs=gbs, seq=seq)


def _may_count(r: RunRecord, steps: Sequence[int], window: tuple[int, int]) -> bool:
    """Whether the steps of a run that has not finished give figures.

    Those of the whole window do; those of a run that goes on, or that started behind the window,
    after its first step; and means over several steps as soon as one lacks the start.
    """
    if r.interval > 1 or r.status == "running" or min(r.step_s) > window[0]:
        return len(r.step_s) > 1
    return (steps[0], steps[-1]) == window


def _why_other_window(r: RunRecord, window: tuple[int, int]) -> str:
    """Why the measured steps are not those of the window."""
    if r.interval > 1:
        return f"each time in the log is the mean of {r.interval} steps"
    if min(r.step_s) > window[0]:
        return "the run starts later"
    if r.last < window[1]:
        return f"the run is at step {r.last}" if r.status == "running" else "the run was shorter"
    gaps = [b - a for a, b in itertools.pairwise(sorted(r.step_s))]
    if gaps and (usual := statistics.mode(gaps)) > window[1] - window[0] + 1:
        return f"the log has one of {usual} steps"
    changes = {r.work(i) for i in r.step_s if window[0] <= i <= window[1]}
    return "the batch changes" if len(changes) > 1 else "a gap"


def _devices(r: RunRecord) -> str:
    return f"{r.gpus} {r.gpu_type}"


def _least_times(r: RunRecord, gpu_types: GpuTypes) -> dict[int, float]:
    """Step -> time of its FLOPs at the peak of the run's GPUs; {} if a setting is unknown.

    The number format may be unknown: then the fastest counts.
    """
    model = _model(r)
    if not (model and r.gpus and r.gpu_type in gpu_types):
        return {}
    gpu, format = gpu_types[r.gpu_type], number_formats.PEAKS.get(r.dtype)
    # A peak of 0: the GPU has no such GEMMs, and the run computed with others.
    fastest = max(gpu.bf16_tflops, gpu.fp8_tflops, gpu.fp4_tflops)
    peak = (gpu.peak_tflops(format) if format else 0) or fastest
    seconds = functools.cache(
        lambda gbs, seq: flops.seconds_at_peak(model, seq, gbs, r.gpus, peak) if gbs and seq else 0
    )
    return {i: least for i in r.step_s if (least := seconds(*r.work(i)))}


def _faster_than_peak(r: RunRecord, steps: Sequence[int], least_s: Mapping[int, float]) -> str:
    """A note if most of the measured steps are faster than the peak: a setting must be wrong."""
    known = [i for i in steps if i in least_s]
    if not known or statistics.median(r.step_s[i] / least_s[i] for i in known) >= 1:
        return ""
    usual, least = (statistics.median(x[i] for i in known) for x in (r.step_s, least_s))
    return (
        f"steps {steps[0]} to {steps[-1]} are faster than the peak of {_devices(r)}: {usual:.3g} s "
        f"for FLOPs of at least {least:.3g} s; the GPU type of this run is another, or its number "
        "of GPUs, model, gbs, seq or number format"
    )


def request(rows: Sequence[RunSummary], options: ReportOptions) -> str:
    """Asks once for the settings that logs do not name; '' if all do."""
    logs = [x.record for x in rows if x.step and x.record.source != "maxbench"]
    lacking = {name: sum(name in unknown(r, options.gpu_types) for r in logs) for name in SETTINGS}
    lacking = {name: count for name, count in lacking.items() if count}
    if not lacking:
        return ""
    parts = [f"the {SETTINGS[name].words}" for name in lacking]
    if len(rows) > 1:
        of = lambda count: f"{count} of {len(rows)} logs {'does' if count == 1 else 'do'} not name"
        most = max(lacking.values())
        parts = [
            part if n == most else f"{part} ({n} of them)"
            for part, n in zip(parts, lacking.values(), strict=True)
        ]
        first = of(most)
    else:
        first = "The log does not name"
    values = {"gpu_type": "|".join(options.gpu_types), "dtype": "|".join(number_formats.DTYPES)}
    values["model"] = "WORKLOAD"
    flags = " ".join(
        f"--{SETTINGS[name].flag}={values.get(name, SETTINGS[name].flag.upper())}"
        for name in lacking
    )
    return (
        f"{first} {_listed(parts)}: {flags} {'gives it' if len(parts) == 1 else 'give them'} once "
        "for all; without, no figure is compared and there is no MFU"
    )


def origins(rows: Sequence[RunSummary]) -> dict[str, list[RunSummary]]:
    """Settings of logs of other programs that the logs do not name, in words -> the runs."""
    found: dict[str, list[RunSummary]] = {}
    for row in rows:
        r = row.record
        if row.step and r.source != "maxbench" and (text := "; ".join(_origins(r))):
            found.setdefault(text, []).append(row)
    return found


def unused(rows: Sequence[RunSummary], options: ReportOptions) -> list[str]:
    """Settings that the user gives and every log names, in words."""
    used = {name for x in rows for name in SETTINGS if x.record.origin(name) is Origin.USER}
    return [
        f"--{SETTINGS[name].flag} applies to no log: each names its own {SETTINGS[name].words}"
        for name in SETTINGS
        if rows and options.given.settings.get(name) and name not in used
    ]


def _origins(r: RunRecord) -> Iterator[str]:
    """'GPU type h100 by the user', for each origin but the log."""
    sources = {
        Origin.USER: "the user",
        Origin.NAME: "the name of the log or its folder",
        Origin.PROGRAM: f"{r.program}'s convention",
    }
    for origin, source in sources.items():
        names = [name for name in SETTINGS if r.origin(name) is origin]
        value = lambda name: f"{r.model} {r.size}" if name == "model" else getattr(r, name)
        if settings := [f"{SETTINGS[name].words} {value(name)}" for name in names]:
            yield f"{_listed(settings)} by {source}"


def _listed(words: Sequence[str]) -> str:
    """'a, b and c'."""
    *rest, last = words
    return f"{', '.join(rest)} and {last}" if rest else last


def unknown(r: RunRecord, gpu_types: GpuTypes) -> list[str]:
    """Settings of a run that a verdict needs and nothing names."""
    found = [name for name in SETTINGS if not getattr(r, name) or r.origin(name) is Origin.UNKNOWN]
    known_type = r.gpu_type in gpu_types or "gpu_type" in found
    return found if known_type else [*found, "gpu_type"]


def _check_loss_and_status(summary: RunSummary) -> None:
    """Sets the verdict of runs that diverged, go on, or were skipped; notes what the log lacks."""
    r = summary.record
    if not_finite := [i for i, x in r.loss.items() if not math.isfinite(x)]:
        first = min(not_finite)
        summary.ok, summary.verdict = False, "DIED"
        summary.why = f"loss is {r.loss[first]} at step {first}"
    if r.status in ("running", "skipped"):
        summary.ok, summary.verdict = False, "-"
        summary.why = "still running" if r.status == "running" else r.reason
    if r.damaged > 0:
        summary.notes.append(f"damaged lines about steps: {r.damaged}")
    summary.notes += filter(None, [r.remedy])
    summary.notes += r.unread
    if not_finite := [i for i, x in r.grad_norm.items() if not math.isfinite(x)]:
        more = f" and in {len(not_finite) - 1} more steps" if len(not_finite) > 1 else ""
        first = min(not_finite)
        summary.notes.append(f"grad norm is {r.grad_norm[first]} at step {first}{more}")
    summary.notes += r.inferred
    summary.notes += gaps(r.step_s)
    summary.notes += [*_changes("gbs", r.batches), *_changes("seq", r.seqs)]
    if r.status == "done" and 0 <= r.last < r.total_steps - 1:
        ended = f"the log ends at step {r.last}, the run at {r.total_steps - 1}"
        summary.notes.append(r.reason or ended)


def _changes(name: str, values: Mapping[int, int]) -> list[str]:
    """A note on a setting that changes from step to step; [] if it does not."""
    known = [(step, value) for step, value in sorted(values.items()) if value]
    changes = [(step, a, b) for (_, a), (step, b) in itertools.pairwise(known) if a != b]
    if not changes:
        return []
    more = f", and {len(changes) - 1} times more" if len(changes) > 1 else ""
    step, before, after = changes[0]
    return [f"{name} changes from {before} to {after} at step {step}{more}"]


def gaps(steps: Iterable[int]) -> list[str]:
    """A note on steps that are missing between the first and the last one of a log; [] if none.

    A program may log every tenth step: an interval counts as a gap if it is longer than the mode.
    """
    pairs = [*itertools.pairwise(sorted(steps))]
    usual = statistics.mode(b - a for a, b in pairs) if pairs else 1
    missing = [f"{a + usual} to {b - usual}" for a, b in pairs if b - a > usual]
    more = f" and in {len(missing) - 1} more places" if len(missing) > 1 else ""
    return [f"no steps in the log from {missing[0]}{more}"] if missing else []


def _add_figures(summary: RunSummary, steps: Sequence[int], options: ReportOptions) -> None:
    """Adds rates, MFU, cost and energy of the steps that count."""
    r, possible = summary.record, summary.possible
    step_s = statistics.fmean(r.step_s[i] for i in steps)
    if logged := [r.tflops[i] for i in steps if r.tflops.get(i)]:
        summary.tflops = step_stats.statistics_of(logged)
    if not (r.gbs and r.seq):
        summary.tokens_s = _logged_tokens_s(r, steps)
        return
    model = _model(r) if r.gpus else None
    known = (
        possible and model and r.gpu_type in options.gpu_types and r.dtype in number_formats.PEAKS
    )
    peak = options.gpu_types[r.gpu_type].peak_tflops(number_formats.PEAKS[r.dtype]) if known else 0
    figures = functools.partial(flops.figures, model, r.seq, r.gbs, r.gpus, peak_tflops=peak)
    mean = figures(step_s)
    summary.tokens_s, summary.days = mean["tokens_per_s"], mean["days_to_1t_tokens"]
    summary.mfu = mean["mfu"] if peak else None
    if model and summary.tflops:
        _name_convention(summary, summary.tflops["mean"], mean["tflops_per_gpu"])
    elif model and possible:
        calculated = [figures(r.step_s[i])["tflops_per_gpu"]["full"] for i in steps]
        summary.tflops = step_stats.statistics_of(calculated)
    _compare_mfu(summary, steps, peak)
    if r.gpus and options.cost and not summary.on_cpu:  # virtual CPU devices are free
        summary.cost = summary.days * 24 * r.gpus * options.cost
    if r.gpus and r.power_w:
        summary.joules = r.power_w * r.gpus / summary.tokens_s


def _logged_tokens_s(r: RunRecord, steps: Sequence[int]) -> float | None:
    """Tokens/s by the rates of the steps in the log, else by their tokens; None if it has none."""
    rates = {i: r.gpus * r.tokens_s[i] for i in steps if r.gpus and i in r.tokens_s}
    tokens = {i: rate * r.step_s[i] for i, rate in rates.items()}
    tokens = tokens or {i: r.tokens[i] for i in steps if i in r.tokens}
    return sum(tokens.values()) / sum(r.step_s[i] for i in tokens) if tokens else None


def _name_convention(summary: RunSummary, logged: float, ours: dict[str, float]) -> None:
    """Notes whose TFLOP/s the run has, and by which convention, where it is not ours (full).

    Args:
      logged: the mean.
      ours: by convention, from the mean step time.
    """
    near = min(ours, key=lambda name: abs(logged / ours[name] - 1))
    difference = abs(logged / ours[near] - 1)
    summary.convention = near if difference < SAME else "of its own"
    if summary.convention != "full":
        program = summary.record.program
        how = f"{near} attention" if summary.convention == near else "a convention of its own"
        how += ", or of another model, gbs, seq or GPUs" if difference > OTHER else ""
        values = ", ".join(f"{x:.1f} {name}" for name, x in ours.items())
        summary.notes.append(
            f"TFLOPS/GPU {logged:.1f} is {program}'s, {how}; by our formula it is {values}"
        )


def _compare_mfu(summary: RunSummary, steps: Sequence[int], peak: float) -> None:
    """Notes an MFU in the log that is not ours, and one above 1 by our formula.

    Args:
      peak: TFLOP/s of a GPU, by which ours is.
    """
    r, ours = summary.record, summary.mfu or {}
    if not ours:
        return
    if ours["full"] > 1:
        summary.notes.append("MFU (full) is above 1: most of its FLOPs are scores that are masked")
    logged = statistics.fmean(values) if (values := [r.mfu[i] for i in steps if i in r.mfu]) else 0
    if not logged or any(abs(logged / x - 1) < OTHER for x in ours.values()):
        return
    note = f"MFU {logged:.1%} is {r.program}'s; ours is {ours['full']:.1%} full"
    if summary.tflops and r.tflops:
        note += f": its peak is {summary.tflops['mean'] / logged:,.0f} TFLOP/s, ours {peak:,.0f}"
    summary.notes.append(note)


def _verdict(summary: RunSummary, times: Sequence[float], gpu_types: GpuTypes) -> tuple[str, str]:
    """PASS, WARN, FAIL or '-', and the reason.

    The step time is the mean. With a spike it is by the rule of the program's published figures,
    and the reason has the other figure.
    """
    r = summary.record
    if r.profiled:
        return "-", f"not comparable: under {r.profiled}"
    if r.mocked:
        return "-", "not comparable: the network was mocked"
    if r.device and r.gpu_type not in gpu_types:
        return "-", f"not comparable: ran on {r.device}"
    if not summary.possible:
        return "-", "not comparable: its steps are faster than the peak of its GPUs"
    if lacking := unknown(r, gpu_types):
        words = _listed([f"the {SETTINGS[name].words}" for name in lacking])
        return "-", f"not comparable: its log does not name {words}"
    model = _model(r)
    comparison = published.compare(
        r.model, r.size, r.dtype, r.gpu_type, gpus=r.gpus, gbs=r.gbs, seq=r.seq,
        layers=model.layers if model else r.layers, format=r.format, layout=r.layout,
    )  # fmt: skip
    step_s, beside = _judged_step(r, times)
    share = comparison.share(step_s)
    summary.baseline, summary.share = comparison.row, share
    text = comparison.verdict(step_s)
    if share and beside:
        name, rule, other, other_s = beside
        text += f", by the {rule}{f', as {name} publishes' if name else ''}; "
        text += f"{other_s:.4g} s by the {other} is {share * step_s / other_s:.1%}"
    if systems := mlperf.systems(
        r.model, r.size, published.gemms(r.format or r.dtype), r.gpu_type,
        gpus=r.gpus, gbs=r.gbs, seq=r.seq, layers=model.layers if model else r.layers,
    ):  # fmt: skip
        if share is None:
            summary.baseline, text, share = None, "", systems.share(step_s)
            summary.share = share
        text = "; ".join(filter(None, [text, systems.verdict(step_s)]))
    if share is None:
        return "-", text
    passes, warns, _ = summary.limits
    return ("PASS" if share >= passes else "WARN" if share >= warns else "FAIL"), text


def _judged_step(
    r: RunRecord, times: Sequence[float]
) -> tuple[float, tuple[str, str, str, float] | None]:
    """The step time of the verdict: the mean; with a spike, what the program's figures publish.

    With a spike also the program if its rule is known, the rule, another rule and the step time by
    that one.
    """
    figures = {"mean": statistics.fmean(times), "median": statistics.median(times)}
    figures["last step"] = times[-1]
    if not spikes(times):
        return figures["mean"], None
    known = r.log_format.rule if r.log_format else ""
    rule, name = known or "mean", f"NVIDIA for {r.program}" if known else ""
    other = "median" if rule == "mean" else "mean"
    return figures[rule], (name, rule, other, figures[other])


def spikes(times: Sequence[float]) -> list[int]:
    """Places of the step times that are far longer than the median."""
    middle = statistics.median(times)
    return [i for i, seconds in enumerate(times) if seconds > SPIKE * middle]


def _spike_note(times: Sequence[float], steps: Sequence[int]) -> list[str]:
    """A note on the longest spike; [] if there is none."""
    if not (found := spikes(times)):
        return []
    longest, middle = max(found, key=times.__getitem__), statistics.median(times)
    more = f"; {len(found) - 1} more are over {SPIKE:g} x" if len(found) > 1 else ""
    return [
        f"step {steps[longest]} takes {times[longest]:.4g} s, {times[longest] / middle:.1f} x the "
        f"median of {middle:.4g} s{more}"
    ]


def alarms(times: Sequence[float]) -> list[str]:
    """Notes on step times that are unusual: two modes, or a drift."""
    if len(times) < 8:
        return []
    times = times[:: -(-len(times) // POINTS)]  # drift() takes O(n^2)
    notes, middle = [], statistics.median(times)
    if (split := two_modes(times)) and split[1] - split[0] > SPLIT * middle:
        notes.append(f"step times have two modes, {split[0]:.4g} and {split[1]:.4g} s")
    moved, order = drift(times)
    if abs(moved) > DRIFT and abs(order) > 0.6:
        notes.append(f"step time drifts by {moved:+z.1%} over the window")
    return notes


def drift(times: Sequence[float]) -> tuple[float, float]:
    """Growth of the step time over all steps, as a share of the median, and how monotonic it is.

    Growth is by the Theil-Sen estimator, the median of the slopes between all pairs, which one slow
    step does not move; monotonicity is Kendall's tau, -1 to 1. Takes O(n^2).
    """
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in itertools.combinations(enumerate(times), 2)]
    if not slopes:
        return 0.0, 0.0
    order = sum((s > 0) - (s < 0) for s in slopes) / len(slopes)
    return statistics.median(slopes) * (len(times) - 1) / statistics.median(times), order


def two_modes(values: Sequence[float]) -> tuple[float, float] | None:
    """Means of two groups with a wide gap between, each at least a fifth of the values; or None."""
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
    """Repeats of a run."""

    name: str
    runs: int
    spread: float  # (slowest - fastest) / median of their medians
    notes: list[str]


def repeats(rows: Iterable[RunSummary]) -> list[RepeatGroup]:
    """Groups of two or more repeats, with notes on what is unusual."""
    groups: dict[tuple, list[RunSummary]] = {}
    for summary in rows:
        if summary.ok and summary.step and summary.possible and not summary.record.profiled:
            groups.setdefault(summary.repeat_key, []).append(summary)
    found = []
    for group in (g for g in groups.values() if len(g) > 1):
        group.sort(key=lambda x: x.record.started)
        medians = [x.step["median"] for x in group if x.step]
        middle = statistics.median(medians)
        spread = (max(medians) - min(medians)) / middle
        notes = [f"runs differ by more than {SPREAD:.0%}"] if spread > SPREAD else []
        notes += [re.sub("step times?", "runs", n) for n in alarms(medians)]
        found.append(RepeatGroup(group[0].record.name, len(group), spread, notes))
    return found


@dataclasses.dataclass(frozen=True)
class Point:
    """One scale of a curve: its fastest run, relative to the smallest scale."""

    gpus: int
    tokens_s: float
    efficiency: float  # tokens/s per GPU, as a share of the smallest scale's
    published: float | None  # efficiency of the published rows


@dataclasses.dataclass(frozen=True)
class Curve:
    """Scaling of one workload: weak (the batch grows with the GPUs) or strong (it is constant)."""

    name: str
    kind: str
    points: tuple[Point, ...]


def curves(rows: Iterable[RunSummary]) -> list[Curve]:
    """Scaling curves of at least two scales."""
    # (workload, kind, batch) -> GPUs -> tokens/s and the record of the fastest run
    best: dict[tuple, dict[int, tuple[float, RunRecord]]] = {}
    for summary in rows:
        r = summary.record
        known = summary.possible and r.model and r.gpus and r.gbs and r.seq
        if not (summary.ok and known and summary.tokens_s) or r.profiled:
            continue
        key = (r.model, r.size, r.dtype, r.gpu_type or r.device, r.seq, r.layers)
        for kind, batch in (("weak", r.gbs / r.gpus), ("strong", r.gbs)):
            scales = best.setdefault((*key, kind == "strong", batch), {})
            this = summary.tokens_s, r
            scales[r.gpus] = max(scales.get(r.gpus, this), this, key=lambda x: x[0])
    found = []
    for (*parts, strong, batch), scales in sorted(best.items(), key=lambda x: x[0]):
        if len(scales) > 1:
            name = " ".join(filter(None, map(str, parts[:4])))
            name += " (virtual devices share the cores)" if parts[3] == "cpu" else ""
            name += f", {batch} in total" if strong else f", {batch:g} per GPU"
            kind = "strong" if strong else "weak"
            found.append(Curve(name, kind, _points(scales, kind)))
    return found


def _points(scales: dict[int, tuple[float, RunRecord]], kind: str) -> tuple[Point, ...]:
    base = min(scales)
    base_tokens_s, r = scales[base]
    rows = {
        p.gpus: p.tokens_per_s / p.gpus
        for p in published.rows()
        if (p.model, p.size, p.dtype, p.gpu_type, p.scaling, p.layers)
        == (r.model, r.size, r.dtype, r.gpu_type, kind, r.layers)
    }
    points = []
    for n, (tokens_s, _) in sorted(scales.items()):
        of_published = rows[n] / rows[base] if {n, base} <= rows.keys() else None
        efficiency = tokens_s / n / (base_tokens_s / base)
        points.append(Point(n, tokens_s, efficiency, of_published))
    return tuple(points)


@dataclasses.dataclass(frozen=True)
class CheckpointOverhead:
    """Projected cost of checkpoints and failures, from the measured time of a save."""

    save_s: float
    interval_s: float
    best_s: float  # the optimal interval
    share: float  # of the total time


def overhead(r: RunRecord, options: ReportOptions) -> CheckpointOverhead | None:
    """Projected overhead of checkpoints and failures; None without saves.

    A restart takes a load. metrics/checkpoint_interval.py has the formulas.
    """
    if not r.saves or not (save_s := statistics.fmean(r.saves)):
        return None
    load_s = statistics.fmean(r.loads) if r.loads else save_s
    mtbf_s = options.mtbf * 3600
    best_s = checkpoint_interval.best_interval_s(save_s, mtbf_s)
    interval_s = options.interval * 60 or best_s
    share = 1 - checkpoint_interval.goodput(interval_s, save_s, load_s, mtbf_s)
    return CheckpointOverhead(save_s, interval_s, best_s, share)


def names(rows: Sequence[RunSummary], options: ReportOptions) -> list[str]:
    """Names of the runs, with the timestamps that distinguish repeats, or their full paths.

    Logs of the same name in different folders have the name of their folder before it.
    """
    logs = collections.Counter(x.record.name for x in rows if x.record.source != "maxbench")
    found = []
    for r in (x.record for x in rows):
        name = r.name + (r.path.name.removeprefix(r.name) if r.source == "maxbench" else "")
        if logs[r.name] > 1 and r.source != "maxbench" and r.path.parent.name:
            name = f"{r.path.parent.name}/{name}"
        found.append(escape_control(str(r.path) if options.full_names else name))
    return found
