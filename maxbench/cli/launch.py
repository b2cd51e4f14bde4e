"""Builds the jobs of a run on a cluster from variables and submits them: `maxbench launch`."""

import importlib.util
import os
import pathlib
import shlex
import sys
from collections.abc import Sequence

from maxbench.config import command_line, commands, options, recipes
from maxbench.config.errors import UserError, check_choice
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.launch import hosts, job_file, jobs, kubernetes, runai, slurm
from maxbench.launch.variables import REFUSED, UNUSED, VARIABLES, JobConfig
from maxbench.preflight import xla_flags
from maxbench.terminal import console

# CLUSTER_TYPE -> scheduler module, with dry_run(configs), the text that would be submitted, and
# submit(configs, wait, suite), which returns an exit code; suite is a name or ''.
SCHEDULERS = {"slurm": slurm, "kubernetes": kubernetes, "runai": runai, "hosts": hosts}
HELP = """\
Checks the variables of launch.sh, writes the job scripts and submits them.

  launch/launch.sh                     submits the run, and a job each for profile and trace
  launch/launch.sh --dry_run           prints the exact scripts and commands
  launch/launch.sh --wait              submits, then waits for the end
  launch/launch.sh --file jobs.toml    submits the jobs of a file, largest first
  launch/launch.sh --suite FILE        the same, with expected results for maxbench report --suite;
                                       exemplar_h100, _b200, _b300, _gb200, _gb300 are built in
  launch/launch.sh -- --layers 8       passes further flags to maxbench train
  JOB_TOTAL_GPUS="8 16 32" DTYPE="bf16 fp8" REPEATS=3 launch/launch.sh    18 runs, largest first

launch/launch.sh is `maxbench launch` in the environment that setup.sh installs.

Variables (accepted aliases in brackets; the last ones are NVIDIA's, which have no effect here or
are refused):
"""


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 submitted, that of sbatch, or with --wait 1 if a job failed.

    Raises:
      UserError: invalid variables or flags.
    """
    words = list(argv[1:])
    cut = words.index("--") if "--" in words else len(words)
    words, trainer_flags = words[:cut], words[cut + 1 :]
    if commands.help_requested(words):
        print(help_text())
        return 0
    in_job = words[:1] == ["--inside"]  # launch.sh as a batch script calls itself so
    asked = _read([argv[0], *words[in_job:]])
    suite, file = job_file.suite_file(asked.suite), asked.file
    configs = job_file.resolve_jobs(os.environ, trainer_flags, suite or file, suite=bool(suite))
    if suite and not all("" in jobs.job_kinds(config) for config in configs):
        raise UserError("DISABLE_PERFRUN=true leaves out the runs that a suite judges")
    cluster = configs[0].values["CLUSTER_TYPE"].lower()
    check_choice("CLUSTER_TYPE", cluster, SCHEDULERS)
    if cluster == "slurm" and not (recipes.ROOT / "launch").is_dir():
        raise UserError(
            "CLUSTER_TYPE='slurm' needs the job scripts of a checkout, and this maxbench is an "
            "installed package: call launch/launch.sh of a checkout; kubernetes, runai and hosts "
            "need none"
        )
    for note in dict.fromkeys(note for config in configs for note in config.notes):
        print(f"launch.sh: note: {note}", file=sys.stderr)
    if in_job:
        print(_script_in_job(configs))
    elif asked.dry_run:
        print(SCHEDULERS[cluster].dry_run(configs))
    else:
        _check_xla_flags(configs)
        return SCHEDULERS[cluster].submit(configs, asked.wait, pathlib.Path(suite).stem)
    return 0


def _read(argv: Sequence[str]) -> options.Launch:
    """The launcher's own flags."""
    try:
        asked = command_line.read(options.Launch, argv)
    except UserError as e:
        raise UserError(f"{e}; flags of maxbench train follow after --") from None
    if asked.suite and asked.file:
        raise UserError("give one of --file and --suite; a suite is a file of jobs")
    return asked


def _check_xla_flags(configs: Sequence[JobConfig]) -> None:
    """Raises UserError for XLA flags or compiler options that XLA does not know.

    A login node without jaxlib cannot check them; the job's preflight does.
    """
    if importlib.util.find_spec("jaxlib") and (
        errors := xla_flags.lint_runs(*(config.run for config in configs))
    ):
        raise UserError("; ".join(errors))


def _script_in_job(configs: Sequence[JobConfig]) -> str:
    """The script of a job that is already running, where sbatch has started launch.sh itself."""
    config = configs[0]
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", config.nodes))
    if len(configs) > 1:
        raise UserError("a job is one run: give one size, DTYPE and JOB_TOTAL_GPUS")
    if nodes < config.nodes:
        raise UserError(
            f"{config.run.layout.describe()} needs {config.nodes} nodes, and this job has {nodes}: "
            f"sbatch -N {config.nodes} launch.sh"
        )
    if missing := slurm.options_missing_in_job(config):
        options = shlex.join(missing)
        print(f"launch.sh: note: this job was submitted without {options}", file=sys.stderr)
        print(f"  (unless you set it): sbatch {options} launch.sh", file=sys.stderr)
    # One allocation runs one job: the profile or trace if one is requested.
    return slurm.script(config, jobs.job_kinds(config)[-1], 0)


def help_text() -> str:
    """HELP and every variable."""
    width = console.terminal_width()
    return "\n".join([HELP, *console.definitions(variables(), width=width, column=25)])


def variables() -> list[tuple[str, str]]:
    """Every variable with its meaning."""
    names = {"models": recipes.models(), "sizes": recipes.sizes(), "presets": recipes.PRESETS}
    listed = {name: " | ".join(x) for name, x in {**names, "schedulers": SCHEDULERS}.items()}
    pairs = []
    for name, v in VARIABLES.items():
        free_bool = ("true", "false") if v.kind == "bool" and not v.default else ()
        choices = " | ".join(GPU_TYPES if v.kind == "gpu type" else v.choices or free_bool)
        meaning = ": ".join(filter(None, (choices, v.meaning.format(**listed))))
        default = {"*": "(by workload)", "": ""}.get(v.default, f"({v.default})")
        default *= "default:" not in v.meaning
        aliases = f" [{', '.join(v.also)}]" if v.also else ""
        pairs.append((name, " ".join(f"{meaning} {default}{aliases}".split())))
    pairs += [(name, f"no effect: {why}") for name, why in UNUSED.items()]
    return pairs + [(name, f"refused: {why}") for name, why in REFUSED.items()]
