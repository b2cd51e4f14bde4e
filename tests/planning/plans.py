"""Plans of command lines, made in this process."""

import contextlib
import io
import json
import os
from unittest import mock

from maxbench.cli import entry
from maxbench.config import command_line
from maxbench.config.run import Run
from maxbench.cost_model import compile_cache, hlo

# Rows of docs/plan.csv (key_of) whose compiled program takes more memory than estimated, by that
# share. XLA keeps the operands of eleven Mamba-2 layers whose weight gradients it delays, and
# transposes a whole stash of MXFP8's mlp_up where a last loop of layers does not recompute it. A
# search compiles such a layout and finds that it does not fit.
UNDERESTIMATED = {
    ("nemotron_h_56b", "b200", "512", "fp8"): 0.20,
    ("nemotron_h_56b", "gb200", "512", "fp8"): 0.19,
    ("llama31_70b", "gb200", "512", "fp8"): 0.26,
    ("llama31_70b", "gb300", "512", "fp8"): 0.33,
}


def key_of(line: dict[str, str]) -> tuple[str, ...]:
    """Workload, GPU type, GPUs and dtype of a line of docs/plan.csv, and its scaling if strong."""
    strong = ("strong",) * (line["scaling"] == "strong")
    return (*(line[name] for name in ("workload", "gpu_type", "gpus", "dtype")), *strong)


def run_of(arguments: str) -> Run:
    return command_line.run_of(arguments.split())


def planned(arguments: str) -> dict:
    """The output of `maxbench plan ARGUMENTS --json`.

    In this process, which has loaded jax. Programs are compiled once: all tests share the cache.
    """
    output = io.StringIO()
    with mock.patch.dict(os.environ), contextlib.redirect_stdout(output):
        code = entry.run("plan", [*arguments.split(), "--json"])
    plan = json.loads(output.getvalue())
    assert code == (0 if plan["fits"] else 3)
    assert not plan["unknown"]
    return plan


def program_of(run: Run) -> hlo.Program:
    """The run's program, which was planned before."""
    return hlo.parse(compile_cache.load(run).text)


def traffic(plan: dict) -> dict[tuple[str, str], dict]:
    """Collectives of a plan by (kind, axes)."""
    return {(x["kind"], x["axes"]): x for x in plan["communication"]}


def exposed_share(plan: dict, kind: str, axes: str) -> float:
    """Exposed time of a kind of collectives over their busy time."""
    collective = traffic(plan)[kind, axes]
    return collective["exposed_s"] / collective["busy_s"]
