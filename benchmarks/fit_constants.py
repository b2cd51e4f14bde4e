"""Fits constants of hardware/gpus.toml to published step times, and says how far off predictions of
workloads are that took no part.

  python benchmarks/fit_constants.py [--cached]

Four constants are fitted to the published H100 rows, as published (maxbench/cost_model/published_deltas.py):
gemm_bf16, gemm_fp8, nvlink_us, and the share of tp's waiting that NeMo hides. All others come from
their sources. Rows that run the same program but for more copies of it count as one. A weak prior
holds each constant near where it stands, so that a workload that alone shows it can be left out.

Leave-one-out: the four fitted on all workloads but the one predicted, and predicted with them.
These errors go to maxbench/hardware/errors.csv, from which `plan` makes the band around each
prediction. --terms: the same without each price and each term in turn. --cached: only rows whose
program is in the cache; the others are compiled.

Each program is played where the constants stand and once more for each of them, and predictions
between are linear: in the inverse of a rate, to which times are in proportion.
"""

import argparse
import collections
import csv
import dataclasses
import math
import pathlib
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy import optimize

from maxbench.config import command_line, recipes
from maxbench.config.run import Run
from maxbench.cost_model import compile_cache, hlo, published_deltas
from maxbench.hardware import published
from maxbench.hardware.gpus import GPU_TYPES, Efficiency
from maxbench.planning import planner

# The lowest and the highest plausible value of every constant in [h100.efficiency].
RANGES = {
    "gemm_bf16": (0.55, 0.85),
    "gemm_fp8": (0.40, 0.80),
    "attention_forward": (0.45, 0.75),
    "attention_backward": (0.35, 0.60),
    "memory": (0.75, 0.95),
    "nvlink": (0.60, 0.90),
    "network": (0.70, 0.98),
    "nvlink_us": (1.0, 14.0),
    "network_us": (5.0, 25.0),
    "wave_us": (1.0, 6.0),
    "launch_us": (1.0, 6.0),
    "host_sync_us": (8.0, 50.0),
    "contention": (0.0, 0.25),
    "step_jitter": (0.0, 0.01),
}
FITTED = {name: RANGES[name] for name in ("gemm_bf16", "gemm_fp8", "nvlink_us")}
FITTED |= {"hidden": (0.3, 1.0)}
STEP = 1.07  # by which a constant is moved to see what depends on it
PRIOR = 0.05  # weight of a constant's distance from where it stands, in widths of its range
BEND = 0.05  # log error from which on errors count in proportion, no longer squared
WITHOUT = {  # prices that can be switched off
    "rounds of tiles": {"wave_us": 0.0},
    "latency of the network": {"network_us": 0.0},
    "contention": {"contention": 0.0},
    "the slowest GPU": {"step_jitter": 0.0},
}
PATH = pathlib.Path(published.__file__).with_name("errors.csv")


@dataclasses.dataclass(frozen=True)
class Row:
    """A published row and what is predicted of it.

    `parts` sum to its step as published: 'compiled', and each term, negated. A part is its seconds
    where the constants stand, and its slopes along each of FITTED in the units of scale().
    """

    published: published.Published
    program: tuple
    parallelism: str
    parts: Mapping[str, np.ndarray]

    @property
    def workload(self) -> str:
        return f"{self.published.model} {self.published.size}"

    def error(self, constants: Sequence[float]) -> float:
        """Predicted over published, less 1."""
        moved = scale(constants) - scale(standing())
        seconds = sum(self.parts.values()) @ np.array([1.0, *moved])
        return float(seconds) / self.published.step_s - 1


def standing() -> list[float]:
    """FITTED as they stand in gpus.toml and terms.py."""
    return [getattr(GPU_TYPES["h100"].efficiency, n, published_deltas.HIDDEN) for n in FITTED]


def scale(constants: Sequence[float]) -> np.ndarray:
    """What times are linear in: a rate's inverse, a latency, the hidden share."""
    rate = [name.startswith("gemm") for name in FITTED]
    return np.array([1 / c if r else c for r, c in zip(rate, constants, strict=True)])


def run_of(row: published.Published) -> Run:
    (config,) = recipes.find_workloads(row.model, row.size)
    run = command_line.run_of(f"--config {config} --gpus {row.gpus} --dtype {row.dtype}".split())
    return planner.as_published(run)


def play(row: published.Published, run: Run, program: hlo.Program, efficiency: Efficiency) -> Row:
    """Plays a row's program at `efficiency` and around it."""

    def seconds(constants: Mapping[str, float]) -> dict[str, float]:
        hidden = constants["hidden"]
        rates = {name: value for name, value in constants.items() if name != "hidden"}
        moved = dataclasses.replace(efficiency, **rates)
        t = planner.simulate_plan(run, program, efficiency=moved)
        less = published_deltas.deltas(run, t, row, planner.costs_of(run, moved), hidden)
        return {"compiled": t.seconds} | {name: -s for name, s in less.items()}

    at = dict(zip(FITTED, standing(), strict=True))
    near = [at | {name: value * STEP} for name, value in at.items()]
    there, *moved = map(seconds, [at, *near])
    widths = [(scale([*n.values()]) - scale([*at.values()])).sum() for n in near]
    part = lambda name, s: [
        s,
        *((m.get(name, 0.0) - s) / w for m, w in zip(moved, widths, strict=True)),
    ]
    parts = {name: np.array(part(name, s)) for name, s in there.items()}
    a, m = run.layout, run.model
    program_of = (row.model, row.size, row.dtype, row.layers, a.fsdp, a.ep, a.tp, a.pp, a.cp)
    kind = published.parallelism(bool(m.experts), a.pp, a.tp, a.fsdp)
    return Row(row, program_of, kind, parts)


def weights(rows: Sequence[Row]) -> list[float]:
    """A row's share of its program: rows that repeat one count as one."""
    alike = collections.Counter(r.program for r in rows)
    return [1 / alike[r.program] for r in rows]


def fit(rows: Sequence[Row]) -> np.ndarray:
    """FITTED with the least error, within their ranges."""
    low, high = np.array([*FITTED.values()]).T
    root = np.sqrt(weights(rows))
    start = np.array(standing())

    def residuals(constants):
        logs = [math.log1p(r.error(constants)) for r in rows]
        return [*(root * logs), *(PRIOR * (constants - start) / (high - low))]

    return optimize.least_squares(
        residuals, start, bounds=(low, high), loss="soft_l1", f_scale=BEND
    ).x


def left_out(rows: Sequence[Row]) -> list[np.ndarray]:
    """FITTED for each row, fitted on all workloads but its own."""
    others = lambda workload: fit([r for r in rows if r.workload != workload])
    found = {workload: others(workload) for workload in {r.workload for r in rows}}
    return [found[r.workload] for r in rows]


def summary(rows: Sequence[Row], errors: Sequence[float]) -> str:
    """'median 3.1 %, 90th percentile 8.0 %, FP8 over BF16 4.0 %'."""
    size = lambda errors, rows, q: published.quantile(map(abs, errors), weights(rows), q)
    half, most = (size(errors, rows, q) for q in (0.5, 0.9))
    key = lambda r: (r.workload, r.published.gpus)
    right = {(*key(r), r.published.dtype): 1 + e for r, e in zip(rows, errors, strict=True)}
    both = [r for r in rows if (*key(r), "fp8") in right and (*key(r), "bf16") in right]
    ratios = [right[*key(r), "fp8"] / right[*key(r), "bf16"] - 1 for r in both]
    fp8 = f"{size(ratios, both, 0.5):.1%}" if both else "none"
    return f"| {half:.1%} | {most:.1%} | {fp8} |"


def assess(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Errors of the fit on all, and of leave-one-out."""
    constants = fit(rows)
    inside = [r.error(constants) for r in rows]
    return inside, [r.error(c) for r, c in zip(rows, left_out(rows), strict=True)]


def without(rows: Sequence[Row], name: str) -> list[Row]:
    """The rows as if a term were not there."""
    less = lambda parts: {n: p for n, p in parts.items() if n != name}
    return [dataclasses.replace(r, parts=less(r.parts)) for r in rows]


def write(rows: Sequence[Row], say: Callable[[str], None]) -> None:
    """errors.csv: each row's leave-one-out error, and the constants it was predicted with."""
    found = left_out(rows)
    with PATH.open("w", newline="") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow([*published.Error._fields, *FITTED])
        for r, weight, constants in zip(rows, weights(rows), found, strict=True):
            p, error = r.published, r.error(constants)
            about = [p.model, p.size, p.dtype, p.gpu_type, p.gpus, r.parallelism]
            writer.writerow(
                [*about, f"{weight:.3f}", f"{error:.4f}", *(f"{c:.4f}" for c in constants)]
            )
    say(f"{PATH}: {len(rows)} rows")


def spreads() -> dict[str, float]:
    """Workload of NeMo's -> Efficiency.step_jitter, from published times alone.

    What FP8 steps grow by more than BF16 steps do, from the fewest to the most GPUs of the whole
    model, is put down to the waits for scales.
    """
    rows = [r for r in published.rows() if "nemo" in r.source]
    found = {}
    for name in dict.fromkeys((r.model, r.size) for r in rows):
        mine = [r for r in rows if (r.model, r.size) == name]
        whole = [r for r in mine if r.layers == max(x.layers for x in mine)]
        of = lambda dtype, whole=whole: sorted(
            (r for r in whole if r.dtype == dtype), key=lambda r: r.gpus
        )
        (few, *_, many), (b_few, *_, b_many) = of("fp8"), of("bf16")
        more = few.step_s * (many.step_s / few.step_s - b_many.step_s / b_few.step_s)
        found[" ".join(name)] = more / (_waits(many) - _waits(few))
    return found


def _waits(row: published.Published) -> float:
    """Seconds of the term at a spread of 1."""
    run = run_of(row)
    efficiency = dataclasses.replace(GPU_TYPES["h100"].efficiency, step_jitter=1.0)
    replicas, times = published_deltas.amax_syncs(run, row)
    return planner.costs_of(run, efficiency).straggler_s(row.step_s, times, replicas)


def workloads(rows: Sequence[Row]) -> None:
    """Prints the fit on all, and the errors of each workload left out."""
    constants = fit(rows)
    print(f"{len(rows)} rows, {len({r.program for r in rows})} programs;", end=" ")
    print(
        "fitted on all:", ", ".join(f"{n} {c:.3f}" for n, c in zip(FITTED, constants, strict=True))
    )
    print("\n| left out | " + " | ".join(FITTED) + " | BF16: median, worst | FP8: median, worst |")
    print("|---" * (len(FITTED) + 3) + "|")
    for workload in dict.fromkeys(r.workload for r in rows):
        constants = fit([r for r in rows if r.workload != workload])
        cells = [f"{c:.3f}" for c in constants]
        for dtype in ("bf16", "fp8"):
            mine = [r for r in rows if (r.workload, r.published.dtype) == (workload, dtype)]
            errors = [r.error(constants) for r in mine] or [math.nan]
            cells.append(f"{statistics.median(errors):+.1%}, {max(errors, key=abs):+.1%}")
        print(f"| {workload} | " + " | ".join(cells) + " |")


def line(name: str, rows: Sequence[Row]) -> None:
    """Prints the errors of the fit on all, and of leave-one-out."""
    print(f"| {name} " + " ".join(summary(rows, e)[:-2] for e in assess(rows)) + " |", flush=True)


def effects(rows: Sequence[Row], again: Callable[[Efficiency], list[Row]]) -> None:
    """Prints what each price and term does to the errors of the rows."""
    for name, off in WITHOUT.items():
        line(f"without {name}", again(dataclasses.replace(GPU_TYPES["h100"].efficiency, **off)))
    for name in dict.fromkeys(n for r in rows for n in r.parts if n != "compiled"):
        line(f"without term: {name}", without(rows, name))


def main() -> None:
    parser = argparse.ArgumentParser()
    yes = lambda name, text: parser.add_argument(name, action="store_true", help=text)
    yes("--cached", "only rows that were compiled")
    yes("--terms", "the errors without each price and term, too: minutes")
    asked = parser.parse_args()
    say = lambda text: print(text, file=sys.stderr, flush=True)
    runs = [(row, run_of(row)) for row in published.rows()]
    if asked.cached:
        runs = [(row, run) for row, run in runs if compile_cache.load(run)]
    programs = {}  # one of those that are alike is read again for each price

    def played(efficiency: Efficiency, some) -> list[Row]:
        return [
            play(row, run, hlo.parse(planner.plan(run).compiled.text), efficiency)
            for row, run in some
        ]

    rows = played(GPU_TYPES["h100"].efficiency, runs)
    write(rows, say)
    for row, pair in zip(rows, runs, strict=True):
        programs.setdefault(row.program, pair)
    print("spread by workload:", ", ".join(f"{w} {s:.4f}" for w, s in spreads().items()))
    workloads(rows)
    head = "median | 90th percentile | FP8 over BF16"
    print(f"\n| | fitted on all: {head} | left out: {head} |\n" + "|---" * 7 + "|")
    line("all prices and terms", rows)
    if asked.terms:
        one = [r for r in rows if any(r.published is row for row, _ in programs.values())]
        line("the same, one row of each program", one)
        effects(one, lambda efficiency: played(efficiency, programs.values()))


if __name__ == "__main__":
    main()
