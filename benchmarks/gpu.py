"""The first hour on a GPU: measures what a CPU cannot show, in stages, and prints a table.

    python benchmarks/gpu.py --part 1                     # six minutes: does it run, and how fast?
    python benchmarks/gpu.py --part 2                     # six minutes: the constants of plan
    python benchmarks/gpu.py --minutes 30                 # stages that fit, most valuable first
    python benchmarks/gpu.py --stages options,attention
    python benchmarks/gpu.py --small                      # toy sizes: a smoke test, also on a CPU
    python benchmarks/gpu.py --plans FILE.json            # afterwards, without a GPU: predictions

Each stage runs in a process of its own, which is replaced after a crash, so neither a crash nor a
hang ends the other stages. Results are written to benchmarks/results/<device>-<jax>.json (in $OUT
if that is set) after every case, with tracebacks; results of stages that do not run again are kept.
Ctrl-C and SIGTERM print the table of the finished cases.

Exit code: 0 all cases passed, 1 a case failed, 2 JAX has no GPU, 130 interrupted.
docs/how-to/first_hour_on_a_gpu.md: requirements, and installation on a machine without network.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # works without installation

from benchmarks import gpu_stages as stages
from maxbench.host import environment

# Most valuable first; with the minutes of each on an H200, those of "documents" and from "ceilings"
# on estimated.
STAGES = {
    "options": (stages.options, 0.4),
    "attention": (stages.attention, 3.3),
    "documents": (stages.documents, 0.6),
    "fp8": (stages.fp8, 1.2),
    "calibrate": (stages.calibrate, 1.5),
    "families": (stages.families, 3.5),
    "profile": (stages.profile, 0.5),
    "ceilings": (stages.ceilings, 1.0),
    "stamps": (stages.stamps, 1.0),
    "unrolled": (stages.unrolled, 0.8),
    "mocked": (stages.mocked, 4.0),
    "maxtext": (stages.maxtext, 1.5),
}
# For a GPU that is available for 15 minutes, and 10 minutes a command.
PARTS = {"1": "options,documents,fp8,calibrate,profile,attention", "2": "families,mocked"}
PART_MINUTES = 6.0
# Stages whose cases need processes of their own, one for each first word of a case's name, because
# peak memory and mocked devices are properties of a process.
PROCESS_PER_CASE = ("fp8", "families", "mocked")


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--minutes", type=float, help="limit of all stages together; default: 60")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--stages", default=",".join(STAGES), help="default: %(default)s")
    parts = "; ".join(f"{name}: {names}" for name, names in PARTS.items())
    help = f"stages of {PART_MINUTES:g} minutes. {parts}"
    chosen.add_argument("--part", choices=PARTS, help=help)
    parser.add_argument("--small", action="store_true", help="toy sizes, also on a CPU")
    parser.add_argument(
        "--plans", type=pathlib.Path, help="a file of results, to add predictions to"
    )
    parser.add_argument("--cases", default="", help="regular expression of the cases that run")
    options = parser.parse_args()
    if options.plans:
        return add_plans(options.plans)
    if options.part:
        options.stages = PARTS[options.part]
    minutes = options.minutes or (PART_MINUTES if options.part else 60)
    if unknown := {*options.stages.split(",")} - {*STAGES}:
        names = ", ".join(sorted(unknown))
        parser.error(f"unknown stage {names}; choose from {', '.join(STAGES)}")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")  # as in training
    # With sharded autotuning a process with mocked GPUs waits for the results of the others.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_shard_autotuning=false".strip()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    results, stopped, end = {}, False, time.monotonic() + 60 * minutes
    try:
        run("machine", stages.machine, 1, results, time.monotonic() + 120, options.small)
        device = results["machine"]["cases"]["jax"]
        if device.get("platform") not in (("gpu", "cpu") if options.small else ("gpu",)):
            print(f"JAX has no GPU: {device}; use --small on a CPU", file=sys.stderr)
            return 2
        for name in options.stages.split(","):
            run(name, *STAGES[name], results, end, options.small, options.cases)
    except (KeyboardInterrupt, RuntimeError) as error:
        # Interrupted while it starts, a process pool raises RuntimeError from KeyboardInterrupt.
        stopped = any(isinstance(e, KeyboardInterrupt) for e in (error, error.__context__))
        if not stopped:
            raise
    print(table(results))
    records = [record for stage in results.values() for record in stage["cases"].values()]
    return 130 if stopped else int(any("error" in record for record in records))


def add_plans(file: pathlib.Path) -> int:
    """Predicts each measured case of a file that has its flags, and writes it next to the
    measurement."""
    os.environ.pop("XLA_FLAGS", None)
    environment.set_for_compile_only()
    results = json.loads(file.read_text())
    for stage in results.values():
        for case, record in stage["cases"].items():
            if "flags" in record and "off" not in case:
                record["planned"] = stages.planned(record)
                print(
                    f"{case:<26} measured {record['step_s']:.4g} s", record["planned"], flush=True
                )
                file.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def run(
    name: str,
    stage: Callable,
    minutes: float,
    results: dict,
    end: float,
    small: bool,
    chosen: str = "",
) -> None:
    """Runs the chosen cases of a stage, unless less than half of its estimated minutes are left; at
    most twice as long as estimated."""
    begin, cases = time.monotonic(), {}
    results[name] = {"started": time.time(), "command": sys.argv, "cases": cases}
    left = (end - begin) / 60
    if minutes > 2 * left:
        reason = f"takes about {minutes:g} minutes, {max(0, left):.1f} are left"
        cases["all"] = {"skipped": reason}
        return
    limit = min(2 * minutes, left)
    print(f"{name}: about {minutes:g} minutes, at most {limit:.1f}", flush=True)
    until = begin + 60 * limit
    names = [case for case, _ in stage(small) if re.search(chosen, case)]
    group_of = lambda case: name in PROCESS_PER_CASE and case.split()[0]
    for group in [[*group] for _, group in itertools.groupby(names, group_of)]:
        while group and time.monotonic() < until:
            for case, record in process(stage, group, small, until):
                cases[case] = record
                group.remove(case)
                save(results)
    seconds, failed = time.monotonic() - begin, sum("error" in x for x in cases.values())
    count = f"{len(cases)} of {len(names)} cases, {failed} failed"
    print(f"{name}: {seconds:.0f} s, {count}", flush=True)


def process(stage: Callable, names: list[str], small: bool, until: float):
    """Runs cases in a new process, until one crashes it or exceeds the time limit: yields (name,
    record) of each, the last one included."""
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.NamedTemporaryFile() as log,
        futures.ProcessPoolExecutor(1, spawn, stages.init_process, (log.name,)) as pool,
    ):
        pid = 0
        try:
            for name in [*names]:
                pid = pid or pool.submit(os.getpid).result()
                case = pool.submit(stages.record, stage, name, small)
                yield name, case.result(max(0, until - time.monotonic()))
        except (BrokenProcessPool, TimeoutError) as error:
            reason = "out of time" if isinstance(error, TimeoutError) else "the process died"
            yield name, {"error": f"{log.read().decode(errors='replace')}\n{reason}"}
        finally:
            if pid:  # and its children: the process leads a session
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)


def save(results: dict) -> None:
    """Writes the file of this device and version of JAX, atomically."""
    machine = results["machine"]["cases"]["jax"]
    if len(results) == 1 or "device" not in machine:  # no results, or of an unknown device
        return
    folder = stages.results_folder()
    name = f"{machine['device']}-{machine['versions']['jax']}".lower().replace(" ", "-")
    file = folder / f"{name}.json"
    old = json.loads(file.read_text()) if file.exists() else {}
    new = {name: x for name, x in results.items() if name not in old or "all" not in x["cases"]}
    part = file.with_suffix(".part")
    part.write_text(json.dumps(old | new, indent=1) + "\n")
    part.rename(file)


def table(results: dict) -> str:
    """One line per case: its figures, the last line of its error, or why it was skipped."""
    lines = []
    for stage, result in results.items():
        for case, record in result["cases"].items():
            figures = {k: v for k, v in record.items() if isinstance(v, str | int | float)}
            if "error" in record:
                figures = {"FAILED": record["error"].strip().splitlines()[-1][:200]}
            texts = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in figures.items()}
            words = (f"{name} {text}" for name, text in texts.items())
            lines.append("  ".join([f"{stage:<9} {case:<26}", *words]))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
