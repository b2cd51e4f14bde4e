"""Flags in XLA_FLAGS that the installed XLA does not know, or whose value it does not take.

Such a flag aborts the process that parses it, at its first device. So another process tries it.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence

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
UNKNOWN = re.compile(r"Unknown flags? in XLA_FLAGS: ([^\n]*)")
PARSE = """
from jaxlib import xla_client
xla_client.CompileOptions().executable_build_options.debug_options
"""
TIMEOUT_S = 60


class Check:
    """A subprocess that parses XLA_FLAGS while this process imports jax."""

    def __init__(self) -> None:
        self._process = None
        if os.environ.get("XLA_FLAGS", "").strip():
            self._process = subprocess.Popen(
                [sys.executable, "-c", PARSE],
                env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "0"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )

    def errors(self) -> list[str]:
        """Waits for the process; returns the errors of its parser, [] if it printed none."""
        if not self._process:
            return []
        with self._process:
            try:
                _, printed = self._process.communicate(timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                return []
        return errors(printed)


def errors(printed: str) -> list[str]:
    """Errors of XLA's flag parser in what a process printed; [] if there is none."""
    if values := BAD_VALUE.findall(printed):
        return [f"{text.rstrip('.')}; this XLA would abort" for text in values]
    if no_flag := NO_FLAG.search(printed):
        return [
            f"{no_flag[1]!r} does not begin with --, so XLA takes it for a file of flags, which "
            "does not exist"
        ]
    unknown = UNKNOWN.search(printed)
    flags: Sequence[str] = unknown[1].split() if unknown else ()
    return [f"this XLA does not know {flag}, {_fix(flag)}" for flag in flags]


def _fix(flag: str) -> str:
    if "=" not in flag:
        return f"and would abort; leave it out, or write {flag}=VALUE"
    replacement = REPLACEMENTS.get(flag.lstrip("-").partition("=")[0])
    return "and would abort; " + (f"use {replacement}" if replacement else "leave it out")
