"""Measures what the constants of a GPU type stand for, on the devices that are here.

maxbench calibrate --write my.toml
"""

import dataclasses
import os
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence

from absl import flags

from maxbench.config import command_line, commands, environment, recipes
from maxbench.config.errors import UserError
from maxbench.config.run import Run
from maxbench.distributed import runtime
from maxbench.hardware.gpus import GPU_TYPES, GpuTypes
from maxbench.preflight import node_health

PLACE = tuple(recipes.FLAG_GROUPS["devices and processes"])


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 measured, 2 bad input."""
    if commands.print_help_if_asked("calibrate", argv):
        return 0
    fv = commands.define("calibrate")
    with command_line.clear_errors("calibrate"), tempfile.TemporaryDirectory() as folder:
        run, path = given(fv, argv, folder)
        runtime.set_environment(run)
        others = runtime.init_distributed(run)
        gpu_types = command_line.gpu_types(fv["hardware"].value)
        text, table = measure(fv["gpu_type"].value, fv["small"].value, gpu_types)
    import jax

    if jax.process_index() == 0:
        print(table)
        if path:
            path.write_text(text)
            print(f"\nwritten: {path}; maxbench plan --hardware {path} reads it")
    if others:
        others.close()
    return 0


def given(
    fv: flags.FlagValues, argv: Sequence[str], folder: str
) -> tuple[Run, pathlib.Path | None]:
    """A toy run that has the devices and processes of the flags, and the file to write.

    Raises:
      UserError: what cannot be.
    """
    command_line.no_words(command_line.flags_of(fv, argv))
    if fv["mock_gpus"].present:
        raise UserError("mock_gpus has no network to measure; leave it out")
    command_line.gpu_types(fv["hardware"].value)
    path = command_line.writable("write", fv["write"].value, ".toml")
    if (name := fv["gpu_type"].value) and not re.fullmatch(r"[a-z][a-z0-9]*", name):
        raise UserError(f"gpu_type={name!r} must be small letters and digits, as h100")
    place = {name: fv[name].value for name in PLACE if fv[name].value is not None}
    config = next(iter(recipes.workloads().values()))
    return recipes.build_run(config, flags=place | {"output_dir": folder}), path


def measure(name: str | None, small: bool, gpu_types: GpuTypes = GPU_TYPES) -> tuple[str, str]:
    """The text of a file for --hardware, and a table of what ran; all processes call it."""
    import jax

    from maxbench.calibration import fit, from_device, microbenchmarks

    device = jax.local_devices()[0]
    kind, count = device.device_kind, jax.device_count()
    name = name or gpu_types.type_of(kind) or re.sub("[^a-z0-9]", "", kind.lower())
    known = gpu_types.get(name)
    sizes = microbenchmarks.SMALL if small or device.platform == "cpu" else microbenchmarks.LARGE
    found = []
    for one in microbenchmarks.all_microbenchmarks(
        sizes, jax.devices(), microbenchmarks.domain(known)
    ):
        found.append(one)
        if jax.process_index() == 0 and sys.stderr.isatty():
            print(f"\r{len(found)} measured, last {one.name:<50}", end="", file=sys.stderr)
    made = None
    if known:  # constants are found without what was measured before
        gpu = dataclasses.replace(known, products=(), kernels=())
    else:
        memory = (device.memory_stats() or {}).get("bytes_limit") or host_bytes() // count
        node, cores = microbenchmarks.node_size()[0], getattr(device, "core_count", 1)
        gpu = made = from_device.made(found, kind, cores, memory, node)
    result = from_device.fit_device(found, gpu, new=bool(made))
    tables = {"products": result.products, "kernels": result.kernels}
    about, table = fit.describe(f"{count} x {kind}"), from_device.table(result)
    if shutil.which("nvidia-smi") and (
        loaded := busy(microbenchmarks.sample_under_load(sizes, draws))
    ):
        about, table = f"{about}, {loaded}", f"{table}\n{loaded}"
    return fit.toml(name, result.efficiency, result.names, "measured", about, made, tables), table


def draws() -> list[tuple[float, float]]:
    """Watts and MHz of each GPU of this node; none without nvidia-smi."""
    each = environment.query_nvidia_smi("power.draw", "clocks.sm")
    return [tuple(map(node_health.number, one.values())) for one in each]


def busy(found: Sequence[tuple[float, float]]) -> str:
    """'1755 MHz and 690 W under its longest product', of the GPU that draws most; or ''."""
    watts, mhz = max(found, default=(0, 0))
    return f"{mhz:.0f} MHz and {watts:.0f} W under its longest product" if watts else ""


def host_bytes() -> int:
    """Memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
