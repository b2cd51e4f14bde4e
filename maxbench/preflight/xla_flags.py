"""XLA flags and compiler options, checked by the installed XLA before a run depends on them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

from maxbench.config.run import Run
from maxbench.step import xla_options

REPLACEMENTS = {  # flags of an older XLA -> what to use instead
    "xla_gpu_graph_level": "--xla_gpu_enable_command_buffer=",
    "xla_gpu_enable_async_collectives": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "xla_gpu_enable_async_all_gather": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "xla_gpu_pipeline_all_gather": "--xla_gpu_enable_pipelined_all_gather=true",
    "xla_gpu_pipeline_reduce_scatter": "--xla_gpu_enable_pipelined_reduce_scatter=true",
    "xla_gpu_pipeline_all_reduce": "--xla_gpu_enable_pipelined_all_reduce=true",
}
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
    builds of a jaxlib know the same options, so a CPU finds the mistakes in those for a GPU.
    """
    env = {**os.environ, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", TRY_OPTIONS, json.dumps(dict(options))]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return ["XLA_FLAGS: the process that tried them did not end within 60 s"]
    if done.returncode == 0:
        return [f"compiler option {line}" for line in done.stdout.splitlines()]
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: ([^\n]*)", done.stderr)
    if not unknown:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return [f"XLA_FLAGS: {lines[-1]}"]
    return [
        f"XLA_FLAGS: this XLA does not know {flag}, {_fix(flag)}" for flag in unknown[1].split()
    ]


def _fix(flag: str) -> str:
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
