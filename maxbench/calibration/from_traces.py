"""Rates and constants from the kernels of profiles, with the prices of the cost model.

A kernel with a known shape is priced as in a plan. What ran faster than the datasheet allows is
refused: its shape is not that of its work.
"""

import collections
import dataclasses
import math
import re
import statistics
from collections.abc import Iterable, Sequence

from maxbench.calibration import fit
from maxbench.config import options
from maxbench.config.errors import UserError
from maxbench.cost_model.costs import Costs
from maxbench.hardware.gpus import Gpu, GpuTypes, Kernels, Products
from maxbench.terminal import console
from maxbench.traces import report
from maxbench.traces.events import ATTENTION, COMMUNICATION, COPY, GEMM, KERNEL, Event

GEMM_SHAPE = re.compile(r"(\w+) (\d+)x(\d+)x(\d+)(?: x(\d+))?$")  # as traces.events.Work.shape
BACKWARD = re.compile("(?i)bwd|bprop|backward|dgrad|wgrad")  # in names of attention kernels
NOT_MEMORY = re.compile(
    "(?i)htod|dtoh|ptop|memset|h2d|d2h|p2p"
)  # copies over links, and writes alone
LEAST_BYTES = 1 << 20  # of copies and other kernels: the launch decides on smaller ones
LARGE_FLOPS, LARGE_BYTES = 1e10, 1 << 26  # of a run, from which on it determines a constant
SHOWN = 40  # rows on a terminal
SPREAD = 0.5  # (p90 - p10) / median from which a group has no ratio: something else ran too


@dataclasses.dataclass(frozen=True)
class Rate:
    """Runs of one kind of work with one shape, or with bytes of one power of two.

    Attributes:
      shape: of a GEMM; bytes of others; with the group's size of a collective.
      runs: of the whole work, which several kernels may share.
      seconds: median of a run; of a collective the tenth percentile, as the rest waits for others.
      spread: (p90 - p10) / median.
      flops, bytes: of a run.
      share: of the datasheet's peak or memory bandwidth; 0 of a collective.
      planned_s: by the cost model; 0 without a price.
    """

    kind: str
    shape: str
    runs: float
    seconds: float
    spread: float
    flops: float
    bytes: float
    share: float
    planned_s: float

    @property
    def ratio(self) -> float:
        """Planned over measured seconds; 0 without a price."""
        return self.planned_s / self.seconds


@dataclasses.dataclass(frozen=True)
class TraceRates:
    """Rates of a GPU type's kernels, and the constants that they determine.

    Attributes:
      refused: reason -> runs.
      constants: of Efficiency, each the median of the large runs of its kind.
      implausible: constants that were not taken, with their values.
      products: rows of the GPU type's table of GEMMs (hardware/gpus.py).
    """

    gpu_type: str
    rates: list[Rate]
    refused: dict[str, int]
    constants: dict[str, float]
    implausible: dict[str, float]
    products: list[list]


def rates_of(asked: options.TraceOptions, gpu_types: GpuTypes) -> TraceRates:
    """Rates of the kernels of the profiles at the paths.

    Raises:
      UserError: no profile can be read, its GPU is of no known type, or no kernel has a shape.
    """
    each = [dataclasses.replace(asked, paths=[path]) for path in asked.paths]
    found = [report.trace(one, gpu_types) for one in each]  # profiles of several runs
    known = {trace.gpu_type: trace.gpu for trace in found if trace.gpu}
    if len(known) != 1 or not all(trace.gpu for trace in found):
        devices = {rank.trace.device or "no name" for trace in found for rank in trace.ranks}
        raise UserError(
            f"the profiles' GPUs ({', '.join(sorted(devices))}) are not of one known type: give "
            "profiles of one type, or --gpu_type"
        )
    ((gpu_type, gpu),) = known.items()
    # Earlier calibrations must not influence this one.
    gpu = dataclasses.replace(gpu, products=Products(()), kernels=Kernels(()))
    costs, refused = Costs(gpu, {"": 1}), collections.Counter[str]()
    groups: dict[tuple[str, str], list[Event]] = collections.defaultdict(list)
    for event in (_moved(e) for trace in found for rank in trace.ranks for e in rank.trace.events):
        if why := _refused(event, gpu):
            refused[why] += 1
        elif key := _key(event):
            groups[key].append(event)
    rates = [_rate(*key, runs, costs) for key, runs in groups.items()]
    if not rates:
        raise UserError(
            "no kernel of the profile has a shape: record PyTorch's with record_shapes=True, and "
            "give --hlo for a program of JAX"
        )
    rates.sort(key=lambda r: -r.runs * r.seconds)
    constants = {name: statistics.median(x) for name, x in _constants(rates).items()}
    implausible = {n: x for n, x in constants.items() if not fit.is_plausible(n, x)}
    kept = {n: x for n, x in constants.items() if n not in implausible}
    products = [*_products(rates)]
    return TraceRates(gpu_type, rates, dict(refused), kept, implausible, products)


def _moved(event: Event) -> Event:
    """The event with twice the bytes of a copy: a profile notes its size, read and written."""
    if event.kind != COPY or event.op:  # an operation's bytes are both
        return event
    return event._replace(work=event.work._replace(bytes=2 * event.work.bytes))


def _refused(event: Event, gpu: Gpu) -> str:
    """Why a run says nothing of the GPU, or ''."""
    seconds, work = (event.end - event.start) / 1e9, event.work
    if not (work.flops or work.bytes):
        return ""
    if seconds <= 0:
        return "no duration"
    if work.peak and work.flops > gpu.peak_tflops(work.peak) * 1e12 * seconds:
        return "faster than the peak"
    streams = event.kind in (KERNEL, COPY) and work.bytes > gpu.chip.l2_bytes
    if streams and work.bytes > gpu.memory_gbytes_per_s * 1e9 * seconds:
        return "faster than the memory"
    return ""


def _key(event: Event) -> tuple[str, str] | None:
    """Kind and shape of a run; None where its work is not known."""
    work = event.work
    if event.kind == GEMM:
        return (GEMM, work.shape) if GEMM_SHAPE.match(work.shape) else None
    if event.kind == ATTENTION:
        passes = "backward" if BACKWARD.search(event.name) else "forward"
        return (f"{ATTENTION} {passes}", f"{work.flops:.3g} FLOP") if work.flops else None
    if event.kind == COMMUNICATION:
        return (COMMUNICATION, work.shape) if work.bytes else None
    if work.bytes < LEAST_BYTES or NOT_MEMORY.search(event.name):
        return None
    return event.kind, f"{2 ** math.floor(math.log2(work.bytes)):,} bytes"


def _rate(kind: str, shape: str, runs: Sequence[Event], costs: Costs) -> Rate:
    seconds = [(event.end - event.start) / 1e9 for event in runs]
    flops, moved = (sum(getattr(e.work, name) for e in runs) for name in ("flops", "bytes"))
    count, gpu, peak = float(len(runs)), costs.gpu, runs[0].work.peak
    if kind == GEMM:
        dtype, *sizes, batch = GEMM_SHAPE.match(shape).groups()  # type: ignore[union-attr]
        m, n, k, batch = (int(size or 1) for size in (*sizes, batch))
        if (whole := flops / (2.0 * m * n * k * batch)) < 0.99 * count:  # kernels share each
            count, seconds = whole, [sum(seconds) / whole]
        planned = max(costs.gemm(m, n, k, batch, dtype), costs.memory(moved / count))
    elif kind.startswith(ATTENTION):
        planned = costs.attention(flops / count, kind.endswith("backward"))
    else:
        planned = 0.0 if kind == COMMUNICATION else costs.memory(moved / count)
    middle, tenths = statistics.median(seconds), [seconds[0]]
    if len(seconds) > 1:
        tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    spread = (tenths[-1] - tenths[0]) / middle
    middle = tenths[0] if kind == COMMUNICATION else middle
    share = moved / count / middle / 1e9 / gpu.memory_gbytes_per_s
    if flops:
        share = flops / count / middle / 1e12 / gpu.peak_tflops(peak or "bf16")
    share = 0.0 if kind == COMMUNICATION or (flops and not peak) else share
    return Rate(kind, shape, count, middle, spread, flops / count, moved / count, share, planned)


def _constants(rates: Iterable[Rate]) -> dict[str, list[float]]:
    """Constant of Efficiency -> the shares of large runs. GEMMs are in `products`."""
    found: dict[str, list[float]] = collections.defaultdict(list)
    for r in rates:
        if r.spread > SPREAD:
            continue
        if r.kind.startswith(ATTENTION) and r.flops > LARGE_FLOPS:
            found[r.kind.replace(" ", "_")].append(r.share)
        elif r.kind in (KERNEL, COPY) and r.bytes > LARGE_BYTES:
            found["memory"].append(r.share)
    return found


def _products(rates: Iterable[Rate]) -> Iterable[list]:
    """Rows of Gpu.products; a profile does not name layouts, which are taken to be 'nn'."""
    for r in rates:
        if r.kind == GEMM and r.spread <= SPREAD:
            dtype, *sizes, batch = GEMM_SHAPE.match(r.shape).groups()  # type: ignore[union-attr]
            sizes = [int(size or 1) for size in (*sizes, batch)]
            yield [dtype, "nn", *sizes, float(f"{1 / r.ratio:.3g}")]


def table(result: TraceRates) -> str:
    """Rates with the prices of the cost model, then the constants."""
    rows = [
        [r.kind, r.shape, f"{r.runs:.0f}", f"{r.seconds * 1e6:,.1f}", f"{r.spread:.0%}", _text(r),
         *([f"{r.planned_s * 1e6:,.1f}", f"{r.ratio:.2f}"] if r.planned_s else [])]
        for r in result.rates[:SHOWN]
    ]  # fmt: skip
    if rest := result.rates[SHOWN:]:
        rows.append([f"{len(rest)} others", "", f"{sum(r.runs for r in rest):.0f}"])
    heads = ["kind", "shape", "runs", "us", "spread", "rate", "plan us", "plan / measured"]
    lines = [*console.table(heads, rows, text=(0, 1)), "", *errors(result.rates)]
    lines += [f"refused: {count} runs {why}" for why, count in result.refused.items()]
    lines += [f"{name}: {x:.3g} of the datasheet" for name, x in result.constants.items()]
    lines += [
        f"{name}: {x:.3g} was measured, plausible is {fit.PLAUSIBLE[name][0]:g} to "
        f"{fit.PLAUSIBLE[name][1]:g}: it is not taken"
        for name, x in result.implausible.items()
    ]
    return "\n".join(lines)


def errors(rates: Sequence[Rate]) -> list[str]:
    """Planned over measured by kind: of all seconds, and median and extremes of the shapes."""
    lines = []
    for kind in dict.fromkeys(r.kind for r in rates if r.planned_s):
        some = [r for r in rates if r.kind == kind]
        planned, measured = (
            sum(r.runs * getattr(r, name) for r in some) for name in ("planned_s", "seconds")
        )
        ratios = sorted(r.ratio for r in some)
        lines.append(
            f"{kind}: plan / measured {planned / measured:.2f} of all seconds; of {len(some)} "
            f"shapes {ratios[0]:.2f} to {ratios[-1]:.2f}, median {statistics.median(ratios):.2f}"
        )
    return lines


def _text(r: Rate) -> str:
    share = f", {r.share:.0%}" if r.share else ""
    if r.flops:
        return f"{r.flops / r.seconds / 1e12:.3g} TFLOP/s{share}"
    return f"{r.bytes / r.seconds / 1e9:.3g} GB/s{share}"
