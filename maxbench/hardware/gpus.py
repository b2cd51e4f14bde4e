"""GPUs as data: peaks, memory and links; what of it programs reach; what the compiler is told.

Units: TFLOP/s are dense (no sparsity), memory is what the vendor sells (GB, 1e9 bytes), bandwidths
are GB/s (1e9 bytes per second). NVLink counts both directions, the network one.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU type. `source` says where the figures come from."""

    bf16_tflops: float
    fp8_tflops: float
    memory_gb: float
    memory_gbps: float
    nvlink_gbps: float
    nvlink_gpus: int  # GPUs that reach each other over NVLink
    gpus_per_node: int
    network_gbps: float  # per GPU, one direction
    source: str

    def peak_tflops(self, dtype: str) -> float:
        """Dense peak in TFLOP/s for 'fp8' or 'bf16'; fp32 runs are held against bf16."""
        return self.fp8_tflops if dtype == "fp8" else self.bf16_tflops


_PEAKS = "peaks: NVIDIA's DGX Cloud recipes; rest: "
GPUS = {  # columns as the fields above
    "h100": Gpu(989, 1979, 80, 3350, 900, 8, 8, 50, _PEAKS + "H100 SXM datasheet"),
    "h200": Gpu(989, 1979, 141, 4800, 900, 8, 8, 50, "H200 SXM datasheet"),
    "b200": Gpu(2250, 4500, 180, 7700, 1800, 8, 8, 50, _PEAKS + "DGX B200 datasheet"),
    "gb200": Gpu(2450, 4900, 186, 8000, 1800, 72, 4, 50, _PEAKS + "GB200 NVL72 datasheet"),
    "gb300": Gpu(2450, 4900, 279, 8000, 1800, 72, 4, 100, _PEAKS + "GB300 NVL72 datasheet"),
}


@dataclasses.dataclass(frozen=True)
class Chip:
    """What XLA's GPU compiler must know of a GPU to compile for it.

    The figures are those a driver reports for the part; openxla/xla keeps one such description per
    GPU under xla/backends/gpu/target_config/specs, from which they were read.
    """

    name: str
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    clock_ghz: float
    l2_bytes: int
    memory_bytes: int
    memory_bytes_per_s: int


CHIPS = {  # columns as the fields above
    "h100": Chip("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98, 52428800, 84942979072, 3352320000000),
    "h200": Chip("NVIDIA H200", (9, 0), 132, 1.98, 52428800, 151397597184, 4800000000000),
    "b200": Chip("NVIDIA B200", (10, 0), 148, 1.965, 132644864, 191514411008, 7672320000000),
    "gb200": Chip("NVIDIA GB200", (10, 0), 152, 2.062, 135528448, 197897748480, 7928064000000),
    "gb300": Chip("NVIDIA GB300", (10, 3), 152, 2.07, 135528448, 297021079552, 7928064000000),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Physics:
    """What programs reach of a GPU's datasheet. One set per GPU type, none per workload.

    Fractions are of the figure in Gpu that each names.
    """

    gemm_bf16: float  # of bf16_tflops, a large matrix product inside a training step
    gemm_fp8: float  # of fp8_tflops
    attention_forward: float  # of bf16_tflops, causal FLOPs counted once
    attention_backward: float
    memory: float  # of memory_gbps, kernels that stream
    nvlink: float  # of nvlink_gbps / 2, a ring collective's bus bandwidth
    network: float  # of network_gbps
    nvlink_us: float  # latency of one step of a collective
    network_us: float
    launch_us: float  # from one kernel's end to the next one's start
    host_us: float  # idle while the host reads a condition: a branch, a loop of unknown length
    contention: float  # a kernel runs longer by this fraction beside a collective


# Name -> value, lowest and highest plausible one, and where that comes from. "Assumed" is a rule of
# thumb that nobody measured for this project yet, set once and not fitted. gemm_bf16 is fitted, to
# half of the Llama 2 70B rows, by benchmarks/fit_physics.py.
_HOPPER = {
    "gemm_bf16": (0.663, 0.55, 0.85, "fitted; alone on one H200 0.78 to 0.81 were measured"),
    "gemm_fp8": (0.60, 0.40, 0.80, "assumed: below bf16's fraction, for the casts"),
    "attention_forward": (0.58, 0.45, 0.75, "assumed, near what arXiv:2407.08608 reports"),
    "attention_backward": (0.46, 0.35, 0.60, "assumed, near what arXiv:2407.08608 reports"),
    "memory": (0.88, 0.75, 0.95, "0.90 was measured for a copy on one H200"),
    "nvlink": (0.80, 0.60, 0.90, "assumed: bus bandwidth of large collectives within a node"),
    "network": (0.90, 0.70, 0.98, "assumed: large messages over InfiniBand"),
    "nvlink_us": (1.0, 0.5, 3.0, "assumed"),
    "network_us": (5.0, 2.0, 15.0, "assumed"),
    "launch_us": (2.0, 1.0, 6.0, "assumed"),
    "host_us": (20.0, 8.0, 50.0, "assumed: a small copy to the host, a wait, and a launch"),
    "contention": (0.08, 0.0, 0.25, "assumed: collectives hold cores and memory"),
}
PHYSICS_RANGES = {name: row[1:] for name, row in _HOPPER.items()}
# No step on Blackwell was measured: its constants are Hopper's, until one is.
PHYSICS = dict.fromkeys(GPUS, Physics(**{name: row[0] for name, row in _HOPPER.items()}))


def nvlink_domain(gpu: Gpu, gpus: int) -> int:
    """GPUs of a job that share one NVLink domain.

    A job of n nodes takes as many nodes of each domain as divide n evenly, which is how a
    scheduler is asked to place it (Slurm's --segment): 16 of the 18 nodes of an NVL72.
    """
    nodes = -(-gpus // gpu.gpus_per_node)
    most = max(1, gpu.nvlink_gpus // gpu.gpus_per_node)
    segment = max(n for n in range(1, most + 1) if nodes % n == 0)
    return segment * gpu.gpus_per_node
