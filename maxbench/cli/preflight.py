"""Checks the nodes before step 0, as its own process: `maxbench preflight`."""

import dataclasses
import itertools
import json
import os
import time
from collections.abc import Sequence

from maxbench.config import command_line, options
from maxbench.config.run import Run
from maxbench.distributed import runtime
from maxbench.preflight import checks, node_health, xla_flags


def main(argv: Sequence[str]) -> int:
    """Returns the exit code, the same in every process: 0 passed, 1 failed.

    Raises:
      UserError: invalid flags, or processes that cannot be connected.
    """
    start = time.perf_counter()
    asked = command_line.read(options.Preflight, argv)
    run = command_line.resolve_run(asked)
    runtime.set_environment(run)
    # Before jax starts: it aborts on a wrong flag without an explanation.
    first_of_node = os.environ.get("SLURM_LOCALID", "0") == "0"
    if first_of_node and (errors := xla_flags.lint_runs(run)):
        print("\n".join(f"preflight: error: {text}" for text in errors), flush=True)
        return 1
    import jax

    from maxbench.step.train_step import on_device

    processes = checks.collect(run)
    kernel = on_device(run, jax.local_devices()[0]).train.attention
    slow = checks.slow_hosts(processes)
    errors = checks.errors(run, processes, asked.allow_tcp)
    if jax.process_index() == 0:
        print_report(run, processes, slow, errors)
        print(f"attention {kernel}")
    if asked.numerics and not errors:
        from maxbench.preflight import numerics, trajectories  # imports jax

        workload = asked.config.partition(":")[0]
        gradients = numerics.findings(run, workload, jax.devices())
        for right, text in itertools.chain(gradients, trajectories.findings(run)):
            errors += [] if right else [text]
            if jax.process_index() == 0:
                print(f"numerics: {text}" if right else f"preflight: error: {text}", flush=True)
    if jax.process_index() == 0:
        verdict = "failed" if errors else "passed"
        print(f"preflight {verdict} in {time.perf_counter() - start:.1f} s")
        if path := asked.json:
            report = {"processes": [dataclasses.asdict(process) for process in processes]}
            with open(path, "w") as file:
                json.dump(report | {"slow_hosts": slow, "errors": errors}, file, indent=1)
    return 1 if errors else 0


def print_report(
    run: Run,
    processes: Sequence[checks.ProcessFacts],
    slow: Sequence[str],
    errors: Sequence[str],
) -> None:
    """Prints rates, findings on the nodes, slow hosts and errors."""
    from maxbench.distributed import stragglers  # imports jax

    print(checks.table(run, processes))
    print("\n".join(node_health.lines(checks.node_findings(run, processes))))
    if slow:
        limit = f"{stragglers.SLOW_FRACTION:.0%}"
        print(f"slow hosts (GEMM below {limit} of the median): {', '.join(slow)}")
        print(f"to exclude them: EXCLUDE_NODES={','.join(slow)}")
    for text in errors:
        print(f"preflight: error: {text}")
