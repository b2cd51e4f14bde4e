"""Run:ai: submits the command of a run through the Run:ai command line.

Version 3.0 of the command line (docs.nvidia.com/run-ai) submits PyTorch workloads, but no JAX
workloads: JAX is a framework of its API alone. A PyTorch workload is a master and workers, which
get MASTER_ADDR, WORLD_SIZE and RANK; launch/runai.sh translates them for JAX. Authentication is
that of `runai login`. APP_SECRET is removed from the environment of all child processes, and is on
no command line.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence

from maxbench.config.errors import UserError
from maxbench.launch import images
from maxbench.launch.jobs import command, environment, job_kinds, short_name
from maxbench.launch.variables import SECRETS, VARIABLES, JobConfig

NEEDED = ("RUN_CONF_IMAGE", "RUN_CONF_MOUNTS", "PROJECT_NAME", "PVC_DIR")


def submissions(s: JobConfig) -> list[list[str]]:
    """The `runai` command of each job.

    Raises:
      UserError: a required variable is not set, a mount is not name:path:claim, or the profiler is
        one that only Slurm's job script can start.
    """
    if missing := next((n for n in NEEDED if not s.values[n]), ""):
        raise UserError(
            f"{missing} is not set, and CLUSTER_TYPE=runai needs {', '.join(NEEDED)}: "
            f"{missing} is {VARIABLES[missing].meaning}"
        )
    images.check_for_registry(s.values["RUN_CONF_IMAGE"], "Run:ai")
    pvc, mounts = s.values["PVC_DIR"], _claims(s)
    if "nsys" in job_kinds(s):
        raise UserError(
            "PROFILER='nsys' needs Slurm's job script; with CLUSTER_TYPE=runai use PROFILER=xplane"
        )
    commands = []
    for kind in job_kinds(s):
        words = ["runai", "training", "pytorch", "submit", short_name(s, kind, 50)]
        words += ["--project", s.values["PROJECT_NAME"], "--image", s.values["RUN_CONF_IMAGE"]]
        gpus = min(s.number("GPUS_PER_NODE"), s.run.layout.gpus)
        words += ["--gpu-devices-request", str(gpus), "--large-shm"]
        if s.nodes > 1:  # besides the master
            words += ["--workers", str(s.nodes - 1)]
        for claim, path in mounts:
            words += ["--existing-pvc", f"claimname={claim},path={path}"]
        # `env` in the container, because the flag for variables differs between versions.
        env = {k: v.replace(str(s.out), pvc) for k, v in environment(s, kind).items()}
        words += ["--command", "--", "env", *(f"{k}={v}" for k, v in env.items())]
        train = [pvc if w == str(s.out) else w for w in command(s, kind)]
        commands.append([*words, "bash", f"{pvc}/maxbench/launch/runai.sh", *train])
    return commands


def _claims(s: JobConfig) -> list[tuple[str, str]]:
    """(claim, path) of RUN_CONF_MOUNTS."""
    found = []
    for mount in s.values["RUN_CONF_MOUNTS"].split(","):
        parts = mount.strip().split(":")
        if len(parts) != 3 or not all(parts) or not parts[1].startswith("/"):
            raise UserError(
                f"RUN_CONF_MOUNTS: {mount!r} is not name:path:k8s-claim; for example "
                "workspace:/workspace:workspace-project-abcde"
            )
        found.append((parts[2], parts[1]))
    if not any(s.values["PVC_DIR"].startswith(path) for _, path in found):
        raise UserError(
            f"PVC_DIR={s.values['PVC_DIR']!r} is in none of the mounted paths "
            f"{', '.join(path for _, path in found)}"
        )
    return found


def dry_run(runs: Sequence[JobConfig]) -> str:
    """The commands that submit() would run."""
    return "\n\n".join(shlex.join(words) for s in runs for words in submissions(s))


def submit(runs: Sequence[JobConfig], wait: bool, suite: str = "") -> int:
    """Submits the jobs; returns the first exit code that is not 0. Does not wait for their end.

    Raises:
      UserError: runai is not installed, or a suite is requested, whose run folders are not known.
    """
    if suite:
        raise UserError(
            "--suite needs the run folders, which Run:ai jobs create in the claim: use --file"
        )
    commands = [(s, words) for s in runs for words in submissions(s)]
    if not shutil.which("runai"):
        raise UserError(
            "runai is not on PATH: install the Run:ai command line from your cluster's web page "
            "(Help, Researcher Command Line Interface) and log in with `runai login`, or use "
            "CLUSTER_TYPE=slurm"
        )
    env = {k: v for k, v in os.environ.items() if k not in SECRETS}
    for s, words in commands:
        print(f"submitting {words[4]}: {s.describe()}", flush=True)
        code = subprocess.run(words, env=env).returncode
        if code:
            print(f"runai ended with exit code {code}: {shlex.join(words)}")
            return code
    print(f"results: {runs[0].values['PVC_DIR']}/experiments; read them with maxbench report")
    return 0
