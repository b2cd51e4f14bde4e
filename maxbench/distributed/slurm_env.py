"""Processes of one srun, from Slurm's environment variables: hosts, and the coordinator."""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping

from maxbench.config import ports

SCONTROL_TIMEOUT_S = 10  # scontrol without a readable slurm.conf retries for a minute


def expand_nodelist(nodelist: str) -> list[str]:
    """Hosts of Slurm's notation, by `scontrol show hostnames`: 'a[1-3,07],b' is a1, a2, ...

    A container image has no Slurm client as a rule, or one without slurm.conf: the list is then
    parsed here.
    """
    if nodelist and shutil.which("scontrol"):
        command = ["scontrol", "show", "hostnames", nodelist]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=SCONTROL_TIMEOUT_S
            )
            if done.stdout.strip():
                return done.stdout.split()
    return _parse_nodelist(nodelist)


def _parse_nodelist(nodelist: str) -> list[str]:
    """'a[1-3,07]b,c' as a1b, a2b, a3b, a07b, c; Slurm itself refuses text after brackets."""
    hosts = []
    for pattern in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        names = [""]
        for text, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", pattern):
            suffixes = [text] if text else _expand_ranges(ranges)
            names = [name + suffix for name in names for suffix in suffixes]
        hosts += names
    return hosts


def _expand_ranges(ranges: str) -> list[str]:
    """'1-3,07' as 1, 2, 3, 07."""
    numbers = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        numbers += [str(i).zfill(len(first)) for i in range(int(first), int(last or first) + 1)]
    return numbers


def process_hosts(env: Mapping[str, str] = os.environ) -> list[str]:
    """Host of each process, in their order; [] if Slurm's variables do not determine it.

    srun fills one node after the other, unless --distribution says otherwise.
    """
    counts = [
        int(count)
        for count, repeats in re.findall(
            r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "")
        )
        for _ in range(int(repeats or 1))
    ]
    hosts = expand_nodelist(env.get("SLURM_STEP_NODELIST", ""))
    distribution = env.get("SLURM_DISTRIBUTION", "block").partition(":")[0]
    in_blocks = distribution == "block" or max(counts, default=0) <= 1
    if len(hosts) != len(counts) or not in_blocks:
        return []
    return [host for host, count in zip(hosts, counts, strict=True) for _ in range(count)]


def coordinator_address(env: Mapping[str, str] = os.environ) -> str:
    """host:port of process 0, which every process of an srun derives alike.

    Raises:
      KeyError, IndexError, ValueError: a variable is missing or malformed.
    """
    host = env.get("MB_COORDINATOR_HOST") or expand_nodelist(env["SLURM_STEP_NODELIST"])[0]
    # Jobs of consecutive numbers may share a node, and each has a few steps.
    number = 4 * int(env["SLURM_JOB_ID"]) + int(env.get("SLURM_STEP_ID", "0"))
    return ports.address(host, ports.port(number))
