"""What one op of a compiled program costs on a GPU: seconds from shapes, bytes and links.

Nothing here is measured at run time: the figures are the GPU's datasheet and what programs
reach of it (hardware/gpus.toml).
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from maxbench.config.number_formats import FORMATS
from maxbench.config.run import AXES
from maxbench.cost_model import hlo
from maxbench.hardware.gpus import Efficiency, Gpu

PEAKS = {dtype: f.peak for f in FORMATS.values() for dtype in f.reads}  # by a GEMM's operands
TILES = ((128, 256), (256, 128), (128, 128), (64, 256))  # of the output, one core each, in cuBLAS
BLOCK_GEMM, TE_GEMM = "__cudnn$blockScaledDot", "te_gemm_v2_ffi"
GEMM = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8", BLOCK_GEMM, TE_GEMM)
READS_PART = frozenset({"dynamic-slice", "slice", "gather"})
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # in place -> which operand is put there
# NCCL's protocols LL, LL128 and Simple, as its tuner prices them (nccl: src/graph/tuning.cc): share
# of the links' rate; latency before the first byte and of a step within a node, both as a share of
# Efficiency.nvlink_us, and of a step between nodes, of network_us.
PROTOCOLS = ((0.5, 1.9, 0.18, 0.19), (0.92, 4.1, 0.56, 0.29), (1.0, 2.5, 1.0, 1.0))
TREE = 0.92  # of a ring's rate, from the same place
NEAR = 2  # rows of a table of measurements that say what is between them


@dataclasses.dataclass(frozen=True)
class Link:
    """Where the devices of a collective sit."""

    axes: str  # mesh axes it runs over, 'fsdp' or 'dp+cp'
    members: int
    domains: int  # NVLink domains that one group touches
    inside: int  # members of one group within one domain

    @property
    def name(self) -> str:
        return "NVLink" if self.domains == 1 else "network"


class Table:
    """What was measured over what a model says of it, by sizes; empty, the model stands.

    Args:
      rows: kind, layout, sizes, and the ratio.
    """

    def __init__(self, rows: Iterable[Sequence]):
        logs = ((kind, layout, np.log(numbers)) for kind, layout, *numbers in rows)
        self.rows = [(kind, layout, x[:-1], float(x[-1])) for kind, layout, x in logs]

    def ratio(self, kind: str, layout: str, *sizes: float) -> float:
        """At other sizes: a mean of the nearest, in logarithms, each by its distance squared.
        Another layout is as far as sizes that differ by a factor of e."""
        at, near = np.log(sizes), []
        for other, turned, there, ratio in self.rows:
            if other == kind:
                away = float(np.sum((there - at) ** 2)) + (turned != layout)
                near.append((away + 1e-9, ratio))
        near = sorted(near)[:NEAR]
        total = sum(1 / away for away, _ in near) or 1.0
        return math.exp(sum(ratio / away for away, ratio in near) / total)


class Costs:
    """Prices of ops for one GPU type and layout.

    Args:
      degrees: mesh axis -> GPUs along it, for all of config.AXES.
      efficiency: in place of the GPU type's own constants.
    """

    def __init__(self, gpu: Gpu, degrees: dict[str, int], efficiency: Efficiency | None = None):
        self.gpu = gpu
        self.chip, self.efficiency = self.gpu.chip, efficiency or self.gpu.efficiency
        self.degrees = [degrees[axis] for axis in AXES]
        self.gpus = math.prod(self.degrees)
        self.domain = self.gpu.nvlink_domain(self.gpus)
        self.products = Table(self.gpu.products)
        self.kernels = Table((kind, "", *row) for kind, *row in self.gpu.kernels)

    # Compute.

    def memory(self, size: float) -> float:
        """Seconds to move `size` bytes, reads and writes together."""
        return size / (self.gpu.memory_gbps * 1e9 * self.efficiency.memory)

    def offload(self, size: float) -> float:
        """Seconds to move `size` bytes to the host's memory or from it; of that link programs reach
        what they do of the GPU's memory."""
        return size / (self.gpu.host_gbps * 1e9 * self.efficiency.memory)

    def kernel(self, size: float, kind: str) -> float:
        """Seconds of a kernel that moves `size` bytes: as memory(), or as its kind was measured."""
        return self.memory(size) * self.kernels.ratio(kind, "", max(size, 1))

    def rate(self, peak: str) -> float:
        """FLOP/s that a large matrix product reaches of a peak: 'bf16' or 'fp8'."""
        return self.gpu.peak_tflops(peak) * getattr(self.efficiency, f"gemm_{peak}") * 1e12

    def gemm(
        self, m: int, n: int, k: int, batch: int = 1, dtype: str = "bf16", layout: str = "nn"
    ) -> float:
        """Seconds of a matrix product on the tensor cores alone; dtype and layout: of its operands.

        The output is cut in tiles, one per core at a time: the last round is rarely full, and each
        fills its pipeline and writes its output before and after the loop over k. Of a few usual
        tiles the fastest counts.
        """
        rate = self.rate(PEAKS.get(dtype, "bf16")) / self.chip.cores
        rate /= 2 if dtype == "f32" else 1  # as TF32

        def seconds(a, b):
            rounds = math.ceil(math.ceil(m / a) * math.ceil(n / b) * batch / self.chip.cores)
            return rounds * (2 * a * b * k / rate + self.efficiency.wave_us * 1e-6)

        tiles = TILES if self.chip.cores > 1 else ((m, n),)  # a CPU's device has no rounds to fill
        modelled = min(seconds(*tile) for tile in tiles)
        return modelled * self.products.ratio(dtype, layout, m, n, k, batch)

    def attention(self, flops: float, backward: bool) -> float:
        """Seconds of flash attention, of the FLOPs that its mask leaves."""
        p = self.efficiency
        reach = p.attention_backward if backward else p.attention_forward
        return flops / (self.gpu.bf16_tflops * 1e12 * reach)

    # Communication.

    def link_of(self, groups: np.ndarray) -> Link:
        """Where groups of devices sit, from the first of them; numbers count along the mesh."""
        group = groups[0] if groups.size else np.arange(self.gpus)
        at = np.array(np.unravel_index(group, self.degrees))
        axes = [axis for axis, row in zip(AXES, at, strict=True) if len(set(row.tolist())) > 1]
        domains, inside = np.unique(group // self.domain, return_counts=True)
        return Link("+".join(axes), len(group), len(domains), int(inside.min()))

    def axis_link(self, *axes: str) -> Link:
        """Where the devices along mesh axes sit."""
        ids = np.arange(self.gpus).reshape(self.degrees)
        along = tuple(slice(None) if a in axes else 0 for a in AXES)
        return self.link_of(ids[along].reshape(1, -1))

    def permute_link(self, pairs: np.ndarray) -> Link:
        """Of a permute: the slowest of its messages decides."""
        cross = pairs[:, 0] // self.domain != pairs[:, 1] // self.domain
        return self.link_of(pairs[[np.argmax(cross)]])

    def collective(self, kind: str, link: Link, sent: int, received: int) -> float:
        """Seconds of a collective alone on its links.

        Args:
          kind: a value of hlo.COLLECTIVES.
          sent, received: bytes of its operands and results on one GPU.

        As NCCL does it: in a ring or, an all-reduce, in a tree, whichever is faster, with the
        protocol that is faster. A ring carries (n - 1) / n of the whole through every GPU; between
        domains each member brings its own network link, so the slower of NVLink and the members'
        links together decides.
        """
        n, p = link.members, self.efficiency
        if n == 1:
            return self.memory(sent + received)
        nvlink = self.gpu.nvlink_gbps / 2 * 1e9 * p.nvlink
        network = self.gpu.network_gbps * 1e9 * p.network
        rate = nvlink if link.domains == 1 else min(nvlink, network * link.inside)
        if kind in ("permute", "all-to-all"):  # messages from GPU to GPU
            latency = PROTOCOLS[-1][1] * p.nvlink_us
            latency = 1e-6 * (latency + (p.nvlink_us if link.domains == 1 else p.network_us))
            if kind == "permute":
                return sent / (nvlink if link.domains == 1 else network) + latency
            outside, inside = (n - link.inside) / n * sent, (link.inside - 1) / n * sent
            return max(outside / network, inside / nvlink) + latency
        size, times = max(sent, received), 2 if kind == "all-reduce" else 1
        found = []
        for share, base, near, far in PROTOCOLS:
            base, near, far = base * p.nvlink_us, near * p.nvlink_us, far * p.network_us
            ring = (n - link.domains) * near + (link.domains - 1) * far
            tree = (link.inside - 1) * near + math.log2(link.domains) * far
            ways = (size * (n - 1) / n, ring), (size / TREE, tree)
            for data, steps in ways[:times]:  # only an all-reduce can be a tree
                found.append((base + times * steps) * 1e-6 + times * data / (rate * share))
        return min(found)

    def straggler_s(self, seconds: float, times: int, n: int) -> float:
        """Seconds lost when n GPUs wait for each other so many times, evenly, in `seconds`.

        They wait for the slowest, the largest of n draws. Draws are independent, so of a short time
        the standard deviation is that of a second times the root.
        """
        largest = statistics.NormalDist().inv_cdf((n - 0.375) / (n + 0.25))  # Blom's, in deviations
        return times * self.efficiency.step_jitter * math.sqrt(seconds / times) * largest

    @property
    def launch(self) -> float:
        """Seconds between two kernels."""
        return self.efficiency.launch_us * 1e-6


def gemm_sizes(where: hlo.Computation, op: hlo.Op) -> tuple[int, int, int, int, str, str]:
    """m, n, k, batch, dtype and layout of a matrix product, from its operands and dimension
    numbers; layout 'nt': which operands are turned, lhs to [k, m] and rhs to [n, k]."""
    lhs, *others = (o.shape for o in where.operands(op))
    rhs = others[op.target == TE_GEMM]  # a scale stands between
    if op.target == BLOCK_GEMM:
        return lhs.dims[1], rhs.dims[1], lhs.dims[2], lhs.dims[0], lhs.dtype, "nt"
    if op.target == TE_GEMM:
        turned = [f"{side}_transposed = true" in op.attrs for side in ("lhs", "rhs")]
        k, b = lhs.dims[0 if turned[0] else 1], 1
    else:
        contract, batch = op.dims("lhs_contracting_dimensions"), op.dims("lhs_batch_dimensions")
        k = math.prod(lhs.dims[d] for d in contract)
        b = math.prod(lhs.dims[d] for d in batch)
        last = len(rhs.dims) - 1 in op.dims("rhs_contracting_dimensions")
        turned = [len(lhs.dims) - 1 not in contract, last]
    layout = "".join("nt"[t] for t in turned)
    return lhs.elements // (k * b), rhs.elements // (k * b), k, b, lhs.dtype, layout


def kernel_kind(ops: Iterable[hlo.Op]) -> str:
    """What makes a kernel slow, of the ops in it."""
    opcodes = {op.opcode for op in ops}
    if opcodes & {"concatenate", "pad"}:
        return "joined"
    return "turned" if "transpose" in opcodes else "plain"


def is_gemm(op: hlo.Op) -> bool:
    return op.opcode == "dot" or op.target in GEMM


def bytes_moved(program: hlo.Program, where: hlo.Computation, op: hlo.Op) -> int:
    """Bytes that a kernel reads and writes.

    Operands are read once. A slice reads its part only; an update in place writes its part and
    does not touch the rest.
    """
    if op.base == "fusion":
        inside = program.called(op)
        reads = sum(_read(inside, p) for p in inside.ops if p.opcode == "parameter")
        root = inside.root
        roots = inside.operands(root) if root.opcode == "tuple" else [root]
        return reads + sum(_written(inside, root) for root in roots)
    shapes = [operand.shape for operand in where.operands(op)]
    if op.base == "copy":
        return 2 * sum(map(hlo.size, shapes))
    if op.opcode in READS_PART:
        return 2 * hlo.size(op.shape)
    if op.opcode == "dynamic-update-slice":
        return 2 * hlo.size(shapes[1])
    # A GEMM's second result is its workspace.
    made = hlo.leaves(op.shape)[0] if op.target in GEMM else op.shape
    return sum(map(hlo.size, shapes)) + hlo.size(made)


def _through(inside: hlo.Computation, op: hlo.Op):
    """The ops that read op, seen through changes of name."""
    for user in inside.users[op.name]:
        if user.opcode == "bitcast":
            yield from ((source, u) for source, u in _through(inside, user))
        else:
            yield op, user


def _read(inside: hlo.Computation, parameter: hlo.Op) -> int:
    part = 0
    for source, user in _through(inside, parameter):
        first = user.operands[0] == source.name
        if user.opcode in READS_PART and first:
            part += hlo.size(user.shape)
        elif user.opcode in UPDATES and first:  # in place; a scatter adds to what it reads
            part += (user.opcode == "scatter") * _written(inside, user)
        elif user.opcode != "tuple":
            return hlo.size(parameter.shape)
    return min(part, hlo.size(parameter.shape))


def _written(inside: hlo.Computation, root: hlo.Op) -> int:
    while root.opcode == "bitcast":
        root = inside.by_name[root.operands[0]]
    if root.opcode == "parameter":
        return 0
    if root.opcode in UPDATES:
        return hlo.size(inside.operands(root)[UPDATES[root.opcode]].shape)
    return hlo.size(root.shape)
