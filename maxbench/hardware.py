"""GPUs as data: peaks, memory and links.

Units: TFLOP/s are dense (no sparsity), memory is what the vendor sells (GB, 1e9 bytes), bandwidths
are GB/s (1e9 bytes per second). NVLink counts both directions, the network one.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
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


GPUS = {
    "h100": Gpu(
        bf16_tflops=989,
        fp8_tflops=1979,
        memory_gb=80,
        memory_gbps=3350,
        nvlink_gbps=900,
        nvlink_gpus=8,
        gpus_per_node=8,
        network_gbps=50,
        source="peaks: NVIDIA's DGX Cloud recipes; rest: H100 SXM datasheet",
    ),
    "h200": Gpu(
        bf16_tflops=989,
        fp8_tflops=1979,
        memory_gb=141,
        memory_gbps=4800,
        nvlink_gbps=900,
        nvlink_gpus=8,
        gpus_per_node=8,
        network_gbps=50,
        source="H200 SXM datasheet",
    ),
    "b200": Gpu(
        bf16_tflops=2250,
        fp8_tflops=4500,
        memory_gb=180,
        memory_gbps=7700,
        nvlink_gbps=1800,
        nvlink_gpus=8,
        gpus_per_node=8,
        network_gbps=50,
        source="peaks: NVIDIA's DGX Cloud recipes; rest: DGX B200 datasheet",
    ),
    "gb200": Gpu(
        bf16_tflops=2450,
        fp8_tflops=4900,
        memory_gb=186,
        memory_gbps=8000,
        nvlink_gbps=1800,
        nvlink_gpus=72,
        gpus_per_node=4,
        network_gbps=50,
        source="peaks: NVIDIA's DGX Cloud recipes; rest: GB200 NVL72 datasheet",
    ),
    "gb300": Gpu(
        bf16_tflops=2450,
        fp8_tflops=4900,
        memory_gb=279,
        memory_gbps=8000,
        nvlink_gbps=1800,
        nvlink_gpus=72,
        gpus_per_node=4,
        network_gbps=100,
        source="peaks: NVIDIA's DGX Cloud recipes; rest: GB300 NVL72 datasheet",
    ),
}
