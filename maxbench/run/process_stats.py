"""Memory of devices and of this process, and the age of this process."""

import os
import pathlib
from typing import Any, NamedTuple


class MemoryUse(NamedTuple):
    """Memory of a device, in bytes; on a CPU, the peak of this process for both."""

    peak: int
    allocated: int


def memory_use(device: Any) -> MemoryUse:
    """Memory of a jax device; a CPU keeps no count of its own."""
    if stats := device.memory_stats():
        return MemoryUse(stats["peak_bytes_in_use"], stats["bytes_in_use"])
    peak = process_peak_bytes()
    return MemoryUse(peak, peak)


def process_peak_bytes() -> int:
    """Peak resident memory of this process; getrusage would include the parent's."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def since_start_s() -> float:
    """Seconds since this process started."""
    stat = pathlib.Path("/proc/self/stat").read_text()
    start_ticks = int(stat.rpartition(")")[2].split()[19])
    uptime_s = float(pathlib.Path("/proc/uptime").read_text().split()[0])
    return uptime_s - start_ticks / os.sysconf("SC_CLK_TCK")
