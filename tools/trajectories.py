"""Writes maxbench/preflight/trajectories.csv: losses of the toy of `maxbench preflight --numerics`.

  python -m tools.trajectories                  all number formats; some ten minutes on a CPU
  python -m tools.trajectories --formats nvfp4          that one alone; others as stored

A line per number format and step: the loss on one CPU device, and `apart`, the largest difference
over the loss, up to that step, of right trainings that round otherwise: on MESHES, and in the
format of trajectories.OTHER_ROUNDING.
"""

import argparse
import csv
import functools
import itertools

import jax

from maxbench.config import precedence, recipes, resolve
from maxbench.config.number_formats import FORMATS
from maxbench.config.run import Device, Run
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.preflight import trajectories

MESHES: tuple[dict[str, int], ...] = (
    {"dp": 8},
    {"fsdp": 2, "tp": 2, "pp": 2},
    {"cp": 2, "tp": 2, "dp": 2},
)
GPU_TYPE = "b200"  # has every format


def job(number_format: str, mesh: dict[str, int]) -> Run:
    """A run in a number format, whose axes the toy's mesh has."""
    of = FORMATS[number_format]
    scaling = {"precision.scaling": of.name} if of.name != of.dtype else {}
    layout = {"mbs": 1, "gbs": trajectories.GBS} | mesh
    seq = {"train.seq": trajectories.TRAINING["train.seq"]}
    config = precedence.build_config(
        recipes.load_workload(f"{trajectories.WORKLOAD}:tiny"),
        flags={"dtype": of.dtype, "gpu_type": GPU_TYPE},
        overrides={f"layout.{name}": n for name, n in layout.items()} | scaling | seq,
    )
    return resolve.resolve(config, GPU_TYPES, Device("cpu"))


@functools.cache
def losses(number_format: str, mesh: int | None = None) -> list[float]:
    """The toy's losses in a number format, on one of MESHES or on one device."""
    axes = {} if mesh is None else MESHES[mesh]
    devices = jax.devices()[: trajectories.DEVICES if axes else 1]
    run = trajectories.toy(job(number_format, axes), len(devices))
    found = trajectories.train(run, devices)
    print(f"{number_format:<8} {axes or 'alone'}: {found[-1]:.4f}", flush=True)
    return found


def lines(number_format: str) -> list[tuple[str, int, str, str]]:
    """The lines of a number format."""
    alone = losses(number_format)
    others = [losses(number_format, mesh) for mesh in range(len(MESHES))]
    others.append(losses(trajectories.OTHER_ROUNDING.get(number_format, "bf16")))
    apart = (max(abs(y / x - 1) for y in step) for x, *step in zip(alone, *others, strict=True))
    so_far = itertools.accumulate(apart, max)
    rows = zip(alone, so_far, strict=True)
    return [(number_format, i, f"{x:.5f}", f"{a:.6f}") for i, (x, a) in enumerate(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=[*FORMATS])
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", trajectories.DEVICES)
    path = trajectories.FILE
    kept: dict[str, list] = {}
    if path.exists():
        with path.open(newline="") as file:
            next(rows := csv.reader(file))
            kept = {name: [*group] for name, group in itertools.groupby(rows, lambda row: row[0])}
    for name in args.formats:
        kept[name] = lines(name)
        with path.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["format", "step", "loss", "apart"])
            writer.writerows(row for name in FORMATS if name in kept for row in kept[name])


if __name__ == "__main__":
    main()
