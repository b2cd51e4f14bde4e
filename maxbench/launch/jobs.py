"""The jobs of a run, for any scheduler: the run itself, and a profile and a trace of it."""

import os

from maxbench.config.errors import UserError
from maxbench.launch.variables import JobConfig, check_printable


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
    steps, flags = s.run.train.steps, [*s.flags, f"--profile={kind}"]
    if "--checkpoint" in flags:  # only the run itself saves: checkpoints are terabytes
        flags += ["--nocheckpoint", "--config.output.checkpoint_every=0"]
    if kind == "nccltrace":
        return [*flags, "--steps", str(min(5, steps))]
    start, stop = s.number("PROFILE_START_STEP"), s.number("PROFILE_STOP_STEP")
    flags += [f"--config.profile.start={start}", f"--config.profile.stop={stop}"]
    flags.append(f"--config.profile.ranks={s.values['RUN_CONF_PROFILE_RANKS']}")
    return [*flags, "--steps", str(stop if s.launch.stops else max(stop, steps))]


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
