"""Slurm: the job script of a run, and its submission."""

import importlib.util
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

from maxbench.launch import checks, runai
from maxbench.launch.variables import ROOT, SECRETS, Settings, additional
from maxbench.run import metrics
from maxbench.run.profile import NSYS_CPU_OPTIONS, NSYS_OPTIONS
from maxbench.spec.errors import UserError

HOPPER = ("h100", "h200")


def kinds(s: Settings) -> list[str]:
    """The jobs to run: profile and trace apart, because their overhead spoils figures.

    Raises:
      UserError: none is left, or a look inside of a run that is one step long.
    """
    jobs = [] if s.on("DISABLE_PERFRUN") else [""]
    if s.on("ENABLE_PROFILE"):
        jobs.append(s.values["PROFILER"])
    if s.on("ENABLE_NCCL_TRACE"):
        jobs.append("nccltrace")
    if s.values["LOAD_CHECKPOINT_PATH"] and any(jobs):
        raise UserError(
            "LOAD_CHECKPOINT_PATH trains one step, the checkpoint's next: nothing to profile or "
            "trace; leave ENABLE_PROFILE and ENABLE_NCCL_TRACE out"
        )
    if not jobs:
        raise UserError(
            "DISABLE_PERFRUN=true leaves nothing to run: set ENABLE_PROFILE=true or "
            "ENABLE_NCCL_TRACE=true too"
        )
    return jobs


def name(s: Settings, kind: str) -> str:
    """The job's name, which is its folder's: the run's, and what else it does."""
    return s.run.name + (f"_{kind}" if kind else "")


def train_flags(s: Settings, kind: str) -> list[str]:
    """Flags of maxbench.train for a job of this kind."""
    if not kind:
        return list(s.flags)
    steps, flags = s.run.train.steps, [*s.flags, f"--profile={kind}"]
    if "--checkpoint" in flags:  # the run itself saves; its terabytes need no copies
        flags += ["--nocheckpoint", "--config.output.checkpoint_every=0"]
    if kind == "nccltrace":
        return [*flags, "--steps", str(min(5, steps))]
    start, stop = s.number("PROFILE_START_STEP"), s.number("PROFILE_STOP_STEP")
    flags += [f"--config.profile.start={start}", f"--config.profile.stop={stop}"]
    flags.append(f"--config.profile.ranks={s.values['RUN_CONF_PROFILE_RANKS']}")
    return [*flags, "--steps", str(stop if s.family.stops else max(stop, steps))]


def commands(s: Settings, python: str = "python3") -> dict[str, list[str]]:
    """For each job, the command that every process runs."""
    return {k: [python, "-m", "maxbench.train", *train_flags(s, k)] for k in kinds(s)}


def runai_jobs(s: Settings) -> dict[str, tuple[dict[str, str], list[str]]]:
    """For each job, the variables and the command of every process."""
    return {kind: (environment(s, kind), command) for kind, command in commands(s).items()}


def environment(s: Settings, kind: str) -> dict[str, str]:
    """Variables of the job by GPU type and layout; what the user has set already wins."""
    layout, gpu = s.run.layout, s.run.layout.gpu_type
    env = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.94", "NVTE_FUSED_ATTN": "1"}
    if gpu in HOPPER:  # slows Blackwell down
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if gpu.startswith("gb"):
        env |= {"NCCL_NET_GDR_LEVEL": "PHB", "NCCL_NET_GDR_C2C": "1"}
    if layout.pp > 1:
        env["NCCL_P2P_NET_CHUNKSIZE"] = str(2 << 20)
    env = {k: os.environ.get(k, v) for k, v in env.items()}
    if kind == "nccltrace":
        env |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "COLL,P2P,NET,INIT"}
    return env


def sbatch_options(s: Settings, kind: str, folder: pathlib.Path) -> list[str]:
    """Options of sbatch, as they stand in the script."""
    v, job = s.values, name(s, kind)
    options = [f"--job-name={job}", f"--nodes={s.nodes}", "--exclusive", "--mem=0"]
    options += [f"--ntasks-per-node={s.tasks_per_node}", "--open-mode=append"]
    options.append(f"--time={'00:15:00' if kind == 'nccltrace' else v['TIME_LIMIT']}")
    options.append(f"--output={folder}/sbatch_{job}.out")
    options.append("--dependency=singleton")  # one run of a name at a time, as the recipes do
    given = {"account": v["SBATCH_ACCOUNT"], "partition": v["SBATCH_PARTITION"]}
    given["exclude"] = v["EXCLUDE_NODES"]
    given["gres"] = "" if (n := v["SBATCH_GPUS_PER_NODE"]) == "none" else f"gpu:{n}"
    options += [f"--{option}={value}" for option, value in given.items() if value]
    # A run that saves goes on after a requeue, and gets time to save before its time limit.
    saves = "--checkpoint" in s.flags and not kind
    options += ["--requeue", "--signal=TERM@120"] if saves else ["--no-requeue"]
    if s.run.layout.gpu_type.startswith("gb") and s.nodes > 18:  # an NVL72 domain has 18 nodes
        segment = max(d for d in range(1, 19) if s.nodes % d == 0)
        options.append(f"--segment={segment}")
    return options + additional(v["ADDITIONAL_SLURM_PARAMS"])


def script(s: Settings, kind: str, stamp: int) -> str:
    """The whole job script. stamp names the folder of results; 0 lets the job choose."""
    v = s.values
    python = os.environ.get("MAXBENCH_PYTHON", sys.executable)
    python = "python3" if v["RUN_CONF_IMAGE"] else python  # the container's own
    folder = s.out / "experiments" / name(s, kind) / f"{name(s, kind)}_{stamp}"
    mounts = ",".join(filter(None, (f"{s.out}:{s.out},{ROOT}:{ROOT}", v["RUN_CONF_MOUNTS"])))
    preflight = [] if s.on("DISABLE_PREFLIGHT") or kind else [python, "-m", "maxbench.preflight"]
    preflight += s.flags if preflight else []
    preflight += ["--allow_tcp"] if preflight and s.on("ALLOW_TCP") else []
    header = {
        "MB_ROOT": str(ROOT),
        "MB_OUT": str(s.out),
        "MB_NAME": name(s, kind),
        "MB_STAMP": str(stamp),
        "MB_NODES": str(s.nodes),
        "MB_TASKS_PER_NODE": str(s.tasks_per_node),
        "MB_MPI": v["SLURM_MPI_TYPE"],
        "MB_BIND": "" if s.on("DISABLE_PINNING") else "numa",
        "MB_LABEL": v["OPTIMIZATION_NAME"],
        "MB_IMAGE": v["RUN_CONF_IMAGE"],
        "MB_MOUNTS": mounts,
        "MB_PROFILE": kind,
        "MB_VBOOST": v["ENABLE_VBOOST"],
        "PYTHONPATH": str(ROOT),
        **environment(s, kind),
    }
    if kind == "nsys":
        header |= nsys_variables(s)
    options = [f"#SBATCH {option}" for option in sbatch_options(s, kind, folder)]
    exports = [f"export {key}={shlex.quote(value)}" for key, value in header.items()]
    arrays = [f"TRAIN=({_words(commands(s, python)[kind])})", f"PREFLIGHT=({_words(preflight)})"]
    body = (ROOT / "launch" / "slurm.sh").read_text()
    return "\n".join(["#!/bin/bash", *options, "", *exports, *arrays, "", body])


def _words(command: Sequence[str]) -> str:
    """Elements of a bash array; a comma is quoted too, so that nobody takes it for a separator."""
    return " ".join(
        f"'{w}'" if shlex.quote(w) == w and "," in w else shlex.quote(w) for w in command
    )


def nsys_variables(s: Settings) -> dict[str, str]:
    """What task.sh needs to start Nsight Systems."""
    model, dtype = s.run.model, s.run.precision.dtype
    return {
        "MB_PROFILE_RANKS": s.values["RUN_CONF_PROFILE_RANKS"],
        "MB_GPU_METRICS": s.values["ENABLE_GPU_METRICS"],
        "MB_NSYS_OPTIONS": NSYS_CPU_OPTIONS if s.on("RUN_CONF_PROFILE_CPU") else NSYS_OPTIONS,
        "MB_NSYS_NAME": f"profile_{model.name}-{model.size}-{dtype}_{s.run.layout.gpus}g",
    }


def dry_run(s: Settings) -> str:
    """Scripts and commands as they would be submitted."""
    if s.values["CLUSTER_TYPE"] == "runai":
        return "\n\n".join(map(shlex.join, runai.submissions(s, runai_jobs(s))))
    parts = []
    for kind, command in commands(s).items():
        made = script(s, kind, int(time.time()))
        parts.append(f"# {name(s, kind)}: {s.run.layout.describe()}; {s.nodes} nodes\n{made}")
        parts.append(f"# the command of each process:\n{shlex.join(command)}")
    return "\n\n".join(parts)


def submit(s: Settings, wait: bool) -> int:
    """Writes the scripts and submits them; returns sbatch's exit code.

    Raises:
      UserError: sbatch or what the jobs need is not there.
    """
    needed(s)
    # sbatch and srun would read these themselves, before the script's options, and fail on 'null'.
    ours = (*SECRETS, "SBATCH_GPUS", "SBATCH_GPUS_PER_NODE", "SLURM_GPUS_PER_NODE")
    clean = {k: v for k, v in os.environ.items() if k not in ours}
    running = []
    for kind in kinds(s):
        job = name(s, kind)
        folder, stamp = metrics.new_folder(s.out, job)
        file = folder / f"sbatch_{job}.sh"
        file.write_text(script(s, kind, stamp))
        command = ["sbatch", "--parsable", *(["--wait"] if wait else []), str(file)]
        running.append((subprocess.Popen(command, env=clean, stdout=subprocess.PIPE), job, folder))
        print(f"submitting {job}: {s.run.layout.describe()}; {s.nodes} nodes", flush=True)
        if not wait:
            _submitted(*running.pop())
    codes = [_submitted(*one) for one in running]
    print(f"when they are done: maxbench report {s.out / 'experiments'}")
    return max(codes, default=0)


def _submitted(process: subprocess.Popen, job: str, folder: pathlib.Path) -> int:
    number = process.stdout.readline().decode().strip().partition(";")[0]
    process.stdout.close()
    if number:
        print(f"job {number}: {folder}/log-{job}.out", flush=True)
        return process.wait()
    code = process.wait()
    raise UserError(f"sbatch refused {folder}/sbatch_{job}.sh (exit code {code}), see above")


def needed(s: Settings) -> None:
    """Raises UserError for a missing tool, with what to do without it, or a wrong XLA flag."""
    if importlib.util.find_spec("jaxlib") and (wrong := checks.lint(checks.xla_words(s.run))):
        raise UserError("; ".join(wrong))
    if not shutil.which("sbatch"):
        train = shlex.join(next(iter(commands(s).values())))
        raise UserError(
            "sbatch is not on PATH: submit from a login node of the cluster (module load slurm?), "
            f"or train on this machine without Slurm: {train}"
        )
    try:
        (s.out / "experiments").mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(
            f"STAGE_PATH={str(s.out)!r} cannot hold results ({e.strerror}); give a folder that you "
            "may write to and that all nodes share"
        ) from None
    image = s.values["RUN_CONF_IMAGE"]
    if image.endswith(".sqsh") and not pathlib.Path(image).exists():
        raise UserError(
            f"RUN_CONF_IMAGE={image!r} does not exist: ./setup.sh makes one where enroot is "
            "installed; leave it empty to use the Python environment of setup.sh"
        )
