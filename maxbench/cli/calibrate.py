"""Constants of a GPU type, measured on the local devices, fitted to finished runs, or from the
kernels of profiles: `maxbench calibrate`."""

import dataclasses
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence

from maxbench.config import command_line, options, recipes
from maxbench.config.errors import UserError
from maxbench.distributed import runtime
from maxbench.hardware.gpus import GPU_TYPES, GpuTypes, Kernels, Products
from maxbench.host import environment, xla_flags
from maxbench.preflight import node_health

DEVICES = tuple(field.name for field in dataclasses.fields(options.Processes))


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done.

    Raises:
      UserError: invalid flags, processes that cannot be joined, or runs or profiles that cannot be
        used.
    """
    asked = command_line.read(options.Calibrate, argv)
    target = command_line.writable("write", asked.write, ".toml")
    gpu_types = command_line.gpu_types(asked.hardware)
    if asked.trace:
        calibrated: tuple[str, str] | None = calibrate_traces(asked, gpu_types)
    else:
        calibrated = (calibrate_runs if asked.runs else calibrate_device)(asked, gpu_types)
    if calibrated:
        text, table = calibrated
        print(table)
        if target and text:
            target.write_text(text)
            print(f"\nwritten: {target}; maxbench plan --hardware {target} reads it")
    return 0


def calibrate_runs(asked: options.Calibrate, gpu_types: GpuTypes) -> tuple[str, str]:
    """Fits constants to finished runs.

    Returns:
      The text of a file for --hardware, '' if the fit does not generalize; and a table of the fit.

    Raises:
      UserError: a flag of the measurement, too few runs, or one that cannot be used.
    """
    given = asked.changed()
    if name := next((name for name in (*DEVICES, "gpu_type", "small", "hlo") if name in given), ""):
        raise UserError(
            f"--{name} is for a measurement of the local devices, and finished runs are given; "
            "leave one of them out"
        )
    from maxbench.calibration import fit, from_runs

    result = from_runs.fit_runs(asked.runs, gpu_types)
    source = fit.describe(f"{result.runs} runs of {len(result.observations)} programs")
    constants = (result.gpu_type, result.efficiency, result.names)
    text = fit.toml(*constants, "fitted", source, band=result.band)
    text = text if result.generalizes else ""
    return text, from_runs.table(result)


def calibrate_traces(asked: options.Calibrate, gpu_types: GpuTypes) -> tuple[str, str]:
    """Turns the kernels of profiles into rates.

    Returns:
      The text of a file for --hardware, and a table of the rates.

    Raises:
      UserError: a flag of the measurement, or profiles that give no rates.
    """
    given = asked.changed()
    if name := next((name for name in (*DEVICES, "small") if name in given), ""):
        raise UserError(f"--{name} is for a measurement of the local devices; leave it or --trace")
    if not asked.runs:
        raise UserError("--trace reads profiles: give files, or folders that have some")
    from maxbench.calibration import fit, from_traces

    paths = options.TraceOptions(
        paths=asked.runs, hlo=asked.hlo, gpu_type=asked.gpu_type or "", hardware=asked.hardware
    )
    result = from_traces.rates_of(paths, gpu_types)
    source = fit.describe(f"{len(result.rates)} kinds of work of profiles")
    efficiency = gpu_types[result.gpu_type].efficiency
    for name, value in result.constants.items():
        efficiency = fit.with_constant(efficiency, name, value)
    constants = (result.gpu_type, efficiency, [*result.constants])
    text = fit.toml(*constants, "measured", source, tables={"products": result.products})
    return text, from_traces.table(result)


def calibrate_device(asked: options.Calibrate, gpu_types: GpuTypes) -> tuple[str, str] | None:
    """Measures the local devices, together with the other processes.

    Returns:
      As measure(), in process 0; None in the others.

    Raises:
      UserError: invalid flags, or processes that cannot be joined.
    """
    if asked.mock_gpus is not None:
        raise UserError("--mock_gpus has no network to measure; leave it out")
    if (name := asked.gpu_type) and not re.fullmatch(r"[a-z][a-z0-9]*", name):
        raise UserError(f"gpu_type={name!r} must be small letters and digits, as h100")
    devices = {name: getattr(asked, name) for name in DEVICES}
    workload = str(next(iter(recipes.workloads())))
    with tempfile.TemporaryDirectory() as folder:
        train = options.TrainOptions(workload, output_dir=folder, **devices)
        run = command_line.resolve_run(train)
        runtime.set_environment(run)
        runtime.require_flags(xla_flags.Check())
        peers = runtime.init_distributed(run)
        measured = measure(asked.gpu_type, asked.small, gpu_types)
    import jax

    first = jax.process_index() == 0
    if peers:
        peers.close()
    return measured if first else None


def measure(name: str | None, small: bool, gpu_types: GpuTypes = GPU_TYPES) -> tuple[str, str]:
    """Runs the microbenchmarks and fits the constants; all processes call it.

    Args:
      name: GPU type that the constants belong to; None = by the devices' name.
      small: toy sizes.
      gpu_types: the known types.

    Returns:
      The text of a file for --hardware, and a table of the microbenchmarks.
    """
    import jax

    from maxbench.calibration import fit, from_device, microbenchmarks

    device = jax.local_devices()[0]
    kind, count = device.device_kind, jax.device_count()
    name = name or gpu_types.type_of(kind) or re.sub("[^a-z0-9]", "", kind.lower())
    known = gpu_types.get(name)
    sizes = microbenchmarks.SMALL if small or device.platform == "cpu" else microbenchmarks.LARGE
    domain = microbenchmarks.domain(known)
    measurements = []
    for measurement in microbenchmarks.all_microbenchmarks(sizes, jax.devices(), domain):
        measurements.append(measurement)
        if jax.process_index() == 0 and sys.stderr.isatty():
            progress = f"{len(measurements)} measured, last {measurement.name:<50}"
            print(f"\r{progress}", end="", file=sys.stderr)
    new = None
    if known:  # earlier calibrations must not influence this one
        gpu = dataclasses.replace(known, products=Products(()), kernels=Kernels(()))
    else:
        memory = (device.memory_stats() or {}).get("bytes_limit") or host_bytes() // count
        node, cores = microbenchmarks.node_size()[0], getattr(device, "core_count", 1)
        gpu = new = from_device.new_gpu(measurements, kind, cores, memory, node)
    result = from_device.fit_device(measurements, gpu, new=bool(new))
    tables = {"products": result.products, "kernels": result.kernels}
    about, table = fit.describe(f"{count} x {kind}"), from_device.table(result)
    if shutil.which("nvidia-smi") and (
        load := under_load(microbenchmarks.sample_under_load(sizes, power_and_clocks))
    ):
        about, table = f"{about}, {load}", f"{table}\n{load}"
    return fit.toml(name, result.efficiency, result.names, "measured", about, new, tables), table


def power_and_clocks() -> list[tuple[float, float]]:
    """(watts, MHz) of each GPU of this node, by nvidia-smi; [] without it."""
    rows = environment.query_nvidia_smi("power.draw", "clocks.sm")
    number = node_health.number
    return [(number(row["power.draw"]), number(row["clocks.sm"])) for row in rows]


def under_load(samples: Sequence[tuple[float, float]]) -> str:
    """'1755 MHz and 690 W under its longest GEMM', of the GPU with the highest power; or ''."""
    watts, mhz = max(samples, default=(0, 0))
    return f"{mhz:.0f} MHz and {watts:.0f} W under its longest GEMM" if watts else ""


def host_bytes() -> int:
    """Memory of this host in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
