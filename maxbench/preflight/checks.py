"""Checks of all processes before the first step: devices, versions, rates, NCCL's transports."""

import collections
import dataclasses
import glob
import os
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

from maxbench.config.run import Run
from maxbench.distributed import runtime
from maxbench.host import environment
from maxbench.preflight import node_health
from maxbench.preflight.node_health import NodeFacts
from maxbench.run_logs import nccl
from maxbench.terminal import console

SMI_PROPERTIES = {
    "name": "name",
    "driver": "driver_version",
    "ecc": "ecc.errors.uncorrected.volatile.total",
    "celsius": "temperature.gpu",
    "slowdown": "clocks_throttle_reasons.hw_slowdown",
}
TYPICAL_FRACTION = {"gemm": 0.8, "all-reduce": 0.8}  # of the data sheet's peak, on good hardware


@dataclasses.dataclass(frozen=True)
class ProcessFacts:
    """Devices and measured rates of one process. All fields can be JSON."""

    host: str
    platform: str  # jax's: 'gpu', 'cpu'
    devices: int
    kind: str  # of the first device
    versions: dict[str, str]
    gpus: list[dict[str, str]]  # SMI_PROPERTIES of each GPU of the node
    node: NodeFacts | None  # from the first process of each node
    gemm_tflops: list[float]  # of each device
    all_reduce_gbytes_per_s: float  # bus bandwidth of an all-reduce over all devices
    transports: dict[str, int]  # NCCL transport -> channels


def collect(run: Run) -> list[ProcessFacts]:
    """Connects the processes, and gathers the facts of all; all processes must call it.

    Raises:
      UserError: the processes cannot be connected.
    """
    from maxbench.distributed import stragglers  # imports jax

    log = os.path.join(tempfile.gettempdir(), f"nccl-preflight-{os.getpid()}.")
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": log}
    peers = runtime.init_distributed(run)
    gathered = stragglers.allgather_json(dataclasses.asdict(_this_process(log, run.output.dir)))
    if peers:
        peers.close()
    for path in glob.glob(f"{log}*"):
        os.unlink(path)
    return [_from_json(facts) for facts in gathered]


def _this_process(nccl_log: str, output_dir: str) -> ProcessFacts:
    """Facts of this process. `nccl_log` is the prefix of the paths of NCCL's logs."""
    import jax

    from maxbench.distributed import stragglers

    facts = ProcessFacts(
        host=environment.hostname(),
        platform=jax.default_backend(),
        devices=jax.local_device_count(),
        kind=jax.local_devices()[0].device_kind,
        versions=environment.versions(),
        gpus=gpus_of_node(),
        node=node_health.facts_once_per_node(output_dir),
        gemm_tflops=stragglers.gemm_tflops(),
        all_reduce_gbytes_per_s=all_reduce_gbytes_per_s(),
        transports={},
    )
    # Read last: the all-reduce makes NCCL choose its transports.
    paths = map(pathlib.Path, glob.glob(f"{nccl_log}*"))
    text = "".join(path.read_text(errors="replace") for path in paths)
    return dataclasses.replace(facts, transports=nccl.transports(text))


def _from_json(facts: dict[str, Any]) -> ProcessFacts:
    node = facts["node"] and NodeFacts(**facts["node"])
    return ProcessFacts(**{**facts, "node": node})


def gpus_of_node() -> list[dict[str, str]]:
    """SMI_PROPERTIES of each GPU of this node; [] without nvidia-smi."""
    return [
        dict(zip(SMI_PROPERTIES, gpu.values(), strict=True))
        for gpu in environment.query_nvidia_smi(*SMI_PROPERTIES.values())
    ]


def all_reduce_gbytes_per_s() -> float:
    """Bus bandwidth of an all-reduce over all n devices, GB/s; 0 for a single device.

    As nccl-tests defines it: 2 (n - 1) / n x bytes / seconds.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, PartitionSpec

    from maxbench.distributed import stragglers

    n = jax.device_count()
    if n == 1:
        return 0.0
    elements = (1 << 26) if jax.default_backend() == "gpu" else (1 << 14)
    mesh = jax.make_mesh((n,), ("all",), axis_types=(AxisType.Auto,))
    replicated = PartitionSpec()
    psum = lambda x: jax.lax.psum(x, "all")
    all_reduce = jax.jit(jax.shard_map(psum, mesh=mesh, in_specs=replicated, out_specs=replicated))
    sharding = jax.NamedSharding(mesh, replicated)
    x = jax.jit(lambda: jnp.ones(elements), out_shardings=sharding)()
    return 2 * (n - 1) / n * x.nbytes / stragglers.best_s(all_reduce, x) / 1e9


def by_host(processes: Sequence[ProcessFacts]) -> dict[str, list[ProcessFacts]]:
    """The processes of each host."""
    hosts: dict[str, list[ProcessFacts]] = {}
    for process in processes:
        hosts.setdefault(process.host, []).append(process)
    return hosts


def node_findings(run: Run, processes: Sequence[ProcessFacts]) -> list[node_health.Finding]:
    """Findings on all nodes."""
    nodes = {process.host: process.node for process in processes if process.node}
    return node_health.judge(nodes, run.layout.gpu_type, run.hardware)


def slow_hosts(processes: Sequence[ProcessFacts]) -> list[str]:
    """Hosts whose slowest GPU is far below the median, slowest first; [] on CPUs."""
    from maxbench.distributed import stragglers

    if processes[0].platform != "gpu":  # rates of a shared CPU are noise
        return []
    worst = {host: _worst_tflops(each) for host, each in by_host(processes).items()}
    return stragglers.slow_hosts(worst)


def _worst_tflops(processes: Sequence[ProcessFacts]) -> float:
    return min(rate for process in processes for rate in process.gemm_tflops)


def errors(run: Run, processes: Sequence[ProcessFacts], allow_tcp: bool = False) -> list[str]:
    """Problems to solve before the run is worth its time, each in a line.

    Args:
      allow_tcp: TCP between nodes is no error.
    """
    problems = []
    if (platform := processes[0].platform) != "gpu" and not run.runtime.cpu_devices:
        reason = runtime.why_no_gpu() or "see the error above"
        problems.append(f"jax runs on {platform}: {reason}; --cpu_devices N runs it on a CPU")
    hosts, devices = by_host(processes), sum(process.devices for process in processes)
    for host, on_host in hosts.items():
        problems += _gpu_errors(run, host, on_host, devices)
    problems += _differences(processes)
    if devices < run.layout.gpus and not run.runtime.mock_gpus:
        problems.append(f"{run.layout.describe()} needs {run.layout.gpus} devices, {devices} exist")
    for _, check, text in (f for f in node_findings(run, processes) if f.verdict == "fail"):
        problems.append(f"{text}: {node_health.CHECKS[check]}")
    transports = {name: 1 for process in processes for name in process.transports}
    if (reason := nccl.uses_slow_transport(transports, len(hosts))) and not allow_tcp:
        problems.append(reason)
    return problems


def _gpu_errors(run: Run, host: str, processes: Sequence[ProcessFacts], devices: int) -> list[str]:
    """Errors of the GPUs of a host. `devices` are those of all hosts."""
    problems = []
    gpus, used = processes[0].gpus, sum(process.devices for process in processes)
    expected = devices == run.layout.gpus or run.runtime.mock_gpus
    if processes[0].platform == "gpu" and len(gpus) not in (0, used) and not expected:
        problems.append(
            f"{host}: nvidia-smi counts {len(gpus)} GPUs and jax {used}: unset "
            "CUDA_VISIBLE_DEVICES, ask for all (--gres=gpu:8), or start a process for each"
        )
    for i, gpu in enumerate(gpus):
        if gpu["ecc"].isdecimal() and int(gpu["ecc"]):
            problems.append(f"{host}: GPU {i} has {gpu['ecc']} uncorrected memory errors")
        if gpu["slowdown"].lower() == "active":
            problems.append(f"{host}: GPU {i} is slowed by its hardware ({gpu['celsius']} C)")
    return problems


def _differences(processes: Sequence[ProcessFacts]) -> list[str]:
    """Properties that must be equal on all hosts, and are not."""
    properties = [_must_be_equal(process) for process in processes]
    problems = []
    for name in dict.fromkeys(name for one in properties for name in one):
        hosts: dict[str, set[str]] = {}
        for process, one in zip(processes, properties, strict=True):
            hosts.setdefault(one.get(name, "none"), set()).add(process.host)
        if len(hosts) > 1:
            values = [f"{v} on {', '.join(sorted(h))}" for v, h in sorted(hosts.items())]
            problems.append(f"{name} differ: {'; '.join(values)}")
    return problems


def _must_be_equal(process: ProcessFacts) -> dict[str, str]:
    drivers = sorted({gpu["driver"] for gpu in process.gpus})
    return {
        "devices": f"{process.devices} x {process.kind}",
        "driver": ", ".join(drivers) or "none",
        "GPUs on the node": str(len(process.gpus)),
        **dict(sorted(process.versions.items())),
    }


def table(run: Run, processes: Sequence[ProcessFacts]) -> str:
    """Rates of each host's slowest device, of the all-reduce, and what good hardware reaches."""
    gpu, hosts = run.gpu, by_host(processes)
    on_gpu = processes[0].platform == "gpu"
    rates = []
    for host, on_host in hosts.items():
        devices = f"{sum(process.devices for process in on_host)} x {on_host[0].kind}"
        rates.append([host, devices, f"{_worst_tflops(on_host):.{1 if on_gpu else 3}f}"])
    rows = console.table(["host", "devices", "gemm TFLOP/s"], rates, text=(0, 1))

    def typical(name: str, peak: float, unit: str) -> str:
        return f"{peak * TYPICAL_FRACTION[name]:.0f} to {peak:.0f} {unit}" if on_gpu else "unknown"

    one_domain = len(hosts) * gpu.gpus_per_node <= gpu.nvlink_gpus
    bus_gbytes_per_s = (
        gpu.nvlink_gbytes_per_s / 2 if one_domain else gpu.network_gbytes_per_s * gpu.gpus_per_node
    )
    rows.append(f"gemm, expected: {typical('gemm', gpu.bf16_tflops, 'TFLOP/s bf16')}")
    rows.append(
        f"all-reduce over all devices: {processes[0].all_reduce_gbytes_per_s:.2f} GB/s bus "
        f"bandwidth; expected: {typical('all-reduce', bus_gbytes_per_s, 'GB/s')}"
    )
    channels: collections.Counter[str] = collections.Counter()
    for process in processes:
        channels.update(process.transports)
    text = ", ".join(f"{name} x {count}" for name, count in sorted(channels.items()))
    rows.append(f"NCCL transports: {text or 'none (not NCCL, or one GPU)'}")
    return "\n".join(rows)
