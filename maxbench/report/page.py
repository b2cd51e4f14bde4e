"""What the HTML page shows; the templates page.html and parts.html say how."""

import functools
import pathlib
import time
from collections.abc import Sequence
from types import SimpleNamespace

from maxbench.report import compare, plots, suite, tables
from maxbench.report.compare import Row, Settings
from maxbench.report.record import at

PLOTTED = 60  # runs that get a plot of their own; more would be a page nobody scrolls
VERDICTS = {"PASS": "PASS", "WARN": "WARN", "FAIL": "FAIL", "DIED": "died"}


@functools.cache
def template():
    """page.html, compiled."""
    import jinja2  # late: no other format needs it, and it takes 50 ms

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return made.get_template("page.html")


def html(rows: Sequence[Row], s: Settings) -> str:
    """The report as one HTML file."""
    runs = []
    for one, name in zip(rows, compare.names(rows, s), strict=True):
        run = SimpleNamespace(row=one, name=name, label=label(one))
        # Where a table says '-', the page says nothing.
        run.cells = {head: "" if x == "-" else x for head, x in tables.cells(one).items()}
        run.why = "; ".join(filter(None, [one.said, *tables.money(one, s)]))
        runs.append(run)
    return template().render(
        title=s.title,
        made=time.strftime("%Y-%m-%d %H:%M"),
        most=PLOTTED,
        runs=runs,
        facts=facts(rows),
        marks=(compare.PASS, 1.0),
        curves=compare.curves(rows),
        plots=plots,
        plotted=[x for x in runs if len(x.row.record.step_s) > 2],
        timed=[(x, parts) for x in runs if (parts := time_parts(x.row))],
        traces=tables.traces(rows),
        sections=tables.sections(rows, s),
        suite=suite.judge(s.suite, rows) if s.suite else None,
        legend=" ".join(tables.LEGEND),
        versions=versions(rows),
    )


def label(one: Row) -> str:
    """A run in a few words: 'llama31 8b bf16, 16 GPUs, GBS 256'."""
    r = one.record
    if not (r.model and r.gpus):
        return r.name
    kind = "GPUs" if r.gpu_type or not r.device else f"x {r.device}"
    words = f"{r.model} {r.size} {r.dtype}".strip() + f", {r.gpus} {kind}"
    return words + (f", GBS {r.gbs}" if r.gbs else "") + (f", {r.profiled}" if r.profiled else "")


def facts(rows: Sequence[Row]) -> dict[str, str]:
    """The figures at the top of the page, by name."""
    good = [x for x in rows if x.ok]
    made = {"finished": f"{len(good)} of {len(rows)}"}
    for kind in ("running", "skipped"):
        if count := sum(x.record.status == kind for x in rows):
            made[kind] = str(count)
    for verdict, name in VERDICTS.items():
        if count := sum(x.verdict == verdict for x in rows):
            made[name] = str(count)
    if rates := [x.tokens_s for x in good if x.tokens_s]:
        made["most tokens/s"] = f"{max(rates):,.0f}"
    if shares := [x.mfu["full"] for x in good if x.mfu]:
        made["best MFU (full)"] = f"{max(shares):.1%}"
    return made


def time_parts(one: Row) -> dict[str, float]:
    """Where the time of a whole run went, in seconds; {} where it does not tell."""
    r, names = one.record, ("start_to_first_step_s", "compile_s", "lower_s")
    start, compiled, lower = (at(r.result, name, 0.0) for name in names)
    if not start or not r.step_s:
        return {}
    parts = {
        "start-up": start - compiled - lower,
        "trace and lower": lower,
        "compile": compiled,
        "steps": sum(r.step_s.values()) - r.step_s[min(r.step_s)],
        "checkpoints": sum(r.saves),
    }
    return {k: v for k, v in parts.items() if v > 0}


def versions(rows: Sequence[Row]) -> str:
    """Which versions the runs had: 'jax 0.10.2 / 0.11.0, flax 0.12.8'."""
    known: dict[str, set[str]] = {}
    for one in rows:
        for key, value in at(one.record.result, "versions", {}).items():
            known.setdefault(str(key), set()).add(str(value))
    return ", ".join(f"{k} {' / '.join(sorted(v))}" for k, v in known.items())
