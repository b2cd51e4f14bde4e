"""Profiles: windows of steps under Nsight Systems or XPlane, and NCCL's own log."""

NSYS_OPTIONS = (
    "--force-overwrite=true",
    "--capture-range=cudaProfilerApi",
    "--capture-range-end=stop",
    "--cuda-graph-trace=node",
    "--cuda-event-trace=false",
    "--inherit-environment=true",
    "--stop-on-exit=true",
    "--trace=cuda,nvtx",
    "--sample=none",
    "--cpuctxsw=none",
)
NSYS_CPU_OPTIONS = (
    *NSYS_OPTIONS[:-2],
    "--sample=process-tree",
    "--cpuctxsw=process-tree",
    "--event-sample=system-wide",
    "--backtrace=lbr",
    "--event-sampling-interval=3",
    "--samples-per-backtrace=1",
)
