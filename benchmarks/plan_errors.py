"""How far docs/plan.csv is from published step times: by workload, overall, and of trends.

python benchmarks/plan_errors.py

Twice: of our program as it is compiled, and as published, without the terms by which the published
programs differ (maxbench/plan/terms.py). A trend is a ratio of two rows, its error that of the
predicted ratio: the same model on more GPUs (weak scaling, against its fewest), FP8 over BF16.
"""

import csv
import math
import pathlib
import statistics

from maxbench.hardware import published

COLUMNS = {"error_pct": "as compiled", "error_as_published_pct": "as published"}


def table() -> dict[tuple, dict]:
    """Rows that have a published time, by (workload, dtype, GPUs); errors as ratios, 1 = right."""
    rows = {}
    with pathlib.Path("docs/plan.csv").open(newline="") as f:
        for row in (r for r in csv.DictReader(f) if r["error_pct"]):
            right = {c: 1 + float(row[c]) / 100 for c in COLUMNS}
            rows[row["workload"], row["dtype"], int(row["gpus"])] = right
    return rows


def trends(rows: dict[tuple, dict]) -> dict[str, list[tuple]]:
    """Name -> pairs of keys of rows whose ratio is a trend."""
    layers = {(f"{r.model}_{r.size}", r.dtype, r.gpus): r.layers for r in published.rows()}
    fewest: dict[tuple, tuple] = {}
    for key in sorted(rows, key=lambda key: key[2]):
        fewest.setdefault((*key[:2], layers[key]), key)
    weak = [(key, fewest[(*key[:2], layers[key])]) for key in rows]
    fp8 = [((w, "fp8", n), (w, "bf16", n)) for w, dtype, n in rows if dtype == "bf16"]
    return {"weak scaling": [p for p in weak if p[0] != p[1]], "FP8 over BF16": fp8}


def summary(errors: list[float]) -> str:
    """Median and 90th percentile of their sizes, in %."""
    sizes = sorted(abs(e) * 100 for e in errors)
    return f"{statistics.median(sizes):.1f}, {sizes[math.ceil(0.9 * len(sizes)) - 1]:.1f}"


def main() -> None:
    rows = table()
    line = lambda name, cells: print(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    line("rows", ["n", *(f"{t}: median, worst %" for t in COLUMNS.values())])
    print("|---" * (2 + len(COLUMNS)) + "|")
    for name in sorted({key[:2] for key in rows}):
        errors = {c: [100 * (r[c] - 1) for k, r in rows.items() if k[:2] == name] for c in COLUMNS}
        text = [f"{statistics.median(e):+.1f}, {max(e, key=abs):+.1f}" for e in errors.values()]
        line(" ".join(name), [len(errors["error_pct"]), *text])
    print()
    line("all", ["n", *(f"{t}: median, 90th percentile %" for t in COLUMNS.values())])
    print("|---" * (2 + len(COLUMNS)) + "|")
    line("rows", [len(rows), *(summary([r[c] - 1 for r in rows.values()]) for c in COLUMNS)])
    for name, pairs in trends(rows).items():
        errors = ([rows[a][c] / rows[b][c] - 1 for a, b in pairs] for c in COLUMNS)
        line(name, [len(pairs), *map(summary, errors)])


if __name__ == "__main__":
    main()
