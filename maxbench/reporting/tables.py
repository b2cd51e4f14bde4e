"""Runs as text: a table for the terminal, CSV, JSON, Markdown, and what moved between two."""

import collections
import csv
import dataclasses
import io
import itertools
import json
import textwrap
from collections.abc import Iterator, Sequence

from maxbench.config.errors import UserError
from maxbench.reporting import compare, suite
from maxbench.reporting.compare import ReportOptions, RunSummary
from maxbench.run_logs import nccl

LEGEND = (
    "Std is of the population. MFU: 'full' convention (every S x S score counted), against the",
    "dense peak of the precision; FP8 runs are held against the FP8 peak although attention",
    "and logits run in BF16. Verdict: tokens/s against the published row of the same GPUs,",
    f"batch, sequence and layers; PASS from {compare.PASS:.0%}, WARN from {compare.WARN:.0%}.",
)
# Head of a cell in tables for people -> its column, and how it is written.
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
NO_CPU = ("TFLOPS/GPU", "Std", "Days/1T")  # figures that mean nothing there
# A narrow terminal does without these, the first ones first.
SPARE = ("p10", "p90", "Median", "Std", "Std s", "Days/1T", "Status", "MFU %", "Loss")


def cells(one: RunSummary) -> dict[str, str]:
    """A row's CELLS as text, '-' where there is none; of a row without steps only its status."""
    data = record(one)
    if one.step is None:
        return {"Status": data["status"]}
    first, last = one.loss
    data["loss"] = None if None in one.loss else f"{first:#.4g} to {last:#.4g}"
    data |= {CELLS[head][0]: None for head in NO_CPU if one.on_cpu}
    made = {}
    for head, (column, form) in CELLS.items():
        made[head] = "-" if data[column] is None else format(data[column], form).rstrip("%")
    return made


def record(one: RunSummary) -> dict:
    """A row as plain data; units in the names, None where unknown.

    The first seven columns are those of the seeds' parser.
    """
    r, step, tflops, mfu = one.record, one.step or {}, one.tflops or {}, one.mfu or {}
    return {
        "filename": str(r.path),
        "status": status(one),
        "time_mean_seconds": step.get("mean"),
        "time_std_dev_seconds": step.get("std"),
        "tflops_per_gpu_mean": tflops.get("mean"),
        "tflops_per_gpu_std_dev": tflops.get("std"),
        "max_iteration": r.last if r.last >= 0 else None,
        "time_median_seconds": step.get("median"),
        "time_p10_seconds": step.get("p10"),
        "time_p90_seconds": step.get("p90"),
        "tokens_per_second": one.tokens_s,
        "mfu_full": mfu.get("full"),
        "mfu_causal": mfu.get("causal"),
        "days_to_1t_tokens": one.days,
        "peak_memory_gib": one.peak_gib,
        "cost_per_1t_tokens_dollars": one.cost,
        "joules_per_token": one.joules,
        "verdict": one.verdict,
        "reason": one.said,
        "loss_first": one.loss[0],
        "loss_last": one.loss[1],
    }


def status(one: RunSummary) -> str:
    """Success, Failed, Running or Skipped."""
    other = {"running": "Running", "skipped": "Skipped"}
    return "Success" if one.ok else other.get(one.record.status, "Failed")


def layout(heads: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: first column to the left, others to the right; rows may be short."""
    widths = [max(map(len, c)) for c in itertools.zip_longest(heads, *body, fillvalue="")]
    lines = []
    for first, *others in (heads, ["-" * w for w in widths], *body):
        right = (f"{c:>{w}}" for c, w in zip(others, widths[1:], strict=False))
        lines.append("  ".join([first.ljust(widths[0]), *right]))
    return lines


def text(rows: Sequence[RunSummary], s: ReportOptions) -> str:
    """The table of the seeds' parser, with what it left out beside and below.

    Where a terminal has no room for it, names stand on lines of their own, and columns are left
    out.
    """
    first, last = s.window
    title = f"Train Step Timing and TFLOPS Analysis (iterations {first}-{last})"
    names, told = compare.names(rows, s), [cells(one) for one in rows]
    body = [[n, *c.values()] for n, c in zip(names, told, strict=True)]
    heads, rule, *lines = layout(["Experiment", *CELLS], body)
    pad = " " * (rule.index(" ") + 3)
    if s.width and len(rule) > s.width:
        pad = "    "
        heads, rule, *lines = narrow(names, told, s.width)
    out = [title, "=" * min(80, s.width or 80), heads, rule]
    for one, line in zip(rows, lines, strict=True):
        if one.step is None:
            out += fold(f"{line} ({one.record.last + 1} iterations) {one.said}", s.width, pad)
            continue
        notes = [one.why] if one.why else []
        out.append(line)
        out += [
            x for n in (*notes, *money(one, s), *one.notes) for x in fold(pad + n, s.width, pad)
        ]
    counts = (f"  {k.replace('_', ' ').capitalize()}: {v}" for k, v in _counts(rows).items())
    out += ["", "Summary:", *counts]
    out[-1] += "%"
    calls = [(t.title, t.lines(max(0, s.width - 2))) for t in traces(rows)]
    for title, lines in (*sections(rows, s), *calls):
        out += ["", title, *(y for x in lines for y in fold(f"  {x}", s.width, "    "))]
    out += ["", *(fold(" ".join(LEGEND), s.width) if s.width else LEGEND)]
    if s.suite:
        verdict = suite.judge(s.suite, rows)
        told = [y for x in verdict.lines() for y in fold(f"  {x}", s.width, "    ")]
        out += ["", "Suite", *told, verdict.title]
    return "\n".join(out)


def narrow(names: Sequence[str], told: Sequence[dict[str, str]], width: int) -> list[str]:
    """Lines of a table up to so many columns: heads, their rule, and for each run two in one."""
    kept = [h for h in CELLS if any(c.get(h, "-") != "-" for c in told)]
    for spare in (None, *SPARE):
        kept = [head for head in kept if head != spare]
        heads, rule, *lines = layout(
            ["", *kept], [["", *(c.get(h, "") for h in kept)] for c in told]
        )
        if len(rule) <= width:
            break
    full = (f"  {c['Status']}" if len(c) == 1 else x for c, x in zip(told, lines, strict=True))
    return [heads, rule, *(f"{n}\n{x}" for n, x in zip(names, full, strict=True))]


def fold(line: str, width: int, indent: str = "") -> list[str]:
    """A line, in lines of up to so many columns; 0 = as it is. Its own breaks stay."""
    each = line.rstrip().split("\n")
    if not width:
        return each
    fold_one = lambda x: textwrap.wrap(x, width, subsequent_indent=indent, break_on_hyphens=False)
    return [y for x in each for y in (fold_one(x) if len(x) > width else [x])]


def money(one: RunSummary, s: ReportOptions) -> list[str]:
    """Dollars and joules of a row, in words."""
    made = []
    if one.cost is not None:
        made.append(f"${one.cost:,.0f} per 1T tokens at ${s.cost:g} per GPU hour")
    if one.joules is not None:
        made.append(f"{one.joules:.3g} J per token ({one.record.power_w:.0f} W per GPU, measured)")
    return made


def _counts(rows: Sequence[RunSummary]) -> dict[str, int]:
    found = collections.Counter(map(status, rows))
    good, bad = found.pop("Success", 0), found.pop("Failed", 0)
    counts = {"success_experiments": good, "failed_experiments": bad}
    counts |= {f"{name.lower()}_experiments": n for name, n in found.items()}
    return counts | {"success_rate": round(100 * good / max(1, good + bad))}


def sections(rows: Sequence[RunSummary], s: ReportOptions) -> list[tuple[str, list[str]]]:
    """Scaling, repeats and checkpoints: a title and lines, only where there is something."""
    found = []
    for curve in compare.curves(rows):
        lines = [
            f"{p.gpus:>6} GPUs {p.tokens_s:>14,.0f} tokens/s {p.efficiency:>7.1%}"
            + (f"  (published {p.published:.1%})" if p.published else "")
            for p in curve.points
        ]
        found.append((f"{curve.kind.capitalize()} scaling efficiency: {curve.name}", lines))
    repeats = [
        "; ".join([f"{g.name}: {g.runs} runs, spread {g.spread:.1%}", *g.notes])
        for g in compare.repeats(rows)
    ]
    saves = [
        f"{one.record.name}: save {o.save_s:.1f} s; every {o.interval_s / 60:.1f} min with a "
        f"failure every {s.mtbf:g} h would cost {o.share:.2%} of the time (best interval "
        f"{o.best_s / 60:.1f} min)"
        for one in rows
        if (o := compare.overhead(one.record, s))
    ]
    found.append(("Repeats", repeats))
    found.append(("Checkpoint overhead, projected (Young 1974, Daly 2006, first order)", saves))
    return [(title, lines) for title, lines in found if lines]


@dataclasses.dataclass(frozen=True)
class Trace:
    """NCCL's calls of one trace run: tables of heads and cells, and what to know about them."""

    title: str
    grids: list[tuple[list[str], list[list[str]]]]
    notes: list[str]

    def lines(self, width: int = 0) -> list[str]:
        """As text; a table that so many columns have no room for is a sentence for each row."""
        made = []
        for heads, body in self.grids:
            table = layout(heads, body)
            if width and len(table[1]) > width:
                table = [", ".join(map(" ".join, zip(heads, row, strict=True))) for row in body]
            made += [*table, ""]
        return made + self.notes


def traces(rows: Sequence[RunSummary]) -> list[Trace]:
    """The trace runs among the rows."""
    made = []
    for one in (x for x in rows if x.trace):
        calls, steps, damaged = (one.trace[k] for k in ("calls", "steps", "damaged_lines"))
        notes = [f"damaged lines left out: {damaged}"] if damaged else []
        grids = [nccl.by_communicator(calls, steps)] if calls else []
        if not calls:
            cpu = one.record.device and not one.record.gpu_type
            why = f"ran on {one.record.device}" if cpu else "NCCL_DEBUG_SUBSYS needs COLL"
            notes.append(f"no NCCL call in the log: {why}")
        elif one.planned:
            grids.append(nccl.beside_plan(one.trace["step_beside_plan"]))
            notes.append("traced: start and end of the run too, and a call per array; planned: a "
                         "step, and one call for all arrays that XLA combines")  # fmt: skip
        else:
            notes.append(f"no plan beside it: {one.unplanned or 'only our own runs have one'}")
        title = f"NCCL calls of {one.record.name}: one GPU, a step ({steps} traced)"
        made.append(Trace(title, grids, notes))
    return made


def to_csv(rows: Sequence[RunSummary], s: ReportOptions) -> str:
    """One line per run; the first seven columns are those of the seeds' parser."""
    forms = {"time": ".3f", "tflops": ".2f", "tokens": ".1f", "days": ".2f", "peak": ".3f"}
    out = io.StringIO()
    found = [record(one) for one in rows]
    writer = csv.DictWriter(out, found[0] if found else (), lineterminator="\n")
    writer.writeheader()
    form = lambda column: forms.get(column.partition("_")[0], ".6g")
    told = lambda k, v: format(v, form(k)) if isinstance(v, float) else v
    writer.writerows({k: told(k, v) for k, v in one.items()} for one in found)
    counts = ((k.partition("_")[0], n) for k, n in _counts(rows).items() if "rate" not in k)
    summary = "".join(f"{n} {name}, " for name, n in counts)
    verdict = f"\n# {suite.judge(s.suite, rows).title}" if s.suite else ""
    return f"{out.getvalue()}# Summary: {summary}{len(rows)} total{verdict}"


def to_json(rows: Sequence[RunSummary], s: ReportOptions) -> str:
    """Everything, for programs: the seeds' fields and ours, per run; scaling; repeats."""
    results = []
    for one in rows:
        r, data = one.record, record(one)
        data |= {"time_mean": data["time_mean_seconds"], "path": str(r.path)}
        data |= {"time_std_dev": data["time_std_dev_seconds"], "source": r.source}
        data |= {"window": one.window, "last_step": r.last, "gpus": r.gpus, "gbs": r.gbs}
        if one.baseline:
            data["published"] = {"step_s": one.baseline.step_s, "source": one.baseline.source}
        if one.trace:
            data["nccl"] = one.trace
        results.append(data)
    analysis = dict(zip(("min_iteration", "max_iteration"), s.window, strict=True))
    whole = {
        "analysis": analysis | {"experiments_directory": ", ".join(s.paths)},
        "results": results,
        "scaling": [dataclasses.asdict(x) for x in compare.curves(rows)],
        "repeats": [dataclasses.asdict(x) for x in compare.repeats(rows)],
        "summary": _counts(rows),
    }
    if s.suite:
        whole["suite"] = suite.judge(s.suite, rows)._asdict()
    return json.dumps(whole, indent=1, allow_nan=False)


def markdown(rows: Sequence[RunSummary], s: ReportOptions) -> str:
    """A table for a pull request or a wiki."""
    shown = ("Status", "Mean s", "Std s", "TFLOPS/GPU", "Tokens/s", "MFU %", "Days/1T")
    heads = ["Run", "Status", "Step s", "Std", "TFLOPS/GPU", "Tokens/s", "MFU (full)"]
    heads += ["Days to 1T", "Verdict"]
    out = [_bars(heads), "|---" + "|---:" * (len(heads) - 2) + "|---|"]
    for one, name in zip(rows, compare.names(rows, s), strict=True):
        c = cells(one)
        said = one.verdict if one.step else f"after {one.record.last + 1} steps:"
        out.append(_bars([name, *(c.get(k, "-") for k in shown), f"{said} {one.said}".strip()]))
    for title, lines in sections(rows, s):
        out += ["", f"**{title}**", "", *(f"- {' '.join(x.split())}" for x in lines)]
    for trace in traces(rows):
        out += ["", f"**{trace.title}**", "", *(f"    {x}" for x in trace.lines())]
    if s.suite:
        verdict = suite.judge(s.suite, rows)
        out += ["", f"**{verdict.title}**", ""]
        out += [f"- {' '.join(x.split())}" for x in verdict.lines()]
    return "\n".join(out)


def _bars(cells: Sequence[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"


def difference(rows: Sequence[RunSummary], s: ReportOptions) -> str:
    """What moved between two runs, from the one at the first of the paths.

    Raises:
      UserError: there are not exactly two runs.
    """
    if len(rows) != 2:
        raise UserError(f"--diff compares two runs, and {len(rows)} are at {', '.join(s.paths)}")
    a, b = sorted(rows, key=lambda x: not str(x.record.path).startswith(s.paths[0]))
    out = [f"A: {a.record.path}", f"B: {b.record.path}", ""]
    theirs = record(b)
    for column, x in record(a).items():
        if isinstance(x, float) and isinstance(y := theirs[column], float):
            change = f"{y / x - 1:+.2%}" if x else ""
            out.append(f"{column:<28} {x:>14.6g} {y:>14.6g}  {change}")
    if a.step and b.step:
        noise = max(a.step["std"], b.step["std"])
        moved = b.step["mean"] - a.step["mean"]
        sure = "more" if abs(moved) > 2 * noise else "less"
        out.append(
            f"the mean step moved by {moved:+.4f} s, {sure} than twice the steps' std {noise:.4f}"
        )
    x, y = settings_of(a), settings_of(b)
    # Another program's log names little: what only one of the two names says nothing.
    both = a.record.source == b.record.source
    changed = [
        f"  {key}: {x.get(key, '(not set)')} -> {y.get(key, '(not set)')}"
        for key in sorted(x.keys() | y.keys() if both else x.keys() & y.keys())
        if x.get(key) != y.get(key)
        and not key.startswith(("config.output.", "config.runtime.coordinator"))
    ]
    out += ["", "settings that differ:" if changed else "no setting differs that both runs name"]
    return "\n".join(out + changed)


NAMED = ("model", "size", "dtype", "gpus", "gbs", "seq", "layers")  # what logs of others tell too
TOLD = ("config", "versions", "environment", "xla_options", "git", "device")  # by result.json


def settings_of(one: RunSummary) -> dict[str, str]:
    """What a run tells of its settings: 'config.layout.cp' -> '2'."""
    named = {k: getattr(one.record, k) for k in NAMED}
    return dict(leaves(named | {k: one.record.result.get(k) for k in TOLD}))


def leaves(data: object, name: str = "") -> Iterator[tuple[str, str]]:
    """What nested dicts hold: ('config.layout.cp', '2')."""
    if isinstance(data, dict):
        for key, inner in data.items():
            yield from leaves(inner, f"{name}.{key}" if name else key)
    elif data is not None:
        yield name, str(data)
