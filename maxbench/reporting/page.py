"""What the HTML page shows; the templates page.html and parts.html say how."""

import collections
import functools
import pathlib
import time
from collections.abc import Sequence
from types import SimpleNamespace

from maxbench.config import recipes
from maxbench.reporting import compare, details, diagnosis, plots, suite, tables
from maxbench.reporting.compare import ReportOptions, RunSummary
from maxbench.run_logs.record import dig

PLOTTED = 60  # runs that get a plot of their own; more would be a page nobody scrolls
EXPLAINED = 3  # runs that are behind, in the sentence at the top
NAMED = 3  # runs in a tile
LAID = 8  # runs over each other, as many as there are colours
FLAT = 0.02  # of the median, from p10 to p90: step times that need no look
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


def html(rows: Sequence[RunSummary], s: ReportOptions) -> str:
    """The report as one HTML file."""
    named = zip(rows, compare.names(rows, s), strict=True)
    runs = [shown(i, one, name, s) for i, (one, name) in enumerate(named)]
    usual = details.usual([run.settings for run in runs])
    same = collections.Counter(run.label for run in runs)
    count: collections.Counter = collections.Counter()
    for run in runs:
        run.settings = details.apart(run.settings, usual)
        if same[run.label] > 1:  # a link must say which
            count[run.label] += 1
            run.label += f", run {count[run.label]}"
    return template().render(
        title=s.title,
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        most=PLOTTED,
        runs=runs,
        usual=usual,
        answer=answered(runs),
        facts=facts(runs),
        marks=(compare.PASS, 1.0),
        curves=[(curve, splits(curve, rows)) for curve in compare.curves(rows)],
        overlays=overlays(runs),
        reach=reach(runs),
        plots=plots,
        details=details,
        traces=tables.traces(rows),
        sections=tables.sections(rows, s),
        suite=suite.judge(s.suite, rows) if s.suite else None,
        legend=" ".join(tables.LEGEND),
        versions=versions(rows),
    )


def shown(i: int, one: RunSummary, name: str, s: ReportOptions) -> SimpleNamespace:
    """A run as the templates read it."""
    run = SimpleNamespace(row=one, name=name, label=label(one), id=f"run-{i + 1}")
    # Where a table says '-', the page says nothing.
    run.cells = {head: "" if x == "-" else x for head, x in tables.cells(one).items()}
    run.why = "; ".join(filter(None, [one.said, *tables.money(one, s)]))
    run.settings = details.settings(one)
    run.spread = spread(one)
    odd = any(note.startswith("step time") for note in one.notes)
    run.flat = bool(run.spread) and not odd and run.spread["p90"] - run.spread["p10"] < FLAT
    run.mfu = mfu(one)
    run.recipe = details.beside_recipe(one, s.gpu_types)
    run.plotted = i < PLOTTED and len(one.record.step_s) > 2
    return run


def mfu(one: RunSummary) -> dict[str, tuple[float, float | None]]:
    """MFU by convention: ours, and the published one where it was counted so.

    In a convention MFU goes as tokens/s, so ours in the published convention is the published
    figure times the run's share of the published tokens/s.
    """
    made = {c: (share, None) for c, share in (one.mfu or {}).items() if share}
    if made and one.share and one.baseline.mfu_pct:
        theirs, convention = one.baseline.mfu_pct / 100, one.baseline.convention
        made[convention] = (made.get(convention, (theirs * one.share,))[0], theirs)
    return made


def spread(one: RunSummary) -> dict[str, float]:
    """Least, p10, p90 and greatest of the steps that count, and their drift, as shares by which
    they differ from the median; {} where no steps count."""
    if not one.step or one.step["median"] <= 0:
        return {}
    times = [t for i, t in sorted(one.record.step_s.items()) if one.window[0] <= i <= one.window[1]]
    found = {"min": min(times), "p10": one.step["p10"], "p90": one.step["p90"], "max": max(times)}
    made = {name: x / one.step["median"] - 1 for name, x in found.items()}
    return made | {"drift": compare.drift(times[:: -(-len(times) // compare.POINTS)])[0]}


def reach(runs: Sequence[SimpleNamespace]) -> float:
    """How far about the median the strips of step times reach: 5 % to 50 %, as the runs need."""
    ends = [abs(run.spread[k]) for run in runs if run.spread for k in ("p10", "p90")]
    return min(0.5, max(0.05, 1.1 * max(ends, default=0)))


def answered(runs: Sequence[SimpleNamespace]) -> SimpleNamespace:
    """The sentence at the top: how many runs are as fast as published, which are not, and why."""
    rows, of = [run.row for run in runs], {id(run.row): run for run in runs}
    late = diagnosis.below_published(rows)
    curves = compare.curves(rows)
    why = lambda one: diagnosis.reasons(one, rows, curves)
    return SimpleNamespace(
        summary=diagnosis.summary(rows),
        behind=[(of[id(one)], why(one)) for one in late[:EXPLAINED]],
        more=[of[id(one)] for one in late[EXPLAINED:PLOTTED]],
        dead=[run for run in runs if run.row.verdict == "DIED"],
        aside=sum(not x.share and x.ok for x in rows) if any(x.share for x in rows) else 0,
    )


def overlays(runs: Sequence[SimpleNamespace]) -> list[SimpleNamespace]:
    """Runs of a workload laid over each other: step times and loss of the slowest per token."""
    groups: dict[tuple, list] = {}
    for run in runs:
        if run.row.window:
            r = run.row.record
            groups.setdefault((r.model, r.size, r.dtype), []).append(run)
    made = []
    for key, every in groups.items():
        some = sorted(every, key=lambda run: run.row.share or 2)[:LAID]  # the furthest behind first
        name = " ".join(key).strip() or "runs that do not name their workload"
        classes = {f"line{i}": run for i, run in enumerate(some)}
        keys = {k: run.label for k, run in classes.items()}
        times = {k: plots.after_the_first(run.row.record.step_s) for k, run in classes.items()}
        loss = {k: plots.finite(run.row.record.loss) for k, run in classes.items()}
        frames = [plots.over_steps(times, f"step times of {name}", "seconds", keys)]
        if loss := {k: x for k, x in loss.items() if x}:
            frames.append(plots.over_steps(loss, f"loss of {name}", "loss", keys))
        made.append(SimpleNamespace(name=name, frames=frames, keys=classes, of=len(every)))
    return made


def splits(curve: compare.Curve, rows: Sequence[RunSummary]) -> list[tuple[int, dict[str, float]]]:
    """Of each scale that plan knows the parts of its predicted step, in seconds."""
    made = []
    for point in curve.points:
        same = [x for x in rows if (x.tokens_s, x.record.gpus) == (point.tokens_s, point.gpus)]
        if same and (plan := same[0].planned):
            made.append((point.gpus, diagnosis.split(plan["parts"])))
    return made


def label(one: RunSummary) -> str:
    """A run in a few words: 'Llama 3.1 8B bf16, 16 GPUs, GBS 256'."""
    r = one.record
    if not (r.model and r.gpus):
        return r.name
    kind = f"GPU{'s' * (r.gpus > 1)}" if r.gpu_type or not r.device else f"x {r.device}"
    words = f"{recipes.display_name(r.model, r.size)} {r.dtype}".strip() + f", {r.gpus} {kind}"
    return words + (f", GBS {r.gbs}" if r.gbs else "") + (f", {r.profiled}" if r.profiled else "")


def facts(runs: Sequence[SimpleNamespace]) -> list[tuple[str, str, list[SimpleNamespace]]]:
    """The figures at the top of the page: name, value, and the runs that are worth a name."""
    good = [run.row for run in runs if run.row.ok]
    made = [("finished", f"{len(good)} of {len(runs)}", [])]
    for kind in ("running", "skipped"):
        if count := sum(run.row.record.status == kind for run in runs):
            made.append((kind, str(count), []))
    for verdict, name in VERDICTS.items():
        if those := [run for run in runs if run.row.verdict == verdict]:
            made.append((name, str(len(those)), those[:NAMED] if verdict != "PASS" else []))
    if rates := [x.tokens_s for x in good if x.tokens_s]:
        made.append(("most tokens/s", f"{max(rates):,.0f}", []))
    if shares := [x.mfu["full"] for x in good if x.mfu]:
        made.append(("best MFU (full)", f"{max(shares):.1%}", []))
    return made


def versions(rows: Sequence[RunSummary]) -> str:
    """Which versions the runs had: 'jax 0.10.2 / 0.11.0, flax 0.12.8'."""
    known: dict[str, set[str]] = {}
    for one in rows:
        for key, value in dig(one.record.result, "versions", {}).items():
            known.setdefault(str(key), set()).add(str(value))
    return ", ".join(f"{k} {' / '.join(sorted(v))}" for k, v in known.items())
