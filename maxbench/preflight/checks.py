"""What the preflight looks at: flags of XLA, GPUs and versions, scores beside their ceilings."""

import collections
import glob
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

from maxbench.config import environment
from maxbench.config.run import Run
from maxbench.distributed import runtime
from maxbench.preflight import node_health
from maxbench.step import xla_options

REPLACED = {
    "xla_gpu_graph_level": "--xla_gpu_enable_command_buffer=",
    "xla_gpu_enable_async_collectives": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "xla_gpu_enable_async_all_gather": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "xla_gpu_pipeline_all_gather": "--xla_gpu_enable_pipelined_all_gather=true",
    "xla_gpu_pipeline_reduce_scatter": "--xla_gpu_enable_pipelined_reduce_scatter=true",
    "xla_gpu_pipeline_all_reduce": "--xla_gpu_enable_pipelined_all_reduce=true",
}
SMI = {  # of a GPU -> nvidia-smi's name of it
    "name": "name",
    "driver": "driver_version",
    "ecc": "ecc.errors.uncorrected.volatile.total",
    "celsius": "temperature.gpu",
    "slowdown": "clocks_throttle_reasons.hw_slowdown",
}
REACHED = {"gemm": 0.8, "all-reduce": 0.8}  # of the datasheet, what good hardware reaches


# Tries compiler options one by one, and prints those that are wrong.
TRY = """
import json, sys, jax
program = jax.jit(lambda: 0).lower()
for name, value in json.loads(sys.argv[1]).items():
    try:
        program.compile(compiler_options={name: value})
    except Exception as error:
        print(name, str(error).splitlines()[0])
"""


def lint(options: Mapping[str, object], words: Sequence[str]) -> list[str]:
    """What this XLA does not know of compiler options, and of XLA_FLAGS ('--name=value').

    An unknown flag in XLA_FLAGS aborts whoever parses it, so a throw-away process tries them.
    Options are known by other names than flags; all builds of a jaxlib know the same, so a CPU
    finds the mistakes of a GPU.
    """
    env = {**os.environ, "XLA_FLAGS": " ".join(words), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", TRY, json.dumps(dict(options))]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return ["XLA_FLAGS: the process that tried them did not end within 60 s"]
    if done.returncode == 0:
        return [f"compiler option {line}" for line in done.stdout.splitlines()]
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: ([^\n]*)", done.stderr)
    if not unknown:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [f"XLA_FLAGS: {last}"]
    found = []
    for word in unknown[1].split():
        instead = REPLACED.get(word.lstrip("-").partition("=")[0])
        hint = f"; use {instead}" if instead else "; leave it out"
        found.append(f"XLA_FLAGS: this XLA does not know {word}, and would abort{hint}")
    return found


def lint_runs(*runs: Run) -> list[str]:
    """lint() of runs on GPUs and of the environment."""
    options = [xla_options.xla_options("gpu", run) for run in runs]
    words = os.environ.get("XLA_FLAGS", "").split()
    differ = [one for i, one in enumerate(options) if one not in options[:i]]
    return list(dict.fromkeys(line for one in differ for line in lint(one, words)))


def gpus_here() -> list[dict[str, str]]:
    """What nvidia-smi tells of the GPUs of this node; [] without it."""
    return [
        dict(zip(SMI, one.values(), strict=True))
        for one in environment.query_nvidia_smi(*SMI.values())
    ]


def errors(run: Run, found: Sequence[dict]) -> list[str]:
    """What must be put right before the run is worth its time.

    Args:
      found: one dict per process: host, devices, kind, versions, gpus.
    """
    wrong, total = [], sum(one["devices"] for one in found)
    if (platform := found[0]["platform"]) != "gpu" and not run.runtime.cpu_devices:
        why = runtime.no_gpu() or "it says above what keeps it from the GPUs"
        wrong.append(f"jax runs on {platform}: {why}; --cpu_devices N says that a CPU is wanted")
    for host, each in by_host(found).items():
        there, ours = len(each[0]["gpus"]), sum(one["devices"] for one in each)
        fits = total == run.layout.gpus or run.runtime.mock_gpus
        if platform == "gpu" and there not in (0, ours) and not fits:
            wrong.append(
                f"{host}: nvidia-smi counts {there} GPUs and jax {ours}: unset "
                "CUDA_VISIBLE_DEVICES, ask for all (--gres=gpu:8), or start a process for each"
            )
        for i, gpu in enumerate(each[0]["gpus"]):
            if gpu["ecc"].isdecimal() and int(gpu["ecc"]):
                wrong.append(f"{host}: GPU {i} has {gpu['ecc']} uncorrected memory errors")
            if gpu["slowdown"].lower() == "active":
                wrong.append(f"{host}: GPU {i} is slowed down by its hardware ({gpu['celsius']} C)")
    facts = lambda one: {
        "devices": f"{one['devices']} x {one['kind']}",
        "driver": ", ".join(sorted({g["driver"] for g in one["gpus"]})) or "none",
        "GPUs on the node": str(len(one["gpus"])),
        **dict(sorted(one["versions"].items())),
    }
    for what in facts(found[0]):
        kinds: dict[str, set[str]] = {}
        for one in found:
            kinds.setdefault(facts(one).get(what, "none"), set()).add(one["host"])
        if len(kinds) > 1:
            parts = [f"{k} on {', '.join(sorted(v))}" for k, v in sorted(kinds.items())]
            wrong.append(f"{what} differ: {'; '.join(parts)}")
    if total < run.layout.gpus and not run.runtime.mock_gpus:
        wrong.append(f"{run.layout.describe()} needs {run.layout.gpus} devices, {total} are there")
    return wrong


def by_host(found: Sequence[dict]) -> dict[str, list[dict]]:
    """What each host's processes have found."""
    hosts: dict[str, list[dict]] = {}
    for one in found:
        hosts.setdefault(one["host"], []).append(one)
    return hosts


def screened(run: Run, found: Sequence[dict]) -> list[tuple[str, str, str]]:
    """What prescreen finds of the nodes, by the one process of each that has looked."""
    nodes = {one["host"]: one["node"] for one in found if one["node"]}
    return node_health.judge(nodes, run.layout.gpu_type, run.gpu_types)


def all_reduce_gbps() -> float:
    """Bus bandwidth of an all-reduce over all devices, GB/s: 2 (n-1)/n x bytes / seconds."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, PartitionSpec

    from maxbench.distributed import stragglers

    count = jax.device_count()
    if count == 1:
        return 0.0
    elements = (1 << 26) if jax.default_backend() == "gpu" else (1 << 14)
    mesh = jax.make_mesh((count,), ("all",), axis_types=(AxisType.Auto,))
    everywhere = PartitionSpec()
    shard = {"mesh": mesh, "in_specs": everywhere, "out_specs": everywhere}
    total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "all"), **shard))
    x = jax.jit(lambda: jnp.ones(elements), out_shardings=jax.NamedSharding(mesh, everywhere))()
    return 2 * (count - 1) / count * x.nbytes / stragglers.best_s(total, x) / 1e9


def table(run: Run, found: Sequence[dict]) -> str:
    """Scores beside their ceilings, a line per host, worst device each."""
    gpu, each_host = run.gpu, by_host(found)
    on_gpu = found[0]["platform"] == "gpu"
    out = [f"{'host':<24} {'devices':<22} {'gemm TFLOP/s':>13}"]
    for host, each in each_host.items():
        score = min(s for one in each for s in one["gemm"])
        kind = f"{sum(o['devices'] for o in each)} x {each[0]['kind']}"
        out.append(f"{host:<24} {kind:<22} {score:>13.{1 if on_gpu else 3}f}")
    one_domain = len(each_host) * gpu.gpus_per_node <= gpu.nvlink_gpus
    link = gpu.nvlink_gbps / 2 if one_domain else gpu.network_gbps * gpu.gpus_per_node
    known = lambda what, ceiling, unit: (
        f"{ceiling * REACHED[what]:.0f} to {ceiling:.0f} {unit}" if on_gpu else "unknown here"
    )
    out.append(f"gemm ceiling: {known('gemm', gpu.bf16_tflops, 'TFLOP/s bf16')}")
    out.append(
        f"all-reduce over all devices: {found[0]['all_reduce']:.2f} GB/s bus; ceiling "
        + known("all-reduce", link, "GB/s")
    )
    ways = collections.Counter()
    for one in found:
        ways.update(one["transports"])
    said = ", ".join(f"{w} x {n}" for w, n in sorted(ways.items())) or "none (not NCCL, or one GPU)"
    out.append(f"NCCL transports: {said}")
    return "\n".join(out)


def collect(log: str, out: str) -> list[dict]:
    """Facts and scores of every process; log is where NCCL's files of this one begin, out where
    results go."""
    import jax

    from maxbench.distributed import stragglers
    from maxbench.run_logs import nccl

    mine = {
        "host": environment.hostname(),
        "platform": jax.default_backend(),
        "devices": jax.local_device_count(),
        "kind": jax.local_devices()[0].device_kind,
        "versions": environment.versions(),
        "gpus": gpus_here(),
        "node": node_health.facts_once_per_node(out),
        "gemm": stragglers.gemm_tflops(),
        "all_reduce": all_reduce_gbps(),
    }
    text = "".join(pathlib.Path(p).read_text(errors="replace") for p in glob.glob(f"{log}*"))
    mine["transports"] = nccl.transports(text)
    return stragglers.allgather_json(mine)
