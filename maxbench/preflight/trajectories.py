"""Losses of a short training in the run's number format, against stored ones.

`maxbench preflight --numerics` trains a toy Llama on train.data=bigram, whose loss falls from
ln(vocabulary) towards data.entropy(). Each process does so on its own GPUs, with the axes of the
run as far as they allow, and compares the loss of each step. It finds what one step's gradients do
not show: the optimizer, the state that a format keeps between steps, and what accumulates. It does
not find a factor that all gradients of a weight have: Adam divides by it.

trajectories.csv has for each number format the losses on one CPU device, and how far right
trainings that round otherwise were from them up to that step, over the loss: on meshes of 8 CPU
devices (another order of sums, and with per-tensor scales other scales), and in the format of
OTHER_ROUNDING. `python -m tools.trajectories` writes it. The tolerance is FACTOR times that: of two
results, each is as far from the unrounded one. Those of delayed and nvfp4 are wide, as the first
step of delayed has scales of 1, and as nvfp4 rounds gradients at random. They were tried on CPUs
alone.
"""

import csv
import math
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from maxbench.config import resolve
from maxbench.config.run import Run
from maxbench.distributed import stragglers
from maxbench.host import environment
from maxbench.preflight import numerics
from maxbench.sharding import mesh
from maxbench.step import data
from maxbench.step.train_step import Step, on_device

FILE = pathlib.Path(__file__).with_suffix(".csv")
WORKLOAD, GBS, DEVICES = "llama31_8b", 8, 8  # at most so many devices
STEPS = 40
# Sequences that cp 2 x tp 2 splits into whole blocks. The learning rate is low enough for rounding
# to change the losses of bf16 by a thousandth, and high enough for the loss to fall by four fifths
# of the way.
TRAINING = {
    "model.layers": 2, "train.seq": 128, "train.steps": STEPS, "train.data": "bigram",
    "optim.lr": 2e-3, "optim.lr_min": 2e-4, "optim.warmup": 10,
    "train.document_end": None,  # the stored losses have none
}  # fmt: skip
# The format whose rounding is left out, or added: by number format; bf16 for others.
OTHER_ROUNDING = {"bf16": "fp32"}
FACTOR = 2
LEAST = 1e-3  # tolerance, over the loss


class Stored(NamedTuple):
    """One step of a stored training.

    Attributes:
      apart: the largest relative difference of right trainings up to this step.
    """

    loss: float
    apart: float

    @property
    def tolerance(self) -> float:
        """Largest relative difference of a right loss."""
        return max(LEAST, FACTOR * self.apart)


def stored(number_format: str) -> list[Stored]:
    """The stored training in a number format, by its name in config/number_formats.py."""
    with FILE.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["format"] == number_format]
    return [Stored(float(row["loss"]), float(row["apart"])) for row in rows]


def findings(run: Run) -> Iterator[tuple[bool, str]]:
    """Whether the losses of each process are right, and a line; all processes must iterate.

    Raises:
      UserError: the toy cannot have the run's number format here.
    """
    devices = jax.local_devices()
    devices = devices[: 1 << (min(len(devices), DEVICES).bit_length() - 1)]
    start = time.perf_counter()
    small = on_device(toy(run, len(devices)), devices[0])
    right, text = compare(small, train(small, devices))
    here = {"host": environment.hostname(), "right": right, "text": text}
    found = stragglers.allgather_json(here)
    seconds = f"{time.perf_counter() - start:.1f} s"
    for process in (p for p in found if not p["right"]):
        yield False, f"{process['host']}: {process['text']}"
    if all(process["right"] for process in found):
        yield True, f"{text}, {seconds}"


def toy(run: Run, devices: int) -> Run:
    """The run that trains in the number format of another one; the same batches on every mesh.

    Args:
      devices: 1, 2, 4 or 8.

    Raises:
      UserError: the number format does not allow the mesh.
    """
    axes = tuple(axis for axis in numerics.SPLIT if axis != "ep")  # the toy has no experts
    small = numerics.toy(run, WORKLOAD, devices, axes, GBS, TRAINING)
    # As few microbatches as there are stages: scales of a tensor are then of the same sequences.
    mbs = max(1, GBS // (small.layout.shards * small.layout.pp))
    config = small.config.changed(layout={"mbs": mbs})
    return resolve.resolve(config, run.hardware, run.device)


def train(run: Run, devices: Sequence[jax.Device]) -> list[float]:
    """The losses of all steps of a run."""
    step = Step(run, mesh.make_mesh(run.layout, [*devices]))
    program, *_ = step.compile()
    state, batches, losses = step.init(), data.Synthetic(run, step.mesh), []
    for _ in range(run.train.steps):
        # Virtual CPU devices on few cores can deadlock in two programs at once.
        state, out = program(state, jax.block_until_ready(next(batches)))
        losses.append(float(out["loss"]))
    return losses


def compare(run: Run, losses: Sequence[float]) -> tuple[bool, str]:
    """Whether the losses of a training are within the tolerances, and a line."""
    expected = stored(run.format.name)
    apart = [abs(x / y.loss - 1) for x, y in zip(losses, expected, strict=True)]
    most = max(range(len(apart)), key=lambda i: apart[i] / expected[i].tolerance)
    name = run.format.name if run.format.name == run.format.dtype else f"fp8 ({run.format.name})"
    what = f"{len(losses)} steps in {name}, {run.layout.describe()}"
    # Of NaN no comparison holds.
    wrong = [i for i, x in enumerate(apart) if not x <= expected[i].tolerance]
    if not wrong:
        text = f"at most {max(apart):.2%} from the stored ones"
        return True, f"losses of {what}: {text} (at most {expected[most].tolerance:.2%})"
    i = wrong[0]
    return False, (
        f"the loss of {what}, leaves the stored trajectory at step {i}: {losses[i]:.4f}, stored "
        f"{expected[i].loss:.4f}, {apart[i]:.2%} apart (at most {expected[i].tolerance:.2%}): "
        f"{_meaning(i, losses[i])}"
    )


def _meaning(step: int, loss: float) -> str:
    """Causes of a loss of this step that is wrong first."""
    if not math.isfinite(loss):
        return "an overflow, or memory that is read before it is written"
    if step == 0:
        return "the forward pass, the first weights or the batches are wrong"
    if step == 1:
        return "the gradients or the update are wrong, or a product that the first loss hides"
    return (
        "each step has a small error: of a scale, of one GPU's gradients, of the optimizer or of "
        "what a format keeps between steps"
    )
