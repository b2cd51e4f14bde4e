"""The report as one HTML file: no script, no network, readable on a phone and on paper."""

import pathlib
import time
from collections.abc import Iterable, Sequence

from maxbench.report import compare, plots, tables
from maxbench.report.compare import Row, Settings
from maxbench.report.plots import escape

PLOTTED = 60  # runs that get a plot of their own; more would be a page nobody scrolls
HEADS = ("Run", "Verdict", "Step times", "Step, s", "TFLOPS/GPU", "Tokens/s", "MFU", "Days/1T")
HEADS += ("GiB",)
PREDICTED = (
    "The coloured parts are what <b>plan predicts</b>: nobody measured them. Measured is the "
    "length of the upper bar alone; where the two differ, a profile says why."
)
Named = Sequence[tuple[Row, str]]  # rows and their names


def html(
    rows: Sequence[Row], s: Settings, names: Sequence[str], title: str = "maxbench report"
) -> str:
    """The page."""
    css = pathlib.Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    named = list(zip(rows, names, strict=True))
    parts = [_facts(rows), _against(rows), _scaling(rows), _runs(named, s), _dead(named)]
    parts += [_step_times(named), _one_step(named), _whole_run(named), _traces(rows)]
    parts += [_lines(rows, s), _foot(rows)]
    when = time.strftime("%Y-%m-%d %H:%M")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{css}</style></head><body>\n"
        f'<h1>{escape(title)}</h1><p class="soft">{len(rows)} run{"s" * (len(rows) != 1)}, '
        f"made {when}</p>\n" + "\n".join(filter(None, parts)) + "\n</body></html>"
    )


def label(one: Row) -> str:
    """A run in a few words: 'llama31 8b bf16, 16 GPUs, GBS 256'."""
    r = one.record
    if not (r.model and r.gpus):
        return r.name
    kind = "GPUs" if r.gpu_type or not r.device else f"x {r.device}"
    words = f"{r.model} {r.size} {r.dtype}".strip() + f", {r.gpus} {kind}"
    return words + (f", GBS {r.gbs}" if r.gbs else "") + (f", {r.profiled}" if r.profiled else "")


def _breakable(text: str) -> str:
    """Long names may break after an underscore."""
    return escape(text).replace("_", "_<wbr>")


def _soft(note: str) -> str:
    return f'<p class="soft">{note}</p>' if note else ""


def _card(head: str, inside: str, name: str = "") -> str:
    small = f"<small>{_breakable(name)}</small>" if name else ""
    return f'<div class="card"><h3>{escape(head)}{small}</h3>{inside}</div>'


def _cards(title: str, cards: Iterable[str], note: str = "") -> str:
    """A section of cards; '' without any."""
    shown = "".join(cards)
    return f'<h2>{title}</h2>{_soft(note)}<div class="cards">{shown}</div>' if shown else ""


def _list(title: str, items: Iterable[str]) -> str:
    """A section of one card with a list of HTML items; '' without any."""
    shown = "".join(f"<li>{item}</li>" for item in items)
    return f'<h2>{title}</h2><div class="card"><ul>{shown}</ul></div>' if shown else ""


def _table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table of HTML cells; a phone shows each row as a card, a cell's head beside it."""
    row = lambda cells: "".join(
        f'<td data-name="{escape(h)}"><span>{c}</span></td>'
        for h, c in zip(heads, cells, strict=True)
    )
    head = "".join(f"<th>{h}</th>" for h in heads)
    rows = "".join(f"<tr>{row(cells)}</tr>" for cells in body)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _facts(rows: Sequence[Row]) -> str:
    count = lambda verdict: sum(x.verdict == verdict for x in rows)
    good = [x for x in rows if x.ok]
    facts = [("finished", f"{len(good)} of {len(rows)}")]
    verdicts = {"PASS": "PASS", "WARN": "WARN", "FAIL": "FAIL", "DIED": "died"}
    facts += [(text, str(count(v))) for v, text in verdicts.items() if count(v)]
    if rates := [x.tokens_s for x in good if x.tokens_s]:
        facts.append(("most tokens/s", f"{max(rates):,.0f}"))
    if shares := [x.mfu["full"] for x in good if x.mfu]:
        facts.append(("best MFU (full)", f"{max(shares):.1%}"))
    cells = "".join(f'<div class="fact"><b>{escape(v)}</b>{escape(k)}</div>' for k, v in facts)
    return f'<div class="facts">{cells}</div>'


def _against(rows: Sequence[Row]) -> str:
    held = [(label(x), x.share, x.verdict) for x in rows if x.share and x.ok]
    if not held:
        return ""
    held.sort(key=lambda x: -x[1])
    made = plots.shares(held[:PLOTTED], "share of the published tokens/s", (compare.PASS, 1.0))
    return f'<h2>Against the published figures</h2><div class="card narrow">{made}</div>'


def _scaling(rows: Sequence[Row]) -> str:
    cards = []
    for curve in compare.curves(rows):
        key = '<span><i class="key"></i>these runs</span>'
        if any(p.published is not None for p in curve.points):
            key += '<span><i class="key theirs"></i>published</span>'
        plot = plots.scaling(curve.points, f"{curve.kind} scaling of {curve.name}")
        inside = f'{plot}<p class="legend">{key}</p>'
        cards.append(_card(f"{curve.name} ({curve.kind})", inside))
    return _cards("Scaling", cards)


def _runs(named: Named, s: Settings) -> str:
    body = []
    for one, name in named:
        if one.step is None:
            continue
        c = [x if x != "-" else "" for x in tables.cells(one, s)]
        step = f"{c[1]} \u00b1 {c[2]}<small>median {c[3]}<br>p10 to p90 {c[4]} to {c[5]}</small>"
        why = "; ".join(filter(None, [one.why, *one.notes, *tables.money(one, s)]))
        steps = f"steps {one.window[0]} to {one.window[1]}; {why}"
        small = "".join(f"<small>{_breakable(x)}</small>" for x in (name, steps))
        badge = f'<span class="badge {c[-1]}">{c[-1]}</span>' if c[-1] else ""
        cells = [f"{escape(label(one))}{small}", badge, plots.sparkline(one.record.step_s)]
        body.append([*cells, step, c[6], c[8], c[9] and c[9] + " %", *c[10:12]])
    return f"<h2>Runs</h2>{_table(HEADS, body)}" if body else ""


def _dead(named: Named) -> str:
    where = lambda last: f"last step {last}" if last >= 0 else "before the first step"
    return _list(
        "Runs that did not finish",
        (
            f"<b>{_breakable(name)}</b>, {where(one.record.last)}: "
            + escape(one.why or "no reason found")
            for one, name in named
            if not one.ok
        ),
    )


def _step_times(named: Named) -> str:
    plotted = [(one, name) for one, name in named if len(one.record.step_s) > 2]
    note = "Shaded: the steps that count. The first step is left out."
    note += f" The first {PLOTTED} runs are plotted." if len(plotted) > PLOTTED else ""
    plot = lambda one, name: plots.step_times(
        one.record.step_s, one.window, f"step times of {name}"
    )
    cards = (_card(label(x), plot(x, name), name) for x, name in plotted[:PLOTTED])
    return _cards("Step times", cards, note)


def _one_step(named: Named) -> str:
    """What plan predicts of each run's step, under the time that was measured, on one scale."""
    planned = [(one, name) for one, name in named if one.planned and one.step]
    missing = {x.unplanned: name for x, name in named if x.unplanned and x.record.gpu_type}
    cards = []
    for one, name in planned[:PLOTTED]:
        measured, predicted = one.step["mean"], one.planned["step_s"]
        full = max(measured, predicted)
        bars = plots.stack({"measured": measured}, f"measured step of {name}", full, "measured")
        parts = {k: v for k, v in one.planned["parts"].items() if v > 0}
        bars += plots.stack(parts, f"predicted step of {name}", full)
        said = f"Predicted {predicted:.3f} s; measured {measured:.3f} s, "
        said += f"{measured / predicted - 1:+.1%}."
        said += f" Measured under {one.record.profiled}." if one.record.profiled else ""
        cards.append(_card(label(one), bars + _soft(said), name))
    return _cards("Where a step goes, as predicted", cards, PREDICTED) + _list(
        "Runs without a prediction",
        (f"{_breakable(name)}: {escape(why)}" for why, name in missing.items()),
    )


def time_parts(one: Row) -> dict[str, float]:
    """Where the time of a whole run went, in seconds; {} where it does not tell."""
    r, number = one.record, lambda k: float(one.record.result.get(k) or 0)
    try:
        start, compiled, lower = map(number, ("start_to_first_step_s", "compile_s", "lower_s"))
    except (TypeError, ValueError):
        return {}
    if not start or not r.step_s:
        return {}
    parts = {
        "start-up": start - compiled - lower,
        "trace and lower": lower,
        "compile": compiled,
        "steps": sum(r.step_s.values()) - r.step_s[min(r.step_s)],
        "checkpoints": sum(x for x, _ in r.saves),
    }
    return {k: v for k, v in parts.items() if v > 0}


def _whole_run(named: Named) -> str:
    timed = [(one, name, parts) for one, name in named if (parts := time_parts(one))]
    bar = lambda parts, name: plots.stack(parts, f"where the time of {name} went")
    cards = (_card(label(x), bar(parts, name), name) for x, name, parts in timed[:PLOTTED])
    return _cards("Where the time went", cards)


def _traces(rows: Sequence[Row]) -> str:
    made = []
    for trace in tables.traces(rows):
        made.append(f"<h2>{_breakable(trace.title)}</h2>")
        for heads, body in trace.grids:
            made.append(_table(heads, [[escape(c) for c in row] for row in body]))
        made += [_soft(escape(note)) for note in trace.notes]
    return "".join(made)


def _lines(rows: Sequence[Row], s: Settings) -> str:
    return "".join(
        _list(escape(title), (escape(x.strip()) for x in lines))
        for title, lines in tables.sections(rows, s)
        if "scaling" not in title  # drawn above
    )


def _foot(rows: Sequence[Row]) -> str:
    versions = {}
    for one in rows:
        found = one.record.result.get("versions")
        for key, value in found.items() if isinstance(found, dict) else ():
            versions.setdefault(str(key), set()).add(str(value))
    said = ", ".join(f"{k} {' / '.join(sorted(v))}" for k, v in versions.items())
    lines = " ".join(tables.legend())
    return f"<footer><p>{escape(lines)}</p><p>{escape(said)}</p></footer>"
