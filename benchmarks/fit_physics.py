"""Fits hardware.PHYSICS to published step times, and says how far off predictions are.

  python benchmarks/fit_physics.py

One constant is fitted, gemm_bf16 of H100; all others come from their sources. The fit is on half of
the Llama 2 70B rows, which are XLA with the same layout and recomputation as ours. For every other
workload the program was another one (NeMo). There, two figures: our program as it is compiled, and
without its kernels that only copy, which those programs do not have. Leave-one-out: the constant
fitted on all workloads but the one predicted.
"""

import dataclasses
import math
import statistics

from maxbench import cli, hlo, plan, published, simulate
from maxbench.config import AXES
from maxbench.costs import Costs
from maxbench.hardware import PHYSICS, PHYSICS_RANGES

FITTED_ON = {("llama2", gpus) for gpus in (64, 256, 1024)}


def config_of(row: published.Published) -> str:
    return f"configs/{row.model}_{row.size}.py"


def compiled_rows() -> list[tuple]:
    """(row, run, program) of each published BF16 row without a pipeline: a fit plays each often."""
    found = []
    for row in (r for r in published.rows() if r.dtype == "bf16"):
        fv = plan.flags.FlagValues()
        cli.define(fv, [])
        command = f"fit --config {config_of(row)} --gpus {row.gpus} --dtype {row.dtype}"
        run = cli.parse(fv, command.split())
        if run.layout.pp == 1:
            found.append((row, run, hlo.parse(plan.plan(run).compiled.text)))
    return found


def predict(run, program, gemm: float, copies: bool) -> float:
    physics = dataclasses.replace(PHYSICS[run.layout.gpu_type], gemm_bf16=gemm)
    degrees = {axis: getattr(run.layout, axis) for axis in AXES}
    timeline = simulate.play(program, Costs(run.layout.gpu_type, degrees, physics))
    return timeline.seconds - (0 if copies else timeline.compute["copy"])


def fit(rows: list[tuple], copies: bool) -> float:
    """The gemm_bf16 with the least squared relative error, by golden section in its range."""
    low, high, _ = PHYSICS_RANGES["gemm_bf16"]
    loss = lambda g: sum(
        math.log(predict(run, p, g, copies) / row.step_s) ** 2 for row, run, p in rows
    )
    ratio = (5**0.5 - 1) / 2
    while high - low > 1e-3:
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if loss(a) < loss(b) else (a, high)
    return (low + high) / 2


def report(rows: list[tuple], gemm, copies: bool, title: str) -> None:
    """Errors of every row; `gemm` is a constant, or the rows to fit it on for each row."""
    print(f"\n{title}")
    errors = []
    cache: dict[str, float] = {}
    for row, run, program in rows:
        name = f"{row.model} {row.size}"
        if name not in cache:
            others = [r for r in rows if f"{r[0].model} {r[0].size}" != name]
            cache[name] = gemm if gemm else fit(others, copies)
        step_s = predict(run, program, cache[name], copies)
        errors.append(abs(step_s / row.step_s - 1))
        print(
            f"  {name:<14}{row.gpus:>6}  published {row.step_s:7.3f}  predicted {step_s:7.3f}  "
            f"{step_s / row.step_s - 1:+6.1%}   gemm_bf16 {cache[name]:.3f}"
        )
    at90 = sorted(errors)[min(len(errors) - 1, math.ceil(0.9 * len(errors)) - 1)]
    print(f"  median {statistics.median(errors):.1%}, 90th percentile {at90:.1%}")


def main() -> None:
    rows = compiled_rows()
    chosen = [r for r in rows if (r[0].model, r[0].gpus) in FITTED_ON]
    fitted = fit(chosen, copies=True)
    print(f"gemm_bf16 fitted on {len(chosen)} of the Llama 2 70B rows: {fitted:.3f}")
    xla = [r for r in rows if r[0].model == "llama2"]
    nemo = [r for r in rows if r[0].model != "llama2"]
    report(xla, fitted, True, "XLA rows, as compiled")
    report(nemo, fitted, True, "NeMo rows, as compiled")
    report(nemo, fitted, False, "NeMo rows, without kernels that only copy")
    report(rows, None, True, "leave one workload out, as compiled")
    report(rows, None, False, "leave one workload out, without kernels that only copy")


if __name__ == "__main__":
    main()
