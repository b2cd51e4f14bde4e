"""Runs as text: a table for the terminal, CSV, JSON, Markdown."""

import csv
import io
import json
from collections.abc import Sequence

from maxbench import compare
from maxbench.compare import Row, Settings

RULE = 80


def text(rows: Sequence[Row], s: Settings, names: Sequence[str]) -> str:
    """The table of the seeds' parser, with what it left out beside and below."""
    first, last = s.window
    wide = max([30, *map(len, names)])
    heads = ("Status", "Mean s", "Std s", "Median", "p10", "p90", "TFLOPS/GPU", "Std")
    heads += ("Tokens/s", "MFU %", "Days/1T", "GiB", "Verdict")
    widths = (7, 8, 7, 8, 8, 8, 10, 6, 12, 6, 9, 7, 7)
    line = lambda cells: " ".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))
    out = [f"Train Step Timing and TFLOPS Analysis (iterations {first}-{last})", "=" * RULE]
    out.append(f"{'Experiment':<{wide}} {line(heads)}")
    out.append(f"{'-' * wide} {' '.join('-' * w for w in widths)}")
    for one, name in zip(rows, names, strict=True):
        if one.step is None:
            done = one.record.last + 1
            status = "Running" if one.record.status == "running" else "Failed"
            out.append(f"{name:<{wide}} {status:>7} ({done} iterations) {one.why}".rstrip())
            continue
        out.append(f"{name:<{wide}} {line(cells(one, s))}")
        out += [f"{'':<{wide}}   {note}" for note in _under(one, s)]
    out += ["", *_summary(rows)]
    for title, lines in sections(rows, s):
        out += ["", title, *(f"  {x}" for x in lines)]
    out += ["", *legend(rows, s)]
    return "\n".join(out)


def cells(one: Row, s: Settings) -> tuple[str, ...]:
    """A row's figures as text, '-' where there is none."""
    number = lambda x, form: "-" if x is None else format(x, form)
    t = one.tflops or {"mean": None, "std": None}
    mfu = one.mfu["full"] * 100 if one.mfu else None
    form = ".2f" if not t["mean"] or t["mean"] >= 0.01 else ".2g"  # toy runs on CPUs
    return (
        "Success" if one.ok else "Failed",
        *(f"{one.step[k]:.3f}" for k in ("mean", "std", "median", "p10", "p90")),
        number(t["mean"], form),
        number(t["std"], form),
        number(one.tokens_s, ",.0f"),
        number(mfu, ".2f"),
        number(one.days, ",.2f"),
        number(one.peak_gib, ".2f"),
        one.verdict,
    )


def _under(one: Row, s: Settings) -> list[str]:
    notes = [one.why] if one.why else []
    if one.window != s.window:
        notes.append(f"steps {one.window[0]} to {one.window[1]} count: the run was shorter")
    if one.cost is not None:
        notes.append(f"${one.cost:,.0f} per 1T tokens at ${s.cost:g} per GPU hour")
    if one.joules is not None:
        notes.append(f"{one.joules:.3g} J per token ({one.record.power_w:.0f} W per GPU, measured)")
    return notes + one.notes


def _summary(rows: Sequence[Row]) -> list[str]:
    good = sum(x.ok for x in rows)
    rate = round(100 * good / len(rows)) if rows else 0
    return [
        "Summary:",
        f"  Success experiments: {good}",
        f"  Failed experiments: {len(rows) - good}",
        f"  Success rate: {rate}%",
    ]


def sections(rows: Sequence[Row], s: Settings) -> list[tuple[str, list[str]]]:
    """Scaling, repeats and checkpoints: a title and lines, only where there is something."""
    found = []
    for curve in compare.curves(rows):
        lines = []
        for p in curve.points:
            theirs = "" if p.published is None else f"  (published {p.published:.1%})"
            lines.append(
                f"{p.gpus:>6} GPUs {p.tokens_s:>14,.0f} tokens/s {p.efficiency:>7.1%}{theirs}"
            )
        found.append((f"{curve.kind.capitalize()} scaling efficiency: {curve.name}", lines))
    lines = []
    for group in compare.repeats(rows):
        alarm = "".join(f"; {n}" for n in group.notes)
        lines.append(f"{group.name}: {len(group.rows)} runs, spread {group.spread:.1%}{alarm}")
    if lines:
        found.append(("Repeats", lines))
    lines = []
    for one in rows:
        o = compare.overhead(one.record, s)
        if o:
            lines.append(
                f"{one.record.name}: save {o.save_s:.1f} s; every {o.interval_s / 60:.1f} min with "
                f"a failure every {o.mtbf_s / 3600:g} h would cost {o.share:.2%} of the time "
                f"(best interval {o.best_s / 60:.1f} min)"
            )
    if lines:
        found.append(("Checkpoint overhead, projected (Young 1974, Daly 2006, first order)", lines))
    return found


def legend(rows: Sequence[Row], s: Settings) -> list[str]:
    """What the columns mean."""
    return [
        "Std is of the population. MFU: 'full' convention (every S x S score counted), against the",
        "dense peak of the precision; FP8 runs are held against the FP8 peak although attention",
        "and logits run in BF16. Verdict: tokens/s against the published row of the same GPUs,",
        f"batch, sequence and layers; PASS from {compare.PASS:.0%}, WARN from {compare.WARN:.0%}.",
    ]


COLUMNS = (
    "filename",
    "status",
    "time_mean_seconds",
    "time_std_dev_seconds",
    "tflops_per_gpu_mean",
    "tflops_per_gpu_std_dev",
    "max_iteration",
    "time_median_seconds",
    "time_p10_seconds",
    "time_p90_seconds",
    "tokens_per_second",
    "mfu_full",
    "mfu_causal",
    "days_to_1t_tokens",
    "peak_memory_gib",
    "cost_per_1t_tokens_dollars",
    "joules_per_token",
    "verdict",
    "reason",
)


def record(one: Row, name: str) -> dict:
    """A row as plain data under the names of COLUMNS, units in the names; None where unknown."""
    step, t, mfu = one.step or {}, one.tflops or {}, one.mfu or {}
    status = "Success" if one.ok else "Running" if one.record.status == "running" else "Failed"
    values = (
        name,
        status,
        step.get("mean"),
        step.get("std"),
        t.get("mean"),
        t.get("std"),
        one.record.last if one.record.last >= 0 else None,
        step.get("median"),
        step.get("p10"),
        step.get("p90"),
        one.tokens_s,
        mfu.get("full"),
        mfu.get("causal"),
        one.days,
        one.peak_gib,
        one.cost,
        one.joules,
        one.verdict,
        "; ".join(filter(None, [one.why, *one.notes])),
    )
    return dict(zip(COLUMNS, values, strict=True))


def to_csv(rows: Sequence[Row], names: Sequence[str]) -> str:
    """One line per run; the first seven columns are those of the seeds' parser."""
    forms = {"time": ".3f", "tflops": ".2f", "tokens": ".1f", "days": ".2f", "peak": ".3f"}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for one, name in zip(rows, names, strict=True):
        made = []
        for column, value in record(one, name).items():
            form = forms.get(column.partition("_")[0], ".6g")
            made.append(format(value, form) if isinstance(value, float) else value)
        writer.writerow(made)
    good = sum(x.ok for x in rows)
    out.write(f"# Summary: {good} success, {len(rows) - good} failed, {len(rows)} total\n")
    return out.getvalue().rstrip("\n")


def to_json(rows: Sequence[Row], s: Settings, names: Sequence[str], paths: Sequence[str]) -> str:
    """Everything, for programs: the seeds' fields and ours, per run; scaling; repeats."""
    results = []
    for one, name in zip(rows, names, strict=True):
        r, data = one.record, record(one, name)
        data |= {"time_mean": data["time_mean_seconds"], "path": str(r.path)}
        data |= {"time_std_dev": data["time_std_dev_seconds"], "source": r.source}
        data |= {"window": one.window, "last_step": r.last, "gpus": r.gpus, "gbs": r.gbs}
        if one.baseline:
            data["published"] = {"step_s": one.baseline.step_s, "source": one.baseline.source}
        results.append(data)
    good = sum(x.ok for x in rows)
    whole = {
        "analysis": {
            "min_iteration": s.window[0],
            "max_iteration": s.window[1],
            "experiments_directory": ", ".join(paths),
        },
        "results": results,
        "scaling": [
            {"name": c.name, "kind": c.kind, "points": [vars(p) for p in c.points]}
            for c in compare.curves(rows)
        ],
        "repeats": [
            {"name": g.name, "runs": len(g.rows), "spread": g.spread, "notes": g.notes}
            for g in compare.repeats(rows)
        ],
        "summary": {
            "success_experiments": good,
            "failed_experiments": len(rows) - good,
            "success_rate": round(100 * good / len(rows)) if rows else 0,
        },
    }
    return json.dumps(whole, indent=1, allow_nan=False)


def markdown(rows: Sequence[Row], s: Settings, names: Sequence[str]) -> str:
    """A table for a pull request or a wiki."""
    heads = ["Run", "Status", "Step s", "Std", "TFLOPS/GPU", "Tokens/s", "MFU (full)"]
    heads += ["Days to 1T", "Verdict"]
    out = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 2) + "|---|"]
    for one, name in zip(rows, names, strict=True):
        name = name.replace("|", "\\|")
        why = one.why.replace("|", "\\|")
        if one.step is None:
            done = f"died after {one.record.last + 1} steps: {why}"
            out.append(f"| {name} | Failed | - | - | - | - | - | - | {done} |")
            continue
        c = cells(one, s)
        picked = [c[0], c[1], c[2], c[6], c[8], c[9], c[10], f"{one.verdict} {why}".strip()]
        out.append("| " + " | ".join([name, *picked]) + " |")
    for title, lines in sections(rows, s):
        out += ["", f"**{title}**", "", *(f"- {' '.join(x.split())}" for x in lines)]
    return "\n".join(out)


def difference(a: Row, b: Row) -> str:
    """What moved from run a to run b."""
    out = [f"A: {a.record.path}", f"B: {b.record.path}", ""]
    data = (record(a, ""), record(b, ""))
    for column in COLUMNS[2:17]:
        x, y = data[0][column], data[1][column]
        if isinstance(x, float) and isinstance(y, float):
            change = f"{y / x - 1:+.2%}" if x else ""
            out.append(f"{column:<28} {x:>14.6g} {y:>14.6g}  {change}")
    if a.step and b.step:
        noise = max(a.step["std"], b.step["std"])
        moved = b.step["mean"] - a.step["mean"]
        sure = "more" if abs(moved) > 2 * noise else "less"
        out.append(
            f"the mean step moved by {moved:+.4f} s, {sure} than twice the steps' std {noise:.4f}"
        )
    changed = _settings_changed(a, b)
    out += ["", "settings that differ:" if changed else "no setting differs that both runs name"]
    return "\n".join(out + changed)


def _settings_changed(a: Row, b: Row) -> list[str]:
    flat: list[dict[str, object]] = []
    for one in (a, b):
        r, leaves = one.record, {}
        for key in ("config", "versions", "environment", "xla_options", "git", "device"):
            _flatten(key, r.result.get(key), leaves)
        for key in ("model", "size", "dtype", "gpus", "gbs", "seq", "layers"):
            leaves.setdefault(key, getattr(r, key))
        flat.append(leaves)
    keys = [k for k in flat[0] if k in flat[1]] if not all(flat) else sorted({*flat[0], *flat[1]})
    skipped = ("config.output.", "config.runtime.coordinator")
    out = []
    for key in keys:
        x, y = flat[0].get(key, "(not set)"), flat[1].get(key, "(not set)")
        if x != y and not key.startswith(skipped):
            out.append(f"  {key}: {x} -> {y}")
    return out


def _flatten(name: str, value: object, into: dict[str, object]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten(f"{name}.{key}", inner, into)
    elif value is not None:
        into[name] = str(value)
