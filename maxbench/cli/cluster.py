"""Writes cluster.toml: `maxbench cluster`."""

import os
import sys
from collections.abc import Mapping, Sequence

from maxbench.config import command_line, commands, console
from maxbench.config.errors import UserError
from maxbench.launch import cluster, job_file


def main(argv: Sequence[str]) -> int:
    """Writes and shows the file; returns the exit code."""
    if rest := command_line.parse_flags(commands.define("cluster"), argv)[1:]:
        raise UserError(
            f"unexpected argument {rest[0]!r}: values are set as variables, GPU_TYPE=h100"
        )
    file = job_file.cluster_file(os.environ).absolute()
    in_file, unanswered = job_file.cluster_values(os.environ), {}

    def ask(name: str, choices: Mapping[str, str]) -> str:
        answer = prompt(name, choices) if sys.stdin.isatty() else ""
        if not answer:
            unanswered[name] = choices
        return answer

    env = job_file.overlay(in_file, os.environ)
    gpu_types = command_line.gpu_types(job_file.env_value(env, "HARDWARE"))
    detected = cluster.detect(env, cluster.nodes(gpu_types), ask, gpu_types)
    if unanswered:
        raise UserError(
            "; ".join(f"set {name}: one of {_listed(c)}" for name, c in unanswered.items())
        )
    for name, value in in_file.items():
        if os.environ.get(name, value) != value:
            print(f"note: {name}={os.environ[name]} is set in the environment and wins")
    named = {job_file.NAMED.get(name) for name in in_file}
    cluster.write(file, {name: value for name, value in detected.items() if name not in named})
    print(f"{file}:\n{file.read_text().strip()}")
    return 0


def prompt(name: str, choices: Mapping[str, str]) -> str:
    """Asks for one of the choices on the terminal; '' without an answer."""
    lines = console.table((), choices.items(), text=(0, 1), indent="  ")
    print("\n".join([f"{name}, which one?", *lines]))
    try:
        while (answer := input("> ").strip()) not in choices:
            if not answer:
                return ""
            print(f"{answer!r} is not one of {', '.join(choices)}")
    except (EOFError, KeyboardInterrupt):
        return ""
    return answer


def _listed(choices: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({text})" if text else name for name, text in choices.items())
