"""Runs as text for people: the table of the terminal, and Markdown."""

import collections
import dataclasses
from collections.abc import Sequence

from maxbench.reporting import compare, diagnosis, suite
from maxbench.reporting.compare import ReportOptions, RunSummary
from maxbench.run_logs import nccl
from maxbench.terminal import console

LEGEND = (
    "Std is the population's. TFLOPS/GPU: as the run's program logs it, else ours, 'full': all S x "
    "S attention scores count. MFU: ours, 'full', as a share of the dense peak of the precision; "
    "for FP8 runs the FP8 peak, although attention and logits run in BF16. Verdict: tokens/s "
    "relative to the published row of the same GPUs, batch, sequence and layers;"
)
LEGEND_WIDTH = 93  # columns, where the output is no terminal
# Head of a cell in tables for people -> its column in record(), and its format.
CELLS = {
    "Status": ("status", ""),
    "Mean s": ("time_mean_seconds", ".3f"),
    "Std s": ("time_std_dev_seconds", ".3f"),
    "Median": ("time_median_seconds", ".3f"),
    "p10": ("time_p10_seconds", ".3f"),
    "p90": ("time_p90_seconds", ".3f"),
    "TFLOPS/GPU": ("tflops_per_gpu_mean", ".2f"),
    "Std": ("tflops_per_gpu_std_dev", ".2f"),
    "Tokens/s": ("tokens_per_second", ",.0f"),
    "MFU %": ("mfu_full", ".2%"),
    "Days/1T": ("days_to_1t_tokens", ",.2f"),
    "GiB": ("peak_memory_gib", ".2f"),
    "Loss": ("loss", ""),
    "Verdict": ("verdict", ""),
}
NOT_ON_CPU = ("TFLOPS/GPU", "Std", "Days/1T")  # figures that are meaningless for virtual devices
# Columns that a narrow terminal leaves out, the first ones first.
OPTIONAL = ("p10", "p90", "Median", "Std", "Std s", "Days/1T", "Status", "MFU %", "Loss")


def cells(summary: RunSummary) -> dict[str, str]:
    """Text of each of a run's CELLS, '-' if unknown; only the status of a run without steps."""
    data = record(summary)
    if summary.step is None:
        return {"Status": data["status"]}
    first, last = summary.loss
    data["loss"] = None if None in summary.loss else f"{first:#.4g} to {last:#.4g}"
    data |= {CELLS[head][0]: None for head in NOT_ON_CPU if summary.on_cpu}
    return {
        head: "-" if data[column] is None else format(data[column], form).rstrip("%")
        for head, (column, form) in CELLS.items()
    }


def record(summary: RunSummary) -> dict:
    """Figures of a run as plain data; units in the names, None if unknown.

    The first seven columns are those of the parser of NVIDIA's recipes.
    """
    r, step = summary.record, summary.step or {}
    tflops, mfu = summary.tflops or {}, summary.mfu or {}
    return {
        "filename": str(r.path),
        "status": status(summary),
        "time_mean_seconds": step.get("mean"),
        "time_std_dev_seconds": step.get("std"),
        "tflops_per_gpu_mean": tflops.get("mean"),
        "tflops_per_gpu_std_dev": tflops.get("std"),
        "max_iteration": r.last if r.last >= 0 else None,
        "time_median_seconds": step.get("median"),
        "time_p10_seconds": step.get("p10"),
        "time_p90_seconds": step.get("p90"),
        "tokens_per_second": summary.tokens_s,
        "mfu_full": mfu.get("full"),
        "mfu_causal": mfu.get("causal"),
        "days_to_1t_tokens": summary.days,
        "peak_memory_gib": summary.peak_gib,
        "cost_per_1t_tokens_dollars": summary.cost,
        "joules_per_token": summary.joules,
        "verdict": summary.verdict,
        "reason": summary.explanation,
        "loss_first": summary.loss[0],
        "loss_last": summary.loss[1],
        "eval_loss_last": next(reversed(r.eval_loss.values()), None),
        "steps_to_target": r.reached and r.reached.step + 1,
        "tokens_to_target": r.reached and r.reached.tokens,
        "seconds_to_target": r.reached and r.reached.elapsed_s,
    }


def status(summary: RunSummary) -> str:
    """Success, Failed, Running or Not read."""
    other = {"running": "Running", "skipped": "Not read"}
    return "Success" if summary.ok else other.get(summary.record.status, "Failed")


def legend(options: ReportOptions) -> str:
    """Meaning of the columns, and the share from which a run has each verdict."""
    passes, warns, reason = options.limits
    warn = f", WARN from {warns:.1%}" if warns < passes else ""
    return f"{LEGEND} PASS from {passes:.1%}{warn}: {reason}."


def text(rows: Sequence[RunSummary], options: ReportOptions) -> str:
    """The table of NVIDIA's parser with further columns, notes below each run, and a summary."""
    first, last = options.window
    width = options.width
    title = f"Train Step Timing and TFLOPS Analysis (iterations {first}-{last})"
    lines = [title, "=" * min(80, width or 80), *_run_lines(rows, options), "", "Summary:"]
    lines += (f"  {k.replace('_', ' ').capitalize()}: {v}" for k, v in counts(rows).items())
    lines[-1] += "%"
    calls = [(t.title, t.lines(max(0, width - 2))) for t in traces(rows)]
    for title, section in (*sections(rows, options), *calls):
        lines += ["", title, *_indented(section, width)]
    if request := compare.request(rows, options):
        lines += ["", *console.fold(request, width)]
    lines += ["", *console.fold(legend(options), width or LEGEND_WIDTH)]
    if options.suite:
        verdict = suite.judge(options.suite, rows)
        lines += ["", "Suite", *_indented(verdict.lines(), width), verdict.title]
    return "\n".join(lines)


def _indented(section: Sequence[str], width: int) -> list[str]:
    return [y for x in section for y in console.fold(f"  {x}", width, "    ")]


def _run_lines(rows: Sequence[RunSummary], options: ReportOptions) -> list[str]:
    """Heads, their rule, and each run with its notes.

    If the terminal is too narrow, each name has its line to itself, and columns are left out.
    """
    names, texts = compare.names(rows, options), [cells(summary) for summary in rows]
    heads = ["Experiment", *CELLS]
    body = [[name, *row.values()] for name, row in zip(names, texts, strict=True)]
    if options.width and console.natural_width(heads, body) > options.width:
        pad = "    "
        head, rule, *lines = _narrow(names, texts, options.width)
    else:
        head, rule, *lines = console.table(heads, body)
        pad = " " * (rule.index(" ") + 3)
    out = [head, rule]
    for summary, line in zip(rows, lines, strict=True):
        if summary.step is None:
            count = f"({summary.record.last + 1} iterations)"
            out += console.fold(f"{line} {count} {summary.explanation}", options.width, pad)
            continue
        notes = [summary.why] if summary.why else []
        out.append(line)
        for note in (*notes, *money(summary, options), *summary.notes):
            out += console.fold(pad + note, options.width, pad)
    return out


def _narrow(names: Sequence[str], texts: Sequence[dict[str, str]], width: int) -> list[str]:
    """Heads, their rule, and for each run its name and, in the line below, its cells."""
    shown = [h for h in CELLS if any(c.get(h, "-") != "-" for c in texts)]
    body = lambda: [[c.get(h, "") for h in shown] for c in texts]
    for head in OPTIONAL:
        if 2 + console.natural_width(shown, body()) <= width:
            break
        shown = [h for h in shown if h != head]
    heads, rule, *lines = console.table(shown, body(), text=(), indent="  ")
    full = (f"  {c['Status']}" if len(c) == 1 else x for c, x in zip(texts, lines, strict=True))
    return [heads, rule, *(f"{n}\n{x}" for n, x in zip(names, full, strict=True))]


def money(summary: RunSummary, options: ReportOptions) -> list[str]:
    """Dollars and joules of a run, as sentences."""
    lines = []
    if summary.cost is not None:
        lines.append(f"${summary.cost:,.0f} per 1T tokens at ${options.cost:g} per GPU hour")
    if summary.joules is not None:
        watts = f"{summary.record.power_w:.0f} W per GPU, measured"
        lines.append(f"{summary.joules:.3g} J per token ({watts})")
    return lines


def counts(rows: Sequence[RunSummary]) -> dict[str, int]:
    """Counts of runs by status, and the percentage of those not running that succeeded."""
    found = collections.Counter(map(status, rows))
    good, bad = found.pop("Success", 0), found.pop("Failed", 0)
    by_status = {"success_experiments": good, "failed_experiments": bad}
    by_status |= {f"{name.lower().replace(' ', '_')}_experiments": n for name, n in found.items()}
    ended = good + bad + found["Not read"]
    return by_status | {"success_rate": round(100 * good / max(1, ended))}


def sections(rows: Sequence[RunSummary], options: ReportOptions) -> list[tuple[str, list[str]]]:
    """Titles and lines of scaling, Exemplar's criterion, origins of settings, repeats and saves."""
    found = []
    for curve in compare.curves(rows):
        points = [
            [f"{p.gpus} GPUs", f"{p.tokens_s:,.0f} tokens/s", f"{p.efficiency:.1%}",
             f"(published {p.published:.1%})" if p.published else ""]
            for p in curve.points
        ]  # fmt: skip
        title = f"{curve.kind.capitalize()} scaling efficiency: {curve.name}"
        found.append((title, console.table((), points, text=())))
    repeats = [
        "; ".join([f"{g.name}: {g.runs} runs, spread {g.spread:.1%}", *g.notes])
        for g in compare.repeats(rows)
    ]
    saves = [
        f"{summary.record.name}: save {o.save_s:.1f} s; every {o.interval_s / 60:.1f} min with a "
        f"failure every {options.mtbf:g} h would cost {o.share:.2%} of the time (best interval "
        f"{o.best_s / 60:.1f} min)"
        for summary in rows
        if (o := compare.overhead(summary.record, options))
    ]
    origins = [
        f"{group[0].record.name if len(group) == 1 else f'{len(group)} logs'}: {text}"
        for text, group in compare.origins(rows).items()
    ]
    origins += compare.unused(rows, options)
    if options.criterion == "exemplar":
        found.append(("Exemplar", [diagnosis.exemplar(rows)]))
    found.append(("Settings that the logs do not name", origins))
    found.append(("Repeats", repeats))
    found.append(("Checkpoint overhead, projected (Daly 2006)", saves))
    return [(title, lines) for title, lines in found if lines]


@dataclasses.dataclass(frozen=True)
class Trace:
    """NCCL calls of one trace run: tables of heads and cells, and notes on how to read them."""

    title: str
    tables: list[tuple[list[str], list[list[str]]]]
    notes: list[str]

    def lines(self, width: int = 0) -> list[str]:
        """The tables as text, in lines of up to `width` columns (0 = any)."""
        lines = []
        for heads, body in self.tables:
            lines += [*console.table(heads, body, width=width), ""]
        return lines + self.notes


def traces(rows: Sequence[RunSummary]) -> list[Trace]:
    """The trace runs among the rows."""
    return [_trace(summary, summary.trace) for summary in rows if summary.trace]


def _trace(summary: RunSummary, trace: dict) -> Trace:
    calls, steps, damaged = (trace[k] for k in ("calls", "steps", "damaged_lines"))
    notes = [f"damaged lines left out: {damaged}"] if damaged else []
    tables = [nccl.calls_table(calls, steps)] if calls else []
    if not calls:
        why = "ran on cpu" if summary.on_cpu else "NCCL_DEBUG_SUBSYS needs COLL"
        notes.append(f"no NCCL call in the log: {why}")
    elif summary.planned:
        tables.append(nccl.plan_table(trace["step_compared_with_plan"]))
        notes.append(
            "traced: includes the start and the end of the run, and one call per array; planned: "
            "one step, and one call for all arrays that XLA combines"
        )
    else:
        why = summary.unplanned or "only maxbench's own runs have one"
        notes.append(f"no prediction to compare with: {why}")
    title = f"NCCL calls of {summary.record.name}: one GPU, a step ({steps} traced)"
    return Trace(title, tables, notes)


def markdown(rows: Sequence[RunSummary], options: ReportOptions) -> str:
    """A table for a pull request or a wiki."""
    shown = ("Status", "Mean s", "Std s", "TFLOPS/GPU", "Tokens/s", "MFU %", "Days/1T")
    heads = ["Run", "Status", "Step s", "Std", "TFLOPS/GPU", "Tokens/s", "MFU (full)"]
    heads += ["Days to 1T", "Verdict"]
    body = []
    for summary, name in zip(rows, compare.names(rows, options), strict=True):
        c = cells(summary)
        verdict = summary.verdict if summary.step else f"after {summary.record.last + 1} steps:"
        verdict = f"{verdict} {summary.explanation}".strip()
        body.append([name, *(c.get(k, "-") for k in shown), verdict])
    out = console.markdown(heads, body, text=(0, len(heads) - 1))
    if request := compare.request(rows, options):
        out += ["", request]
    for title, lines in sections(rows, options):
        out += ["", f"**{title}**", "", *_bullets(lines)]
    for trace in traces(rows):
        out += ["", f"**{trace.title}**", "", *(f"    {x}" for x in trace.lines())]
    if options.suite:
        judged = suite.judge(options.suite, rows)
        out += ["", f"**{judged.title}**", "", *_bullets(judged.lines())]
    return "\n".join(out)


def _bullets(lines: Sequence[str]) -> list[str]:
    return [f"- {' '.join(x.split())}" for x in lines]
