"""Errors of docs/plan.csv against published step times: by workload, overall, and of trends.

  python tools/plan_errors.py

Three errors per row: of the program as compiled; as published (without the deltas of
maxbench/evidence/published_deltas.py); and as published with constants fitted to the other
workloads (maxbench/evidence/errors.csv). Only rows of the most frequent cost model revision count.
Rows that differ only in the number of copies of a program count as one. A trend is the ratio of two
rows, with the error of the predicted ratio: the same model on more GPUs (weak scaling, against its
fewest), and FP8 over BF16. Rows that were published by releases of Megatron-Bridge are a table of
their own, as compiled: no delta describes those programs.
"""

import collections
import csv
import pathlib
import statistics

from maxbench.evidence import error_band, published

WAYS = ("as compiled", "as published", "left out")
Key = tuple[str, str, int]  # workload, dtype, GPUs


def table() -> tuple[dict[Key, tuple[float, ...]], dict[Key, float]]:
    """Rows that the deltas describe -> predicted over published in each of WAYS; their weights."""
    ratios, weights = {}, {}
    known = [r for r in lines() if r["error_as_published_pct"]]
    (latest, _), *_ = collections.Counter(r["prices"] for r in known).most_common()
    left = {
        (e.workload.replace(" ", "_"), e.dtype, e.gpus): e for e in error_band.read("errors.csv")
    }
    for r in (r for r in known if r["prices"] == latest):
        key = (r["workload"], r["dtype"], int(r["gpus"]))
        if key in left:
            ours = [1 + float(r[c]) / 100 for c in ("error_pct", "error_as_published_pct")]
            ratios[key], weights[key] = (*ours, 1 + left[key].error), left[key].weight
    return ratios, weights


def lines() -> list[dict[str, str]]:
    """Rows of docs/plan.csv with a published time."""
    with pathlib.Path("docs/plan.csv").open(newline="") as f:
        return [r for r in csv.DictReader(f) if r["error_pct"]]


def newer_programs() -> list[dict[str, str]]:
    """Rows that no delta describes."""
    return [r for r in lines() if not r["error_as_published_pct"]]


def described() -> list[dict[str, str]]:
    """Rows that the deltas describe."""
    return [r for r in lines() if r["error_as_published_pct"]]


def trends(rows: dict[Key, tuple]) -> dict[str, list[tuple[Key, Key]]]:
    """Name -> pairs of keys of rows whose ratio is a trend."""
    layers = {(f"{r.model}_{r.size}", r.dtype, r.gpus): r.layers for r in published.fitted_rows()}
    fewest: dict[tuple, tuple] = {}
    for key in sorted(rows, key=lambda key: key[2]):
        fewest.setdefault((*key[:2], layers[key]), key)
    weak = [(key, fewest[(*key[:2], layers[key])]) for key in rows]
    fp8 = [((w, "fp8", n), (w, "bf16", n)) for w, dtype, n in rows if dtype == "bf16"]
    return {
        "weak scaling": [p for p in weak if p[0] != p[1]],
        "FP8 over BF16": [(a, b) for a, b in fp8 if a in rows],
    }


def summary(errors: list[float], weights: list[float]) -> str:
    """Median and 90th percentile of their sizes, in %."""
    at = lambda share: error_band.quantile(map(abs, errors), weights, share)
    return f"{at(0.5) * 100:.1f}, {at(0.9) * 100:.1f}"


def main() -> None:
    rows, weights = table()
    line = lambda name, cells: print(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    ways = [*enumerate(WAYS)]
    line("rows", ["n", *(f"{way}: median, worst %" for way in WAYS)])
    print("|---" * (2 + len(WAYS)) + "|")
    for name in sorted({key[:2] for key in rows}):
        errors = [[100 * (r[i] - 1) for k, r in rows.items() if k[:2] == name] for i, _ in ways]
        text = [f"{statistics.median(e):+.1f}, {max(e, key=abs):+.1f}" for e in errors]
        line(" ".join(name), [len(errors[0]), *text])
    print()
    line("all", ["n", *(f"{way}: median, 90th percentile %" for way in WAYS)])
    print("|---" * (2 + len(WAYS)) + "|")
    shares = [weights[k] for k in rows]
    line(
        "programs",
        [
            round(sum(shares)),
            *(summary([r[i] - 1 for r in rows.values()], shares) for i, _ in ways),
        ],
    )
    for name, pairs in trends(rows).items():
        if pairs:
            errors = ([rows[a][i] / rows[b][i] - 1 for a, b in pairs] for i, _ in ways)
            shares = [weights[a] for a, _ in pairs]
            line(name, [len(pairs), *(summary(e, shares) for e in errors)])
    print()
    columns = {
        "gpu_type": "GPU",
        "dtype": "dtype",
        "memory_gib": "GiB",
        "fits": "fits",
        "step_s": "predicted s",
        "published_s": "published s",
        "error_pct": "error %",
        "exposed_pct": "exposed %",
        "copies_pct": "copies %",
    }
    line("workload, GPUs", [*columns.values()])
    print("|---" * (1 + len(columns)) + "|")
    newer = newer_programs()
    for r in newer:
        line(f"{r['workload']}, {r['gpus']}", [r[x] for x in columns])
    print("\nours over NVIDIA's, as compiled")
    for name, rows_of in (("Megatron-Bridge", newer), ("NeMo and MaxText", described())):
        errors = [float(r["error_pct"]) for r in rows_of]
        fast, slow = sum(e < -10 for e in errors), sum(e > 10 for e in errors)
        near, middle = len(errors) - fast - slow, statistics.median(errors)
        print(f"{name}: {len(errors)} rows, median {middle:+.1f} %, {near} within 10 %, "
              f"{slow} slower, {fast} faster")  # fmt: skip


if __name__ == "__main__":
    main()
