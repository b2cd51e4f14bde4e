"""Health of the nodes: what makes a run slow or wrong is found before it starts.

The preflight reads the facts of every node, judge() compares them, and lines() formats the
findings. Each check passes, warns or fails.
"""

import collections
import dataclasses
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from maxbench.hardware.gpus import Gpu, GpuTypes
from maxbench.host import environment
from maxbench.terminal import console

# Check -> why it matters; in the order of the report.
CHECKS = {
    "gpu type": "layout, ceilings and published figures are of GPU_TYPE; set it in cluster.toml",
    "driver": "figures are comparable only between nodes with the same driver",
    "ecc": "without it a flipped bit reaches the weights unnoticed",
    "mig": "a MIG slice is slower than the whole GPU that figures are compared with",
    "persistence": "without it the driver is loaded for each process, and clocks start low",
    "power limit": "below the default the GPU lowers its clocks in every large GEMM",
    "clock": "the slowest GPU sets the step time",
    "nvlink": "one link that is down slows every collective of the node",
    "imex": "without a channel NVLink does not reach GPUs of other nodes",
    "network": "gradients and pipeline stages of other nodes are sent over it",
    "governor": "a CPU in a power-saving state launches kernels late",
    "disk": "logs, compiled programs and checkpoints are written to it",
}
SMI_PROPERTIES = (
    "driver_version",
    "ecc.mode.current",
    "mig.mode.current",
    "persistence_mode",
    "power.limit",
    "power.default_limit",
    "clocks.max.sm",
    "name",
)
# Free disk space, GiB: below the first a run fails, below the second it may.
MIN_FREE_GIB, AMPLE_FREE_GIB = 1, 10


@dataclasses.dataclass(frozen=True)
class NodeFacts:
    """Facts of one node. All fields can be JSON."""

    gpus: list[dict[str, str]]  # SMI_PROPERTIES of each
    links: list[str]  # state of each NVLink of each GPU: '26.562 GB/s', '<inactive>'
    ports: dict[str, tuple[str, float]]  # state and Gbit/s of each network port
    governors: list[str]  # of the CPUs, each once
    imex: bool  # an IMEX channel exists
    free_gib: float  # on the disk of the results


class Finding(NamedTuple):
    """The result of one check."""

    verdict: str  # pass | warn | fail
    check: str  # a key of CHECKS
    text: str


def read_facts(output_dir: str, root: pathlib.Path = pathlib.Path("/")) -> NodeFacts:
    """Reads the facts of this node, from nvidia-smi and the files under `root`."""
    links = environment.run_lines("nvidia-smi", "nvlink", "--status")
    parents = (pathlib.Path(output_dir), *pathlib.Path(output_dir).parents)
    existing = next((path for path in parents if path.exists()), None)
    governors = root.glob("sys/devices/system/cpu/cpu*/cpufreq/scaling_governor")
    return NodeFacts(
        gpus=environment.query_nvidia_smi(*SMI_PROPERTIES),
        links=[line.split(":", 1)[1].strip() for line in links if "Link" in line],
        ports=dict(_ports(root / "sys/class/infiniband")),
        governors=sorted({_read(path) for path in governors}),
        imex=any(root.glob("dev/nvidia-caps-imex-channels/channel*")),
        free_gib=round(shutil.disk_usage(existing).free / 2**30, 1) if existing else 0.0,
    )


def facts_once_per_node(output_dir: str) -> NodeFacts | None:
    """read_facts() in the first process of each node; None in the others."""
    first = os.environ.get("SLURM_LOCALID", "0") == "0"
    return read_facts(output_dir) if first else None


def _ports(folder: pathlib.Path) -> Iterator[tuple[str, tuple[str, float]]]:
    """Name, state and Gbit/s of each network port."""
    for port in sorted(folder.glob("*/ports/*")):
        rate = re.match(r"[0-9.]+", _read(port / "rate"))
        state = _read(port / "state").partition(": ")[2]
        yield f"{port.parts[-3]}/{port.name}", (state, float(rate[0]) if rate else 0.0)


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def judge(nodes: Mapping[str, NodeFacts], gpu_type: str, gpu_types: GpuTypes) -> list[Finding]:
    """Findings of all checks, in the order of CHECKS. Hosts of equal findings share one.

    Args:
      nodes: facts by host.
      gpu_type: the GPU type of the run, a key of gpu_types.
    """
    hosts: dict[Finding, list[str]] = collections.defaultdict(list)
    for host, node in nodes.items():
        for finding in _judge_gpus(node, gpu_type, gpu_types):
            hosts[finding].append(host)
        for finding in _judge_node(node, gpu_types[gpu_type], len(nodes)):
            hosts[finding].append(host)
    values = collections.Counter(finding.check for finding in hosts)
    findings = []
    for (verdict, check, text), names in hosts.items():
        differs = values[check] > 1 and check in ("driver", "clock") and verdict == "pass"
        text = f"{text} on {', '.join(names)}"
        findings.append(Finding("warn" if differs else verdict, check, text))
    order = list(CHECKS)
    return sorted(findings, key=lambda finding: (order.index(finding.check), finding.text))


def _judge_gpus(node: NodeFacts, gpu_type: str, gpu_types: GpuTypes) -> Iterator[Finding]:
    if not node.gpus:
        return
    values = lambda name: sorted({gpu[name] for gpu in node.gpus})
    names = values("name")
    text = f"{len(node.gpus)} x {', '.join(names)}"
    types = sorted({gpu_types.type_of(name) or "no known type" for name in names})
    if types == [gpu_type]:
        yield Finding("pass", "gpu type", text)
    else:
        yield Finding("warn", "gpu type", f"{text} ({', '.join(types)}), not {gpu_type}")
    for check, name, bad, verdict in (
        ("driver", "driver_version", "", ""),
        ("ecc", "ecc.mode.current", "Disabled", "warn"),
        ("mig", "mig.mode.current", "Enabled", "fail"),
        ("persistence", "persistence_mode", "Disabled", "warn"),
    ):
        yield Finding(verdict if bad in values(name) else "pass", check, ", ".join(values(name)))
    limits = {(gpu["power.limit"], gpu["power.default_limit"]) for gpu in node.gpus}
    lowered = any(number(limit) < number(default) for limit, default in limits)
    text = ", ".join(f"{limit} W of {default} W" for limit, default in sorted(limits))
    yield Finding("warn" if lowered else "pass", "power limit", text)
    clocks = values("clocks.max.sm")
    yield Finding(
        "pass" if len(clocks) == 1 else "warn", "clock", f"{', '.join(clocks)} MHz at most"
    )
    if node.links:
        down, count = sum("inactive" in link for link in node.links), len(node.links)
        text = f"{down} of {count} links down" if down else f"{count} links"
        yield Finding("warn" if down else "pass", "nvlink", text)


def _judge_node(node: NodeFacts, gpu: Gpu, node_count: int) -> Iterator[Finding]:
    """Findings on network, CPU and disk."""
    multi_node = bool(node.gpus) and node_count > 1
    if multi_node and gpu.nvlink_gpus > gpu.gpus_per_node:
        verdict, text = ("pass", "a channel") if node.imex else ("warn", "no channel")
        yield Finding(verdict, "imex", text)
    if multi_node:
        up = [gbit for state, gbit in node.ports.values() if state == "ACTIVE"]
        gbytes_per_s, expected = sum(up) / 8, gpu.network_gbytes_per_s * gpu.gpus_per_node
        text = f"{len(up)} of {len(node.ports)} ports up, {gbytes_per_s:g} of {expected:g} GB/s"
        yield Finding("pass" if gbytes_per_s >= expected else "warn", "network", text)
    if node.governors:
        fast = node.governors == ["performance"]
        yield Finding("pass" if fast else "warn", "governor", ", ".join(node.governors))
    if node.free_gib >= AMPLE_FREE_GIB:
        yield Finding("pass", "disk", f"{AMPLE_FREE_GIB} GiB or more free")
    else:
        verdict = "warn" if node.free_gib >= MIN_FREE_GIB else "fail"
        yield Finding(verdict, "disk", f"{node.free_gib:g} GiB free")


def number(text: str) -> float:
    """A number that nvidia-smi printed; 0 for [N/A]."""
    return float(text) if re.fullmatch(r"[0-9.]+", text) else 0.0


def lines(findings: Sequence[Finding]) -> list[str]:
    """A line per finding, which says why the check matters unless it passed."""
    rows = [
        [verdict, check, text if verdict == "pass" else f"{text}: {CHECKS[check]}"]
        for verdict, check, text in findings
    ]
    return console.table((), rows, text=(0, 1, 2))
