"""Variables of a cluster without a scheduler, or with Run:ai's alone, for cluster.toml."""

import concurrent.futures
import shlex
import subprocess
from typing import NamedTuple

from maxbench.config.errors import UserError
from maxbench.config.recipes import ROOT
from maxbench.hardware.gpus import GpuTypes
from maxbench.launch import hosts, runai
from maxbench.launch.cluster import Answers

TIMEOUT_S = 60
CONNECTIONS = 16  # at once


class Host(NamedTuple):
    """A host as it describes itself."""

    architecture: str
    gpu_type: str  # '' = unknown
    gpus: int

    def __str__(self) -> str:
        return f"{self.gpus} {self.gpu_type or 'GPUs'}, {self.architecture}"


def detect(answers: Answers) -> dict[str, str]:
    """Variables of hosts that ssh reaches.

    Raises:
      UserError: a host cannot be reached, or hosts differ.
    """
    text = answers.resolve("SSH_HOSTS", {}, needed=True)
    names = hosts.expand(text)
    if not names:
        return answers.found
    with concurrent.futures.ThreadPoolExecutor(CONNECTIONS) as pool:
        replies = [*pool.map(lambda name: _describe(name, answers.gpu_types), names)]
    errors, kinds = [], dict[Host, str]()
    for name, reply in zip(names, replies, strict=True):
        if isinstance(reply, Host):
            kinds.setdefault(reply, name)
        else:
            errors.append(f"{name}: {reply}")
    if errors:
        raise UserError("; ".join(errors))
    if len(kinds) > 1:
        texts = [f"{name} has {host}" for host, name in kinds.items()]
        raise UserError(f"the hosts of SSH_HOSTS differ: {'; '.join(texts)}; list equal ones")
    (host,) = kinds
    known = {host.gpu_type: ""} if host.gpu_type else dict.fromkeys(answers.gpu_types, "")
    answers.resolve("GPU_TYPE", known)
    answers.resolve("GPUS_PER_NODE", {str(host.gpus): ""} if host.gpus else {})
    answers.resolve("ARCHITECTURE", {host.architecture: ""})
    return answers.found


def _describe(name: str, gpu_types: GpuTypes) -> Host | str:
    """A host's architecture and GPUs, or why it cannot be used."""
    root = shlex.quote(str(ROOT))
    script = (
        f"test -d {root} || {{ echo there is no folder {root} >&2; exit 9; }}; "
        "uname -m; nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null || true"
    )
    try:
        done = subprocess.run(
            [*hosts.SSH, name, script],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return str(e)
    if done.returncode:
        return done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if not lines:
        return "its shell prints nothing"
    return Host(lines[0], gpu_types.type_of(lines[1]) if lines[1:] else "", len(lines[1:]))


def detect_runai(answers: Answers) -> dict[str, str]:
    """Variables of Run:ai, which are asked: its command line does not list them all."""
    answers.resolve("GPU_TYPE", dict.fromkeys(answers.gpu_types, ""))
    for name in runai.NEEDED:
        answers.resolve(name, {}, needed=True)
    return answers.found
