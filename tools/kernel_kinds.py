"""Measured and predicted seconds by kind of kernel, of the profiles in benchmarks/results/h200.

    python -m tools.kernel_kinds

Kernels are recognized by their names: those of cuBLAS and CUTLASS are GEMMs, those of cuDNN are
attention, all others are memory-bound.
"""

import collections
import gzip
import pathlib
import re

import jax

from maxbench.config.run import AXES
from maxbench.cost_model import hlo, simulate
from maxbench.cost_model.costs import Costs
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.terminal import console

FOLDER = pathlib.Path(__file__).parents[1] / "benchmarks/results/h200"
STEPS = 3  # of a profile
KINDS = {"GEMMs": r"nvjet|gemm|cutlass|xmma", "attention": "sdpa|fmha|flash", "memory-bound": ""}


def measured(profile: bytes) -> collections.Counter[str]:
    """Seconds of a step by kind of kernel."""
    found: collections.Counter[str] = collections.Counter()
    data = jax.profiler.ProfileData.from_serialized_xspace(profile)
    for line in data.find_plane_with_name("/device:GPU:0").lines:
        for event in line.events if line.name.startswith("Stream") else ():
            kind = next(k for k, name in KINDS.items() if re.search(name, event.name.lower()))
            found[kind] += event.duration_ns / 1e9 / STEPS
    return found


def predicted(text: str) -> dict[str, float]:
    """Seconds of a step by kind of kernel, with the constants of gpus.toml."""
    costs = Costs(GPU_TYPES["h200"], dict.fromkeys(AXES, 1))
    parts = simulate.simulate(hlo.parse(text), costs).compute
    memory_bound = parts["memory"] + parts["copy"]
    return {"GEMMs": parts["gemm"], "attention": parts["attention"], "memory-bound": memory_bound}


def main() -> None:
    rows = []
    for file in sorted(FOLDER.glob("*.xplane.pb.gz")):
        name = file.name.removesuffix(".xplane.pb.gz")
        text = gzip.decompress((FOLDER / f"{name}.hlo.txt.gz").read_bytes()).decode()
        ours, theirs = predicted(text), measured(gzip.decompress(file.read_bytes()))
        for kind in KINDS:
            error = f"{ours[kind] / theirs[kind] - 1:+.1%}"
            rows.append([name, kind, f"{theirs[kind]:.4f}", f"{ours[kind]:.4f}", error])
    heads = ["program", "kernels", "measured s", "predicted s", "error"]
    print("\n".join(console.table(heads, rows, text=(0, 1))))


if __name__ == "__main__":
    main()
