"""Run:ai: the same command, submitted through the Run:ai command line as a distributed workload.

The command reference of version 3.0 (docs.nvidia.com/run-ai) has `runai training pytorch submit`
and no JAX, and nothing earlier was found that has; JAX is a framework of the API alone. A PyTorch
workload is a master and workers that are told of each other by MASTER_ADDR, WORLD_SIZE and RANK,
which is all that JAX needs: launch/runai.sh translates. The command line's own login is used
(`runai login`). APP_SECRET is taken out of the environment of everything that is started, and is
on no command line.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence

from maxbench.config.errors import UserError
from maxbench.launch.jobs import command, environment, job_kinds
from maxbench.launch.variables import SECRETS, VARIABLES, JobConfig

NEEDED = ("RUN_CONF_IMAGE", "RUN_CONF_MOUNTS", "PROJECT_NAME", "PVC_DIR")


def submissions(s: JobConfig) -> list[list[str]]:
    """The `runai` command of each job, from the job's own environment and command.

    Raises:
      UserError: a variable that is needed is not set, a mount is not name:path:claim, or a
        profiler is asked for that nobody would start.
    """
    if lacking := next((n for n in NEEDED if not s.values[n]), ""):
        raise UserError(
            f"{lacking} is not set, and CLUSTER_TYPE=runai needs {', '.join(NEEDED)}: "
            f"{lacking} is {VARIABLES[lacking].meaning}"
        )
    pvc, mounts = s.values["PVC_DIR"], _claims(s)
    if "nsys" in job_kinds(s):
        raise UserError(
            "PROFILER='nsys' is started by Slurm's job script alone; with CLUSTER_TYPE=runai use "
            "PROFILER=xplane"
        )
    made = []
    for kind in job_kinds(s):
        words = ["runai", "training", "pytorch", "submit", workload_name(s, kind)]
        words += ["--project", s.values["PROJECT_NAME"], "--image", s.values["RUN_CONF_IMAGE"]]
        gpus = min(s.number("GPUS_PER_NODE"), s.run.layout.gpus)
        words += ["--gpu-devices-request", str(gpus), "--large-shm"]
        if s.nodes > 1:  # beside the master
            words += ["--workers", str(s.nodes - 1)]
        for claim, path in mounts:
            words += ["--existing-pvc", f"claimname={claim},path={path}"]
        # `env` in the container, because the flag for variables is not the same in all versions.
        env = {k: v.replace(str(s.out), pvc) for k, v in environment(s, kind).items()}
        words += ["--command", "--", "env", *(f"{k}={v}" for k, v in env.items())]
        train = [pvc if w == str(s.out) else w for w in command(s, kind)]
        made.append([*words, "bash", f"{pvc}/maxbench/launch/runai.sh", *train])
    return made


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
            f"PVC_DIR={s.values['PVC_DIR']!r} lies in none of the mounted paths "
            f"{', '.join(path for _, path in found)}"
        )
    return found


def workload_name(s: JobConfig, kind: str) -> str:
    """A name that Kubernetes accepts: lower case, 63 characters, no underscore."""
    run = s.run
    words = (run.model.name, run.model.size, run.precision.dtype, f"{run.layout.gpus}g", kind)
    return re.sub(r"[^a-z0-9]+", "-", "-".join(filter(None, ("maxbench", *words))).lower())[:50]


def dry_run(runs: Sequence[JobConfig]) -> str:
    """Commands as they would be given."""
    return "\n\n".join(shlex.join(words) for s in runs for words in submissions(s))


def submit(runs: Sequence[JobConfig], wait: bool, suite: str = "") -> int:
    """Submits the jobs; returns the first exit code that is not 0. Nothing waits for their end.

    Raises:
      UserError: there is no runai, or a suite is wanted, whose runs nobody could tell from others.
    """
    if suite:
        raise UserError(
            "--suite lists the folders of jobs, which Run:ai's make in the claim: --file"
        )
    made = [(s, words) for s in runs for words in submissions(s)]
    if not shutil.which("runai"):
        raise UserError(
            "runai is not on PATH: install the Run:ai command line from your cluster's web page "
            "(Help, Researcher Command Line Interface) and log in with `runai login`, or use "
            "CLUSTER_TYPE=slurm"
        )
    env = {k: v for k, v in os.environ.items() if k not in SECRETS}
    for s, words in made:
        print(f"submitting {words[4]}: {s.run.layout.describe()}; {s.nodes} nodes", flush=True)
        code = subprocess.run(words, env=env).returncode
        if code:
            print(f"runai ended with exit code {code}: {shlex.join(words)}")
            return code
    print(f"results: {runs[0].values['PVC_DIR']}/experiments; then: maxbench report")
    return 0
