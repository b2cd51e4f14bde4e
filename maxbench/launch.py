"""Checks the variables of launch.sh, makes the job scripts and submits them.

  launch/launch.sh               submits: the run, and a job each for profile and trace
  launch/launch.sh --dry-run     prints the exact scripts and commands
  launch/launch.sh --wait        submits, waits for the end
  launch/launch.sh -- --layers 8 further flags of the trainer

Variables (other names that are understood in brackets):
"""

import importlib.util
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

from maxbench import cli, preflight, runai
from maxbench.profile import NSYS_CPU_OPTIONS, NSYS_OPTIONS
from maxbench.variables import ROOT, SECRETS, VARIABLES, Settings, additional, settle

HOPPER = ("h100", "h200")


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 submitted, 2 bad input, or sbatch's own."""
    words = list(argv[1:])
    cut = words.index("--") if "--" in words else len(words)
    options, extra = words[:cut], words[cut + 1 :]
    if {"--help", "-h"} & set(options):
        print(help_text())
        return 0
    with cli.clear_errors("launch"):
        known = ("--dry-run", "--wait", "--inside")
        for option in options:
            if option not in known:
                raise ValueError(
                    f"unknown option {option!r}; there are {', '.join(known[:2])}, --help, and "
                    "flags of the trainer after --"
                )
        settings = settle(os.environ, extra)
        for note in settings.notes:
            print(f"launch.sh: note: {note}", file=sys.stderr)
        if "--inside" in options:
            has = int(os.environ.get("SLURM_JOB_NUM_NODES", settings.nodes))
            if has < settings.nodes:
                raise ValueError(
                    f"{settings.run.layout.describe()} needs {settings.nodes} nodes, and this job "
                    f"has {has}: sbatch -N {settings.nodes} launch.sh"
                )
            kind = kinds(settings)[-1]  # one allocation, one job: the profile if one is asked for
            print(script(settings, kind, 0))
            return 0
        if "--dry-run" in options:
            print(dry_run(settings))
            return 0
        if settings.values["CLUSTER_TYPE"] == "runai":
            return runai.submit(settings, kinds(settings), commands(settings))
        return submit(settings, wait="--wait" in options)


def help_text() -> str:
    """The docstring and every variable."""
    lines = [__doc__.strip(), ""]
    for name, (default, meaning, others) in VARIABLES.items():
        known = f" [{', '.join(others)}]" if others else ""
        default = {"*": "(by workload)", "": ""}.get(default, f"({default})")
        lines.append(f"  {name:<24} {meaning} {default}{known}")
    return "\n".join(lines)


def kinds(s: Settings) -> list[str]:
    """The jobs to run: profile and trace apart, because their overhead spoils figures.

    Raises:
      ValueError: none is left.
    """
    jobs = [] if s.on("DISABLE_PERFRUN") else [""]
    if s.on("ENABLE_PROFILE"):
        jobs.append(s.values["PROFILER"])
    if s.on("ENABLE_NCCL_TRACE"):
        jobs.append("nccltrace")
    if not jobs:
        raise ValueError(
            "DISABLE_PERFRUN=true leaves nothing to run: set ENABLE_PROFILE=true or "
            "ENABLE_NCCL_TRACE=true too"
        )
    return jobs


def name(s: Settings, kind: str) -> str:
    """The job's name, which is its folder's: the run's, and what else it does."""
    return s.run.name + (f"_{kind}" if kind else "")


def train_flags(s: Settings, kind: str) -> list[str]:
    """Flags of maxbench.train for a job of this kind."""
    flags = list(s.flags)
    start, stop = s.number("PROFILE_START_STEP"), s.number("PROFILE_STOP_STEP")
    if kind in ("nsys", "xplane"):
        ranks = s.values["RUN_CONF_PROFILE_RANKS"].replace(" ", "")
        flags += [f"--profile={kind}", f"--config.profile.start={start}"]
        flags += [f"--config.profile.stop={stop}", f"--config.profile.ranks={ranks}"]
        steps = stop if s.family.stops else max(stop, s.run.train.steps)
        flags += ["--steps", str(steps)]
    if kind == "nccltrace":
        flags += ["--profile=nccltrace", "--steps", str(min(5, s.run.train.steps))]
    return flags


def commands(s: Settings, python: str = "python3") -> dict[str, list[str]]:
    """For each job, the command that every process runs."""
    return {k: [python, "-m", "maxbench.train", *train_flags(s, k)] for k in kinds(s)}


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
    options += [f"--account={v['SBATCH_ACCOUNT']}"] if v["SBATCH_ACCOUNT"] else []
    options += [f"--partition={v['SBATCH_PARTITION']}"] if v["SBATCH_PARTITION"] else []
    if v["SBATCH_GPUS_PER_NODE"] != "none":
        options.append(f"--gres=gpu:{v['SBATCH_GPUS_PER_NODE']}")
    options += [f"--exclude={v['EXCLUDE_NODES']}"] if v["EXCLUDE_NODES"] else []
    saves = "--checkpoint" in s.flags
    options.append("--requeue" if saves else "--no-requeue")
    if saves:
        options.append("--signal=TERM@120")  # time to save before the time limit
    if s.run.layout.gpu_type.startswith("gb") and s.nodes > 18:  # an NVL72 domain has 18 nodes
        segment = max(d for d in range(1, 19) if s.nodes % d == 0)
        options.append(f"--segment={segment}")
    return options + additional(v["ADDITIONAL_SLURM_PARAMS"])


def script(s: Settings, kind: str, stamp: int) -> str:
    """The whole job script. stamp names the folder of results; 0 lets the job choose."""
    python = os.environ.get("MAXBENCH_PYTHON", sys.executable)
    v = s.values
    python = "python3" if v["RUN_CONF_IMAGE"] else python
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
        "PYTHONPATH": str(ROOT),
        **environment(s, kind),
    }
    if kind == "nsys":
        header |= nsys_variables(s)
    options = [f"#SBATCH {option}" for option in sbatch_options(s, kind, folder)]
    exports = [f"export {key}={shlex.quote(value)}" for key, value in header.items()]
    train = [python, "-m", "maxbench.train", *train_flags(s, kind)]
    arrays = [f"TRAIN=({_words(train)})", f"PREFLIGHT=({_words(preflight)})"]
    body = (ROOT / "launch" / "slurm.sh").read_text()
    return "\n".join(["#!/bin/bash", *options, "", *exports, *arrays, "", body])


def _words(command: Sequence[str]) -> str:
    """Elements of a bash array; a comma is quoted too, so that nobody takes it for a separator."""
    return " ".join(
        f"'{w}'" if shlex.quote(w) == w and "," in w else shlex.quote(w) for w in command
    )


def nsys_variables(s: Settings) -> dict[str, str]:
    """What task.sh needs to start Nsight Systems."""
    cpu = s.on("RUN_CONF_PROFILE_CPU")
    layout = s.run
    return {
        "MB_PROFILE_RANKS": s.values["RUN_CONF_PROFILE_RANKS"].replace(" ", ""),
        "MB_GPU_METRICS": "true" if s.on("ENABLE_GPU_METRICS") else "false",
        "MB_NSYS_OPTIONS": " ".join(NSYS_CPU_OPTIONS if cpu else NSYS_OPTIONS),
        "MB_NSYS_NAME": f"profile_{layout.model.name}-{layout.model.size}-"
        f"{layout.precision.dtype}_{layout.layout.gpus}g",
    }


def dry_run(s: Settings) -> str:
    """Scripts and commands as they would be submitted."""
    if s.values["CLUSTER_TYPE"] == "runai":
        made = runai.submissions(s, kinds(s), commands(s))
        return "\n\n".join(shlex.join(command) for command in made)
    parts = []
    for kind in kinds(s):
        made = script(s, kind, int(time.time()))
        train = shlex.join(["python3", "-m", "maxbench.train", *train_flags(s, kind)])
        parts.append(f"# {name(s, kind)}: {s.run.layout.describe()}; {s.nodes} nodes\n{made}")
        parts.append(f"# the command of each process:\n{train}")
    return "\n\n".join(parts)


def submit(s: Settings, wait: bool) -> int:
    """Writes the scripts and submits them; returns sbatch's exit code.

    Raises:
      ValueError: sbatch or what the jobs need is not there.
    """
    needed(s)
    clean = {k: v for k, v in os.environ.items() if k not in SECRETS}
    running = []
    for kind in kinds(s):
        job = name(s, kind)
        folder, stamp = new_folder(s.out / "experiments" / job, job)
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
    raise ValueError(f"sbatch refused {folder}/sbatch_{job}.sh (exit code {code}), see above")


def new_folder(experiment: pathlib.Path, job: str) -> tuple[pathlib.Path, int]:
    """Makes <experiment>/<job>_<stamp> and returns it with its stamp."""
    stamp = int(time.time())
    while True:
        try:
            folder = experiment / f"{job}_{stamp}"
            folder.mkdir(parents=True)
            return folder, stamp
        except FileExistsError:
            stamp += 1


def needed(s: Settings) -> None:
    """Raises ValueError for a missing tool, with what to do without it, or a wrong XLA flag."""
    if importlib.util.find_spec("jaxlib") and (wrong := preflight.lint(preflight.xla_words(s.run))):
        raise ValueError("; ".join(wrong))
    if not shutil.which("sbatch"):
        train = shlex.join(["python3", "-m", "maxbench.train", *train_flags(s, kinds(s)[0])])
        raise ValueError(
            "sbatch is not on PATH: submit from a login node of the cluster (module load slurm?), "
            f"or train on this machine without Slurm: {train}"
        )
    image = s.values["RUN_CONF_IMAGE"]
    if image.endswith(".sqsh") and not pathlib.Path(image).exists():
        raise ValueError(
            f"RUN_CONF_IMAGE={image!r} does not exist: ./setup.sh makes one where enroot is "
            "installed; leave it empty to use the Python environment of setup.sh"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv))
