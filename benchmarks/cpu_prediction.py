"""Predictions compared with measurements on the local CPU: toy steps.

  python benchmarks/cpu_prediction.py

Calibrates the CPU as `maxbench calibrate` does, compiles 20 toy runs in fp32 for meshes of virtual
devices, and predicts each from its own compiled program. A virtual device is a thread and shares
the cores with the others, so CPU seconds per step and device are measured. Then one or two
constants are fitted to all runs but one, as `maxbench calibrate RUN ...` does, and that run is
predicted.
Result: benchmarks/results/cpu_prediction.json.
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
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # if maxbench is not installed

import jax

from maxbench.calibration import fit, from_device, from_runs, microbenchmarks
from maxbench.cli import calibrate
from maxbench.config import precedence, recipes, resolve
from maxbench.config.run import Device, Run
from maxbench.cost_model import hlo, simulate
from maxbench.cost_model.costs import Costs, Table
from maxbench.hardware.gpus import GPU_TYPES, Efficiency, Gpu
from maxbench.planning import planner
from maxbench.sharding import mesh
from maxbench.step import data
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
    device_fit, cpu = calibrate_cpu()
    efficiency = device_fit.efficiency
    observations = []
    for name, flags in RUNS:
        workload = recipes.load_workload(f"{name}:tiny")
        asked = precedence.build_config(workload, flags={"dtype": "fp32"} | flags)
        run = resolve.resolve(asked, GPU_TYPES, Device("cpu"))
        label = f"{name} {' '.join(f'{k} {v}' for k, v in flags.items())}"
        observations.append(observe(run, label, cpu))
        print(line(observations[-1], efficiency), flush=True)
    errors = [o.error(efficiency) for o in observations]
    by_constants, by_other_shapes = gemm_errors(device_fit.products)
    record = {
        "device": fit.describe(f"{jax.device_count()} x cpu"),
        "programs": len(observations),
        "calibrated": spread(errors),
        "gemms": len(device_fit.products),
        "gemm_by_constants": by_constants,
        "gemm_by_other_shapes": by_other_shapes,
    }
    for names in FITTED:
        left_out = left_out_errors(observations, names, efficiency)
        record[f"left out, {' and '.join(names)} fitted"] = spread(left_out)
    runs = [
        {"run": o.name, "measured_s": o.seconds, "error": error}
        for o, error in zip(observations, errors, strict=True)
    ]
    PATH.write_text(json.dumps(record | {"runs": runs}, indent=1) + "\n")
    print(json.dumps(record, indent=1))


def calibrate_cpu() -> tuple[from_device.DeviceFit, Gpu]:
    """A GPU type of this CPU, with its tables."""
    count = jax.device_count()
    small = microbenchmarks.SMALL
    measurements = [*microbenchmarks.all_microbenchmarks(small, jax.devices(), count)]
    memory = calibrate.host_bytes() // count
    cpu = from_device.new_gpu(measurements, "cpu", 1, memory, count)
    result = from_device.fit_device(measurements, cpu, new=True)
    tables = {"products": result.products, "kernels": result.kernels}
    return result, dataclasses.replace(cpu, efficiency=result.efficiency, **tables)


def observe(run: Run, name: str, cpu: Gpu) -> fit.Observation:
    """A run's measured step, with its prediction. CPU seconds include no waiting."""
    step = Step(run, mesh.make_mesh(run.layout))
    compiled, _, _ = step.compile()
    program = hlo.parse(compiled.as_text())
    meaning = planner.meaning_of(run, program)
    degrees = run.layout.mesh_shape

    def predict(efficiency):
        t = simulate.simulate(program, Costs(cpu, degrees, efficiency), meaning)
        return t.seconds - t.compute["slowest"]

    seconds = step_s(compiled, step.init(), data.Synthetic(run, step.mesh))
    return fit.Observation(name, seconds / run.layout.gpus, predict)


def step_s(compiled, state, batches) -> float:
    """CPU seconds of a step, the median over rows."""

    def row(times: int) -> tuple[float, float]:
        """CPU and wall-clock seconds per step."""
        nonlocal state
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(times):
            state, out = compiled(state, next(batches))
            jax.block_until_ready(out)
        return (time.process_time() - cpu) / times, (time.perf_counter() - wall) / times

    row(2)
    times = max(2, round(ROW_S / row(2)[1]))
    return statistics.median(row(times)[0] for _ in range(ROWS))


def left_out_errors(
    observations: list[fit.Observation], names: tuple[str, ...], efficiency: Efficiency
) -> list[float]:
    """Errors of each run with constants fitted to the others."""
    linear, errors = [from_runs.linearize(o, names, efficiency) for o in observations], []
    for i, o in enumerate(observations):
        others = dict.fromkeys(names, linear[:i] + linear[i + 1 :])
        errors.append(o.error(fit.fit(others, efficiency, from_runs.MAX_FACTOR)[0]))
    return errors


def gemm_errors(rows: list[list]) -> tuple[float, float]:
    """Median errors of GEMMs, by the constants alone and by the rows of other shapes."""
    by_others = []
    for dtype, layout, *sizes, ratio in rows:
        others = Table(row for row in rows if row[2:-1] != sizes)
        by_others.append(abs(others.ratio(dtype, layout, *sizes) / ratio - 1))
    return statistics.median(abs(1 / row[-1] - 1) for row in rows), statistics.median(by_others)


def spread(errors: list[float]) -> dict[str, float]:
    return {"median": statistics.median(map(abs, errors)), "worst": max(map(abs, errors))}


def line(o: fit.Observation, efficiency: Efficiency) -> str:
    ms = o.seconds * 1e3
    return f"{o.name:<40} {ms:8.2f} ms measured, predicted {o.error(efficiency):+.1%}"


if __name__ == "__main__":
    main()
