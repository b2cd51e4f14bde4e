"""XLA flags and compiler options, checked by the installed XLA before a run depends on them."""

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

from maxbench.config.run import Run
from maxbench.host import environment
from maxbench.step import xla_options

REPLACEMENTS = {  # flags of an older XLA -> what to use instead
    "xla_gpu_graph_level": "--xla_gpu_enable_command_buffer=",
    "xla_gpu_enable_async_collectives": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "xla_gpu_enable_async_all_gather": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "xla_gpu_pipeline_all_gather": "--xla_gpu_enable_pipelined_all_gather=true",
    "xla_gpu_pipeline_reduce_scatter": "--xla_gpu_enable_pipelined_reduce_scatter=true",
    "xla_gpu_pipeline_all_reduce": "--xla_gpu_enable_pipelined_all_reduce=true",
}
# Lines of XLA's flag parser (tsl/util/command_line_flags.cc) about a value; a page of all flags
# follows.
BAD_VALUE = re.compile(r"\] ((?:Couldn't interpret value|Illegal value|Failed to parse)[^\n]*)")
NO_FLAG = re.compile(r'Could not open file "([^"\n]*)" to read flags')
# Tries compiler options one by one, and prints those that XLA refuses.
TRY_OPTIONS = """
import json, sys, jax
program = jax.jit(lambda: 0).lower()
for name, value in json.loads(sys.argv[1]).items():
    try:
        program.compile(compiler_options={name: value})
    except Exception as error:
        print(name, str(error).splitlines()[0])
"""


def lint(options: Mapping[str, object], flags: Sequence[str]) -> list[str]:
    """Errors of compiler options, and of flags in XLA_FLAGS ('--name=value').

    An unknown flag in XLA_FLAGS aborts the process that parses it, so a subprocess tries them. All
    builds of a jaxlib know the same options, so a CPU finds the mistakes in those for a GPU. The
    process takes seconds, so the cache folder has a file for what these versions accept.
    """
    tried = json.dumps([environment.versions(), dict(options), [*flags]])
    accepted = environment.cache_dir() / "xla_flags" / hashlib.sha256(tried.encode()).hexdigest()
    if accepted.exists():
        return []
    if not (errors := _try(options, flags)):
        with contextlib.suppress(OSError):  # without the file the next run tries them again
            accepted.parent.mkdir(parents=True, exist_ok=True)
            accepted.touch()
    return errors


def _try(options: Mapping[str, object], flags: Sequence[str]) -> list[str]:
    """As lint(), in a subprocess."""
    env = {**os.environ, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", TRY_OPTIONS, json.dumps(dict(options))]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return ["XLA_FLAGS: the process that tried them did not end within 60 s"]
    if done.returncode == 0:
        return [f"compiler option {line}" for line in done.stdout.splitlines()]
    return [f"XLA_FLAGS: {error}" for error in _errors(done.stderr, done.returncode)]


def _errors(stderr: str, code: int) -> list[str]:
    """Errors of XLA's flag parser, which ends the process."""
    if values := BAD_VALUE.findall(stderr):
        return [f"{text.rstrip('.')}; this XLA would abort" for text in values]
    if no_flag := NO_FLAG.search(stderr):
        return [
            f"{no_flag[1]!r} does not begin with --, so XLA takes it for a file of flags, which "
            "does not exist"
        ]
    if unknown := re.search(r"Unknown flags? in XLA_FLAGS: ([^\n]*)", stderr):
        return [f"this XLA does not know {flag}, {_fix(flag)}" for flag in unknown[1].split()]
    return (stderr.strip().splitlines() or [f"exit code {code}"])[-1:]


def _fix(flag: str) -> str:
    if "=" not in flag:
        return f"and would abort; leave it out, or write {flag}=VALUE"
    replacement = REPLACEMENTS.get(flag.lstrip("-").partition("=")[0])
    return "and would abort; " + (f"use {replacement}" if replacement else "leave it out")


def lint_runs(*runs: Run) -> list[str]:
    """Errors of the compiler options of runs on GPUs, and of XLA_FLAGS in the environment."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    options = []
    for run in runs:
        if (one := xla_options.xla_options("gpu", run)) not in options:
            options.append(one)
    return list(dict.fromkeys(error for one in options for error in lint(one, flags)))
