"""Kills a small run at random moments, again and again, each time going on from what it left, and
damages checkpoints: what comes out must be, bit for bit, what a run without trouble gives.

  python -m benchmarks.kills --kills 160 --pairs 40 --damages 70 --seed 1

A start is forked from a process that has loaded jax and compiled nothing: it is a process of its
own, which takes a second instead of ten.
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
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from maxbench.cli import entry
from maxbench.config import command_line
from maxbench.run import checkpoint, loop
from maxbench.sharding import mesh
from maxbench.step.train_step import Step

WORDS = ["--config", "configs/llama31_8b.py:tiny", "--dtype", "fp32", "--layers", "1"]
WORDS += ["--seq", "16", "--config.model.embed=32", "--config.model.mlp=64"]
WORDS += ["--config.precision.grads=fp32"]
SAVES = ["--config.output.checkpoint_every=1"]
FOREVER = 1_000_000  # steps


def environment() -> dict[str, str]:
    """What jax must find before a start is forked: what others have compiled."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "maxbench"
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache / "kills"),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(1 << 30),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


@functools.cache
def forks():
    """What forks processes of a run: it knows no variable that this process gets later."""
    ours = dict(os.environ)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([entry.__name__, loop.__name__])
    try:
        os.environ.update(environment())
        process = context.Process(target=print)  # the first starts it
        process.start()
        process.join()
    finally:
        os.environ.clear()
        os.environ.update(ours)
    return context


def fork(words: Sequence[str], output: str, devices: int = 1, **variables: str):
    """A process that does as `python -m maxbench.train WORDS >output 2>&1` would."""
    process = forks().Process(target=_be, args=(words, output, devices, variables))
    process.start()
    return process


def _be(words, output, devices, variables) -> None:
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(variables)
    jax.config.update("jax_num_cpu_devices", devices)  # --cpu_devices comes too late
    sys.exit(entry.run("train", words))


class Start:
    """A run's process, or several, in a folder where earlier starts have left what they had."""

    def __init__(self, out: pathlib.Path, steps: int, *more: str, processes: int = 1):
        self.out, self.before = out, len(folders(out))
        out.mkdir(parents=True, exist_ok=True)
        words = [*WORDS, "--steps", str(steps), "--output_dir", str(out), *resume(out), *more]
        if processes > 1:
            words += [f"--fsdp={processes}", f"--processes={processes}"]
            words += ["--coordinator", free_address()]
        self.output = str(out / f"{time.time_ns()}.txt")
        self.processes = []
        for i in range(processes):
            one = ["--process", str(i)] * (processes > 1)
            self.processes.append(fork([*words, *one], self.output, SLURMD_NODENAME=f"n{i}"))

    def folder(self) -> pathlib.Path | None:
        """Of this start; None while there is none."""
        there = folders(self.out)
        return there[-1] if len(there) > self.before else None

    def runs(self) -> bool:
        return any(p.is_alive() for p in self.processes)

    def until(self, event) -> None:
        """Waits for it, or for the end."""
        while not event() and self.runs():
            time.sleep(0.01)

    def codes(self, seconds: float = 300) -> list[int]:
        """Waits for all; their exit codes."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.1, end - time.monotonic()))
        codes = [p.exitcode for p in self.processes]
        for process in self.processes:
            process.kill()
        assert None not in codes, f"it does not end: {self.said()}"
        return codes

    def said(self) -> str:
        return pathlib.Path(self.output).read_text()[-4000:]


def free_address() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


def folders(out: pathlib.Path) -> list[pathlib.Path]:
    """Of the runs so far, in the order in which they started."""
    return sorted(p.parent for p in out.glob("experiments/*/*/result.json"))


def losses(folder: pathlib.Path) -> dict[int, float]:
    """A run's losses by step; the last line may be half of one."""
    text = (folder / "metrics.jsonl").read_text()
    return {
        x["step"]: x["loss"] for x in map(json.loads, text[: text.rfind("\n") + 1].split("\n")[:-1])
    }


def saved(folder: pathlib.Path) -> int:
    """The last step that the log says is saved."""
    lines = next(folder.glob("log-*.out")).read_text().splitlines()
    said = [line for line in lines if line.startswith("Global Checkpoint Save")]
    return int(said[-1].split("Iteration: ")[1].split()[0]) if said else 0


def last(checkpoints: pathlib.Path, step: int = 0) -> dict[str, int]:
    """Fingerprints of a checkpoint of those in a folder, by default the newest."""
    step = step or max(int(p.name) for p in checkpoints.iterdir() if p.name.isdecimal())
    return json.loads((checkpoints / f"{step}/about/run.json").read_text())["fingerprints"]


def resume(out: pathlib.Path) -> list[str]:
    """As a requeued job: from whatever its earlier starts have left."""
    left = [str(p) for p in folders(out) if any(p.glob("checkpoints/*/about/run.json"))]
    return ["--resume", ",".join(left)] if left else []


def killed(out: pathlib.Path, chance: random.Random, processes: int) -> tuple[pathlib.Path, str]:
    """Starts a run and ends it, or one of its processes, at a random moment; returns its folder,
    and when or how."""
    run = Start(out, FOREVER, *SAVES, processes=processes)
    run.until(run.folder)
    steps = chance.choice((0, 1, 1, 2, 3, 4))
    run.until(lambda: len(losses(run.folder())) >= steps)
    time.sleep(chance.uniform(0, 0.5))
    how = signal.SIGTERM if chance.random() < 0.2 else signal.SIGKILL
    victims = run.processes
    if how == signal.SIGKILL and chance.random() < 0.7:
        victims = [chance.choice(victims)]
    for process in victims:
        os.kill(process.pid, how)
    codes, folder = run.codes(60), run.folder()
    assert folder, run.said()
    result = json.loads((folder / "result.json").read_text())
    if how == signal.SIGTERM:  # so early that nobody listened yet, or heard
        assert {*codes} in ({75}, {-how}), (codes, run.said())
        return folder, "SIGTERM"
    assert 0 not in codes, (codes, run.said())
    if len(victims) < processes:
        one = run.processes.index(victims[0])
        why = f"process {one} of {processes} on n{one} died, see {run.output}"
        assert (result["status"], result["reason"]) == ("failed", why), (result, run.said())
        return folder, f"process {one}"
    assert result["status"] == "running", result
    if any(folder.glob("checkpoints/*tmp*")):
        return folder, "in a save"
    return folder, "among steps" if losses(folder) else "before a step"


def kill_and_resume(out: pathlib.Path, kills: int, chance: random.Random, processes: int = 1):
    """Starts, kills, starts again; returns losses by step, the last fingerprints, and the kills.

    What the log told to be saved must never be lost.
    """
    seen, safe, fell = {}, 0, collections.Counter()
    for _ in range(kills):
        folder, when = killed(out, chance, processes)
        fell[when] += 1
        here = losses(folder)
        assert min(here, default=safe) >= safe, f"{folder}: from {min(here)}, {safe} was saved"
        assert all(seen.get(i, loss) == loss for i, loss in here.items()), folder
        seen |= here
        safe = max(safe, saved(folder))
        print(f"\r{fell.total()} {len(seen)} steps", end="", file=sys.stderr, flush=True)
    end = Start(out, max(seen, default=0) + 2, "--checkpoint", processes=processes)
    assert {*end.codes()} == {0}, end.said()
    return seen | losses(end.folder()), last(end.folder() / "checkpoints"), fell


def straight(out: pathlib.Path, steps: int, processes: int = 1):
    """The same without trouble: losses by step, and the last fingerprints."""
    run = Start(out, steps, "--checkpoint", processes=processes)
    assert {*run.codes()} == {0}, run.said()
    return losses(run.folder()), last(run.folder() / "checkpoints")


def kill(out: pathlib.Path, kills: int, chance: random.Random, processes: int = 1) -> str:
    """Kills a run so many times; says how, and raises AssertionError for any bit that is lost."""
    found, prints, fell = kill_and_resume(out / "killed", kills, chance, processes)
    expected, whole = straight(out / "straight", max(found) + 1, processes)
    assert found == expected, "other losses"
    assert prints == whole, "other weights"
    how = ", ".join(f"{n} {when}" for when, n in sorted(fell.items()))
    each = f"{processes} processes" if processes > 1 else "1 process"
    return f"{kills} kills of {each} ({how}): {len(found)} steps, all bits the same"


# --- damaged checkpoints ---

HOWS = ("flip", "cut", "delete", "empty", "swap")


def kind(file: pathlib.Path) -> str:
    """What a file of a checkpoint is, whatever its name is this time."""
    return re.sub(r"[0-9a-f]{32}", "*", str(file))


def damage(folder: pathlib.Path, kind_: str, how: str, chance: random.Random) -> str:
    """Does something to one file of a kind in a checkpoint; returns what. To swap, it takes the
    bytes of another of its kind, or of the other checkpoint's."""
    of_kind = lambda f: [
        p for p in sorted(f.rglob("*")) if p.is_file() and kind(p.relative_to(f)) == kind_
    ]
    file = chance.choice(of_kind(folder))
    whole = file.read_bytes()
    others = [p.read_bytes() for f in folder.parent.iterdir() for p in of_kind(f)]
    at = chance.randrange(len(whole))
    match how:
        case "flip":
            flipped = bytes([whole[at] ^ 1 << chance.randrange(8)])
            file.write_bytes(whole[:at] + flipped + whole[at + 1 :])
        case "cut":
            file.write_bytes(whole[:at])
        case "delete":
            file.unlink()
        case "empty":
            file.write_bytes(b"")
        case "swap":
            file.write_bytes(chance.choice([x for x in others if x != whole] or [whole[::-1]]))
    return f"{how} {file.relative_to(folder)}"


def damaged(out: pathlib.Path, times: int, chance: random.Random) -> collections.Counter:
    """Damages the newer of two checkpoints so many times, kind after kind of files, way after way;
    returns how often it was passed over, and how often it was whole in spite of it."""
    run = command_line.run_of([*WORDS, "--steps", "9"])
    step = Step(run, mesh.make_mesh(run.layout))
    with checkpoint.Saver(out / "whole", run) as saver:
        state = step.init()
        for i in (1, 2):
            saver.save(state | {"step": jnp.int32(i)})
    prints = {i: last(out / "whole", i) for i in (1, 2)}
    newest = out / "whole/2"
    kinds = sorted({kind(p.relative_to(newest)) for p in newest.rglob("*") if p.is_file()})
    ways = list(itertools.product(kinds, HOWS))
    chance.shuffle(ways)
    seen = collections.Counter()
    for i, (which, how) in zip(range(times), itertools.cycle(ways)):
        copy = out / str(i)
        shutil.copytree(out / "whole", copy)
        what = damage(copy / "2", which, how, chance)
        found, skipped = checkpoint.find_checkpoints(str(copy), run)
        read = checkpoint.read_onto(lambda order: step.abstract)
        kept, state = checkpoint.restore(found, skipped, read)
        at = kept.about["step"]
        assert checkpoint.array_checksums(state) == prints[at], what
        assert len(skipped) == 2 - at, (what, skipped)
        assert at == 2 or str(copy / "2") in skipped[0], skipped
        seen["passed over" if skipped else "whole"] += 1
        shutil.rmtree(copy)
    seen["ways"] = min(times, len(ways))
    return seen


def main(argv) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=5, help="kills of runs of two processes")
    parser.add_argument("--damages", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory() as scratch:
        out, begun = pathlib.Path(scratch), time.monotonic()
        seen = damaged(out / "damaged", given.damages, random.Random(given.seed))
        print(f"{given.damages} damaged checkpoints: {dict(seen)}", flush=True)
        for processes, kills in ((1, given.kills), (2, given.pairs)):
            chance = random.Random(f"{given.seed} {processes}")
            said = kill(out / str(processes), kills, chance, processes)
            print(f"{said}; {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
