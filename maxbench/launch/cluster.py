"""Writes cluster.toml under STAGE_PATH, from what Slurm reports; asks for what it does not.

cluster_kubernetes.py and cluster_hosts.py do so for clusters without Slurm.
"""

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

from maxbench.config.errors import UserError
from maxbench.hardware.gpus import GPU_TYPES, GpuTypes
from maxbench.host import environment
from maxbench.launch import job_file, slurm, variables

HEAD = """\
# Defaults of jobs on this cluster, which the environment overrides; written by maxbench cluster.
# Any variable that launch.sh --help lists may be added.
"""
FIELD = re.compile(r"(\w+)=(\S*)")
GPU_GRES = re.compile(r"(?:^|,)gpu:(?:([^:,(]+):)?(\d+)")
# Variables that setup.sh or a user adds; they are not detected.
ADDED = ("RUN_CONF_IMAGE", "RUN_CONF_MOUNTS")
Ask = Callable[[str, Mapping[str, str]], str]  # variable, {choice: its meaning}; {} = any text


class Kind(NamedTuple):
    """A kind of nodes in a partition; '' and 0 if Slurm does not report a field."""

    partition: str
    gpu_type: str
    gpus: int  # per node
    architecture: str

    def __str__(self) -> str:
        count = f"{self.gpus} {self.gpu_type or 'GPUs'}" if self.gpus else "no gres"
        return ", ".join(filter(None, [count, self.architecture]))


def nodes(gpu_types: GpuTypes = GPU_TYPES) -> collections.Counter[Kind]:
    """Number of nodes of each kind.

    Raises:
      UserError: Slurm is not installed, or does not answer.
    """
    if not shutil.which("scontrol"):
        raise UserError(
            "scontrol is not on PATH: run this on a login node of the cluster (module load slurm?)"
            ", or set CLUSTER_TYPE to kubernetes, runai or hosts"
        )
    found: collections.Counter[Kind] = collections.Counter()
    lines, why = _run("scontrol", "show", "nodes", "--oneliner")
    for line in lines:
        fields = dict(reversed(FIELD.findall(line)))  # the first one of a name: comments are last
        gres = GPU_GRES.search(fields.get("Gres", ""))
        features = fields.get("AvailableFeatures", "")
        texts = [(gres[1] or "") if gres else "", *features.split(",")]
        named = next(filter(None, map(gpu_types.type_of, texts)), "")
        count, architecture = int(gres[2]) if gres else 0, fields.get("Arch", "")
        for partition in filter(None, fields.get("Partitions", "").split(",")):
            found[Kind(partition, named, count, architecture)] += 1
    if not found:
        raise UserError(f"scontrol shows no node of a partition{f': {why}' if why else ''}")
    return found


def accounts() -> dict[str, str]:
    """The user's Slurm accounts, with a mark on the default one; {} without accounting."""
    user = getpass.getuser()
    default, _ = _run("sacctmgr", "-nP", "show", "user", user, "format=defaultaccount")
    accounts, _ = _run("sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=account")
    return {name: "your default" if name in default else "" for name in sorted({*accounts})}


def _run(*command: str) -> tuple[list[str], str]:
    """Lines that a command prints, and the reason if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as e:
        return [], str(e)
    if done.returncode:
        return [], " ".join(done.stderr.split())
    return [line.strip() for line in done.stdout.splitlines() if line.strip()], ""


class Answers:
    """Values of variables: from the environment, the only choice, or an answer.

    Args:
      env: its variables are taken unchanged.
      ask: called for a variable with several possible values, or without a known one.
      ask_optional: the same for a variable that may stay empty.

    Attributes:
      found: the variables with a value.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        ask: Ask,
        ask_optional: Ask | None = None,
        gpu_types: GpuTypes = GPU_TYPES,
    ):
        self.env, self.ask, self.ask_optional = env, ask, ask_optional or ask
        self.gpu_types = gpu_types
        self.found = {n: text for n in ADDED if (text := job_file.env_value(env, n))}

    def of_env(self, name: str) -> str:
        """A variable's value in the environment, or ''."""
        return job_file.env_value(self.env, name)

    def resolve(
        self,
        name: str,
        choices: Mapping[str, str],
        detected: str = "",
        needed: bool = False,
        optional: bool = False,
    ) -> str:
        """Sets a variable, and returns its value or ''.

        Args:
          choices: possible values and their meanings; the only one is taken.
          detected: taken if the environment has no value.
          needed: ask for any text if there is no choice.
          optional: ask even for the only choice, and accept no answer.

        Raises:
          UserError: the value is invalid.
        """
        value = self.of_env(name) or detected
        if not value and optional:
            value = self.ask_optional(name, choices)
        elif not value and (len(choices) > 1 or (needed and not choices)):
            value = self.ask(name, choices)
        elif not value:
            value = next(iter(choices), "")
        if value:
            v = variables.VARIABLES[name]
            self.found[name] = variables.checked(name, value, v, self.gpu_types)
        return self.found.get(name, "")


def detect(kinds: Mapping[Kind, int], answers: Answers) -> dict[str, str]:
    """Variables of a Slurm cluster.

    Args:
      kinds: nodes().

    Raises:
      UserError: a variable of the environment is invalid.
    """
    env, gpu_types = answers.env, answers.gpu_types
    in_job = bool(env.get("SLURM_JOB_ID"))
    here = environment.query_nvidia_smi("name") if in_job else []

    def resolve(name: str, of_this_job: str, choices: Mapping[str, str]) -> str:
        return answers.resolve(name, choices, of_this_job if in_job else "")

    with_gpus = {kind: n for kind, n in kinds.items() if kind.gpus} or kinds
    partitions = collections.defaultdict(list)
    for kind, n in with_gpus.items():
        partitions[kind.partition].append(f"{n} node{'s' * (n > 1)} of {kind}")
    choices = {name: " and ".join(texts) for name, texts in partitions.items()}
    partition = resolve("SBATCH_PARTITION", env.get("SLURM_JOB_PARTITION", ""), choices)
    usable = [k for k in with_gpus if k.partition == partition] or [*with_gpus]

    types = dict.fromkeys((k.gpu_type for k in usable if k.gpu_type), "")
    of_this_job = gpu_types.type_of(here[0]["name"]) if here else ""
    gpu_type = resolve("GPU_TYPE", of_this_job, types or dict.fromkeys(gpu_types, ""))
    usable = [k for k in usable if k.gpu_type in ("", gpu_type)] or usable
    counts = dict.fromkeys((str(k.gpus) for k in usable if k.gpus), "")
    count = resolve("GPUS_PER_NODE", str(len(here) or ""), counts)
    resolve("SBATCH_GPUS_PER_NODE", "", {count if counts else "none": ""})
    architectures = dict.fromkeys((k.architecture for k in usable if k.architecture), "")
    resolve("ARCHITECTURE", platform.machine(), architectures)
    resolve("SBATCH_ACCOUNT", env.get("SLURM_JOB_ACCOUNT", ""), accounts())
    if shutil.which("sbatch"):
        resolve("SEGMENT", "", {str(slurm.sbatch_supports("--segment")).lower(): ""})
    return answers.found


def write(file: pathlib.Path, values: Mapping[str, str]) -> None:
    """Appends variables to the file, or creates it.

    Raises:
      UserError: the file cannot be written.
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
