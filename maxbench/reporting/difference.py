"""Differences between two runs: figures, and every setting that result.json names."""

from collections.abc import Iterator, Sequence

from maxbench.config.errors import UserError
from maxbench.reporting import plots, tables
from maxbench.reporting.compare import ReportOptions, RunSummary
from maxbench.terminal import console
from maxbench.terminal.chart import chart

# Settings that the logs of other programs name too.
NAMED = ("model", "size", "dtype", "gpus", "gbs", "seq", "layers")
# Sections of result.json that describe a run.
SECTIONS = ("run", "versions", "environment", "xla_options", "git", "device")


def difference(rows: Sequence[RunSummary], options: ReportOptions) -> str:
    """Figures and settings that differ between two runs, from A, which the first path names, to B.

    Raises:
      UserError: there are not exactly two runs.
    """
    if len(rows) != 2:
        raise UserError(
            f"--diff compares two runs, and {len(rows)} are at {', '.join(options.paths)}"
        )
    a, b = sorted(rows, key=lambda x: not str(x.record.path).startswith(options.paths[0]))
    figures_a, figures_b = tables.record(a), tables.record(b)
    body = [
        [column, f"{x:.6g}", f"{y:.6g}", console.change(y / x - 1, 2) if x else ""]
        for column, x in figures_a.items()
        if isinstance(x, float) and isinstance(y := figures_b[column], float)
    ]
    lines = [f"A: {a.record.path}", f"B: {b.record.path}", ""]
    lines += console.table(["", "A", "B", "change"], body) if body else []
    if a.step and b.step:
        noise = max(a.step["std"], b.step["std"])
        change = b.step["mean"] - a.step["mean"]
        relation = "more" if abs(change) > 2 * noise else "less"
        lines.append(
            f"the mean step changed by {change:+.4f} s, {relation} than twice the steps' std "
            f"{noise:.4f}"
        )
    lines += _losses(a, b)
    changed = changed_settings(a, b)
    if not changed:
        return "\n".join([*lines, "", "no setting differs that both runs name"])
    changes = (f"  {key}: {x} -> {y}" for key, (x, y) in changed.items())
    return "\n".join([*lines, "", "settings that differ:", *changes])


def _losses(a: RunSummary, b: RunSummary) -> list[str]:
    """Lines of a chart of both runs' losses, by steps or by tokens as plots.of_loss()."""
    frame = plots.of_loss({"A": a.record, "B": b.record}, "loss")
    if not frame:
        return []
    lines = {k: dict(line) for k, line in frame.lines.items()}
    lines |= {k.lower(): dict(points) for k, points in frame.dots.items()}
    legend = ["a, b: held-out data"] if frame.dots else []
    return ["", *chart(lines, frame.names[0], "loss"), *legend]


def changed_settings(a: RunSummary, b: RunSummary) -> dict[str, tuple[str, str]]:
    """Settings by name that differ, as (A's, B's).

    Logs of other programs name few settings: between different programs, only those that both
    name are compared.
    """
    x, y = settings_of(a), settings_of(b)
    same_program = a.record.source == b.record.source
    return {
        key: (x.get(key, "(not set)"), y.get(key, "(not set)"))
        for key in sorted(x.keys() | y.keys() if same_program else x.keys() & y.keys())
        if x.get(key) != y.get(key)
        and not key.startswith(("run.output.", "run.runtime.coordinator"))
    }


def settings_of(summary: RunSummary) -> dict[str, str]:
    """Settings that a run's log or result.json names: 'run.layout.cp' -> '2'."""
    record = summary.record
    named = {k: getattr(record, k) for k in NAMED}
    if record.source != "maxbench":
        named |= {"program": record.program, "layout": record.layout}
    return dict(leaves(named | {k: summary.record.result.get(k) for k in SECTIONS}))


def leaves(data: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Values of nested dicts by dotted name: ('run.layout.cp', '2')."""
    if isinstance(data, dict):
        for key, inner in data.items():
            yield from leaves(inner, f"{name}.{key}" if name else key)
    elif data is not None:
        yield name, str(data)
