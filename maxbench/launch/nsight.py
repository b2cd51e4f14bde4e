"""Options of `nsys profile` for the profiling job of a run, as in NVIDIA's recipes."""

_COMMON = (
    "--force-overwrite=true --capture-range=cudaProfilerApi --capture-range-end=stop "
    "--cuda-graph-trace=node --cuda-event-trace=false --inherit-environment=true "
    "--stop-on-exit=true --trace=cuda,nvtx "
)
NSYS_OPTIONS = _COMMON + "--sample=none --cpuctxsw=none"
NSYS_CPU_OPTIONS = _COMMON + (
    "--sample=process-tree --cpuctxsw=process-tree --event-sample=system-wide --backtrace=lbr "
    "--event-sampling-interval=3 --samples-per-backtrace=1"
)
