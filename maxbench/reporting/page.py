"""Content of the HTML page; the templates page.html, parts.html and run.html have its layout."""

import base64
import collections
import dataclasses
import functools
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from maxbench.config import recipes
from maxbench.reporting import compare, details, diagnosis, plots, suite, tables
from maxbench.reporting.compare import ReportOptions, RunSummary
from maxbench.run_logs.record import dig
from maxbench.terminal import console

if TYPE_CHECKING:  # it loads numpy
    from maxbench.planning.explain import Explanation
    from maxbench.traces.report import TraceReport

PLOTTED = 60  # at most so many runs have a plot of their own
EXPLAINED = 3  # runs below published that the text at the top explains
NAMED = 3  # runs that a tile links to
OVERLAID = 8  # runs in one plot, one per colour
FLAT = 0.02  # p90 - p10 as a share of the median, below which step times are folded away
VERDICTS = {"PASS": "PASS", "WARN": "WARN", "FAIL": "FAIL", "DIED": "died"}
WORST_FIRST = ("DIED", "FAIL", "WARN", "-", "PASS")
COLUMNS = {  # of the table -> the cell that one needs
    "Step times": "Mean s", "Step, s": "Mean s", "TFLOPS/GPU": "TFLOPS/GPU",
    "Tokens/s": "Tokens/s", "MFU": "MFU %", "GiB": "GiB", "Loss": "Loss",
}  # fmt: skip


@dataclasses.dataclass(kw_only=True)
class PageRun:
    """A run as the templates read it."""

    row: RunSummary
    name: str
    label: str  # unique on the page, see page_runs()
    id: str  # of its section
    cells: Mapping[str, str]  # of the table; '' if unknown
    why: str  # reason, notes and money
    settings: Mapping[str, str]  # that differ from those of most runs
    spread: Mapping[str, float]  # see spread()
    flat: bool  # step times need no attention
    mfu: Mapping[str, tuple[float, float | None]]  # see mfu()
    # see details.recipe_differences()
    recipe: tuple[str, list[tuple[str, str, str]]] | None
    plotted: bool
    # The first run with the same prediction, which shows where its seconds go; None without one.
    explained_by: "PageRun | None" = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """The text at the top: how many runs are as fast as published, which are not, and why."""

    summary: str
    explained: list[tuple[PageRun, list[str]]]  # runs below published, with reasons
    other_slow: list[PageRun]  # further runs below published
    dead: list[PageRun]
    not_compared: int  # runs that have no published figure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlay:
    """Runs of one workload in common plots."""

    name: str
    frames: list[plots.Frame]
    keys: Mapping[str, PageRun]  # CSS class -> run
    total: int  # runs of the workload, of which keys has the first


@functools.cache
def template() -> Any:
    """page.html, compiled."""
    import jinja2  # late: no other format needs it, and it takes 50 ms

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["change"] = console.change
    return environment.get_template("page.html")


def html(rows: Sequence[RunSummary], options: ReportOptions) -> str:
    """The report as one HTML file."""
    settings = [details.settings(row) for row in rows]
    common = details.most_common(settings)
    unusual = [details.unusual(named, common) for named in settings]
    runs = page_runs(rows, unusual, options)
    return template().render(
        title=options.title,
        created=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        most=PLOTTED,
        runs=runs,
        ranked=sorted(runs, key=lambda run: (severity(run), run.row.share or 0)),
        columns=[head for head, cell in COLUMNS.items() if any(run.cells[cell] for run in runs)],
        severity=severity,
        common=common,
        answer=answer(runs),
        request=compare.request(rows, options),
        facts=facts(runs),
        marks=(options.limits.passes, 1.0),
        curves=[(curve, predicted_parts(curve, rows)) for curve in compare.curves(rows)],
        overlays=overlays(runs),
        reach=reach(runs),
        plots=plots,
        details=details,
        drawing=drawing,
        traces=tables.traces(rows),
        sections=tables.sections(rows, options),
        suite=suite.judge(options.suite, rows) if options.suite else None,
        legend=tables.legend(options),
        versions=versions(rows),
    )


def page_runs(
    rows: Sequence[RunSummary], unusual: Sequence[Mapping[str, str]], options: ReportOptions
) -> list[PageRun]:
    """All runs as the templates read them; equal labels get a number, because links show them."""
    named = zip(rows, compare.names(rows, options), unusual, strict=True)
    runs = [page_run(i, row, name, settings, options) for i, (row, name, settings) in
            enumerate(named)]  # fmt: skip
    same = collections.Counter(run.label for run in runs)
    count: collections.Counter = collections.Counter()
    for run in runs:
        if same[run.label] > 1:
            count[run.label] += 1
            run.label += f", run {count[run.label]}"
    first: dict[int, PageRun] = {}
    for run in runs:
        if run.row.planned and run.row.planned.get("explained"):
            run.explained_by = first.setdefault(id(run.row.planned), run)
    return runs


def severity(run: PageRun) -> int:
    """Place of a run's verdict among all, the worst first."""
    return WORST_FIRST.index(run.row.verdict)


def drawing(explained: "Explanation | TraceReport") -> str:
    """The drawing of a step as the URL of an image, whose style is its own."""
    return f"data:image/svg+xml;base64,{base64.b64encode(explained.svg().encode()).decode()}"


def page_run(
    i: int, row: RunSummary, name: str, settings: Mapping[str, str], options: ReportOptions
) -> PageRun:
    """The i-th run as the templates read it."""
    step_spread = spread(row)
    alarm = any(note.startswith("step time") for note in row.notes)
    return PageRun(
        row=row,
        name=name,
        label=label(row),
        id=f"run-{i + 1}",
        # A table prints '-' for what is unknown, the page nothing.
        cells=dict.fromkeys(tables.CELLS, "")
        | {head: "" if x == "-" else x for head, x in tables.cells(row).items()},
        why="; ".join(filter(None, [row.explanation, *tables.money(row, options)])),
        settings=settings,
        spread=step_spread,
        flat=bool(step_spread) and not alarm and step_spread["p90"] - step_spread["p10"] < FLAT,
        mfu=mfu(row),
        recipe=details.recipe_differences(row, options.gpu_types),
        plotted=i < PLOTTED and len(row.record.step_s) > 2,
    )


def mfu(row: RunSummary) -> dict[str, tuple[float, float | None]]:
    """MFU by convention: the run's, and the published one in the convention that it is given in.

    Within a convention MFU is proportional to tokens/s, so the run's MFU in the published
    convention is the published figure times the run's share of the published tokens/s.
    """
    by_convention: dict[str, tuple[float, float | None]] = {
        c: (share, None) for c, share in (row.mfu or {}).items() if share
    }
    if by_convention and row.share and row.baseline and row.baseline.mfu_pct:
        published, convention = row.baseline.mfu_pct / 100, row.baseline.convention
        own, _ = by_convention.get(convention, (published * row.share, None))
        by_convention[convention] = (own, published)
    return by_convention


def spread(row: RunSummary) -> dict[str, float]:
    """Least, p10, p90 and greatest of the steps that count, and their drift, as relative
    differences from the median; {} if no steps count."""
    if not row.step or not row.window or row.step["median"] <= 0:
        return {}
    first, last = row.window
    times = [t for i, t in sorted(row.record.step_s.items()) if first <= i <= last]
    ends = {"min": min(times), "p10": row.step["p10"], "p90": row.step["p90"], "max": max(times)}
    relative = {name: x / row.step["median"] - 1 for name, x in ends.items()}
    return relative | {"drift": compare.drift(times[:: -(-len(times) // compare.POINTS)])[0]}


def reach(runs: Sequence[PageRun]) -> float:
    """Half the width of the strips of step times, as a share of the median: 5 % to 50 %."""
    ends = [abs(run.spread[k]) for run in runs if run.spread for k in ("p10", "p90")]
    return min(0.5, max(0.05, 1.1 * max(ends, default=0)))


def answer(runs: Sequence[PageRun]) -> Answer:
    """The text at the top of the page."""
    rows, run_of = [run.row for run in runs], {id(run.row): run for run in runs}
    slow = diagnosis.below_published(rows)
    curves = compare.curves(rows)
    compared = any(x.share for x in rows)
    return Answer(
        summary=diagnosis.summary(rows),
        explained=[
            (run_of[id(row)], diagnosis.reasons(row, rows, curves)) for row in slow[:EXPLAINED]
        ],
        other_slow=[run_of[id(row)] for row in slow[EXPLAINED:PLOTTED]],
        dead=[run for run in runs if run.row.verdict == "DIED"],
        not_compared=sum(not x.share and x.ok for x in rows) if compared else 0,
    )


def overlays(runs: Sequence[PageRun]) -> list[Overlay]:
    """Step times and loss of the runs of each workload, the slowest relative to published first."""
    groups: dict[tuple, list[PageRun]] = {}
    for run in runs:
        if run.row.window:
            r = run.row.record
            groups.setdefault((r.model, r.size, r.dtype), []).append(run)
    found = []
    for key, group in groups.items():
        slowest = sorted(group, key=lambda run: run.row.share or 2)[:OVERLAID]
        name = " ".join(key).strip() or "runs that do not name their workload"
        classes = {f"line{i}": run for i, run in enumerate(slowest)}
        labels = {k: run.label for k, run in classes.items()}
        times = {k: plots.after_the_first(run.row.record.step_s) for k, run in classes.items()}
        records = {k: run.row.record for k, run in classes.items()}
        frames = [plots.over_steps(times, f"step times of {name}", "seconds", labels)]
        if loss := plots.of_loss(records, f"loss of {name}", labels):
            frames.append(loss)
        found.append(Overlay(name=name, frames=frames, keys=classes, total=len(group)))
    return found


def predicted_parts(
    curve: compare.Curve, rows: Sequence[RunSummary]
) -> list[tuple[int, dict[str, float]]]:
    """GPUs and the parts of the predicted step in seconds, of each scale that has a prediction."""
    found = []
    for point in curve.points:
        same = [x for x in rows if (x.tokens_s, x.record.gpus) == (point.tokens_s, point.gpus)]
        if same and (plan := same[0].planned):
            found.append((point.gpus, diagnosis.split(plan["parts_s"])))
    return found


def label(row: RunSummary) -> str:
    """A run in a few words: 'Llama 3.1 8B bf16, 16 GPUs, GBS 256'."""
    r = row.record
    if not (r.model and r.gpus):
        return r.name
    kind = f"GPU{'s' * (r.gpus > 1)}" if r.gpu_type or not r.device else f"x {r.device}"
    words = f"{recipes.display_name(r.model, r.size)} {r.dtype}".strip() + f", {r.gpus} {kind}"
    return words + (f", GBS {r.gbs}" if r.gbs else "") + (f", {r.profiled}" if r.profiled else "")


def facts(runs: Sequence[PageRun]) -> list[tuple[str, str, list[PageRun]]]:
    """Tiles at the top of the page: name, value, and the runs that the tile links to."""
    finished = [run.row for run in runs if run.row.ok]
    tiles: list[tuple[str, str, list[PageRun]]] = [
        ("finished", f"{len(finished)} of {len(runs)}", [])
    ]
    for kind in ("running", "skipped"):
        if count := sum(run.row.record.status == kind for run in runs):
            tiles.append((kind, str(count), []))
    for verdict, name in VERDICTS.items():
        if judged := [run for run in runs if run.row.verdict == verdict]:
            tiles.append((name, str(len(judged)), judged[:NAMED] if verdict != "PASS" else []))
    if rates := [x.tokens_s for x in finished if x.tokens_s and x.possible]:
        tiles.append(("most tokens/s", f"{max(rates):,.0f}", []))
    if shares := [x.mfu["full"] for x in finished if x.mfu]:
        tiles.append(("best MFU (full)", f"{max(shares):.1%}", []))
    return tiles


def versions(rows: Sequence[RunSummary]) -> str:
    """Versions of the programs that the runs used: 'jax 0.10.2 / 0.11.0, flax 0.12.8'."""
    known: dict[str, set[str]] = {}
    for row in rows:
        for key, value in dig(row.record.result, "versions", {}).items():
            known.setdefault(str(key), set()).add(str(value))
    return ", ".join(f"{k} {' / '.join(sorted(v))}" for k, v in known.items())
