"""Constants of a GPU type from what its devices did, beside those that stand in gpus.toml.

What was measured are programs (calibration/microbenchmarks.py). Each is predicted as a step is, and the
constants are those that predict them best. They go into a file for --hardware.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from maxbench.calibration import fit
from maxbench.calibration.fit import Observation
from maxbench.calibration.microbenchmarks import Measured
from maxbench.config.run import AXES
from maxbench.cost_model import hlo, simulate
from maxbench.cost_model.costs import Costs, Table, gemm_sizes, is_gemm
from maxbench.cost_model.simulate import Timeline
from maxbench.hardware.gpus import GPU_TYPES, Efficiency, Gpu

# Constant -> kinds of programs that it is found from, in this order: each leans on those before.
ABOUT = {
    "memory": ("copy",),
    "launch_us": ("launch",),
    "gemm_bf16": ("bf16 product", "f32 product"),
    "wave_us": ("bf16 product", "f32 product"),
    "gemm_fp8": ("f8e4m3fn product",),
    "attention_forward": ("attention forward",),
    "attention_backward": ("attention backward",),
    "host_sync_us": ("host",),
    "nvlink_us": ("NVLink",),
    "nvlink": ("NVLink",),
    "network_us": ("network",),
    "network": ("network",),
    "contention": ("beside",),
}


@dataclasses.dataclass(frozen=True)
class DeviceFit:
    """What calibrating found of a GPU type.

    Attributes:
      before: its constants as they were.
      efficiency: as they are now; `names` are those that were measured, the others as before.
      cases: constant -> what was measured about it.
      products, kernels: rows of the GPU type's tables.
    """

    before: Efficiency
    efficiency: Efficiency
    names: list[str]
    cases: dict[str, list[Observation]]
    products: list[list]
    kernels: list[list]


def fit_device(measured: Sequence[Measured], gpu: Gpu, new: bool = False) -> DeviceFit:
    """Finds the constants of a GPU type; of a new type those too that were found to be none."""
    cases = [(one.kind, case(one, gpu)) for one in measured]
    about = {
        constant: [case for kind, case in cases if kind in kinds]
        for constant, kinds in ABOUT.items()
    }
    before = gpu.efficiency
    efficiency, names = fit.fit(about, before)
    seen = [name for name in names if new or not fit.hidden(name, efficiency)]
    for constant in {*names} - {*seen}:
        efficiency = fit.with_constant(efficiency, constant, getattr(before, constant))
    alone = Costs(gpu, dict.fromkeys(AXES, 1), efficiency)
    kernels = [kernel(one, alone) for one in measured if one.kind == "kernel"]
    alone.kernels = Table((kind, "", *row) for kind, *row in kernels)
    products = [row for one in measured if "product" in one.kind and (row := product(one, alone))]
    return DeviceFit(before, efficiency, seen, about, products, kernels)


def product(one: Measured, costs: Costs) -> list | None:
    """The row of a product; none where the compiler made another one of it."""
    program = hlo.parse(one.text)
    places = [(where, op) for where in program.computations.values() for op in where.ops]
    ((*sizes, dtype, layout),) = {gemm_sizes(*at) for at in places if is_gemm(at[1])}
    if dtype not in one.kind or not one.name.endswith(layout):
        return None
    t = simulate.simulate(program, costs)
    alone = costs.gemm(*sizes, dtype) * t.flops / (2 * math.prod(sizes))
    return [dtype, layout, *sizes, ratio(one, t, t.compute["gemm"], alone)]


def kernel(one: Measured, costs: Costs) -> list:
    """The row of kernels of one kind."""
    t = simulate.simulate(hlo.parse(one.text), costs, record=True)
    priced = t.compute["memory"] + t.compute["copy"]
    return [one.name.split()[-1], max(x.bytes for x in t.events), ratio(one, t, priced, priced)]


def ratio(one: Measured, t: Timeline, priced: float, modelled: float) -> float:
    """What of a program took longer than modelled, when all that is not priced in it took that."""
    left = max(one.seconds - (t.seconds - priced), 0.1 * one.seconds)
    return float(f"{left / modelled:.3g}")


def case(one: Measured, gpu: Gpu) -> Observation:
    """A program that ran, and what is predicted of it."""
    program, degrees = hlo.parse(one.text), dict.fromkeys(AXES, 1) | one.degrees
    predict = lambda efficiency: simulate.simulate(program, Costs(gpu, degrees, efficiency)).seconds
    return Observation(f"{one.kind}, {one.name}", one.seconds, predict)


def made(measured: Sequence[Measured], device: str, cores: int, memory: int, node: int) -> Gpu:
    """The record of a device that gpus.toml does not have: what its links, memory and products did
    at their best are its peaks; where there is no link, a link stays H100's.

    Args:
      device: as its driver names it.
      cores: that share the tiles of a product.
      memory: bytes.
      node: devices of one node.
    """
    like = GPU_TYPES["h100"]
    degrees = dict.fromkeys(AXES, 1)

    def most(kind: str, amount: Callable[[Timeline], float], otherwise: float) -> float:
        """The highest rate at which programs of a kind did so much of something, per second."""
        ran = [one for one in measured if one.kind == kind]
        play = lambda one: simulate.simulate(
            hlo.parse(one.text), Costs(like, degrees | one.degrees)
        )
        return max((amount(play(one)) / one.seconds for one in ran), default=otherwise)

    tera = lambda t: t.flops / 1e12
    moved = lambda t: t.compute["memory"] * like.memory_gbps * like.efficiency.memory
    # An all-reduce sends everything twice.
    sent = lambda t: 2 * sum(x.bytes for x in t.traffic.values()) / 1e9
    # Where there is fp32 the compiler makes bf16 of it, and costs.py calls it half as fast.
    bf16 = max(most("bf16 product", tera, 0), 2 * most("f32 product", tera, 0))
    gbps = most("copy", moved, 0)
    chip = dataclasses.replace(
        like.chip,
        name=device,
        cores=cores,
        memory_bytes=memory,
        memory_bytes_per_s=round(gbps * 1e9),
    )
    return dataclasses.replace(
        like,
        bf16_tflops=bf16,
        products=(),
        kernels=(),
        fp8_tflops=most("f8e4m3fn product", tera, bf16),
        memory_gb=memory / 1e9,
        memory_gbps=gbps,
        nvlink_gbps=2 * most("NVLink", sent, like.nvlink_gbps / 2),
        nvlink_gpus=node,
        gpus_per_node=node,
        network_gbps=most("network", sent, like.network_gbps),
        chip=chip,
    )


def table(found: DeviceFit) -> str:
    """What was measured beside what is predicted of it, then the constants."""
    every = {case.name: case for cases in found.cases.values() for case in cases}.values()
    wide = max(len(case.name) for case in every)
    lines = [f"{'program':<{wide}} {'measured':>14} {'predicted':>10} {'calibrated':>11}"]
    for case in every:
        errors = (f"{case.error(p):+.1%}" for p in (found.before, found.efficiency))
        text = "{:>10} {:>11}".format(*errors)
        lines.append(f"{case.name:<{wide}} {case.seconds * 1e6:11,.1f} us {text}")
    lines += ["", f"{'constant':<20} {'now':>10} {'measured':>10}   median error, over programs"]
    for name in found.names:
        before, after = (getattr(p, name) for p in (found.before, found.efficiency))
        errors = (fit.median_error(found.cases[name], p) for p in (found.before, found.efficiency))
        text = "{:.1%} -> {:.1%}".format(*errors)
        count = len(found.cases[name])
        lines.append(f"{name:<20} {before:>10.4g} {after:>10.4g}   {text}, {count}")
    if rest := [name for name, cases in found.cases.items() if cases and name not in found.names]:
        lines.append(f"as they were, because nothing here shows them: {', '.join(rest)}")
    return "\n".join(lines)
