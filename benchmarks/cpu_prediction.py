"""Holds predictions against what this machine can measure: toy steps on its own CPU.

  python benchmarks/cpu_prediction.py

Calibrates the CPU as `maxbench calibrate` does, compiles 20 toy runs in fp32 for meshes of virtual
devices, and predicts each from its own compiled program. A device is one thread here, and shares
the cores with the others: measured are seconds that the process works, by step and device. Then a
constant or two are fitted to all runs but one, as `maxbench plan --calibrate` does, and that one is
predicted. Result: benchmarks/results/cpu_prediction.json.
"""

import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # it need not be installed

import jax

from maxbench.calibration import fit, from_device, from_runs, microbenchmarks
from maxbench.cli import calibrate
from maxbench.config import recipes, resolve
from maxbench.config.run import AXES, Run
from maxbench.cost_model import hlo, simulate
from maxbench.cost_model.costs import Costs, Table
from maxbench.hardware.gpus import Efficiency, Gpu
from maxbench.planning import planner
from maxbench.sharding import mesh
from maxbench.step.train_step import Step

RUNS = (
    *(("llama31_8b", x) for x in ({}, {"dp": 2}, {"fsdp": 4}, {"tp": 2}, {"cp": 2}, {"gbs": 8})),
    ("llama31_8b", {"pp": 2, "gbs": 8}),
    ("llama31_8b", {"dp": 2, "fsdp": 2, "tp": 2}),
    ("llama31_8b", {"seq": 256, "layers": 4}),
    ("llama31_8b", {"layers": 8, "fsdp": 2}),
    ("llama2_70b", {"fsdp": 2}),
    ("llama2_70b", {"dp": 2, "tp": 4}),
    ("llama31_70b", {"pp": 2, "tp": 2, "gbs": 8}),
    ("llama31_405b", {"cp": 2, "tp": 2}),
    ("nemotron4_340b", {}),
    ("nemotron4_340b", {"dp": 2, "tp": 2}),
    ("grok1_314b", {}),
    ("grok1_314b", {"ep": 2}),
    ("grok1_314b", {"ep": 2, "tp": 2}),
    ("grok1_314b", {"fsdp": 2, "gbs": 16}),
)
ROWS, ROW_S = 7, 0.4  # rows of steps, and seconds of each
FITTED = (("memory",), ("memory", "gemm_bf16"))
PATH = pathlib.Path(__file__).parent / "results" / "cpu_prediction.json"


def main() -> None:
    found, cpu = calibrated()
    cases = []
    for name, flags in RUNS:
        run = resolve.build_run(
            recipes.load_workload(f"{name}:tiny"), flags={"dtype": "fp32"} | flags
        )
        cases.append(case(run, f"{name} {' '.join(f'{k} {v}' for k, v in flags.items())}", cpu))
        print(line(cases[-1], found.efficiency), flush=True)
    errors = [case.error(found.efficiency) for case in cases]
    record = {"device": fit.describe(f"{jax.device_count()} x cpu"), "programs": len(cases)}
    record |= {"calibrated": spread(errors), "products": len(found.products)}
    alone, beside = products_left_out(found.products)
    record |= {"product_by_constants": alone, "product_by_other_shapes": beside}
    for names in FITTED:
        record[f"left out, {' and '.join(names)} fitted"] = spread(left_out(cases, names, found))
    record["runs"] = [
        {"run": c.name, "measured_s": c.seconds, "error": e}
        for c, e in zip(cases, errors, strict=True)
    ]
    PATH.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({k: v for k, v in record.items() if k != "runs"}, indent=1))


def calibrated() -> tuple[from_device.DeviceFit, Gpu]:
    """Makes a GPU type of this CPU, with its tables."""
    ran = [
        *microbenchmarks.all_microbenchmarks(
            microbenchmarks.SMALL, jax.devices(), jax.device_count()
        )
    ]
    memory = calibrate.host_bytes() // jax.device_count()
    cpu = from_device.made(ran, "cpu", 1, memory, jax.device_count())
    found = from_device.fit_device(ran, cpu, new=True)
    tables = {"products": found.products, "kernels": found.kernels}
    return found, dataclasses.replace(cpu, efficiency=found.efficiency, **tables)


def case(run: Run, name: str, cpu: Gpu) -> fit.Observation:
    """A run's step, and what is predicted of it; nobody waits while only work is counted."""
    step = Step(run, mesh.make_mesh(run.layout))
    compiled, _, _ = step.compile()
    program = hlo.parse(compiled.as_text())
    shares = planner.branch_frequencies(run, program)
    degrees = {axis: getattr(run.layout, axis) for axis in AXES}

    def predict(efficiency):
        t = simulate.simulate(program, Costs(cpu, degrees, efficiency), shares)
        return t.seconds - t.compute["slowest"]

    return fit.Observation(name, seconds(compiled, step.init()) / run.layout.gpus, predict)


def seconds(compiled, state) -> float:
    """CPU seconds of a step, the median over rows."""

    def row(times: int) -> tuple[float, float]:
        nonlocal state
        begin, work = time.perf_counter(), time.process_time()
        for _ in range(times):
            state, out = compiled(state)
            jax.block_until_ready(out)
        return (time.process_time() - work) / times, (time.perf_counter() - begin) / times

    row(2)
    times = max(2, round(ROW_S / row(2)[1]))
    return statistics.median(row(times)[0] for _ in range(ROWS))


def left_out(
    cases: list[fit.Observation], names: tuple[str, ...], found: from_device.DeviceFit
) -> list[float]:
    """Errors of each run with constants fitted to the others."""
    near, errors = [from_runs.linearize(case, names, found.efficiency) for case in cases], []
    for i, one in enumerate(cases):
        about = dict.fromkeys(names, near[:i] + near[i + 1 :])
        errors.append(one.error(fit.fit(about, found.efficiency, from_runs.FAR)[0]))
    return errors


def products_left_out(products: list[list]) -> tuple[float, float]:
    """Median errors of products, by the constants alone and by the rows of other shapes."""
    beside = []
    for dtype, layout, *sizes, ratio in products:
        others = Table(row for row in products if row[2:-1] != sizes)
        beside.append(abs(others.ratio(dtype, layout, *sizes) / ratio - 1))
    return statistics.median(abs(1 / row[-1] - 1) for row in products), statistics.median(beside)


def spread(errors: list[float]) -> dict[str, float]:
    return {"median": statistics.median(map(abs, errors)), "worst": max(map(abs, errors))}


def line(case: fit.Observation, efficiency: Efficiency) -> str:
    ms = case.seconds * 1e3
    return f"{case.name:<40} {ms:8.2f} ms measured, predicted {case.error(efficiency):+.1%}"


if __name__ == "__main__":
    main()
