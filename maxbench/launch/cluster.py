"""Writes cluster.toml under STAGE_PATH: what Slurm says of this cluster, the rest asked once."""

import collections
import getpass
import json
import pathlib
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from typing import NamedTuple

from maxbench.config import environment
from maxbench.config.errors import UserError
from maxbench.hardware.gpus import GPU_TYPES, GpuTypes
from maxbench.launch import job_file, slurm, variables

HEAD = """\
# What jobs on this cluster take where the environment says nothing else; maxbench cluster wrote it.
# Any variable that launch.sh --help lists may stand here.
"""
FIELD = re.compile(r"(\w+)=(\S*)")
GPU_GRES = re.compile(r"(?:^|,)gpu:(?:([^:,(]+):)?(\d+)")
# What setup.sh or a user adds; it is not looked for.
ADDED = ("RUN_CONF_IMAGE", "RUN_CONF_MOUNTS")
Ask = Callable[[str, Mapping[str, str]], str]  # a variable, its choices and what each is


class Kind(NamedTuple):
    """Nodes of a partition that are alike; '' and 0 stand for what Slurm does not tell."""

    partition: str
    gpu_type: str
    gpus: int  # of a node
    architecture: str

    def __str__(self) -> str:
        count = f"{self.gpus} {self.gpu_type or 'GPUs'}" if self.gpus else "no gres"
        return ", ".join(filter(None, [count, self.architecture]))


def nodes(gpu_types: GpuTypes = GPU_TYPES) -> collections.Counter[Kind]:
    """How many nodes of each kind there are.

    Raises:
      UserError: there is no Slurm here, or it does not answer.
    """
    if not shutil.which("scontrol"):
        raise UserError(
            "scontrol is not on PATH: run this on a login node of the cluster (module load slurm?)"
        )
    found = collections.Counter()
    lines, why = _said("scontrol", "show", "nodes", "--oneliner")
    for line in lines:
        fields = dict(reversed(FIELD.findall(line)))  # the first of a name: comments come later
        gres = GPU_GRES.search(fields.get("Gres", ""))
        features = fields.get("AvailableFeatures", "")
        named = gpu_types.type_of(f"{gres[1] if gres else ''} {features}")
        count, architecture = int(gres[2]) if gres else 0, fields.get("Arch", "")
        for partition in filter(None, fields.get("Partitions", "").split(",")):
            found[Kind(partition, named, count, architecture)] += 1
    if not found:
        raise UserError(f"scontrol shows no node of a partition{f': {why}' if why else ''}")
    return found


def accounts() -> dict[str, str]:
    """The user's accounts, and which of them is the default one; {} where Slurm keeps none."""
    user = getpass.getuser()
    default, _ = _said("sacctmgr", "-nP", "show", "user", user, "format=defaultaccount")
    every, _ = _said("sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=account")
    return {name: "your default" if name in default else "" for name in sorted({*every})}


def _said(*command: str) -> tuple[list[str], str]:
    """Lines that a command printed, and why there are none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as e:
        return [], str(e)
    if done.returncode:
        return [], " ".join(done.stderr.split())
    return [line.strip() for line in done.stdout.splitlines() if line.strip()], ""


def detect(
    env: Mapping[str, str],
    there: Mapping[Kind, int],
    ask: Ask,
    gpu_types: GpuTypes = GPU_TYPES,
) -> dict[str, str]:
    """The cluster's variables.

    Args:
      env: what it says is taken as it is.
      there: nodes().
      ask: called where there are several that it may be, or none is known.

    Raises:
      UserError: a variable of env cannot be.
    """
    found = {n: text for n in ADDED if (text := job_file.env_value(env, n))}
    in_job = bool(env.get("SLURM_JOB_ID"))
    here = environment.query_nvidia_smi("name") if in_job else []

    def settle(name: str, own: str, choices: Mapping[str, str]) -> str:
        """The value by the environment, by the job, as the only one that may be, or by asking."""
        value = job_file.env_value(env, name) or (own if in_job else "")
        if not value:
            value = ask(name, choices) if len(choices) > 1 else next(iter(choices), "")
        if value:
            found[name] = variables.checked(name, value, variables.VARIABLES[name], gpu_types)
        return found.get(name, "")

    with_gpus = {kind: n for kind, n in there.items() if kind.gpus} or there
    partitions = collections.defaultdict(list)
    for kind, n in with_gpus.items():
        partitions[kind.partition].append(f"{n} node{'s' * (n > 1)} of {kind}")
    choices = {name: " and ".join(about) for name, about in partitions.items()}
    partition = settle("SBATCH_PARTITION", env.get("SLURM_JOB_PARTITION", ""), choices)
    mine = [k for k in with_gpus if k.partition == partition] or [*with_gpus]

    types = dict.fromkeys((k.gpu_type for k in mine if k.gpu_type), "")
    own = gpu_types.type_of(here[0]["name"]) if here else ""
    kind = settle("GPU_TYPE", own, types or dict.fromkeys(gpu_types, ""))
    mine = [k for k in mine if k.gpu_type in ("", kind)] or mine
    counts = dict.fromkeys((str(k.gpus) for k in mine if k.gpus), "")
    count = settle("GPUS_PER_NODE", str(len(here) or ""), counts)
    settle("SBATCH_GPUS_PER_NODE", "", {count if counts else "none": ""})
    kinds = dict.fromkeys((k.architecture for k in mine if k.architecture), "")
    settle("ARCHITECTURE", platform.machine(), kinds)
    settle("SBATCH_ACCOUNT", env.get("SLURM_JOB_ACCOUNT", ""), accounts())
    if shutil.which("sbatch"):
        settle("SEGMENT", "", {str(slurm.sbatch_supports("--segment")).lower(): ""})
    return found


def write(file: pathlib.Path, values: Mapping[str, str]) -> None:
    """Adds variables to the file, which is made where there is none.

    Raises:
      UserError: it cannot be written.
    """
    if not values and file.exists():
        return
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        text = file.read_text() if file.exists() else HEAD
        part = file.with_suffix(".part")
        part.write_text(text + ("" if text.endswith("\n") else "\n") + lines)
        part.replace(file)
    except OSError as e:
        raise UserError(f"{str(file)!r} cannot be written: {e.strerror}") from None
