"""XLA flags and compiler options, checked by the installed XLA before a run depends on them."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from maxbench.config.run import Run
from maxbench.host import environment, xla_flags
from maxbench.step import xla_options

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
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1:]
    return [f"XLA_FLAGS: {error}" for error in xla_flags.errors(done.stderr) or last]


def lint_runs(*runs: Run) -> list[str]:
    """Errors of the compiler options of runs on GPUs, and of XLA_FLAGS in the environment."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    options = []
    for run in runs:
        if (one := xla_options.xla_options("gpu", run)) not in options:
            options.append(one)
    return list(dict.fromkeys(error for one in options for error in lint(one, flags)))
