"""Slurm: job scripts and their submission."""

import functools
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence

from maxbench.config.errors import UserError
from maxbench.config.recipes import ROOT
from maxbench.launch import images, job_file, submission
from maxbench.launch.jobs import (
    command,
    environment,
    job_kinds,
    job_name,
    nsys_variables,
    suite_writer,
    time_limit,
)
from maxbench.launch.variables import SECRETS, JobConfig
from maxbench.run_logs import folders

BEFORE_TIME_LIMIT = "--signal=TERM@120"  # lets a run save that can


def sbatch_options(s: JobConfig, kind: str, folder: pathlib.Path) -> list[str]:
    """Options of sbatch in the job script."""
    v, job = s.values, job_name(s, kind)
    options = [f"--job-name={job}", f"--nodes={s.nodes}", "--exclusive", "--mem=0"]
    options += [f"--ntasks-per-node={s.tasks_per_node}", "--open-mode=append"]
    options.append(f"--time={time_limit(s, kind)}")
    options.append(f"--output={folder}/sbatch_{job}.out")
    options.append("--dependency=singleton")  # one job per name at a time, as in NVIDIA's recipes
    optional = {"account": v["SBATCH_ACCOUNT"], "partition": v["SBATCH_PARTITION"]}
    optional["exclude"] = v["EXCLUDE_NODES"]
    optional["gres"] = "" if (n := v["SBATCH_GPUS_PER_NODE"]) == "none" else f"gpu:{n}"
    options += [f"--{option}={value}" for option, value in optional.items() if value]
    options.append("--requeue")  # exit_codes.restarts() has the rule
    options += [BEFORE_TIME_LIMIT] if "--checkpoint" in s.flags and not kind else []
    if (same_domain := segment(s)) and not segment_disabled_because(s):
        options += same_domain
    return options + additional(v["ADDITIONAL_SLURM_PARAMS"])


def segment(s: JobConfig) -> list[str]:
    """The option that allocates whole NVLink domains; [] if a node is one, or one is enough."""
    gpu = s.run.gpu
    domain = gpu.nvlink_gpus // gpu.gpus_per_node
    return [f"--segment={gpu.segment(s.nodes)}"] if 1 < domain < s.nodes else []


@functools.cache
def sbatch_supports(option: str) -> bool:
    """Whether the sbatch of this machine has an option; True if there is no sbatch to query."""
    try:
        done = subprocess.run(["sbatch", "--help"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return True
    return option in done.stdout or done.returncode != 0


def segment_disabled_because(s: JobConfig) -> str:
    """Why --segment is not used, or ''."""
    if choice := s.values["SEGMENT"]:
        return "" if choice == "true" else "SEGMENT=false"
    return "" if sbatch_supports("--segment") else "sbatch has no --segment (Slurm < 23.11)"


def notes(s: JobConfig) -> list[str]:
    """Notes on options that are left out."""
    return (
        [f"{option[0]} is left out: {why}"]
        if (option := segment(s)) and (why := segment_disabled_because(s))
        else []
    )


def options_missing_in_job(s: JobConfig) -> list[str]:
    """Options of sbatch that launch.sh cannot set because sbatch has already started it."""
    v, names = s.values, {"TIME_LIMIT": "time", "EXCLUDE_NODES": "exclude"}
    env = job_file.overlay(job_file.cluster_values(os.environ), os.environ)
    options = [f"--{o}={v[name]}" for name, o in names.items() if env.get(name)]
    options += ["--requeue", BEFORE_TIME_LIMIT] if "--checkpoint" in s.flags else []
    return options + additional(v["ADDITIONAL_SLURM_PARAMS"])


def script(s: JobConfig, kind: str, stamp: int) -> str:
    """The job script. stamp: timestamp in the name of the run folder; 0 = chosen by the job."""
    v = s.values
    python = "python3" if v["RUN_CONF_IMAGE"] else python_of_nodes()  # of the container
    folder = s.out / "experiments" / job_name(s, kind) / f"{job_name(s, kind)}_{stamp}"
    files = map(pathlib.Path, (s.flags[1].partition(":")[0], v["HARDWARE"]))
    user_files = {p.parent for p in files if p.is_file()}  # mounted too if outside the checkout
    mounted = [s.out, ROOT, *sorted(p for p in user_files if not p.is_relative_to(ROOT))]
    mounts = ",".join([*(f"{p}:{p}" for p in mounted), *filter(None, [v["RUN_CONF_MOUNTS"]])])
    preflight = [] if s.on("DISABLE_PREFLIGHT") or kind else [python, "-m", "maxbench.preflight"]
    preflight += s.flags if preflight else []
    preflight += ["--allow_tcp"] if preflight and s.on("ALLOW_TCP") else []
    header = {
        "MB_ROOT": str(ROOT),
        "MB_OUT": str(s.out),
        "MB_NAME": job_name(s, kind),
        "MB_STAMP": str(stamp),
        "MB_MAX_RESTARTS": v["MAX_RESTARTS"],
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
    options = [f"#SBATCH {shlex.quote(option)}" for option in sbatch_options(s, kind, folder)]
    exports = [f"export {key}={shlex.quote(value)}" for key, value in header.items()]
    arrays = [f"TRAIN=({_words(command(s, kind, python))})", f"PREFLIGHT=({_words(preflight)})"]
    body = (ROOT / "launch" / "slurm.sh").read_text()
    return "\n".join(["#!/bin/bash", *options, "", *exports, *arrays, "", body])


def python_of_nodes() -> str:
    """The Python of a job. If this one is of setup.sh, the wrapper that selects by architecture."""
    python = os.environ.get("MAXBENCH_PYTHON", sys.executable)
    folder = pathlib.Path(python).parent.parent
    wrapper = folder.parent / "venv" / "bin" / "python"
    own = folder.name == f"venv-{platform.machine()}" and wrapper.exists()
    return str(wrapper) if own else python


def _words(command: Sequence[str]) -> str:
    """Elements of a bash array. Commas are quoted too: shellcheck takes them for separators."""
    return " ".join(
        f"'{w}'" if shlex.quote(w) == w and "," in w else shlex.quote(w) for w in command
    )


def additional(text: str) -> list[str]:
    """'nodelist=a,b;exclusive' -> ['--nodelist=a,b', '--exclusive'].

    Raises:
      UserError: a part is not an sbatch option.
    """
    options = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        key, is_set, value = part.partition("=")
        key = key.strip().lstrip("-")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", key) or re.search(r"[\s\\]", value.strip()):
            raise UserError(
                f"ADDITIONAL_SLURM_PARAMS: {part!r} is not key=value or key; "
                "for example 'nodelist=node001,node002;constraint=gpu'"
            )
        options.append(f"--{key}={value.strip()}" if is_set else f"--{key}")
    return options


def dry_run(runs: Sequence[JobConfig]) -> str:
    """The scripts and commands that submit() would use."""
    each = [(job_name(s, kind), s, kind) for s in runs for kind in job_kinds(s)]
    times = Counter((job, f": {s.expect}" if s.expect else "") for job, s, _ in each)
    listed = [f"# {n} x {job}{expected}" for (job, expected), n in times.items()]
    parts = ["\n".join(listed)] if len(runs) > 1 else []
    for job, s, kind in {x[0]: x for x in each}.values():
        text = script(s, kind, int(time.time()))
        parts.append(f"# {job}: {s.describe()}\n{text}")
        parts.append(f"# command of each process:\n{shlex.join(command(s, kind))}")
    return "\n\n".join(parts)


def submit(runs: Sequence[JobConfig], wait: bool, suite: str = "") -> int:
    """Writes the scripts and submits them; returns sbatch's exit code.

    Args:
      suite: name of the suite, whose runs are listed for maxbench report --suite.

    Raises:
      UserError: sbatch, the container image or the Python environment is missing.
    """
    check_prerequisites(runs)
    for note in dict.fromkeys(note for s in runs for note in notes(s)):
        print(f"launch.sh: note: {note}", file=sys.stderr)
    # sbatch and srun read these before the script's options, and fail on 'null'.
    removed = (*SECRETS, "SBATCH_GPUS", "SBATCH_GPUS_PER_NODE", "SLURM_GPUS_PER_NODE")
    clean = {k: v for k, v in os.environ.items() if k not in removed}
    results, running, suite_list = runs[0].out / "experiments", [], None
    each = [(s, kind) for s in runs for kind in job_kinds(s)]
    if suite:
        suite_list = suite_writer(each, results, suite)
    for s, kind in each:
        job = job_name(s, kind)
        folder, stamp = folders.new_folder(s.out, job)
        file = folder / f"sbatch_{job}.sh"
        file.write_text(script(s, kind, stamp))
        if suite_list and not kind:
            suite_list.add(folder)
        sbatch = ["sbatch", "--parsable", *(["--wait"] if wait else []), str(file)]
        running.append((subprocess.Popen(sbatch, env=clean, stdout=subprocess.PIPE), job, folder))
        print(f"submitting {job}: {s.describe()}", flush=True)
        if not wait:
            _submitted(*running.pop())
    codes = [_submitted(*job) for job in running]
    submission.print_next_steps(results, str(suite_list.file) if suite_list else "")
    return max(codes, default=0)


def _submitted(process: subprocess.Popen, job: str, folder: pathlib.Path) -> int:
    assert process.stdout is not None
    number = process.stdout.readline().decode().strip().partition(";")[0]
    process.stdout.close()
    if number:
        (folder / "job_id").write_text(number)
        print(f"job {number}: {folder}/log-{job}.out", flush=True)
        return process.wait()
    code = process.wait()
    raise UserError(f"sbatch refused {folder}/sbatch_{job}.sh (exit code {code}), see above")


def check_prerequisites(runs: Sequence[JobConfig]) -> None:
    """Raises UserError for a missing tool, with what to do without it."""
    s = runs[0]
    additional(s.values["ADDITIONAL_SLURM_PARAMS"])
    if not shutil.which("sbatch"):
        train = shlex.join(command(s, job_kinds(s)[0]))
        raise UserError(
            "sbatch is not on PATH: submit from a login node of the cluster (module load slurm?), "
            f"or train on this machine without Slurm: {train}"
        )
    try:
        (s.out / "experiments").mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(
            f"STAGE_PATH={str(s.out)!r} cannot be written ({e.strerror}); give a folder on a "
            "file system that all nodes share"
        ) from None
    for one in runs:
        _check_environment(one)


def _check_environment(s: JobConfig) -> None:
    """Raises UserError if the nodes would find neither the image nor a Python environment."""
    image, kind = s.values["RUN_CONF_IMAGE"], s.values["ARCHITECTURE"]
    images.check_for_slurm(image)
    venv = pathlib.Path(python_of_nodes()).parent.parent
    is_wrapper = venv.name == "venv" and not (venv / "pyvenv.cfg").exists()
    of_nodes = venv.parent / f"venv-{kind}" / "bin" / "python"
    if is_wrapper and kind and not image and not of_nodes.exists():
        raise UserError(
            f"the nodes are {kind} and {of_nodes.parent.parent} does not exist: sbatch -N 1 "
            "setup.sh creates it on one of them"
        )
