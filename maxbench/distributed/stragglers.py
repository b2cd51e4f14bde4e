"""Slow hosts: GEMM rates of every device, gathered from all processes and compared.

A step ends on all hosts at once, because collectives wait for the slowest: step times alone cannot
name it. So every device runs the same GEMM by itself, still warm from the last step. This takes
some 50 ms after the last step, and counts in no figure.
"""

import json
import statistics
import timeit
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from maxbench.distributed import runtime
from maxbench.host import environment

SLOW_FRACTION = 0.93  # of the median rate; slower hosts are reported


def allgather_json(value: dict) -> list[dict]:
    """The JSON object of every process, in their order; all processes must call it."""
    if runtime.process_count() == 1:
        return [value]
    text = json.dumps(value).encode()
    longest = int(multihost_utils.process_allgather(np.array(len(text))).max())
    padded = np.frombuffer(text.ljust(longest), np.uint8)  # JSON ignores trailing spaces
    return [json.loads(bytes(row)) for row in multihost_utils.process_allgather(padded)]


def best_s(f: Callable, x: jax.Array, repeats: int = 3) -> float:
    """Seconds of f(x), the shortest of some calls after one that compiles."""
    call = lambda: f(x).block_until_ready()
    call()
    return min(timeit.repeat(call, number=1, repeat=repeats))


def gemm_tflops() -> list[float]:
    """TFLOP/s of a square GEMM on each device of this process, one after the other.

    On a GPU 8192 x 8192 in bf16, on a CPU 256 x 256 in fp32. The data are random, because zeros
    draw less power and clock higher.
    """
    on_gpu = jax.default_backend() == "gpu"
    n, dtype = (8192, jnp.bfloat16) if on_gpu else (256, jnp.float32)
    square = jax.jit(lambda a: (a @ a).astype(dtype))
    a = jax.random.normal(jax.random.key(0), (n, n), dtype)
    copies = (jax.device_put(a, device) for device in jax.local_devices())
    return [2 * n**3 / best_s(square, copy) / 1e12 for copy in copies]


def slow_hosts(tflops: Mapping[str, float]) -> list[str]:
    """Hosts whose rate is below SLOW_FRACTION of the median, slowest first.

    Of two hosts, the median is the faster one, and the other must be further off.
    """
    if len(tflops) < 2:
        return []
    fraction = SLOW_FRACTION if len(tflops) > 2 else SLOW_FRACTION**2
    limit = statistics.median_high(tflops.values()) * fraction
    return [host for host, rate in sorted(tflops.items(), key=lambda x: x[1]) if rate < limit]


def compare_hosts(step_s: Sequence[float]) -> tuple[dict[str, dict], list[str]]:
    """Step times and GEMM rates of each host, and the slow hosts; all processes must call it.

    Args:
      step_s: seconds of the measured steps, as this process saw them.

    Returns:
      {host: {'step_s': median or None, 'gemm_tflops': one per device}}, and names of slow hosts.
    """
    median_s = statistics.median(step_s) if step_s else None
    this = {"host": environment.hostname(), "gemm_tflops": gemm_tflops(), "step_s": median_s}
    hosts: dict[str, dict] = {}
    for process in allgather_json(this):
        empty = {"step_s": process["step_s"], "gemm_tflops": []}
        hosts.setdefault(process["host"], empty)["gemm_tflops"] += process["gemm_tflops"]
    if jax.default_backend() != "gpu":  # rates of a shared CPU are noise
        return hosts, []
    return hosts, slow_hosts({name: min(host["gemm_tflops"]) for name, host in hosts.items()})
