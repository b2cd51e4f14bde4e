"""How far docs/plan.csv is from the published step times, by workload and precision.

python benchmarks/plan_errors.py
"""

import csv
import itertools
import pathlib
import statistics

COLUMNS = {"error_pct": "as compiled", "error_without_copies_pct": "without copies"}


def main() -> None:
    with pathlib.Path("docs/plan.csv").open(newline="") as f:
        rows = [row for row in csv.DictReader(f) if row["error_pct"]]
    of = lambda row: (row["workload"], row["dtype"])
    print("| rows | n | " + " | ".join(f"{t}: median, worst %" for t in COLUMNS.values()) + " |")
    print("|---" * (2 + len(COLUMNS)) + "|")
    groups = {name: list(group) for name, group in itertools.groupby(sorted(rows, key=of), of)}
    for name, group in groups.items():
        cells = []
        for column in COLUMNS:
            errors = [float(row[column]) for row in group]
            cells.append(f"{statistics.median(errors):+.1f}, {max(errors, key=abs):+.1f}")
        print(f"| {' '.join(name)} | {len(group)} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
