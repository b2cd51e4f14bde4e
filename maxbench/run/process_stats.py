"""Memory of devices and of this process, and the age of this process."""

import contextlib
import os
import pathlib
import resource
import sys
from typing import Any, NamedTuple

from maxbench.host import environment


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
    """Peak resident memory of this process."""
    with contextlib.suppress(OSError, IndexError):  # macOS has no /proc, a sandbox no VmHWM
        status = pathlib.Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # on Linux also of the parent
    return peak if sys.platform == "darwin" else peak * 1024


def since_start_s() -> float | None:
    """Seconds since this process started; whole ones without /proc, None without ps too."""
    try:
        stat = pathlib.Path("/proc/self/stat").read_text()
        uptime_s = float(pathlib.Path("/proc/uptime").read_text().split()[0])
    except OSError:
        elapsed = environment.run_lines("ps", "-o", "etime=", "-p", str(os.getpid()))
        days, _, clock = "".join(elapsed).strip().rpartition("-")  # [[days-]hours:]minutes:seconds
        parts = zip((1, 60, 3600), reversed(clock.split(":")), strict=False)
        return sum(unit * int(n) for unit, n in parts) + 86400 * int(days or 0) if clock else None
    start_ticks = int(stat.rpartition(")")[2].split()[19])
    return uptime_s - start_ticks / os.sysconf("SC_CLK_TCK")
