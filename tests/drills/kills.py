"""Kills a small run at random moments and resumes it, again and again; and damages checkpoints.

  python -m tests.drills.kills --kills 160 --pairs 40 --damages 70 --seed 1

Losses and weights must be equal, bit for bit, to those of an uninterrupted run. It reads a text, so
no sequence is lost or read twice. Each process is forked from one that has loaded jax and compiled
nothing, which takes a second instead of ten.
"""

import argparse
import collections
import functools
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxbench.cli import entry
from maxbench.config import command_line
from maxbench.run import checkpoint, loop, restore
from maxbench.run.checksums import array_checksums
from maxbench.run_logs import run_folder
from maxbench.sharding import mesh
from maxbench.step.train_step import Step, on_device

FLAGS = ["--config", "configs/llama31_8b.py:tiny", "--dtype", "fp32", "--layers", "1"]
FLAGS += ["--seq", "16", "--config.model.embed=32", "--config.model.mlp=64"]
FLAGS += ["--config.precision.grads=fp32"]
# A learning rate that does not depend on the number of steps.
FLAGS += ["--config.optim.warmup=2", "--config.optim.lr=1e-3", "--config.optim.lr_min=1e-3"]
DATA = ["--data", "LICENSE"]
SAVE_EVERY_STEP = ["--config.output.checkpoint_every=1"]
ENDLESS = 1_000_000  # steps


def environment() -> dict[str, str]:
    """Environment of the process that forks runs: the CPU, and a compilation cache."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "maxbench"
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache / "kills"),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(1 << 30),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


@functools.cache
def fork_server():
    """A multiprocessing context whose server has loaded jax.

    The server keeps the environment of its start: later variables of this process do not reach it.
    """
    original = dict(os.environ)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([entry.__name__, loop.__name__, "grain"])
    try:
        os.environ.update(environment())
        process = context.Process(target=print)  # the first process starts the server
        process.start()
        process.join()
    finally:
        os.environ.clear()
        os.environ.update(original)
    return context


def start_process(flags: Sequence[str], output_path: str, devices: int = 1, **variables: str):
    """Starts a process equal to `VARIABLES python -m maxbench.train FLAGS >output_path 2>&1`."""
    process = fork_server().Process(target=_train, args=(flags, output_path, devices, variables))
    process.start()
    return process


def _train(flags, output_path, devices, variables) -> None:
    file = os.open(output_path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(variables)
    jax.config.update("jax_num_cpu_devices", devices)  # jax is loaded: --cpu_devices has no effect
    sys.exit(entry.run("train", flags))


class RunProcesses:
    """The processes of a run that resumes from the folders of earlier runs in `out`."""

    start, axis = staticmethod(start_process), "fsdp"

    def __init__(self, out: pathlib.Path, steps: int, *flags: str, processes: int = 1):
        self.out, self.earlier = out, len(run_folders(out))
        out.mkdir(parents=True, exist_ok=True)
        flags = [*FLAGS, "--steps", str(steps), "--output_dir", str(out), *resume(out), *flags]
        if processes > 1:
            flags += [f"--{self.axis}={processes}", f"--processes={processes}"]
            flags += ["--coordinator", free_address()]
        self.output_path = str(out / f"{time.time_ns()}.txt")
        self.processes = []
        for i in range(processes):
            number = ["--process", str(i)] * (processes > 1)
            host = f"n{i}"
            process = self.start([*flags, *number], self.output_path, SLURMD_NODENAME=host)
            self.processes.append(process)

    def folder(self) -> pathlib.Path | None:
        """Folder of this run, or None before it exists."""
        folders = run_folders(self.out)
        return folders[-1] if len(folders) > self.earlier else None

    def is_running(self) -> bool:
        return any(p.is_alive() for p in self.processes)

    def wait_until(self, event: Callable[[], object]) -> None:
        """Waits until event() is true, or all processes have ended."""
        while not event() and self.is_running():
            time.sleep(0.01)

    def exit_codes(self, timeout_s: float = 300) -> list[int]:
        """Waits for all processes; returns their exit codes."""
        end = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.1, end - time.monotonic()))
        codes = [p.exitcode for p in self.processes]
        for process in self.processes:
            process.kill()
        assert None not in codes, f"a process does not end: {self.printed()}"
        return codes

    def printed(self) -> str:
        """The last 4,000 characters that the processes printed."""
        return pathlib.Path(self.output_path).read_text()[-4000:]


def free_address() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


def run_folders(out: pathlib.Path) -> list[pathlib.Path]:
    """Folders of the runs so far, in the order of their starts."""
    return sorted(p.parent for p in out.glob("experiments/*/*/result.json"))


def losses(folder: pathlib.Path) -> dict[int, float]:
    """A run's losses by step, without a last line that is incomplete."""
    text = (folder / "metrics.jsonl").read_text()
    records = map(json.loads, text[: text.rfind("\n") + 1].split("\n")[:-1])
    return {record["step"]: record["loss"] for record in records}


def last_saved_step(folder: pathlib.Path) -> int:
    """Step of the last checkpoint that the log reports, or 0."""
    lines = next(folder.glob("log-*.out")).read_text().splitlines()
    saves = [line for line in lines if line.startswith("Global Checkpoint Save")]
    return int(saves[-1].split("Iteration: ")[1].split()[0]) if saves else 0


def fingerprints(checkpoints: pathlib.Path, step: int = 0) -> dict[str, int]:
    """Checksums of a checkpoint's arrays, by default of the newest in the folder."""
    step = step or max(int(p.name) for p in checkpoints.iterdir() if p.name.isdecimal())
    return json.loads((checkpoints / f"{step}/about/run.json").read_text())["fingerprints"]


def resume(out: pathlib.Path) -> list[str]:
    """Flags of a requeued job, which resumes from the folders of all earlier runs."""
    folders = [str(p) for p in run_folders(out) if any(p.glob("checkpoints/*/about/run.json"))]
    return ["--resume", ",".join(folders)] if folders else []


def start_and_kill(
    out: pathlib.Path, rng: random.Random, processes: int
) -> tuple[pathlib.Path, str]:
    """Starts a run, and kills it or one of its processes at a random moment.

    Returns:
      The run's folder, and what was killed or when.
    """
    run = RunProcesses(out, ENDLESS, *SAVE_EVERY_STEP, *DATA, processes=processes)
    run.wait_until(run.folder)
    steps = rng.choice((0, 1, 1, 2, 3, 4))
    run.wait_until(lambda: len(losses(run.folder())) >= steps)
    time.sleep(rng.uniform(0, 0.5))
    number = signal.SIGTERM if rng.random() < 0.2 else signal.SIGKILL
    victims = run.processes
    if number == signal.SIGKILL and rng.random() < 0.7:
        victims = [rng.choice(victims)]
    for process in victims:
        os.kill(process.pid, number)
    codes, folder = run.exit_codes(60), run.folder()
    assert folder, run.printed()
    result = json.loads((folder / "result.json").read_text())
    if number == signal.SIGTERM:  # the handler may not be installed yet
        assert {*codes} in ({75}, {-number}), (codes, run.printed())
        return folder, "SIGTERM"
    assert 0 not in codes, (codes, run.printed())
    if len(victims) < processes:
        i = run.processes.index(victims[0])
        reason = f"process {i} of {processes} on n{i} died, see {run.output_path}"
        ending = (result["status"], result["reason"])
        assert ending == ("failed", reason), (result, run.printed())
        return folder, f"process {i}"
    assert result["status"] == "running", result
    assert run_folder.read_state(folder).status == "died", result["process"]
    if any(folder.glob("checkpoints/*tmp*")):
        return folder, "in a save"
    return folder, "among steps" if losses(folder) else "before a step"


class Trained(NamedTuple):
    """Outcome of one run, or of a run that was killed and resumed."""

    losses: dict[int, float]
    fingerprints: dict[str, int]  # of the last checkpoint


def kill_and_resume(
    out: pathlib.Path, kills: int, rng: random.Random, processes: int = 1
) -> tuple[Trained, collections.Counter]:
    """Starts and kills a run `kills` times, each time resuming, and completes it.

    Asserts that no checkpoint which the log reports is lost.

    Returns:
      The outcome, and how often each moment or process was hit.
    """
    by_step: dict[int, float] = {}
    saved_step, moments = 0, collections.Counter()
    for _ in range(kills):
        folder, moment = start_and_kill(out, rng, processes)
        moments[moment] += 1
        new = losses(folder)
        first = min(new, default=saved_step)
        assert first >= saved_step, f"{folder}: resumed at {first}, {saved_step} was saved"
        assert all(by_step.get(i, loss) == loss for i, loss in new.items()), folder
        by_step.update(new)
        saved_step = max(saved_step, last_saved_step(folder))
        print(f"\r{moments.total()} {len(by_step)} steps", end="", file=sys.stderr, flush=True)
    steps = max(by_step, default=0) + 2
    last = RunProcesses(out, steps, "--checkpoint", *DATA, processes=processes)
    assert {*last.exit_codes()} == {0}, last.printed()
    by_step.update(losses(last.folder()))
    return Trained(by_step, fingerprints(last.folder() / "checkpoints")), moments


def uninterrupted(out: pathlib.Path, steps: int, processes: int = 1) -> Trained:
    """Trains the same model without an interruption."""
    run = RunProcesses(out, steps, "--checkpoint", *DATA, processes=processes)
    assert {*run.exit_codes()} == {0}, run.printed()
    return Trained(losses(run.folder()), fingerprints(run.folder() / "checkpoints"))


def compare_killed(out: pathlib.Path, kills: int, rng: random.Random, processes: int = 1) -> str:
    """Compares a killed run with an uninterrupted one; returns a line for the report.

    Raises:
      AssertionError: a bit differs.
    """
    trained, moments = kill_and_resume(out / "killed", kills, rng, processes)
    expected = uninterrupted(out / "uninterrupted", max(trained.losses) + 1, processes)
    assert trained.losses == expected.losses, "other losses"
    assert trained.fingerprints == expected.fingerprints, "other weights"
    counts = ", ".join(f"{n} {moment}" for moment, n in sorted(moments.items()))
    run = f"{processes} processes" if processes > 1 else "1 process"
    return f"{kills} kills of {run} ({counts}): {len(trained.losses)} steps, all bits the same"


# --- damaged checkpoints ---

DAMAGES = ("flip", "cut", "delete", "empty", "swap")


def file_kind(file: pathlib.Path) -> str:
    """The path of a checkpoint's file, without the random parts of its name."""
    return re.sub(r"[0-9a-f]{32}", "*", str(file))


def damage_file(folder: pathlib.Path, kind: str, how: str, rng: random.Random) -> str:
    """Damages one file of a kind in a checkpoint; returns a description.

    'swap' writes the bytes of another file of the kind, from this checkpoint or its neighbour.
    """
    of_kind = lambda root: [
        p for p in sorted(root.rglob("*")) if p.is_file() and file_kind(p.relative_to(root)) == kind
    ]
    file = rng.choice(of_kind(folder))
    data = file.read_bytes()
    others = [p.read_bytes() for root in folder.parent.iterdir() for p in of_kind(root)]
    at = rng.randrange(len(data))
    match how:
        case "flip":
            flipped = bytes([data[at] ^ 1 << rng.randrange(8)])
            file.write_bytes(data[:at] + flipped + data[at + 1 :])
        case "cut":
            file.write_bytes(data[:at])
        case "delete":
            file.unlink()
        case "empty":
            file.write_bytes(b"")
        case "swap":
            file.write_bytes(rng.choice([x for x in others if x != data] or [data[::-1]]))
    return f"{how} {file.relative_to(folder)}"


def restore_damaged(out: pathlib.Path, times: int, rng: random.Random) -> collections.Counter:
    """Damages the newer of two checkpoints, and restores: each kind of file in each way in turn.

    Asserts that either checkpoint is restored bit for bit.

    Returns:
      How often the damaged one was 'skipped', and how often 'whole' in spite of the damage.
    """
    run = on_device(command_line.run_of([*FLAGS, "--steps", "9"]), jax.local_devices()[0])
    step = Step(run, mesh.make_mesh(run.layout))
    with checkpoint.Saver(out / "whole", run, dict) as saver:
        state = step.init()
        for i in (1, 2):
            saver.save(state | {"step": jnp.int32(i)})
    expected = {i: fingerprints(out / "whole", i) for i in (1, 2)}
    newest = out / "whole/2"
    kinds = sorted({file_kind(p.relative_to(newest)) for p in newest.rglob("*") if p.is_file()})
    cases = list(itertools.product(kinds, DAMAGES))
    rng.shuffle(cases)
    outcomes = collections.Counter()
    for i, (kind, how) in zip(range(times), itertools.cycle(cases)):
        copy = out / str(i)
        shutil.copytree(out / "whole", copy)
        description = damage_file(copy / "2", kind, how, rng)
        candidates = restore.find_checkpoints(str(copy), run)
        read = restore.read_onto(lambda order: step.abstract)
        restored, state = restore.restore(candidates, read)
        at = restored.info.step
        assert array_checksums(state) == expected[at], description
        assert len(candidates.skipped) == 2 - at, (description, candidates.skipped)
        assert at == 2 or str(copy / "2") in candidates.skipped[0], candidates.skipped
        outcomes["skipped" if candidates.skipped else "whole"] += 1
        shutil.rmtree(copy)
    outcomes["cases"] = min(times, len(cases))
    return outcomes


def main(argv) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=5, help="kills of runs of two processes")
    parser.add_argument("--damages", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory() as scratch:
        out, start = pathlib.Path(scratch), time.monotonic()
        outcomes = restore_damaged(out / "damaged", args.damages, random.Random(args.seed))
        print(f"{args.damages} damaged checkpoints: {dict(outcomes)}", flush=True)
        for processes, kills in ((1, args.kills), (2, args.pairs)):
            rng = random.Random(f"{args.seed} {processes}")
            line = compare_killed(out / str(processes), kills, rng, processes)
            print(f"{line}; {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
