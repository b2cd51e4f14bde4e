"""The report as one HTML file: no script, no network, readable on a phone and on paper."""

import pathlib
import time
from collections.abc import Sequence

from maxbench import compare, plots, tables
from maxbench.compare import Row, Settings
from maxbench.plots import escape

PLOTTED = 60  # runs that get a plot of their own; more would be a page nobody scrolls
HEADS = ("Run", "Verdict", "Step times", "Step, s", "TFLOPS/GPU", "Tokens/s", "MFU", "Days/1T")
HEADS += ("GiB",)


def html(
    rows: Sequence[Row], s: Settings, names: Sequence[str], title: str = "maxbench report"
) -> str:
    """The page."""
    css = pathlib.Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    parts = [_facts(rows), _against(rows), _scaling(rows), _runs(rows, s, names)]
    parts += [_dead(rows, names), _step_times(rows, names), _whole_run(rows, names)]
    parts += [_lines(rows, s), _foot(rows, s)]
    when = time.strftime("%Y-%m-%d %H:%M")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{css}</style></head><body>\n"
        f'<h1>{escape(title)}</h1><p class="soft">{len(rows)} run{"s" * (len(rows) != 1)}, '
        f"made {when}</p>\n" + "\n".join(filter(None, parts)) + "\n</body></html>"
    )


def _badge(verdict: str) -> str:
    return (
        f'<span class="badge {escape(verdict)}">{escape(verdict)}</span>' if verdict != "-" else ""
    )


def label(one: Row) -> str:
    """A run in a few words: 'llama31 8b bf16, 16 GPUs, GBS 256'."""
    r = one.record
    if not (r.model and r.gpus):
        return r.name
    kind = "GPUs" if r.gpu_type or not r.device else f"x {r.device}"
    words = f"{r.model} {r.size} {r.dtype}".strip() + f", {r.gpus} {kind}"
    return words + (f", GBS {r.gbs}" if r.gbs else "") + (f", {r.profiled}" if r.profiled else "")


def _card(one: Row, name: str, inside: str) -> str:
    head = f"{escape(label(one))}<small>{_breakable(name)}</small>"
    return f'<div class="card"><h3>{head}</h3>{inside}</div>'


def _breakable(text: str) -> str:
    """Long names may break after an underscore."""
    return escape(text).replace("_", "_<wbr>")


def _facts(rows: Sequence[Row]) -> str:
    count = lambda *verdicts: sum(x.verdict in verdicts for x in rows)
    fastest = max((x for x in rows if x.ok and x.tokens_s), key=lambda x: x.tokens_s, default=None)
    best = max((x.mfu["full"] for x in rows if x.ok and x.mfu), default=None)
    facts = [("finished", f"{sum(x.ok for x in rows)} of {len(rows)}")]
    facts += [(v, str(count(v))) for v in ("PASS", "WARN", "FAIL") if count(v)]
    if count("DIED"):
        facts.append(("died", str(count("DIED"))))
    if fastest:
        facts.append(("most tokens/s", f"{fastest.tokens_s:,.0f}"))
    if best is not None:
        facts.append(("best MFU (full)", f"{best:.1%}"))
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
        key = '<p class="legend"><span><i class="key"></i>these runs</span>'
        if any(p.published is not None for p in curve.points):
            key += '<span><i class="key theirs"></i>published</span>'
        plot = plots.scaling(curve.points, f"{curve.kind} scaling of {curve.name}")
        cards.append(
            f'<div class="card"><h3>{escape(curve.name)} ({curve.kind})</h3>{plot}{key}</p></div>'
        )
    return f'<h2>Scaling</h2><div class="cards">{"".join(cards)}</div>' if cards else ""


def _runs(rows: Sequence[Row], s: Settings, names: Sequence[str]) -> str:
    body = []
    for one, name in zip(rows, names, strict=True):
        if one.step is None:
            continue
        c = [x if x != "-" else "" for x in tables.cells(one, s)]
        step = f"{c[1]} \u00b1 {c[2]}<small>median {c[3]}<br>p10 to p90 {c[4]} to {c[5]}</small>"
        values = [step, c[6], c[8], c[9] and c[9] + " %", *c[10:12]]
        why = "; ".join(filter(None, [one.why, *one.notes, *_money(one, s)]))
        steps = f"steps {one.window[0]} to {one.window[1]}"
        small = "".join(f"<small>{_breakable(x)}</small>" for x in (name, f"{steps}; {why}"))
        cells = [f'<td data-name="Run">{escape(label(one))}{small}</td>']
        cells.append(f'<td data-name="Verdict">{_badge(one.verdict)}</td>')
        cells.append(f'<td data-name="Step times">{plots.sparkline(one.record.step_s)}</td>')
        named = zip(HEADS[3:], values, strict=True)
        cells += [f'<td data-name="{escape(h)}"><span>{v}</span></td>' for h, v in named]
        body.append(f"<tr>{''.join(cells)}</tr>")
    if not body:
        return ""
    head = "".join(f"<th>{h}</th>" for h in HEADS)
    return (
        f'<h2>Runs</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _money(one: Row, s: Settings) -> list[str]:
    made = []
    if one.cost is not None:
        made.append(f"${one.cost:,.0f} per 1T tokens at ${s.cost:g} per GPU hour")
    if one.joules is not None:
        made.append(f"{one.joules:.3g} J per token")
    return made


def _dead(rows: Sequence[Row], names: Sequence[str]) -> str:
    items = []
    for one, name in zip(rows, names, strict=True):
        if one.ok:
            continue
        last = one.record.last
        where = f"last step {last}" if last >= 0 else "before the first step"
        items.append(
            f"<li><b>{_breakable(name)}</b>, {where}: {escape(one.why or 'no reason found')}</li>"
        )
    return (
        f'<h2>Runs that did not finish</h2><div class="card"><ul>{"".join(items)}</ul></div>'
        if items
        else ""
    )


def _step_times(rows: Sequence[Row], names: Sequence[str]) -> str:
    cards = []
    for one, name in zip(rows, names, strict=True):
        if len(one.record.step_s) > 2 and len(cards) < PLOTTED:
            plot = plots.step_times(one.record.step_s, one.window, f"step times of {name}")
            cards.append(_card(one, name, plot))
    if not cards:
        return ""
    more = (
        "" if len(rows) <= PLOTTED else f'<p class="soft">the first {PLOTTED} runs are plotted</p>'
    )
    note = '<p class="soft">Shaded: the steps that count. The first step is left out.</p>'
    return f'<h2>Step times</h2>{note}<div class="cards">{"".join(cards)}</div>{more}'


def time_parts(one: Row) -> dict[str, float]:
    """Where the time of a whole run went, in seconds; {} where it does not tell."""
    r, number = one.record, lambda k: float(one.record.result.get(k) or 0)
    try:
        start, compiled, lower = map(number, ("start_to_first_step_s", "compile_s", "lower_s"))
    except (TypeError, ValueError):
        return {}
    if not start or not r.step_s:
        return {}
    first = min(r.step_s)
    steps = sum(v for i, v in r.step_s.items() if i != first)
    parts = {
        "start-up": max(0.0, start - compiled - lower),
        "trace and lower": lower,
        "compile": compiled,
        "steps": steps,
        "checkpoints": sum(x for x, _ in r.saves),
    }
    return {k: v for k, v in parts.items() if v > 0}


def _whole_run(rows: Sequence[Row], names: Sequence[str]) -> str:
    cards = []
    for one, name in zip(rows, names, strict=True):
        if len(cards) >= PLOTTED:
            break
        breakdown = one.record.result.get("breakdown")  # seconds of a step, from plan or a profile
        if isinstance(breakdown, dict) and all(
            isinstance(v, int | float) for v in breakdown.values()
        ):
            bar = plots.stack(breakdown, f"where a step of {name} goes")
            cards.append(f'<div class="card"><h3>One step of {escape(name)}</h3>{bar}</div>')
        if parts := time_parts(one):
            bar = plots.stack(parts, f"where the time of {name} went")
            cards.append(_card(one, name, bar))
    return f'<h2>Where the time went</h2><div class="cards">{"".join(cards)}</div>' if cards else ""


def _lines(rows: Sequence[Row], s: Settings) -> str:
    out = []
    for title, lines in tables.sections(rows, s):
        if "scaling" in title:
            continue  # drawn above
        items = "".join(f"<li>{escape(x.strip())}</li>" for x in lines)
        out.append(f'<h2>{escape(title)}</h2><div class="card"><ul>{items}</ul></div>')
    return "".join(out)


def _foot(rows: Sequence[Row], s: Settings) -> str:
    versions = {}
    for one in rows:
        found = one.record.result.get("versions")
        for key, value in found.items() if isinstance(found, dict) else ():
            versions.setdefault(str(key), set()).add(str(value))
    said = ", ".join(f"{k} {' / '.join(sorted(v))}" for k, v in versions.items())
    lines = " ".join(tables.legend(rows, s))
    return f"<footer><p>{escape(lines)}</p><p>{escape(said)}</p></footer>"
