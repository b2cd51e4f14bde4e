"""A first hour on one GPU: what a CPU cannot show, stage by stage, and one table, last.

    python benchmarks/gpu.py --minutes 9                  # what fits, most valuable first
    python benchmarks/gpu.py --stages options,attention
    python benchmarks/gpu.py --small                      # toy sizes: a smoke test, on a CPU too

A stage is a process of its own, and another one after a crash: neither that nor a hang ends the
rest. benchmarks/results/<device>-<jax>.json (in $OUT where that is set) is written after every
case, errors whole; stages that are not run again stay in it. Ctrl-C and SIGTERM leave the table of
what is done. Exit code: 0 all went well, 1 something failed, 2 jax has no GPU, 130 stopped. What it
needs, and how to bring that to a machine without network: docs/how-to/first_hour_on_a_gpu.md.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # it need not be installed

from benchmarks import gpu_stages as stages

# In order of value, and the minutes that each takes on an H200: guesses, until one was seen.
STAGES = {
    "options": (stages.options, 0.3),
    "attention": (stages.attention, 1.0),
    "ceilings": (stages.ceilings, 1.0),
    "stamps": (stages.stamps, 1.0),
    "fp8": (stages.fp8, 1.2),
    "families": (stages.families, 3.5),
    "unrolled": (stages.unrolled, 0.8),
    "profile": (stages.profile, 0.5),
    "mocked": (stages.mocked, 4.0),
    "maxtext": (stages.maxtext, 1.5),
}
# Peak memory and mocked devices are a process's own: one for each first word of a case's name.
APART = ("families", "mocked")


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--minutes", type=float, default=60, help="of all stages together")
    parser.add_argument("--stages", default=",".join(STAGES), help="default: %(default)s")
    parser.add_argument("--small", action="store_true", help="toy sizes; a CPU will do")
    options = parser.parse_args()
    if unknown := {*options.stages.split(",")} - {*STAGES}:
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")  # as in training
    # Else a mocked process would wait for what the others tune.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_shard_autotuning=false".strip()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found, stopped, end = {}, False, time.monotonic() + 60 * options.minutes
    try:
        run("machine", stages.machine, 1, found, time.monotonic() + 120, options.small)
        device = found["machine"]["cases"]["jax"]
        if device.get("platform") not in (("gpu", "cpu") if options.small else ("gpu",)):
            print(f"jax finds no GPU, and --small is not given: {device}", file=sys.stderr)
            return 2
        for name in options.stages.split(","):
            run(name, *STAGES[name], found, end, options.small)
    except (KeyboardInterrupt, RuntimeError) as error:
        # A pool that is only being started says that it cannot be joined, and hides the signal.
        stopped = any(isinstance(e, KeyboardInterrupt) for e in (error, error.__context__))
        if not stopped:
            raise
    print(table(found))
    records = [record for stage in found.values() for record in stage["cases"].values()]
    return 130 if stopped else int(any("error" in record for record in records))


def run(name: str, stage: Callable, minutes: float, found: dict, end: float, small: bool) -> None:
    """Runs a stage if half of its minutes are left; it may take twice as many, if those are."""
    begin, cases = time.monotonic(), {}
    found[name] = {"started": time.time(), "command": sys.argv, "cases": cases}
    left = (end - begin) / 60
    if minutes > 2 * left:
        cases["all"] = {"skipped": f"takes some {minutes:g} minutes, {max(0, left):.1f} are left"}
        return
    limit = min(2 * minutes, left)
    print(f"{name}: some {minutes:g} minutes, at most {limit:.1f}", flush=True)
    names, until = [case for case, _ in stage(small)], begin + 60 * limit
    apart = lambda case: name in APART and case.split()[0]
    for group in [[*cases] for _, cases in itertools.groupby(names, apart)]:
        while group and time.monotonic() < until:
            for case, record in process(stage, group, small, until):
                cases[case] = record
                group.remove(case)
                save(found)
    seconds, failed = time.monotonic() - begin, sum("error" in x for x in cases.values())
    count = f"{len(cases)} of {len(names)} cases, {failed} failed"
    print(f"{name}: {seconds:.0f} s, {count}", flush=True)


def process(stage: Callable, names: list[str], small: bool, until: float):
    """Runs cases in a process of their own, until one ends it or time is over; yields records."""
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.NamedTemporaryFile() as said,
        futures.ProcessPoolExecutor(1, spawn, stages.alone, (said.name,)) as pool,
    ):
        pid = 0
        try:
            for name in [*names]:
                pid = pid or pool.submit(os.getpid).result()
                case = pool.submit(stages.record, stage, name, small)
                yield name, case.result(max(0, until - time.monotonic()))
        except (BrokenProcessPool, TimeoutError) as error:
            why = "out of time" if isinstance(error, TimeoutError) else "the process died"
            yield name, {"error": f"{said.read().decode(errors='replace')}\n{why}"}
        finally:
            if pid:  # and what it started, in a session of its own
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)


def save(found: dict) -> None:
    """Writes the file of this device and this jax, whole or not at all."""
    machine = found["machine"]["cases"]["jax"]
    if len(found) == 1 or "device" not in machine:  # nothing to tell, or nobody knows of what
        return
    folder = pathlib.Path(os.environ.get("OUT") or pathlib.Path(__file__).with_name("results"))
    name = f"{machine['device']}-{machine['versions']['jax']}".lower().replace(" ", "-")
    file = folder / f"{name}.json"
    old = json.loads(file.read_text()) if file.exists() else {}
    new = {name: x for name, x in found.items() if name not in old or "all" not in x["cases"]}
    part = file.with_suffix(".part")
    part.write_text(json.dumps(old | new, indent=1) + "\n")
    part.rename(file)


def table(found: dict) -> str:
    """A line for each case: its figures, the last line of its error, or why it was skipped."""
    lines = []
    for stage, about in found.items():
        for case, record in about["cases"].items():
            shown = {k: v for k, v in record.items() if isinstance(v, str | int | float)}
            if "error" in record:
                shown = {"FAILED": record["error"].strip().splitlines()[-1][:200]}
            texts = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in shown.items()}
            words = (f"{name} {text}" for name, text in texts.items())
            lines.append("  ".join([f"{stage:<9} {case:<26}", *words]))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
