"""Measures the constants of a GPU type on the local devices: `maxbench calibrate`."""

import dataclasses
import os
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence

from absl import flags

from maxbench.config import command_line, commands, environment, recipes, resolve, run_flags
from maxbench.config.errors import UserError
from maxbench.config.run import Run
from maxbench.distributed import runtime
from maxbench.hardware.gpus import GPU_TYPES, GpuTypes
from maxbench.preflight import node_health

DEVICE_FLAGS = tuple(run_flags.FLAG_GROUPS["devices and processes"])


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 measured.

    Raises:
      UserError: invalid flags, or processes that cannot be joined.
    """
    fv = commands.define("calibrate")
    with tempfile.TemporaryDirectory() as folder:
        run, target = toy_run(fv, argv, folder)
        runtime.set_environment(run)
        peers = runtime.init_distributed(run)
        gpu_types = command_line.gpu_types(fv["hardware"].value)
        text, table = measure(fv["gpu_type"].value, fv["small"].value, gpu_types)
    import jax

    if jax.process_index() == 0:
        print(table)
        if target:
            target.write_text(text)
            print(f"\nwritten: {target}; maxbench plan --hardware {target} reads it")
    if peers:
        peers.close()
    return 0


def toy_run(
    fv: flags.FlagValues, argv: Sequence[str], folder: str
) -> tuple[Run, pathlib.Path | None]:
    """A toy run with the devices and processes of the flags, and the file of --write.

    Raises:
      UserError: invalid flags.
    """
    command_line.refuse_positional(command_line.parse_flags(fv, argv))
    if fv["mock_gpus"].present:
        raise UserError("--mock_gpus has no network to measure; leave it out")
    command_line.gpu_types(fv["hardware"].value)
    target = command_line.writable("write", fv["write"].value, ".toml")
    if (name := fv["gpu_type"].value) and not re.fullmatch(r"[a-z][a-z0-9]*", name):
        raise UserError(f"gpu_type={name!r} must be small letters and digits, as h100")
    devices = {name: fv[name].value for name in DEVICE_FLAGS if fv[name].value is not None}
    workload = next(iter(recipes.workloads().values()))
    return resolve.build_run(workload, flags=devices | {"output_dir": folder}), target


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
        gpu = dataclasses.replace(known, products=(), kernels=())
    else:
        memory = (device.memory_stats() or {}).get("bytes_limit") or host_bytes() // count
        node, cores = microbenchmarks.node_size()[0], getattr(device, "core_count", 1)
        gpu = new = from_device.made(measurements, kind, cores, memory, node)
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
