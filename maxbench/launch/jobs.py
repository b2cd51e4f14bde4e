"""The jobs of a run, for any scheduler: the run itself, and a profile and a trace of it."""

import os
import pathlib
import re
import time
import zlib
from collections.abc import Sequence
from typing import Any

from maxbench.config import flag_words, ports
from maxbench.config.errors import UserError
from maxbench.launch.node import NodeJob
from maxbench.launch.nsight import NSYS_CPU_OPTIONS, NSYS_OPTIONS
from maxbench.launch.variables import JobConfig, check_printable
from maxbench.run_logs.suite_file import SuiteWriter

NCCL_TRACE_LIMIT = "00:15:00"  # of a job that traces a few steps


def job_kinds(s: JobConfig) -> list[str]:
    """Kinds of the jobs: '', 'nsys', 'xplane', 'nccltrace'. Profile and trace are jobs of their own
    because their overhead distorts step times.

    Raises:
      UserError: no job is left, or the profile or trace would be of a single step.
    """
    jobs = [] if s.on("DISABLE_PERFRUN") else [""]
    if s.on("ENABLE_PROFILE"):
        jobs.append(s.values["PROFILER"])
    if s.on("ENABLE_NCCL_TRACE"):
        jobs.append("nccltrace")
    if s.values["LOAD_CHECKPOINT_PATH"] and any(jobs):
        raise UserError(
            "LOAD_CHECKPOINT_PATH trains one step after the checkpoint, too few to profile or "
            "trace; remove ENABLE_PROFILE and ENABLE_NCCL_TRACE"
        )
    if not jobs:
        raise UserError(
            "DISABLE_PERFRUN=true leaves no job to run: also set ENABLE_PROFILE=true or "
            "ENABLE_NCCL_TRACE=true"
        )
    return jobs


def job_name(s: JobConfig, kind: str) -> str:
    """Name of the job and of its folder: the run's, with the kind."""
    return s.run.name + (f"_{kind}" if kind else "")


def train_flags(s: JobConfig, kind: str) -> list[str]:
    """Flags of maxbench.train for a job of this kind."""
    if not kind:
        return list(s.flags)
    steps, own = s.run.train.steps, [f"--profile={kind}"]
    if "--checkpoint" in s.flags:  # only the run itself saves: checkpoints are terabytes
        own += ["--nocheckpoint", "--config.output.checkpoint_every=0"]
    if kind == "nccltrace":
        return flag_words.replaced(s.flags, *own, "--steps", str(min(5, steps)))
    start, stop = s.number("PROFILE_START_STEP"), s.number("PROFILE_STOP_STEP")
    own += [f"--config.profile.start={start}", f"--config.profile.stop={stop}"]
    own.append(f"--config.profile.ranks={s.values['RUN_CONF_PROFILE_RANKS']}")
    own += ["--steps", str(stop if s.launch.stops else max(stop, steps))]
    return flag_words.replaced(s.flags, *own)


def command(s: JobConfig, kind: str, python: str = "python3") -> list[str]:
    """The command that every process of a job runs."""
    return [python, "-m", "maxbench.train", *train_flags(s, kind)]


def environment(s: JobConfig, kind: str) -> dict[str, str]:
    """Environment of the job by GPU type and layout; the user's own values take precedence."""
    env = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.94", "NVTE_FUSED_ATTN": "1"}
    env |= s.run.gpu.environment
    # A cache per job name, of which one runs at a time: no job reads a program that another one is
    # writing.
    env["JAX_COMPILATION_CACHE_DIR"] = f"{s.out}/cache/{job_name(s, kind)}"
    if s.run.layout.pp > 1:
        env["NCCL_P2P_NET_CHUNKSIZE"] = str(2 << 20)
    env = {k: check_printable(k, os.environ.get(k, v)) for k, v in env.items()}
    if kind == "nccltrace":
        env |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "COLL,P2P,NET,INIT"}
    return env


def time_limit(s: JobConfig, kind: str) -> str:
    """The time limit of a job, as Slurm writes it."""
    return NCCL_TRACE_LIMIT if kind == "nccltrace" else s.values["TIME_LIMIT"]


def seconds(text: str) -> int:
    """Seconds of a time limit in Slurm's notation: minutes, minutes:seconds, hours:minutes:seconds,
    days-hours, days-hours:minutes and days-hours:minutes:seconds."""
    days, has_days, clock = text.rpartition("-")
    numbers = [int(number) for number in clock.split(":")]
    if has_days:
        numbers += [0] * (3 - len(numbers))
    elif len(numbers) == 1:
        numbers = [0, *numbers, 0]
    hours, minutes, rest = [0] * (3 - len(numbers)) + numbers
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest


def port(job: str) -> int:
    """A port for process 0 of a job, by the job's name."""
    return ports.port(zlib.crc32(job.encode()))


def node_job(s: JobConfig, kind: str, stamp: int, **fields: Any) -> NodeJob:
    """A job for maxbench.launch.node, which runs it on each node.

    Args:
      fields: those of NodeJob that the scheduler determines.
    """
    return NodeJob(
        name=job_name(s, kind),
        stamp=stamp,
        nodes=s.nodes,
        tasks_per_node=s.tasks_per_node,
        gpus=0 if s.number("CPU_DEVICES") else gpus_of_node(s),
        preflight="" if s.on("DISABLE_PREFLIGHT") or kind else "true",
        allow_tcp="true" if s.on("ALLOW_TCP") else "",
        time_limit_s=seconds(time_limit(s, kind)),
        label=s.values["OPTIMIZATION_NAME"],
        profile=kind,
        **fields,
    )


def suite_writer(
    each: Sequence[tuple[JobConfig, str]], results: pathlib.Path, suite: str
) -> SuiteWriter:
    """The list of a suite's runs in a folder, which exists.

    Args:
      each: all jobs, with their kinds.
    """
    expectations = [(job_name(s, ""), s.expect) for s, kind in each if not kind and s.expect]
    return SuiteWriter(results / f"suite_{suite}_{int(time.time())}.json", suite, expectations)


def gpus_of_node(s: JobConfig) -> int:
    """GPUs that a job uses on each of its nodes."""
    return s.run.layout.gpus // s.nodes


def short_name(s: JobConfig, kind: str, length: int) -> str:
    """A name that Kubernetes accepts: lower-case letters, digits and -, starting with a letter."""
    run = s.run
    words = (run.model.name, run.model.size, run.precision.dtype, f"{run.layout.gpus}g", kind)
    text = "-".join(filter(None, ("maxbench", *words))).lower()
    return re.sub(r"[^a-z0-9]+", "-", text)[:length].strip("-")


def nsys_variables(s: JobConfig) -> dict[str, str]:
    """Variables with which task.sh starts Nsight Systems."""
    model, dtype = s.run.model, s.run.precision.dtype
    return {
        "MB_PROFILE_RANKS": s.values["RUN_CONF_PROFILE_RANKS"],
        "MB_GPU_METRICS": s.values["ENABLE_GPU_METRICS"],
        "MB_NSYS_OPTIONS": NSYS_CPU_OPTIONS if s.on("RUN_CONF_PROFILE_CPU") else NSYS_OPTIONS,
        "MB_NSYS_NAME": f"profile_{model.name}-{model.size}-{dtype}_{s.run.layout.gpus}g",
    }
