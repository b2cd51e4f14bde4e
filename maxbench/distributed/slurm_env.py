"""What Slurm says of the processes that one srun starts: how many, on which hosts, where is 0."""

import os
import re
from collections.abc import Mapping


def hosts(nodelist: str) -> list[str]:
    """Hosts of Slurm's notation: 'a[1-3,07]b,c' is a1b, a2b, a3b, a07b, c."""
    found = []
    for name in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        names = [""]
        for text, numbers in re.findall(r"([^\[]+)|\[([^\]]*)\]", name):
            names = [x + y for x in names for y in ([text] if text else _numbers(numbers))]
        found += names
    return found


def _numbers(ranges: str) -> list[str]:
    """'1-3,07' as 1, 2, 3, 07."""
    found = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        found += [str(i).zfill(len(first)) for i in range(int(first), int(last or first) + 1)]
    return found


def places(env: Mapping[str, str] = os.environ) -> list[str]:
    """The host of each process, in their order; [] where it cannot be told.

    Processes are dealt out node by node, unless srun's --distribution says otherwise.
    """
    each = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counts = [int(n) for n, times in each for _ in range(int(times or 1))]
    names = hosts(env.get("SLURM_STEP_NODELIST", ""))
    way = env.get("SLURM_DISTRIBUTION", "block").partition(":")[0]
    if len(names) != len(counts) or (way != "block" and max(counts, default=0) > 1):
        return []
    return [name for name, n in zip(names, counts, strict=True) for _ in range(n)]


def address(env: Mapping[str, str] = os.environ) -> str:
    """host:port of process 0, as every process of an srun works it out by itself."""
    first = hosts(env["SLURM_STEP_NODELIST"])[0]
    number = int(env["SLURM_JOB_ID"]) + int(env.get("SLURM_STEP_ID", "0"))
    return f"{first}:{61440 + number % 4096}"  # ports that nobody else is given
