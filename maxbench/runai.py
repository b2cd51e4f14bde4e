"""Run:ai: the same command, submitted through the Run:ai command line as a JAX workload.

The command line's own login is used (`runai login`). APP_SECRET is taken out of the environment of
everything that is started, and is on no command line.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from maxbench.variables import SECRETS, Settings


def submissions(
    s: Settings, kinds: Sequence[str], commands: Mapping[str, Sequence[str]]
) -> list[list[str]]:
    """The `runai` command of each job.

    Raises:
      ValueError: a mount that is not name:path:claim, or a profiler that is not there.
    """
    mounts = [f"claimname={claim},path={path}" for claim, path in _claims(s)]
    made = []
    for kind in kinds:
        job = workload_name(s, kind)
        command = ["runai", "training", "jax", "submit", job]
        command += ["--project", s.values["PROJECT_NAME"], "--image", s.values["RUN_CONF_IMAGE"]]
        command += ["--workers", str(s.nodes), "--large-shm"]
        gpus = min(int(s.values["GPUS_PER_NODE"]), s.run.layout.gpus)
        command += ["--gpu-devices-request", str(gpus)]
        for mount in mounts:
            command += ["--existing-pvc", mount]
        root = f"{s.values['PVC_DIR']}/maxbench"
        train = [root if w == str(s.out) else w for w in commands[kind]]
        train = [s.values["PVC_DIR"] if w == root else w for w in train]
        made.append([*command, "--command", "--", "bash", f"{root}/launch/runai.sh", *train])
    return made


def _claims(s: Settings) -> list[tuple[str, str]]:
    """(claim, path) of RUN_CONF_MOUNTS."""
    found = []
    for mount in s.values["RUN_CONF_MOUNTS"].split(","):
        parts = mount.strip().split(":")
        if len(parts) != 3 or not all(parts) or not parts[1].startswith("/"):
            raise ValueError(
                f"RUN_CONF_MOUNTS: {mount!r} is not name:path:k8s-claim; for example "
                "workspace:/workspace:workspace-project-abcde"
            )
        found.append((parts[2], parts[1]))
    if not any(s.values["PVC_DIR"].startswith(path) for _, path in found):
        raise ValueError(
            f"PVC_DIR={s.values['PVC_DIR']!r} lies in none of the mounted paths "
            f"{', '.join(path for _, path in found)}"
        )
    return found


def workload_name(s: Settings, kind: str) -> str:
    """A name that Kubernetes accepts: lower case, 63 characters, no underscore."""
    run = s.run
    words = (run.model.name, run.model.size, run.precision.dtype, f"{run.layout.gpus}g", kind)
    return re.sub(r"[^a-z0-9]+", "-", "-".join(filter(None, ("maxbench", *words))).lower())[:50]


def submit(s: Settings, kinds: Sequence[str], commands: Mapping[str, Sequence[str]]) -> int:
    """Submits the jobs; returns the first exit code that is not 0.

    Raises:
      ValueError: there is no runai.
    """
    made = submissions(s, kinds, commands)
    if not shutil.which("runai"):
        raise ValueError(
            "runai is not on PATH: install the Run:ai command line from your cluster's web page "
            "(Help, Researcher Command Line Interface) and log in with `runai login`, or use "
            "CLUSTER_TYPE=slurm"
        )
    env = {k: v for k, v in os.environ.items() if k not in SECRETS}
    for command in made:
        print(f"submitting {command[4]}: {s.run.layout.describe()}; {s.nodes} workers", flush=True)
        code = subprocess.run(command, env=env).returncode
        if code:
            print(f"runai ended with exit code {code}: {shlex.join(command)}")
            return code
    print(f"results: {s.values['PVC_DIR']}/experiments; then: maxbench report")
    return 0
