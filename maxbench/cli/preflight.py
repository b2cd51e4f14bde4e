"""A look at the nodes before step 0, in seconds, as its own process: is the run worth starting?

maxbench preflight --config llama31_8b --gpus 8
"""

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
    """Returns the exit code, the same in every process: 0 go on, 1 do not, 2 bad input."""
    if commands.print_help_if_asked("preflight", argv):
        return 0
    fv = commands.define("preflight")
    start = time.perf_counter()
    with command_line.clear_errors("preflight"):
        run = command_line.parse(fv, argv)
        runtime.set_environment(run)
    # Before jax starts: it would abort without a word about what to do.
    if os.environ.get("SLURM_LOCALID", "0") == "0" and (wrong := checks.lint_runs(run)):
        print("\n".join(f"preflight: error: {text}" for text in wrong), flush=True)
        return 1
    import jax

    from maxbench.model import attention

    with command_line.clear_errors("preflight"):
        found = gather(run)
        kernel = attention.select_kernel(run, jax.local_devices()[0])
    late, wrong = evaluate(run, found, fv["allow_tcp"].value)
    if jax.process_index() == 0:
        print_report(run, found, late, wrong)
        print(f"attention {kernel}")
        print(f"preflight {'failed' if wrong else 'passed'} in {time.perf_counter() - start:.1f} s")
        if fv["json"].value:
            with open(fv["json"].value, "w") as f:
                json.dump({"processes": found, "slow_hosts": late, "wrong": wrong}, f, indent=1)
    return 1 if wrong else 0


def gather(run: Run) -> list[dict]:
    """Joins the other processes; facts and scores of each, and how NCCL connects it.

    Raises:
      UserError: the processes cannot be joined as the run says.
    """
    log = os.path.join(tempfile.gettempdir(), f"nccl-preflight-{os.getpid()}.")
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": log}
    others = runtime.init_distributed(run)
    found = checks.collect(log, run.output.dir)
    if others:
        others.close()
    for path in glob.glob(f"{log}*"):
        os.unlink(path)
    return found


def evaluate(run: Run, found: Sequence[dict], allow_tcp: bool) -> tuple[list[str], list[str]]:
    """Names of hosts that are slow, and what must be put right."""
    from maxbench.distributed import stragglers
    from maxbench.run_logs import nccl

    each_host = checks.by_host(found)
    wrong = checks.errors(run, found)
    failed = [row for row in checks.screened(run, found) if row[0] == "fail"]
    wrong += [f"{what}: {node_health.WHY[check]}" for _, check, what in failed]
    ways = {way: 1 for one in found for way in one["transports"]}
    if (why := nccl.uses_slow_transport(ways, len(each_host))) and not allow_tcp:
        wrong.append(why)
    if found[0]["platform"] != "gpu":  # a shared CPU's scores are noise
        return [], wrong
    worst = {h: min(s for one in each for s in one["gemm"]) for h, each in each_host.items()}
    return stragglers.slow_hosts(worst), wrong


def print_report(
    run: Run, found: Sequence[dict], late: Sequence[str], wrong: Sequence[str]
) -> None:
    """Prints scores, slow hosts and what is wrong."""
    from maxbench.distributed import stragglers

    print(checks.table(run, found))
    print("\n".join(node_health.lines(checks.screened(run, found))))
    if late:
        print(f"slow hosts (gemm below {stragglers.SLOW:.0%} of the median): {', '.join(late)}")
        print(f"leave them out: EXCLUDE_NODES={','.join(late)}")
    for text in wrong:
        print(f"preflight: error: {text}")
