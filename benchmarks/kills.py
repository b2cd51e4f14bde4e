"""Kills a small run at random moments, again and again, each time going on from what it left, and
damages checkpoints: what comes out must be, bit for bit, what a run without trouble gives.

  python benchmarks/kills.py --kills 200 --damages 50 --seed 1
"""

import argparse
import collections
import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import jax.numpy as jnp

from maxbench.mesh import axes
from maxbench.run import checkpoint
from maxbench.spec import cli
from maxbench.step.step import Step

WORDS = ["--config", "configs/llama31_8b.py:tiny", "--dtype", "fp32", "--layers", "1"]
WORDS += ["--seq", "16", "--config.model.embed=32", "--config.model.mlp=64"]
WORDS += ["--config.precision.grads=fp32", "--config.output.checkpoint_every=1"]


def start(out: pathlib.Path, steps: int, *more: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "maxbench.train", *WORDS, "--steps", str(steps)]
    command += ["--output_dir", str(out), *more]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def folders(out: pathlib.Path) -> list[pathlib.Path]:
    """Of the runs so far, in the order in which they started."""
    return sorted(p.parent for p in out.rglob("result.json"))


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


def killed(out: pathlib.Path, chance: random.Random) -> tuple[pathlib.Path, str]:
    """Starts a run and ends it at a random moment; returns its folder, and when or how."""
    before = len(folders(out))
    process = start(out, 100_000, *resume(out))
    while len(folders(out)) == before and process.poll() is None:
        time.sleep(0.01)
    if chance.random() < 0.9:
        while not losses(folders(out)[-1]) and process.poll() is None:
            time.sleep(0.01)
    time.sleep(chance.uniform(0, 2))
    how = signal.SIGTERM if chance.random() < 0.2 else signal.SIGKILL
    process.send_signal(how)
    said, _ = process.communicate(timeout=120)
    assert process.returncode in (0, -how), said
    folder = folders(out)[-1]
    when = "among steps" if losses(folder) else "before a step"
    return folder, when if how == signal.SIGKILL else "SIGTERM"


def kill_and_resume(out: pathlib.Path, kills: int, chance: random.Random):
    """Starts, kills, starts again; returns losses by step, the last fingerprints, and the kills.

    What the log told to be saved must never be lost.
    """
    seen, safe, fell = {}, 0, collections.Counter()
    for _ in range(kills):
        folder, when = killed(out, chance)
        fell[when] += 1
        here = losses(folder)
        assert min(here, default=safe) >= safe, f"{folder}: from {min(here)}, {safe} was saved"
        assert all(seen.get(i, loss) == loss for i, loss in here.items()), folder
        seen |= here
        safe = max(safe, saved(folder))
    process = start(out, max(seen, default=0) + 2, *resume(out))
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    folder = folders(out)[-1]
    return seen | losses(folder), last(folder / "checkpoints"), fell


def straight(out: pathlib.Path, steps: int):
    """The same without trouble: losses by step, and the last fingerprints."""
    process = start(out, steps)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    (folder,) = folders(out)
    return losses(folder), last(folder / "checkpoints")


def damage(folder: pathlib.Path, chance: random.Random) -> str:
    """Does something to one file of a checkpoint; returns what."""
    file = chance.choice(sorted(p for p in folder.rglob("*") if p.is_file()))
    whole, how = file.read_bytes(), chance.choice(["flip", "cut", "zeros", "delete", "empty"])
    if not whole or how in ("delete", "empty"):
        file.unlink() if how == "delete" else file.write_bytes(b"")
    at = chance.randrange(len(whole)) if whole else 0
    if whole and how == "flip":
        flipped = bytes([whole[at] ^ 1 << chance.randrange(8)])
        file.write_bytes(whole[:at] + flipped + whole[at + 1 :])
    elif whole and how == "cut":
        file.write_bytes(whole[:at])
    elif whole and how == "zeros":
        file.write_bytes(whole[:at] + bytes(64) + whole[at + 64 :])
    return f"{how} {file.relative_to(folder)}"


def damaged(out: pathlib.Path, times: int, chance: random.Random) -> collections.Counter:
    """Damages the newer of two checkpoints, so many times; returns how often it was passed over,
    and how often it was whole in spite of it."""
    run = cli.run_of([*WORDS, "--steps", "9"])
    step = Step(run, axes.make_mesh(run.layout))
    with checkpoint.Saver(out / "whole", run) as saver:
        state = step.init()
        for i in (1, 2):
            saver.save(state | {"step": jnp.int32(i)})
    prints = {i: last(out / "whole", i) for i in (1, 2)}
    seen = collections.Counter()
    for i in range(times):
        copy = out / str(i)
        shutil.copytree(out / "whole", copy)
        what = damage(copy / "2", chance)
        found, skipped = checkpoint.locate(str(copy), run)
        read = checkpoint.read_onto(lambda order: step.abstract)
        kept, state = checkpoint.restore(found, skipped, read)
        at = kept.about["step"]
        assert checkpoint.fingerprints(state) == prints[at], what
        assert len(skipped) == 2 - at, (what, skipped)
        assert at == 2 or str(copy / "2") in skipped[0], skipped
        seen["passed over" if skipped else "whole"] += 1
        shutil.rmtree(copy)
    return seen


def main(argv) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--damages", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        out, begun = pathlib.Path(scratch), time.monotonic()
        chance = random.Random(given.seed)
        seen = damaged(out / "damaged", given.damages, chance)
        print(f"{given.damages} damaged checkpoints: {dict(seen)}", flush=True)
        found, prints, fell = kill_and_resume(out / "killed", given.kills, chance)
        expected, whole = straight(out / "straight", max(found) + 1)
        assert found == expected, "other losses"
        assert prints == whole, "other weights"
        took = time.monotonic() - begun
        print(
            f"{given.kills} kills {dict(fell)}: {len(found)} steps, all bits the same; {took:.0f} s"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
