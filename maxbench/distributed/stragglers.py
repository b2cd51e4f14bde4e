"""Hosts side by side: facts and scores gathered from every process, and which one is slow.

A step ends everywhere at once, because its collectives wait for the slowest: step times alone
cannot name it. So every device runs the same product on its own, hot from the last step, and the
scores are compared. That costs some 50 ms after the last step, outside of every figure.
"""

import json
import statistics
import timeit
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from maxbench.config import environment
from maxbench.distributed import runtime

SLOW = 0.93  # of the median score


def allgather_json(what: dict) -> list[dict]:
    """One dict from every process, in their order; all processes must call it."""
    if runtime.processes() == 1:
        return [what]
    text = json.dumps(what).encode()
    longest = int(multihost_utils.process_allgather(np.array(len(text))).max())
    padded = np.frombuffer(text.ljust(longest), np.uint8)  # with spaces, which JSON leaves out
    return [json.loads(bytes(row)) for row in multihost_utils.process_allgather(padded)]


def best_s(f: Callable, x: jax.Array, times: int = 3) -> float:
    """Seconds of f(x) at its best of so many times, compiled before."""
    once = lambda: f(x).block_until_ready()
    once()
    return min(timeit.repeat(once, number=1, repeat=times))


def gemm_tflops() -> list[float]:
    """TFLOP/s of a square product on each device of this process, one after the other.

    8192 wide in bf16 on a GPU, 256 wide in fp32 on a CPU; random data, because zeros draw less
    power and clock higher.
    """
    gpu = jax.default_backend() == "gpu"
    wide, dtype = (8192, jnp.bfloat16) if gpu else (256, jnp.float32)
    product = jax.jit(lambda a: (a @ a).astype(dtype))
    a = jax.random.normal(jax.random.key(0), (wide, wide), dtype)
    each = (jax.device_put(a, device) for device in jax.local_devices())
    return [2 * wide**3 / best_s(product, x) / 1e12 for x in each]


def slow_hosts(scores: Mapping[str, float]) -> list[str]:
    """Hosts whose score is below SLOW of the median, slowest first; none below three hosts of a
    kind unless one is far off."""
    if len(scores) < 2:
        return []
    bar = statistics.median_high(scores.values()) * (SLOW if len(scores) > 2 else SLOW**2)
    return [h for h, s in sorted(scores.items(), key=lambda x: x[1]) if s < bar]


def compare_hosts(step_s: Sequence[float]) -> dict:
    """Step times and scores by host, and the slow hosts; all processes must call it.

    Args:
      step_s: seconds of the steps that count, as this process saw them.
    """
    mine = {"host": environment.hostname(), "gemm_tflops": gemm_tflops()}
    mine["step_s"] = statistics.median(step_s) if step_s else None
    found: dict[str, dict] = {}
    for one in allgather_json(mine):
        host = found.setdefault(one["host"], {"step_s": one["step_s"], "gemm_tflops": []})
        host["gemm_tflops"] += one["gemm_tflops"]
    late = slow_hosts({h: min(x["gemm_tflops"]) for h, x in found.items()})
    on_gpu = jax.default_backend() == "gpu"  # a shared CPU's scores are noise
    return {"hosts": found, "slow_hosts": late if on_gpu else []}
