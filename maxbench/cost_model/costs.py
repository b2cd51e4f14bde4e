"""Seconds of one HLO op on a GPU, from its shapes, bytes and links.

Inputs are the GPU's datasheet and the efficiency of real programs (hardware/gpus.toml); nothing is
measured at run time.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from maxbench.config.number_formats import FORMATS
from maxbench.cost_model import hlo
from maxbench.hardware.gpus import Efficiency, Gpu

PEAKS = {dtype: f.peak for f in FORMATS.values() for dtype in f.reads}  # by operand dtype
TILES = ((128, 256), (256, 128), (128, 128), (64, 256))  # output tiles of cuBLAS, one per core
BLOCK_GEMM, TE_GEMM = "__cudnn$blockScaledDot", "te_gemm_v2_ffi"
TE_GROUPED = ("te_grouped_gemm_ffi", "te_grouped_gemm_v2_ffi")
GEMM = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8", BLOCK_GEMM, TE_GEMM,
        *TE_GROUPED)  # fmt: skip
# cuDNN's attention, called by XLA and by Transformer Engine.
CUDNN_ATTENTION, TE_ATTENTION = "__cudnn$fmha", ("te_fused_attn_forward", "te_fused_attn_backward")
# Custom calls that move bytes alone: sorting, top-k, Transformer Engine's quantization. The work of
# others, and of UNPRICED opcodes, is not in their shapes: their bytes are a lower bound.
MOVES_BYTES = ("AllocateBuffer", "__cub$", "__gpu$TopK", "TopK", "te_dbias_quantize", "te_act_lu",
               "te_dact_dbias_quantize", "te_quantize", "te_dequantize", "te_grouped_quantize",
               "te_norm", "te_scaled", "te_rht_amax")  # fmt: skip
UNPRICED = frozenset({"convolution", "fft", "cholesky", "triangular-solve", "ragged-dot"})
READS_PART = frozenset({"dynamic-slice", "slice", "gather"})
UPDATES = {
    "dynamic-update-slice": 1,
    "scatter": 2,
}  # in-place op -> operand with new values
# NCCL's protocols LL, LL128 and Simple, as its tuner models them (nccl: src/graph/tuning.cc):
# fraction of the link rate; base latency and latency of a step within a node, as fractions of
# Efficiency.nvlink_us; latency of a step between nodes, as a fraction of network_us.
PROTOCOLS = ((0.5, 1.9, 0.18, 0.19), (0.92, 4.1, 0.56, 0.29), (1.0, 2.5, 1.0, 1.0))
TREE = 0.92  # tree bandwidth over ring bandwidth, from the same file
NEIGHBORS = 2  # measured rows that one look-up interpolates


@dataclasses.dataclass(frozen=True)
class Link:
    """Topology of one replica group of a collective."""

    axes: str  # mesh axes of the group, 'fsdp' or 'dp+cp'; unknown: '2 x 8 GPUs' of two domains
    members: int
    domains: int  # NVLink domains that the group spans
    inside: int  # members of the group within one domain
    pods: int = 1  # pods of the network that the group spans (networks.Network)

    @property
    def name(self) -> str:
        return "NVLink" if self.domains == 1 else "network"


class Table:
    """Ratios of measured to modelled time, by kind, layout and sizes. Empty: every ratio is 1.

    Args:
      rows: (kind, layout, *sizes, ratio).
    """

    def __init__(self, rows: Iterable[Sequence]):
        logs = ((kind, layout, np.log(numbers)) for kind, layout, *numbers in rows)
        self.rows = [(kind, layout, x[:-1], float(x[-1])) for kind, layout, x in logs]

    def ratio(self, kind: str, layout: str, *sizes: float) -> float:
        """Interpolated ratio: mean of the nearest rows' logarithms, weighted by 1 / distance².

        Distance is Euclidean in the logarithms of the sizes; another layout adds 1 to its square.
        """
        target, distances = np.log(sizes), []
        for row_kind, row_layout, row_sizes, log_ratio in self.rows:
            if row_kind == kind:
                squared = float(np.sum((row_sizes - target) ** 2)) + (row_layout != layout)
                distances.append((squared + 1e-9, log_ratio))
        nearest = sorted(distances)[:NEIGHBORS]
        total = sum(1 / squared for squared, _ in nearest) or 1.0
        return math.exp(sum(log_ratio / squared for squared, log_ratio in nearest) / total)


class Costs:
    """Costs of ops on one GPU type and mesh.

    Args:
      gpu: the GPU type.
      degrees: mesh axis -> GPUs along it, the slowest axis first; {"": n} if the axes of n GPUs
        are not known.
      efficiency: replaces the GPU type's own constants.
      order: device id in the program -> place of its GPU in the order of nodes; (): the same.
    """

    def __init__(
        self,
        gpu: Gpu,
        degrees: Mapping[str, int],
        efficiency: Efficiency | None = None,
        order: Sequence[int] = (),
    ):
        self.gpu = gpu
        self.chip, self.efficiency = gpu.chip, efficiency or gpu.efficiency
        self.axes, self.degrees = [*degrees], [*degrees.values()]
        self.gpus = math.prod(self.degrees)
        self.order = np.array(order) if order else None
        self.domain = self.gpu.nvlink_domain(self.gpus)

    @functools.cached_property
    def products(self) -> Table:
        """Measured GEMMs."""
        return Table(self.gpu.products)

    @functools.cached_property
    def kernels(self) -> Table:
        """Measured memory-bound kernels."""
        return Table((kind, "", *row) for kind, *row in self.gpu.kernels)

    # Compute.

    def memory(self, size: float) -> float:
        """Seconds to move `size` bytes, reads and writes together."""
        return size / (self.gpu.memory_gbytes_per_s * 1e9 * self.efficiency.memory)

    def offload(self, size: float) -> float:
        """Seconds to copy `size` bytes to or from host memory. The link's efficiency is taken to
        be that of GPU memory."""
        return size / (self.gpu.host_gbytes_per_s * 1e9 * self.efficiency.memory)

    def kernel(self, size: float, kind: str) -> float:
        """Seconds of a kernel that moves `size` bytes: memory(), scaled by the measured ratio of
        its kind (kernel_kind), if any."""
        return self.memory(size) * self.kernels.ratio(kind, "", max(size, 1))

    def rate(self, peak: str) -> float:
        """Achieved FLOP/s of a large GEMM, for the peak 'bf16', 'fp8' or 'fp4'."""
        return self.gpu.peak_tflops(peak) * getattr(self.efficiency, f"gemm_{peak}") * 1e12

    def gemm(
        self, m: int, n: int, k: int, batch: int = 1, dtype: str = "bf16", layout: str = "nn"
    ) -> float:
        """Seconds of a GEMM on the tensor cores alone.

        The output is split into tiles, one per core and wave. The last wave is rarely full (wave
        quantization), and each wave has a prologue and an epilogue around its loop over k
        (Efficiency.wave_us). The fastest of a few common tile sizes counts.

        Args:
          dtype: HLO dtype of the operands.
          layout: of the operands, as in gemm_sizes().
        """
        rate = self.rate(PEAKS.get(dtype, "bf16")) / self.chip.cores
        rate /= 2 if dtype == "f32" else 1  # as TF32

        def seconds(a, b):
            waves = math.ceil(math.ceil(m / a) * math.ceil(n / b) * batch / self.chip.cores)
            return waves * (2 * a * b * k / rate + self.efficiency.wave_us * 1e-6)

        tiles = TILES if self.chip.cores > 1 else ((m, n),)  # a CPU device has no waves
        modelled = min(seconds(*tile) for tile in tiles)
        return modelled * self.products.ratio(dtype, layout, m, n, k, batch)

    def attention(self, flops: float, backward: bool) -> float:
        """Seconds of flash attention; `flops` are those that the mask leaves."""
        p = self.efficiency
        fraction = p.attention_backward if backward else p.attention_forward
        return flops / (self.gpu.bf16_tflops * 1e12 * fraction)

    # Communication.

    def link_of(self, groups: np.ndarray) -> Link:
        """The link of replica groups [groups, members], from the first group. Device ids count
        along the mesh in row-major order."""
        group = groups[0] if groups.size else np.arange(self.gpus)
        at = np.array(np.unravel_index(group, self.degrees))
        axes = [axis for axis, row in zip(self.axes, at, strict=True) if len(set(row.tolist())) > 1]
        return _link(axes, self._places(group), self.domain, self.gpu.pod_gpus)

    def axis_link(self, *axes: str) -> Link:
        """The link of the devices along mesh axes."""
        sizes = tuple(zip(self.axes, self.degrees, strict=True))
        if self.order is None:  # a search asks for the same ones of thousands of layouts
            return _axis_link(sizes, axes, self.domain, self.gpu.pod_gpus)
        split = [axis for axis, n in sizes if axis in axes and n > 1]
        places = self._places(_along(sizes, axes))
        return _link(split, places, self.domain, self.gpu.pod_gpus)

    def _places(self, devices: np.ndarray) -> np.ndarray:
        return devices if self.order is None else self.order[devices]

    def permute_link(self, pairs: np.ndarray) -> Link:
        """The link of a permute's (source, target) pairs: a pair between pods, else between NVLink
        domains, if any."""
        places = self._places(pairs)
        apart = lambda gpus: places[:, 0] // gpus != places[:, 1] // gpus
        crossed = apart(self.domain).astype(int) + apart(self.gpu.pod_gpus or self.gpus)
        return self.link_of(pairs[[np.argmax(crossed)]])

    def collective(self, kind: str, link: Link, sent: int, received: int) -> float:
        """Seconds of a collective alone on its links.

        NCCL's algorithms: the faster of ring and tree (all-reduce only), with the fastest protocol.
        A ring moves (n - 1) / n of the data through every GPU. Between domains each member uses its
        own network link, so the rate is the lower of NVLink and the sum of the members' links.

        Args:
          kind: a value of hlo.COLLECTIVES.
          sent, received: bytes of its operands and results on one GPU.
        """
        n, p = link.members, self.efficiency
        if n == 1:
            return self.memory(sent + received)
        nvlink = self.gpu.nvlink_gbytes_per_s / 2 * 1e9 * p.nvlink
        network = self.gpu.network_gbytes_per_s * 1e9 * p.network / self._between_pods(kind, link)
        rate = nvlink if link.domains == 1 else min(nvlink, network * link.inside)
        if kind in ("permute", "all-to-all"):  # point-to-point messages
            latency = PROTOCOLS[-1][1] * p.nvlink_us
            latency = 1e-6 * (latency + (p.nvlink_us if link.domains == 1 else p.network_us))
            if kind == "permute":
                return sent / (nvlink if link.domains == 1 else network) + latency
            outside, inside = (n - link.inside) / n * sent, (link.inside - 1) / n * sent
            return max(outside / network, inside / nvlink) + latency
        size, times = max(sent, received), 2 if kind == "all-reduce" else 1
        candidates = []
        for share, base, near, far in PROTOCOLS:
            base, near, far = base * p.nvlink_us, near * p.nvlink_us, far * p.network_us
            ring = (n - link.domains) * near + (link.domains - 1) * far
            tree = (link.inside - 1) * near + math.log2(link.domains) * far
            algorithms = (size * (n - 1) / n, ring), (size / TREE, tree)
            for data, steps in algorithms[:times]:  # only an all-reduce has a tree
                candidates.append((base + times * steps) * 1e-6 + times * data / (rate * share))
        return min(candidates)

    def _between_pods(self, kind: str, link: Link) -> float:
        """Factor by which the links between pods slow a collective down.

        A ring crosses from pod to pod once per pod, so that only the last node of each pod sends
        through those links; an all-to-all sends to all pods alike.
        """
        if link.pods == 1:
            return 1.0
        crossing = link.pods / link.domains
        if kind == "permute":
            crossing = 1.0
        elif kind == "all-to-all":
            crossing = (1 - 1 / link.pods) / (1 - 1 / link.domains)
        return max(1.0, self.gpu.oversubscription * crossing)

    def straggler_s(self, seconds: float, times: int, n: int) -> float:
        """Seconds lost when n GPUs synchronize `times` times, evenly spaced, in `seconds`.

        Each time they wait for the slowest: the maximum of n independent normal draws (Blom's
        approximation). The standard deviation scales with the square root of the interval.
        """
        largest = statistics.NormalDist().inv_cdf((n - 0.375) / (n + 0.25))
        return times * self.efficiency.step_jitter * math.sqrt(seconds / times) * largest

    @property
    def launch(self) -> float:
        """Seconds between two kernels."""
        return self.efficiency.launch_us * 1e-6


def _link(axes: Sequence[str], places: np.ndarray, domain: int, pod: int) -> Link:
    """The link of GPUs at places in the order of nodes.

    Args:
      axes: mesh axes along which they differ.
      domain, pod: GPUs of an NVLink domain and of a pod; 0 = no pods.
    """
    domains, inside = np.unique(places // domain, return_counts=True)
    pods = len(np.unique(places // pod)) if pod else 1
    label = "+".join(axes) or f"{len(domains)} x {inside.min()} GPUs"
    return Link(label, len(places), len(domains), int(inside.min()), pods)


def _along(sizes: Sequence[tuple[str, int]], axes: Sequence[str]) -> np.ndarray:
    """Device ids along some axes of a mesh, at place 0 of the others, in row-major order."""
    ids, stride = np.zeros(1, int), 1
    for axis, n in reversed(sizes):
        if axis in axes:
            ids = (np.arange(n)[:, None] * stride + ids).ravel()
        stride *= n
    return ids


@functools.lru_cache(1 << 14)
def _axis_link(
    sizes: tuple[tuple[str, int], ...], axes: tuple[str, ...], domain: int, pod: int
) -> Link:
    """Costs.axis_link() of devices in the order of nodes."""
    split = [axis for axis, n in sizes if axis in axes and n > 1]
    return _link(split, _along(sizes, axes), domain, pod)


def gemm_sizes(where: hlo.Computation, op: hlo.Op) -> tuple[int, int, int, int, str, str]:
    """m, n, k, batch, dtype and layout of a GEMM, from its operands and dimension numbers.

    Layout is one letter per operand, 't' where it is transposed: lhs [k, m], rhs [n, k]."""
    if op.target in TE_GROUPED:
        return _grouped_sizes(where, op)
    lhs, *others = (o.shape for o in where.operands(op))
    rhs = others[op.target == TE_GEMM]  # operand 1 is a scale
    if op.target == BLOCK_GEMM:
        return lhs.dims[1], rhs.dims[1], lhs.dims[2], lhs.dims[0], lhs.dtype, "nt"
    if op.target == TE_GEMM:  # of the dims before a boundary, and of those from it on
        transposed = [f"{side}_transposed = true" in op.attrs for side in ("lhs", "rhs")]
        boundary = op.integer("lhs_axis_boundary", 1)
        k, b = math.prod(lhs.dims[:boundary] if transposed[0] else lhs.dims[boundary:]), 1
    else:
        contract, batch = op.dims("lhs_contracting_dimensions"), op.dims("lhs_batch_dimensions")
        k = math.prod(lhs.dims[d] for d in contract)
        b = math.prod(lhs.dims[d] for d in batch)
        last = len(rhs.dims) - 1 in op.dims("rhs_contracting_dimensions")
        transposed = [len(lhs.dims) - 1 not in contract, last]
    layout = "".join("nt"[t] for t in transposed)
    return lhs.elements // (k * b), rhs.elements // (k * b), k, b, lhs.dtype, layout


def _grouped_sizes(where: hlo.Computation, op: hlo.Op) -> tuple[int, int, int, int, str, str]:
    """gemm_sizes() of Transformer Engine's grouped GEMM, whose groups are taken to be even.

    The rows of lhs are in groups. Its gradient of the weights contracts them: lhs is transposed.
    """
    lhs, *others = (o.shape for o in where.operands(op))
    groups = max([x.elements for x in others if x.dtype in ("s32", "s64")], default=0) or 1
    rows, columns = (op.integer(f"lhs_{side}_size", 1) for side in ("left", "right"))
    transposed = [f"{side}_is_trans = true" in op.attrs for side in ("lhs", "rhs")]
    n = op.integer("rhs_right_size", 1)
    if transposed[1]:
        n = op.integer("rhs_left_size", 1) // groups
    rows = max(1, rows // groups)
    m, k = (columns, rows) if transposed[0] else (rows, columns)
    return m, n, k, groups, lhs.dtype, "".join("nt"[t] for t in transposed)


def kernel_kind(ops: Iterable[hlo.Op]) -> str:
    """Kind of a memory-bound kernel, by the slowest op in it: plain, transposed or concatenated."""
    opcodes = {op.opcode for op in ops}
    if opcodes & {"concatenate", "pad"}:
        return "concatenated"
    return "transposed" if "transpose" in opcodes else "plain"


def is_gemm(op: hlo.Op) -> bool:
    return op.opcode == "dot" or op.target in GEMM


def is_attention(op: hlo.Op) -> bool:
    return op.target.startswith((CUDNN_ATTENTION, *TE_ATTENTION))


def has_price(op: hlo.Op) -> bool:
    """Whether the work of a kernel other than a GEMM follows from its shapes."""
    if op.opcode == "custom-call":
        return is_attention(op) or op.target.startswith(MOVES_BYTES) or is_gemm(op)
    return op.opcode not in UNPRICED


def bytes_moved(program: hlo.Program, where: hlo.Computation, op: hlo.Op) -> int:
    """Bytes that a kernel reads and writes.

    Each operand is read once. A slice reads only its result; an in-place update writes only the
    new values.
    """
    if op.base == "fusion":
        inside = program.called(op)
        reads = sum(_bytes_read(inside, p) for p in inside.ops if p.opcode == "parameter")
        root = inside.root
        roots = inside.operands(root) if root.opcode == "tuple" else [root]
        return reads + sum(_bytes_written(inside, root) for root in roots)
    shapes = [operand.shape for operand in where.operands(op)]
    if op.base == "copy":
        return 2 * sum(map(hlo.size, shapes))
    if op.opcode in READS_PART:
        return 2 * hlo.size(op.shape)
    if op.opcode == "dynamic-update-slice":
        return 2 * hlo.size(shapes[1])
    # A GEMM's second result is its workspace.
    result = hlo.leaves(op.shape)[0] if op.target in GEMM else op.shape
    return sum(map(hlo.size, shapes)) + hlo.size(result)


def _readers(inside: hlo.Computation, op: hlo.Op) -> Iterator[tuple[hlo.Op, hlo.Op]]:
    """(op or a bitcast of it, an op that reads it)."""
    for user in inside.users[op.name]:
        if user.opcode == "bitcast":
            yield from _readers(inside, user)
        else:
            yield op, user


def _bytes_read(inside: hlo.Computation, parameter: hlo.Op) -> int:
    """Bytes of a fusion's parameter that it reads."""
    part = 0
    for source, user in _readers(inside, parameter):
        first = user.operands[0] == source.name
        if user.opcode in READS_PART and first:
            part += hlo.size(user.shape)
        elif user.opcode in UPDATES and first:  # in place; a scatter adds to what it reads
            part += (user.opcode == "scatter") * _bytes_written(inside, user)
        elif user.opcode != "tuple":
            return hlo.size(parameter.shape)
    return min(part, hlo.size(parameter.shape))


def _bytes_written(inside: hlo.Computation, root: hlo.Op) -> int:
    """Bytes that a fusion writes for one of its results."""
    while root.opcode == "bitcast":
        root = inside.by_name[root.operands[0]]
    if root.opcode == "parameter":
        return 0
    if root.opcode in UPDATES:
        return hlo.size(inside.operands(root)[UPDATES[root.opcode]].shape)
    return hlo.size(root.shape)
