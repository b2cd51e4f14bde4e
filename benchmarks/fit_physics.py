"""Fits constants of hardware/gpus.toml to published step times, and says how far off predictions
are without that.

  python benchmarks/fit_physics.py

Two constants of H100 are fitted, gemm_bf16 and gemm_fp8; all others come from their sources. The
first lines give their fit on half of the Llama 2 70B rows, which are XLA with our layout and
recomputation. Then leave-one-out: both constants fitted on all workloads but the one predicted,
on the BF16 rows first, then on the FP8 rows. Twice: our program as it is compiled, and as
published, without the terms by which the published programs differ (maxbench/plan/terms.py).

Each program is parsed once and played on a grid of the two constants; between its points the
prediction is interpolated in their inverses, which products take time in proportion to.
"""

import dataclasses
import itertools
import math
import statistics
import sys

import numpy as np

from maxbench.hardware import published
from maxbench.hardware.gpus import GPUS
from maxbench.plan import hlo, planner, terms
from maxbench.spec import cli, recipes

# The lowest and the highest plausible value of every constant in [h100.physics].
RANGES = {
    "gemm_bf16": (0.55, 0.85),
    "gemm_fp8": (0.40, 0.80),
    "attention_forward": (0.45, 0.75),
    "attention_backward": (0.35, 0.60),
    "memory": (0.75, 0.95),
    "nvlink": (0.55, 0.90),
    "network": (0.70, 0.98),
    "nvlink_us": (1.0, 6.0),
    "network_us": (5.0, 25.0),
    "round_us": (1.0, 6.0),
    "launch_us": (1.0, 6.0),
    "host_us": (8.0, 50.0),
    "contention": (0.0, 0.25),
    "spread": (0.0, 0.01),
}
FITTED_ON = (64, 256, 1024)  # GPUs of the Llama 2 70B rows
NODES = 3  # of the grid, per constant
DTYPES = ("bf16", "fp8")
AS = ("as compiled", "as published")


@dataclasses.dataclass(frozen=True)
class Row:
    """A published row and its prediction on the grid: [2 kinds, gemm_bf16, gemm_fp8] seconds."""

    published: published.Published
    seconds: np.ndarray

    @property
    def workload(self) -> str:
        return f"{self.published.model} {self.published.size}"

    def predict(self, kind: int, bf16: float, fp8: float) -> float:
        along = [np.interp(1 / fp8, 1 / grid("gemm_fp8"), line) for line in self.seconds[kind]]
        return float(np.interp(1 / bf16, 1 / grid("gemm_bf16"), along))

    def error(self, kind: int, bf16: float, fp8: float) -> float:
        return self.predict(kind, bf16, fp8) / self.published.step_s - 1


def grid(name: str) -> np.ndarray:
    """Values of a constant, from the highest plausible one down: evenly spaced inverses."""
    low, high = RANGES[name]
    return 1 / np.linspace(1 / high, 1 / low, NODES)


def play(row: published.Published) -> Row:
    """Plays the row's program, from the cache or compiled now, on the grid."""
    (config,) = recipes.find(row.model, row.size)
    run = cli.run_of(f"--config {config} --gpus {row.gpus} --dtype {row.dtype}".split())
    run = planner.as_published(run)
    compiled = planner.plan(run).compiled
    program = hlo.parse(compiled.text)
    seconds = np.zeros((2, NODES, NODES))
    for (i, bf16), (j, fp8) in itertools.product(*(enumerate(grid(f"gemm_{d}")) for d in DTYPES)):
        if j and row.dtype == "bf16":
            seconds[:, i, j] = seconds[:, i, 0]  # no product of it is in FP8
            continue
        physics = dataclasses.replace(GPUS["h100"].physics, gemm_bf16=bf16, gemm_fp8=fp8)
        t = planner.play(run, program, physics=physics)
        less = sum(terms.terms(run, t, row).values())
        seconds[:, i, j] = t.seconds, t.seconds - less
    return Row(row, seconds)


def fit(rows: list[Row], kind: int) -> tuple[float, float]:
    """gemm_bf16 and gemm_fp8 with the least squared error, to 0.002 within their ranges."""

    def best(dtype: str, constants) -> float:
        low, high = RANGES[f"gemm_{dtype}"]
        mine = [r for r in rows if r.published.dtype == dtype]
        loss = lambda g: sum(math.log1p(r.error(kind, *constants(g))) ** 2 for r in mine)
        return min(np.arange(low, high + 1e-9, 2e-3), key=loss)

    bf16 = best("bf16", lambda g: (g, 0.6))
    return bf16, best("fp8", lambda g: (bf16, g))


def summary(errors: list[float]) -> str:
    sizes = sorted(map(abs, errors))
    p90 = sizes[math.ceil(0.9 * len(sizes)) - 1]
    return f"median {statistics.median(sizes):.1%}, 90th percentile {p90:.1%}"


def main() -> None:
    rows = []
    for row in published.rows():
        rows.append(play(row))
        print(f"\r{len(rows)} rows played", end="", file=sys.stderr)
    print(file=sys.stderr)
    chosen = [r for r in rows if r.workload == "llama2 70b" and r.published.gpus in FITTED_ON]
    bf16, fp8 = fit(chosen, 0)
    print(f"half of the Llama 2 70B rows: gemm_bf16 {bf16:.3f}, gemm_fp8 {fp8:.3f}")
    for kind, name in enumerate(AS):
        print(f"\nleave one workload out, {name}: median and worst error")
        errors = []
        for workload in dict.fromkeys(r.workload for r in rows):
            constants = fit([r for r in rows if r.workload != workload], kind)
            text = f"  {workload:<15} gemm_bf16 {constants[0]:.3f} gemm_fp8 {constants[1]:.3f}"
            for dtype in DTYPES:
                mine = [r for r in rows if (r.workload, r.published.dtype) == (workload, dtype)]
                found = [r.error(kind, *constants) for r in mine]
                errors += found
                text += f"   {dtype} {statistics.median(found):+6.1%} {max(found, key=abs):+6.1%}"
            print(text)
        print(f"  {len(errors)} rows: {summary(errors)}")


if __name__ == "__main__":
    main()
