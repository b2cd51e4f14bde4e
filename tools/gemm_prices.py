"""Prices of GEMMs against kernels that others measured, and what tells power from tiles.

    python -m tools.gemm_prices

public_gemms.csv has the medians of `maxbench calibrate --trace` for PyTorch profiles of
github.com/AMD-AGI/TraceLens, revision 171dd74: runs of milliseconds, at the full clock. The rows of
benchmarks/results/h200/constants.toml are of GEMMs that ran for seconds, at 690 W and 1,470 of
1,980 MHz. Both are priced with the cost model of today and with a second one: more tile shapes, and
one start per kernel beside a shorter one per wave. Its latencies are fitted to the public kernels;
its fraction of the peak to each set, and the two fractions differ by the clock alone.
"""

import csv
import dataclasses
import itertools
import math
import pathlib
import statistics
import tomllib
from collections.abc import Sequence
from typing import NamedTuple

from maxbench.cost_model.costs import Costs
from maxbench.hardware.gpus import GPU_TYPES, Kernels, Products
from maxbench.terminal import console

ROOT = pathlib.Path(__file__).parents[1]
LEAST = 128  # rows and columns of a GEMM: smaller ones read weights, and are bound by memory
ALIGNED = 8  # elements of a row that the fast kernels need to be a multiple of
SUSTAINED_FLOPS = 1e11  # of a GEMM of constants.toml, from which on it ran at the power limit
SIDES = range(64, 257, 8)  # of output tiles, whose accumulators fit into the registers of a core
TILES = [(a, b) for a in (64, 128, 192, 256) for b in SIDES if a * b <= 128 * 256]
FRACTIONS = [x / 100 for x in range(60, 100)]
LATENCIES = list(itertools.product((0.25, 0.5, 1.0, 2.0, 4.0), (0.0, 2.0, 3.5, 5.0, 6.5)))  # us


class Gemm(NamedTuple):
    gpu_type: str
    m: int
    n: int
    k: int
    us: float


def public() -> list[Gemm]:
    """GEMMs of public profiles that fill a tile, with aligned rows."""
    with (ROOT / "tools/public_gemms.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["batch"] == "1"]
    found = (
        Gemm(r["gpu_type"], *(int(r[x]) for x in ("m", "n", "k")), float(r["us"])) for r in rows
    )
    return [g for g in found if min(g.m, g.n) >= LEAST and not (g.n % ALIGNED or g.k % ALIGNED)]


def sustained() -> list[Gemm]:
    """Large BF16 GEMMs of an H200 at its power limit."""
    values = tomllib.loads((ROOT / "benchmarks/results/h200/constants.toml").read_text())["h200"]
    efficiency = dataclasses.replace(GPU_TYPES["h200"].efficiency, **values["efficiency"])
    costs = costs_of("h200", efficiency)
    rows = [row for row in values["products"] if row[0] == "bf16" and row[5] == 1]
    # A row is the ratio of the measured to the modelled time.
    found = (Gemm("h200", m, n, k, costs.gemm(m, n, k) * ratio * 1e6)
             for _, _, m, n, k, _, ratio in rows)  # fmt: skip
    return [g for g in found if 2.0 * g.m * g.n * g.k >= SUSTAINED_FLOPS]


def costs_of(gpu_type: str, efficiency=None) -> Costs:
    gpu = dataclasses.replace(GPU_TYPES[gpu_type], products=Products(()), kernels=Kernels(()))
    return Costs(gpu, {"": 1}, efficiency)


def second_model(g: Gemm, fraction: float, wave_us: float, start_us: float) -> float:
    """Microseconds of a GEMM: waves of the best tile, and the start of the kernel."""
    gpu = GPU_TYPES[g.gpu_type]
    rate = gpu.bf16_tflops * 1e6 * fraction / gpu.chip.cores  # per us and core
    of = lambda a, b: math.ceil(math.ceil(g.m / a) * math.ceil(g.n / b) / gpu.chip.cores)
    return start_us + min(of(a, b) * (2 * a * b * g.k / rate + wave_us) for a, b in TILES)


def today(g: Gemm) -> float:
    """Microseconds of a GEMM by the cost model."""
    return costs_of(g.gpu_type).gemm(g.m, g.n, g.k) * 1e6


def rms(errors: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(x * x for x in errors))


def fitted(gemms: Sequence[Gemm], latencies: Sequence[tuple[float, float]]):
    """(rms of log errors, fraction, wave_us, start_us) of the best fit."""
    error = lambda *x: rms([math.log(second_model(g, *x) / g.us) for g in gemms])
    choices = ((f, *latency) for f in FRACTIONS for latency in latencies)
    return min((error(*x), *x) for x in choices)


def main() -> None:
    of_h100 = [g for g in public() if g.gpu_type == "h100"]
    at_power = sustained()
    _, full, *latencies = best = fitted(of_h100, LATENCIES)
    limited = fitted(at_power, [tuple(latencies)])
    heads = ["GEMMs", "count", "today: rms", "median", "second model: rms", "fraction of peak"]
    rows = []
    for name, gemms, (error, fraction, *_) in (
        ("public, H100, full clock", of_h100, best),
        ("calibrate, H200, 690 W", at_power, limited),
    ):
        now = [math.log(today(g) / g.us) for g in gemms]
        median = f"{math.expm1(statistics.median(now)):+.0%}"
        rows.append(
            [name, len(gemms), f"{rms(now):.0%}", median, f"{error:.0%}", f"{fraction:.2f}"]
        )
    print("\n".join(console.table(heads, [[*map(str, row)] for row in rows])))
    print(
        f"\nlatencies of the second model: {latencies[0]:g} us a wave, {latencies[1]:g} us a "
        f"kernel; the power limit costs {1 - limited[1] / full:.0%} of the rate"
    )


if __name__ == "__main__":
    main()
