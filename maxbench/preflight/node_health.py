"""What of a node makes a run slow or wrong before it starts: each check passes, warns or fails.

facts() are gathered from every node by the preflight, judge() compares them, lines() shows them.
"""

import collections
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence

from maxbench.config import environment
from maxbench.hardware.gpus import Gpu, GpuTypes

# What is checked -> why it matters.
WHY = {
    "gpu type": "layout, ceilings and published figures are of GPU_TYPE; cluster.toml can say it",
    "driver": "another driver is another machine: figures are comparable with one alone",
    "ecc": "without it a flipped bit goes on into the weights unseen",
    "mig": "a part of a GPU is not the GPU that figures are held against",
    "persistence": "without it the driver is loaded anew, and clocks start low",
    "power limit": "below the default the GPU clocks lower in every large product",
    "clock": "a step ends with its slowest GPU",
    "nvlink": "a link that is down makes every collective of the node wait for it",
    "imex": "without a channel GPUs of other nodes are not reached by NVLink",
    "network": "gradients and pipeline stages of other nodes come through it",
    "governor": "a CPU that sleeps starts kernels late",
    "disk": "logs, compiled programs and checkpoints end up there",
}
SMI = ("driver_version", "ecc.mode.current", "mig.mode.current", "persistence_mode")
SMI += ("power.limit", "power.default_limit", "clocks.max.sm", "name")
ENOUGH = (1, 10)  # GiB free: below the first a run fails, below the second it may


def facts(out: str, root: pathlib.Path = pathlib.Path("/")) -> dict:
    """Of this node: GPUs, links, network ports, CPU governors, and GiB free where results go."""
    links = environment.run_lines("nvidia-smi", "nvlink", "--status")
    there = next((p for p in (pathlib.Path(out), *pathlib.Path(out).parents) if p.exists()), None)
    cpus = root.glob("sys/devices/system/cpu/cpu*/cpufreq/scaling_governor")
    return {
        "gpus": environment.query_nvidia_smi(*SMI),
        "links": [line.split(":", 1)[1].strip() for line in links if "Link" in line],
        "ports": dict(_ports(root / "sys/class/infiniband")),
        "governors": sorted({_text(path) for path in cpus}),
        "imex": any(root.glob("dev/nvidia-caps-imex-channels/channel*")),
        "free_gib": round(shutil.disk_usage(there).free / 2**30, 1) if there else 0.0,
    }


def _ports(folder: pathlib.Path) -> Iterator[tuple[str, list]]:
    """Name of each network port, its state and its Gbit/s."""
    for port in sorted(folder.glob("*/ports/*")):
        rate = re.match(r"[0-9.]+", _text(port / "rate"))
        state = _text(port / "state").partition(": ")[2]
        yield f"{port.parts[-3]}/{port.name}", [state, float(rate[0]) if rate else 0.0]


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def judge(
    hosts: Mapping[str, dict], gpu_type: str, gpu_types: GpuTypes
) -> list[tuple[str, str, str]]:
    """(pass | warn | fail, check, what was found and where) of facts by host."""
    gpu, found = gpu_types[gpu_type], collections.defaultdict(list)
    for host, one in hosts.items():
        for verdict, check, what in (
            *_gpus(one, gpu_type, gpu_types),
            *_node(one, gpu, len(hosts)),
        ):
            found[verdict, check, what].append(host)
    many = collections.Counter(check for _, check, _ in found)
    made = []
    for (verdict, check, what), where in found.items():
        differs = many[check] > 1 and check in ("driver", "clock") and verdict == "pass"
        made.append(("warn" if differs else verdict, check, f"{what} on {', '.join(where)}"))
    return sorted(made, key=lambda row: (list(WHY).index(row[1]), row[2]))


def _gpus(one: dict, gpu_type: str, gpu_types: GpuTypes) -> Iterator[tuple[str, str, str]]:
    """Verdicts on the GPUs of a node."""
    every = lambda name: sorted({gpu[name] for gpu in one["gpus"]})
    if not one["gpus"]:
        return
    names = every("name")
    said = f"{len(one['gpus'])} x {', '.join(names)}"
    right = {gpu_types.type_of(name) for name in names} == {gpu_type}
    yield ("pass", "gpu type", said) if right else ("warn", "gpu type", f"{said}, not {gpu_type}")
    for check, name, bad, verdict in (
        ("driver", "driver_version", "", ""),
        ("ecc", "ecc.mode.current", "Disabled", "warn"),
        ("mig", "mig.mode.current", "Enabled", "fail"),
        ("persistence", "persistence_mode", "Disabled", "warn"),
    ):
        yield (verdict if bad in every(name) else "pass"), check, ", ".join(every(name))
    limits = {(gpu["power.limit"], gpu["power.default_limit"]) for gpu in one["gpus"]}
    low = [pair for pair in limits if number(pair[0]) < number(pair[1])]
    said = ", ".join(f"{limit} W of {usual} W" for limit, usual in sorted(limits))
    yield ("warn" if low else "pass"), "power limit", said
    clocks = every("clocks.max.sm")
    yield ("pass" if len(clocks) == 1 else "warn"), "clock", f"{', '.join(clocks)} MHz at most"
    if one["links"]:
        down = sum("inactive" in link for link in one["links"])
        said = f"{down} of {len(one['links'])} links down" if down else f"{len(one['links'])} links"
        yield ("warn" if down else "pass"), "nvlink", said


def _node(one: dict, gpu: Gpu, nodes: int) -> Iterator[tuple[str, str, str]]:
    """Verdicts on the rest of a node."""
    if one["gpus"] and gpu.nvlink_gpus > gpu.gpus_per_node and nodes > 1:
        yield ("pass", "imex", "a channel") if one["imex"] else ("warn", "imex", "no channel")
    if one["gpus"] and nodes > 1:
        up = [rate for state, rate in one["ports"].values() if state == "ACTIVE"]
        gbps, wanted = sum(up) / 8, gpu.network_gbps * gpu.gpus_per_node
        said = f"{len(up)} of {len(one['ports'])} ports up, {gbps:g} of {wanted:g} GB/s"
        yield ("pass" if gbps >= wanted else "warn"), "network", said
    if one["governors"]:
        good = one["governors"] == ["performance"]
        yield ("pass" if good else "warn"), "governor", ", ".join(one["governors"])
    low, some = (one["free_gib"] < bar for bar in ENOUGH)
    said = f"{one['free_gib']:g} GiB free" if some else f"{ENOUGH[1]} GiB or more free"
    yield ("fail" if low else "warn" if some else "pass"), "disk", said


def number(text: str) -> float:
    """A number of nvidia-smi; 0 for [N/A]."""
    return float(text) if re.fullmatch(r"[0-9.]+", text) else 0.0


def lines(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """A line per finding; why it matters where it does not pass."""
    return [
        f"{verdict}  {check:<12} {what}" + ("" if verdict == "pass" else f": {WHY[check]}")
        for verdict, check, what in rows
    ]


def facts_once_per_node(out: str) -> dict:
    """facts(), by one process of each node."""
    return facts(out) if os.environ.get("SLURM_LOCALID", "0") == "0" else {}
