"""Fits constants of hardware/gpus.toml to published step times, and reports leave-one-out errors.

  python tools/fit_constants.py [--cached]

Four constants are fitted to the published H100 rows, predicted as published
(maxbench/evidence/published_deltas.py): gemm_bf16, gemm_fp8, nvlink_us, and the share of exposed
tp communication that NeMo hides. All others come from their sources. Rows that differ only in the
number of copies of a program count as one. A weak prior keeps each constant near its current value,
so that the only workload that depends on it can be left out.

Leave-one-out: a workload is predicted with constants fitted to the others. These errors are stored
in maxbench/evidence/errors.csv; maxbench/evidence/error_band.py computes bands from them. --terms:
also without each part of the cost model and each delta. --cached: only rows whose program is in the
cache.

Each program is simulated at the current constants and once per constant around them; predictions in
between are linear in latencies and in inverse rates.
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

from maxbench.config import command_line, recipes, resolve
from maxbench.config.run import Run
from maxbench.cost_model import compile_cache, hlo
from maxbench.evidence import error_band, published, published_deltas
from maxbench.hardware.gpus import GPU_TYPES, Efficiency
from maxbench.planning import planner

# The lowest and the highest plausible value of every constant in [h100.efficiency].
RANGES = {
    "gemm_bf16": (0.55, 0.85),
    "gemm_fp8": (0.40, 0.80),
    "gemm_fp4": (0.40, 0.80),
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
STEP = 1.07  # factor of a constant for its slope
PRIOR = 0.05  # weight of a constant's distance from its current value, in widths of its range
LINEAR_FROM = 0.05  # log error above which the loss is linear
LARGEST = {0.5: 0.04, 0.9: 0.11}  # share of the programs -> largest error of a left-out prediction
WITHOUT = {  # parts of the cost model that can be switched off
    "rounds of tiles": {"wave_us": 0.0},
    "latency of the network": {"network_us": 0.0},
    "contention": {"contention": 0.0},
    "the slowest GPU": {"step_jitter": 0.0},
}
PATH = pathlib.Path(error_band.__file__).with_name("errors.csv")


@dataclasses.dataclass(frozen=True)
class Row:
    """A published row and its prediction.

    `parts` sum to the predicted step as published: 'compiled', and each delta, negated. A part is
    its seconds at the current constants, and its slope along each of FITTED in units of scale().
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
        changes = scale(constants) - scale(current())
        seconds = sum(self.parts.values()) @ np.array([1.0, *changes])
        return float(seconds) / self.published.step_s - 1


def current() -> list[float]:
    """Values of FITTED in gpus.toml and published_deltas.py."""
    return [getattr(GPU_TYPES["h100"].efficiency, n, published_deltas.HIDDEN) for n in FITTED]


def scale(constants: Sequence[float]) -> np.ndarray:
    """Variables that times are linear in: inverse rates, latencies, the hidden share."""
    rate = [name.startswith("gemm") for name in FITTED]
    return np.array([1 / c if r else c for r, c in zip(rate, constants, strict=True)])


def run_of(row: published.Published) -> Run:
    (config,) = recipes.find_workloads(row.model, row.size)
    run = command_line.run_of(f"--config {config} --gpus {row.gpus} --dtype {row.dtype}".split())
    return planner.as_published(resolve.changed(run, precision={"backend": "xla"}))


def linearize(
    row: published.Published, run: Run, program: hlo.Program, efficiency: Efficiency
) -> Row:
    """Simulates a row's program at `efficiency` and around it."""

    def seconds(constants: Mapping[str, float]) -> dict[str, float]:
        hidden = constants["hidden"]
        rates = {name: value for name, value in constants.items() if name != "hidden"}
        changed = dataclasses.replace(efficiency, **rates)
        t = planner.simulate_plan(run, program, efficiency=changed)
        deltas = published_deltas.deltas(run, t, row, planner.costs_of(run, changed), hidden)
        return {"compiled": t.seconds} | {name: -s for name, s in deltas.items()}

    center = dict(zip(FITTED, current(), strict=True))
    neighbors = [center | {name: value * STEP} for name, value in center.items()]
    at_center, *around = map(seconds, [center, *neighbors])
    widths = [(scale([*n.values()]) - scale([*center.values()])).sum() for n in neighbors]

    def part(name: str, s: float) -> np.ndarray:
        slopes = ((other.get(name, 0.0) - s) / w for other, w in zip(around, widths, strict=True))
        return np.array([s, *slopes])

    parts = {name: part(name, s) for name, s in at_center.items()}
    a, m = run.layout, run.model
    program_of = (row.model, row.size, row.dtype, row.layers, a.fsdp, a.ep, a.tp, a.pp, a.cp)
    kind = error_band.parallelism(bool(m.experts), a.pp, a.tp, a.fsdp)
    return Row(row, program_of, kind, parts)


def weights(rows: Sequence[Row]) -> list[float]:
    """Weight of each row: 1 over the rows of its program."""
    count = collections.Counter(r.program for r in rows)
    return [1 / count[r.program] for r in rows]


def fit(rows: Sequence[Row]) -> np.ndarray:
    """Values of FITTED with the smallest error, within their ranges."""
    low, high = np.array([*FITTED.values()]).T
    root = np.sqrt(weights(rows))
    start = np.array(current())

    def residuals(constants):
        logs = [math.log1p(r.error(constants)) for r in rows]
        return [*(root * logs), *(PRIOR * (constants - start) / (high - low))]

    return optimize.least_squares(
        residuals, start, bounds=(low, high), loss="soft_l1", f_scale=LINEAR_FROM
    ).x


def left_out(rows: Sequence[Row]) -> list[np.ndarray]:
    """Values of FITTED for each row, fitted to the other workloads."""
    without_it = lambda workload: fit([r for r in rows if r.workload != workload])
    constants = {workload: without_it(workload) for workload in {r.workload for r in rows}}
    return [constants[r.workload] for r in rows]


def summary(rows: Sequence[Row], errors: Sequence[float]) -> str:
    """'median 3.1 %, 90th percentile 8.0 %, FP8 over BF16 4.0 %'."""
    size = lambda errors, rows, q: error_band.quantile(map(abs, errors), weights(rows), q)
    median, p90 = (size(errors, rows, q) for q in (0.5, 0.9))
    key = lambda r: (r.workload, r.published.gpus)
    ratio = {(*key(r), r.published.dtype): 1 + e for r, e in zip(rows, errors, strict=True)}
    both = [r for r in rows if (*key(r), "fp8") in ratio and (*key(r), "bf16") in ratio]
    fp8_errors = [ratio[*key(r), "fp8"] / ratio[*key(r), "bf16"] - 1 for r in both]
    fp8 = f"{size(fp8_errors, both, 0.5):.1%}" if both else "none"
    return f"| {median:.1%} | {p90:.1%} | {fp8} |"


def assess(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Errors of the fit to all rows, and leave-one-out errors."""
    constants = fit(rows)
    fitted = [r.error(constants) for r in rows]
    return fitted, [r.error(c) for r, c in zip(rows, left_out(rows), strict=True)]


def without(rows: Sequence[Row], name: str) -> list[Row]:
    """The rows without a delta."""
    rest = lambda parts: {n: p for n, p in parts.items() if n != name}
    return [dataclasses.replace(r, parts=rest(r.parts)) for r in rows]


def write(rows: Sequence[Row], log: Callable[[str], None]) -> None:
    """Writes errors.csv: leave-one-out errors, and the constants of each prediction."""
    fitted = left_out(rows)
    with PATH.open("w", newline="") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow([*error_band.Error._fields, *FITTED])
        for r, weight, constants in zip(rows, weights(rows), fitted, strict=True):
            p, error = r.published, r.error(constants)
            columns = [r.workload, p.dtype, p.gpu_type, p.framework, p.gpus, r.parallelism]
            # MaxText published one workload: without it nothing is fitted to MaxText.
            for way in ("workload", "framework")[: 2 if p.framework == "maxtext" else 1]:
                values = [*columns, way, f"{weight:.3f}", f"{error:.4f}"]
                writer.writerow([*values, *(f"{c:.4f}" for c in constants)])
    log(f"{PATH}: {len(rows)} rows")


def problems() -> list[str]:
    """Reasons not to publish errors.csv: errors above those that the documentation names, rows that
    are not published, and workloads without an error."""
    errors = [e for e in error_band.read(PATH.name) if e.left_out == "workload"]
    sizes, shares = [abs(e.error) for e in errors], [e.weight for e in errors]
    found = []
    for share, limit in LARGEST.items():
        if (size := error_band.quantile(sizes, shares, share)) > limit:
            found.append(f"quantile {share} of left-out errors is {size:.1%}, above {limit:.0%}")
    known = {(f"{r.model} {r.size}", r.dtype, r.gpus) for r in published.fitted_rows()}
    stored = {(e.workload, e.dtype, e.gpus) for e in errors}
    found += [f"not a published row: {row}" for row in sorted(stored - known)]
    kinds = lambda rows: {row[:2] for row in rows}
    found += [f"no error of {work} {dtype}" for work, dtype in sorted(kinds(known) - kinds(stored))]
    return [f"{PATH}: {text}" for text in found]


def step_jitters() -> dict[str, float]:
    """NeMo workload -> Efficiency.step_jitter, from published times alone.

    FP8 steps grow more than BF16 steps from the fewest to the most GPUs of the whole model. The
    difference is attributed to amax synchronization.
    """
    rows = [r for r in published.fitted_rows() if r.framework == "nemo"]
    jitters = {}
    for name in dict.fromkeys((r.model, r.size) for r in rows):
        of_workload = [r for r in rows if (r.model, r.size) == name]
        layers = max(r.layers for r in of_workload)
        whole = sorted((r for r in of_workload if r.layers == layers), key=lambda r: r.gpus)
        few, *_, many = (r for r in whole if r.dtype == "fp8")
        bf16_few, *_, bf16_many = (r for r in whole if r.dtype == "bf16")
        growth = many.step_s / few.step_s - bf16_many.step_s / bf16_few.step_s
        jitters[" ".join(name)] = few.step_s * growth / (_unit_sync_s(many) - _unit_sync_s(few))
    return jitters


def _unit_sync_s(row: published.Published) -> float:
    """Seconds of amax synchronization with a step_jitter of 1."""
    run = run_of(row)
    efficiency = dataclasses.replace(GPU_TYPES["h100"].efficiency, step_jitter=1.0)
    replicas, times = published_deltas.amax_syncs(run, row)
    return planner.costs_of(run, efficiency).straggler_s(row.step_s, times, replicas)


def workloads(rows: Sequence[Row]) -> None:
    """Prints the fit to all rows, and the errors of each workload left out."""
    constants = fit(rows)
    print(f"{len(rows)} rows, {len({r.program for r in rows})} programs;", end=" ")
    print(
        "fitted to all:", ", ".join(f"{n} {c:.3f}" for n, c in zip(FITTED, constants, strict=True))
    )
    print("\n| left out | " + " | ".join(FITTED) + " | BF16: median, worst | FP8: median, worst |")
    print("|---" * (len(FITTED) + 3) + "|")
    for workload in dict.fromkeys(r.workload for r in rows):
        constants = fit([r for r in rows if r.workload != workload])
        cells = [f"{c:.3f}" for c in constants]
        for dtype in ("bf16", "fp8"):
            chosen = [r for r in rows if (r.workload, r.published.dtype) == (workload, dtype)]
            errors = [r.error(constants) for r in chosen] or [math.nan]
            cells.append(f"{statistics.median(errors):+.1%}, {max(errors, key=abs):+.1%}")
        print(f"| {workload} | " + " | ".join(cells) + " |")


def line(name: str, rows: Sequence[Row]) -> None:
    """Prints a line of assess()."""
    print(f"| {name} " + " ".join(summary(rows, e)[:-2] for e in assess(rows)) + " |", flush=True)


def ablations(rows: Sequence[Row], simulate: Callable[[Efficiency], list[Row]]) -> None:
    """Prints the errors without each part of the cost model, and without each delta."""
    for name, off in WITHOUT.items():
        line(f"without {name}", simulate(dataclasses.replace(GPU_TYPES["h100"].efficiency, **off)))
    for name in dict.fromkeys(n for r in rows for n in r.parts if n != "compiled"):
        line(f"without delta: {name}", without(rows, name))


def main() -> None:
    parser = argparse.ArgumentParser()
    yes = lambda name, text: parser.add_argument(name, action="store_true", help=text)
    yes("--cached", "only rows that were compiled")
    yes("--terms", "also errors without parts of the cost model, and without deltas: minutes")
    yes("--check", "fits nothing; exits with the problems of the stored errors")
    options = parser.parse_args()
    if options.check:
        sys.exit("\n".join(problems()) or 0)
    log = lambda text: print(text, file=sys.stderr, flush=True)
    runs = [(row, run_of(row)) for row in published.fitted_rows()]
    if options.cached:
        runs = [(row, run) for row, run in runs if compile_cache.load(run)]
    programs = {}  # one row of each

    def simulate(efficiency: Efficiency, runs) -> list[Row]:
        return [
            linearize(row, run, hlo.parse(planner.plan(run).compiled.text), efficiency)
            for row, run in runs
        ]

    rows = simulate(GPU_TYPES["h100"].efficiency, runs)
    write(rows, log)
    for row, pair in zip(rows, runs, strict=True):
        programs.setdefault(row.program, pair)
    print("step_jitter:", ", ".join(f"{w} {s:.4f}" for w, s in step_jitters().items()))
    workloads(rows)
    head = "median | 90th percentile | FP8 over BF16"
    print(f"\n| | fitted to all: {head} | left out: {head} |\n" + "|---" * 7 + "|")
    line("the whole model", rows)
    if options.terms:
        one = [r for r in rows if any(r.published is row for row, _ in programs.values())]
        line("the same, one row of each program", one)
        ablations(one, lambda efficiency: simulate(efficiency, programs.values()))
    sys.exit("\n".join(problems()) or 0)


if __name__ == "__main__":
    main()
