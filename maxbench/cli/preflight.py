"""Checks the nodes before step 0, as its own process: `maxbench preflight`."""

import glob
import json
import os
import tempfile
import time
from collections.abc import Sequence

from maxbench.config import command_line, commands
from maxbench.config.run import Run
from maxbench.distributed import runtime
from maxbench.preflight import checks, node_health


def main(argv: Sequence[str]) -> int:
    """Returns the exit code, the same in every process: 0 passed, 1 failed.

    Raises:
      UserError: invalid flags, or processes that cannot be joined.
    """
    fv = commands.define("preflight")
    start = time.perf_counter()
    run = command_line.parse(fv, argv)
    runtime.set_environment(run)
    # Before jax starts: it aborts on a wrong flag without an explanation.
    if os.environ.get("SLURM_LOCALID", "0") == "0" and (errors := checks.lint_runs(run)):
        print("\n".join(f"preflight: error: {text}" for text in errors), flush=True)
        return 1
    import jax

    from maxbench.model import attention

    processes = gather(run)
    kernel = attention.select_kernel(run, jax.local_devices()[0])
    slow, errors = evaluate(run, processes, fv["allow_tcp"].value)
    if jax.process_index() == 0:
        print_report(run, processes, slow, errors)
        print(f"attention {kernel}")
        verdict = "failed" if errors else "passed"
        print(f"preflight {verdict} in {time.perf_counter() - start:.1f} s")
        if fv["json"].value:
            with open(fv["json"].value, "w") as f:
                json.dump(
                    {"processes": processes, "slow_hosts": slow, "wrong": errors}, f, indent=1
                )
    return 1 if errors else 0


def gather(run: Run) -> list[dict]:
    """Joins the other processes; returns facts, scores and NCCL transports of each process.

    Raises:
      UserError: the processes cannot be joined.
    """
    log = os.path.join(tempfile.gettempdir(), f"nccl-preflight-{os.getpid()}.")
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": log}
    peers = runtime.init_distributed(run)
    processes = checks.collect(log, run.output.dir)
    if peers:
        peers.close()
    for path in glob.glob(f"{log}*"):
        os.unlink(path)
    return processes


def evaluate(run: Run, processes: Sequence[dict], allow_tcp: bool) -> tuple[list[str], list[str]]:
    """Names of slow hosts, and the errors that must be fixed before the run."""
    from maxbench.distributed import stragglers
    from maxbench.run_logs import nccl

    hosts = checks.by_host(processes)
    errors = checks.errors(run, processes)
    for verdict, check, finding in checks.screened(run, processes):
        if verdict == "fail":
            errors.append(f"{finding}: {node_health.WHY[check]}")
    transports = {name: 1 for process in processes for name in process["transports"]}
    if (why := nccl.uses_slow_transport(transports, len(hosts))) and not allow_tcp:
        errors.append(why)
    if processes[0]["platform"] != "gpu":  # scores of a shared CPU are noise
        return [], errors
    worst = {host: min(s for one in each for s in one["gemm"]) for host, each in hosts.items()}
    return stragglers.slow_hosts(worst), errors


def print_report(
    run: Run, processes: Sequence[dict], slow: Sequence[str], errors: Sequence[str]
) -> None:
    """Prints scores, node health, slow hosts and errors."""
    from maxbench.distributed import stragglers

    print(checks.table(run, processes))
    print("\n".join(node_health.lines(checks.screened(run, processes))))
    if slow:
        print(f"slow hosts (GEMM below {stragglers.SLOW:.0%} of the median): {', '.join(slow)}")
        print(f"to exclude them: EXCLUDE_NODES={','.join(slow)}")
    for text in errors:
        print(f"preflight: error: {text}")
