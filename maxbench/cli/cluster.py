"""Writes cluster.toml: `maxbench cluster`."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence

from maxbench.config import command_line, options
from maxbench.config.errors import UserError, check_choice
from maxbench.launch import cluster, cluster_hosts, cluster_kubernetes, job_file, variables
from maxbench.terminal import console

DETECT = {
    "kubernetes": cluster_kubernetes.detect,
    "runai": cluster_hosts.detect_runai,
    "hosts": cluster_hosts.detect,
}
WITHOUT_SLURM = {  # scheduler -> its program, and what it stands for
    "kubernetes": ("kubectl", "JobSets, through kubectl"),
    "runai": ("runai", "Run:ai, through its command line"),
    "hosts": ("ssh", "plain hosts, by ssh"),
}


def main(argv: Sequence[str]) -> int:
    """Writes and shows the file; returns the exit code."""
    command_line.read(options.ClusterFile, argv)
    file = job_file.cluster_file(os.environ).absolute()
    in_file, unanswered = job_file.cluster_values(os.environ), {}

    def ask_optional(name: str, choices: Mapping[str, str]) -> str:
        return prompt(name, choices) if sys.stdin.isatty() else ""

    def ask(name: str, choices: Mapping[str, str]) -> str:
        if not (answer := ask_optional(name, choices)):
            unanswered[name] = choices
        return answer

    env = job_file.overlay(in_file, os.environ)
    gpu_types = command_line.gpu_types(job_file.env_value(env, "HARDWARE"))
    answers = cluster.Answers(env, ask, ask_optional, gpu_types)
    detected = _detect(answers)
    if unanswered:
        raise UserError("; ".join(_request(name, c) for name, c in unanswered.items()))
    for name, value in in_file.items():
        if os.environ.get(name, value) != value:
            print(f"note: {name}={os.environ[name]} is set in the environment and wins")
    named = {job_file.NAMED.get(name) for name in in_file}
    cluster.write(file, {name: value for name, value in detected.items() if name not in named})
    print(f"{file}:\n{file.read_text().strip()}")
    return 0


def _detect(answers: cluster.Answers) -> dict[str, str]:
    """Variables of the cluster, as its scheduler reports them.

    Raises:
      UserError: there is no scheduler here, or it does not answer; a variable is invalid.
    """
    scheduler = answers.of_env("CLUSTER_TYPE").lower()
    if not scheduler and not shutil.which("scontrol"):
        present = {name: text for name, (tool, text) in WITHOUT_SLURM.items() if shutil.which(tool)}
        if present:
            print("scontrol is not on PATH: no Slurm here", file=sys.stderr)
            if not (scheduler := answers.ask("CLUSTER_TYPE", present)):
                return {}
    if scheduler in ("", "slurm"):
        return cluster.detect(cluster.nodes(answers.gpu_types), answers)
    check_choice("CLUSTER_TYPE", scheduler, DETECT)
    return {"CLUSTER_TYPE": scheduler, **DETECT[scheduler](answers)}


def prompt(name: str, choices: Mapping[str, str]) -> str:
    """Asks for one of the choices on the terminal, or for a text if there is none; '' without an
    answer."""
    lines = console.table((), choices.items(), text=(0, 1), indent="  ")
    question = f"{name}, which one?" if choices else f"{name}, {_meaning(name)}?"
    print("\n".join([question, *lines]))
    try:
        while (answer := input("> ").strip()) not in choices:
            if not answer or not choices:
                return answer
            print(f"{answer!r} is not one of {', '.join(choices)}")
    except (EOFError, KeyboardInterrupt):
        return ""
    return answer


def _request(name: str, choices: Mapping[str, str]) -> str:
    """The line that names a variable to set, for a command that cannot ask."""
    return f"set {name}: one of {_listed(choices)}" if choices else f"set {name}: {_meaning(name)}"


def _meaning(name: str) -> str:
    return variables.VARIABLES[name].meaning


def _listed(choices: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({text})" if text else name for name, text in choices.items())
