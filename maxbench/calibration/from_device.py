"""Constants of a GPU type, fitted to microbenchmarks of its devices.

Each microbenchmark is predicted as a step is, and the constants are fitted to the predictions. The
result is a file for --hardware.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence

from maxbench.calibration import fit
from maxbench.calibration.fit import Observation
from maxbench.calibration.microbenchmarks import Measurement
from maxbench.config.run import AXES
from maxbench.cost_model import hlo, simulate
from maxbench.cost_model.costs import PEAKS, Costs, Table, gemm_sizes, is_gemm
from maxbench.cost_model.simulate import Timeline
from maxbench.hardware.gpus import GPU_TYPES, Efficiency, Gpu, Kernels, OptionalPeak, Products
from maxbench.terminal import console

# Constant -> kinds of microbenchmarks that it is fitted to. In order: each depends on those before.
KINDS_OF: Mapping[str, tuple[str, ...]] = types.MappingProxyType({
    "memory": ("copy",),
    "launch_us": ("launch",),
    "gemm_bf16": ("bf16 GEMM", "f32 GEMM"),
    "wave_us": ("bf16 GEMM", "f32 GEMM"),
    "gemm_fp8": ("f8e4m3fn GEMM",),
    "attention_forward": ("attention forward",),
    "attention_backward": ("attention backward",),
    "host_sync_us": ("host",),
    "nvlink_us": ("NVLink",),
    "nvlink": ("NVLink",),
    "network_us": ("network",),
    "network": ("network",),
    "contention": ("contention",),
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DeviceFit:
    """Fitted constants of a GPU type.

    Attributes:
      before: the constants before the fit.
      efficiency: the constants after it; only `names` were fitted.
      observations: constant -> its observations.
      products, kernels: rows of the GPU type's tables (hardware/gpus.py).
      implausible: constant -> the value that the microbenchmarks ask for, and that was not taken.
    """

    before: Efficiency
    efficiency: Efficiency
    names: list[str]
    observations: dict[str, list[Observation]]
    products: list[list]
    kernels: list[list]
    implausible: dict[str, float] = dataclasses.field(default_factory=dict)


def fit_device(measurements: Sequence[Measurement], gpu: Gpu, new: bool = False) -> DeviceFit:
    """Fits the constants of a GPU type.

    Args:
      new: whether gpus.toml lacks the type. Then latencies that were fitted to their lower limit
        are kept; a known type keeps its own.
    """
    observed = [(m.kind, observation(m, gpu)) for m in measurements]
    observations = {
        constant: [o for kind, o in observed if kind in kinds]
        for constant, kinds in KINDS_OF.items()
    }
    before = gpu.efficiency
    efficiency, fitted = fit.fit(observations, before)
    names = [name for name in fitted if new or not fit.is_unresolved(name, efficiency)]
    asked = {name: getattr(efficiency, name) for name in names}
    implausible = {} if new else {n: x for n, x in asked.items() if not fit.is_plausible(n, x)}
    names = [name for name in names if name not in implausible]
    for name in {*fitted} - {*names}:
        efficiency = fit.with_constant(efficiency, name, getattr(before, name))
    costs = Costs(gpu, dict.fromkeys(AXES, 1), efficiency)
    kernels = [kernel_row(m, costs) for m in measurements if m.kind == "kernel"]
    costs.kernels = Table((kind, "", *row) for kind, *row in kernels)
    gemms = [row for m in measurements if "GEMM" in m.kind and (row := gemm_row(m, costs))]
    return DeviceFit(before, efficiency, names, observations, gemms, kernels, implausible)


def gemm_row(m: Measurement, costs: Costs) -> list | None:
    """The row of a GEMM in Gpu.products; None if the compiler changed its dtype or layout, or left
    some of the repeats out, so that it is faster than the peak."""
    program = hlo.parse(m.text)
    ops = [(where, op) for where in program.computations.values() for op in where.ops]
    ((rows, columns, k, batch, dtype, layout),) = {
        gemm_sizes(where, op) for where, op in ops if is_gemm(op)
    }
    if dtype not in m.kind or not m.name.endswith(layout):
        return None
    t, sizes = simulate.simulate(program, costs), (rows, columns, k, batch)
    modelled = costs.gemm(*sizes, dtype) * t.flops / (2 * math.prod(sizes))
    if t.flops > 1.001e12 * costs.gpu.peak_tflops(PEAKS.get(dtype, "bf16")) * m.seconds:
        return None
    return [dtype, layout, *sizes, ratio(m, t, t.compute["gemm"], modelled)]


def kernel_row(m: Measurement, costs: Costs) -> list:
    """The row of memory-bound kernels of one kind in Gpu.kernels."""
    t = simulate.simulate(hlo.parse(m.text), costs, record=True)
    modelled = t.compute["memory"] + t.compute["copy"]
    size = max(event.bytes for event in t.events)
    return [m.name.split()[-1], size, ratio(m, t, modelled, modelled)]


def ratio(m: Measurement, t: Timeline, simulated: float, modelled: float) -> float:
    """Measured over modelled seconds of the ops in question.

    Args:
      t: the simulated program.
      simulated: seconds of these ops in it; all others are taken to be exact.
      modelled: their seconds without the tables.
    """
    rest = max(m.seconds - (t.seconds - simulated), 0.1 * m.seconds)
    return float(f"{rest / modelled:.3g}")


def observation(m: Measurement, gpu: Gpu) -> Observation:
    """A microbenchmark with its prediction."""
    program, degrees = hlo.parse(m.text), dict.fromkeys(AXES, 1) | m.degrees
    predict = lambda efficiency: simulate.simulate(program, Costs(gpu, degrees, efficiency)).seconds
    return Observation(f"{m.kind}, {m.name}", m.seconds, predict)


def new_gpu(
    measurements: Sequence[Measurement], device: str, cores: int, memory: int, node: int
) -> Gpu:
    """The record of a device that gpus.toml does not have.

    Its peaks are the best measured rates of GEMMs, memory and links; a link that the device lacks
    has H100's.

    Args:
      device: the driver's name.
      cores: that run the tiles of a GEMM.
      memory: bytes.
      node: devices per node.
    """
    like = GPU_TYPES["h100"]
    degrees = dict.fromkeys(AXES, 1)

    def best_rate(kind: str, amount: Callable[[Timeline], float], default: float) -> float:
        """The highest amount per second of the microbenchmarks of a kind."""
        simulated = lambda m: simulate.simulate(hlo.parse(m.text), Costs(like, degrees | m.degrees))
        rates = (amount(simulated(m)) / m.seconds for m in measurements if m.kind == kind)
        return max(rates, default=default)

    tflops = lambda t: t.flops / 1e12
    gigabytes = lambda t: t.compute["memory"] * like.memory_gbytes_per_s * like.efficiency.memory
    # An all-reduce sends its data twice.
    sent = lambda t: 2 * sum(x.bytes for x in t.traffic.values()) / 1e9
    # On a CPU the compiler widens bf16 to fp32, which costs.py models at half the bf16 rate.
    bf16 = max(best_rate("bf16 GEMM", tflops, 0), 2 * best_rate("f32 GEMM", tflops, 0))
    gbytes_per_s = best_rate("copy", gigabytes, 0)
    chip = dataclasses.replace(
        like.chip,
        name=device,
        cores=cores,
        memory_bytes=memory,
        memory_bytes_per_s=round(gbytes_per_s * 1e9),
    )
    return dataclasses.replace(
        like,
        bf16_tflops=bf16,
        products=Products(()),
        kernels=Kernels(()),
        fp8_tflops=OptionalPeak(best_rate("f8e4m3fn GEMM", tflops, bf16)),
        memory_gb=memory / 1e9,
        memory_gbytes_per_s=gbytes_per_s,
        nvlink_gbytes_per_s=2 * best_rate("NVLink", sent, like.nvlink_gbytes_per_s / 2),
        nvlink_gpus=node,
        gpus_per_node=node,
        network_gbytes_per_s=best_rate("network", sent, like.network_gbytes_per_s),
        chip=chip,
    )


def table(result: DeviceFit) -> str:
    """Measured and predicted times of the microbenchmarks, then the constants."""
    before_and_after = result.before, result.efficiency
    unique = {o.name: o for some in result.observations.values() for o in some}.values()
    changes = lambda o: [console.change(o.error(p)) for p in before_and_after]
    rows = [[o.name, f"{o.seconds * 1e6:,.1f} us", *changes(o)] for o in unique]
    programs = console.table(["program", "measured", "predicted", "calibrated"], rows)
    rows = []
    for name in result.names:
        before, after = (getattr(p, name) for p in before_and_after)
        some = result.observations[name]
        errors = " -> ".join(f"{fit.median_error(some, p):.1%}" for p in before_and_after)
        rows.append([name, f"{before:.4g}", f"{after:.4g}", f"{errors}, {len(some)}"])
    heads = ["constant", "now", "measured", "median error, programs"]
    lines = [*programs, "", *console.table(heads, rows, text=(0, 3))]
    lines += [
        f"{name}: {value:.4g} was measured, plausible is {fit.PLAUSIBLE[name][0]:g} to "
        f"{fit.PLAUSIBLE[name][1]:g}: it stays {getattr(result.before, name):.4g}"
        for name, value in result.implausible.items()
    ]
    unfitted = [n for n, some in result.observations.items() if some and n not in result.names]
    if unfitted:
        lines.append(f"unchanged, because no program depends on them: {', '.join(unfitted)}")
    return "\n".join(lines)
