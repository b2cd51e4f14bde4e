"""Restoring checkpoints onto any mesh: the newest that is undamaged and fits the run."""

import dataclasses
import gc
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from maxbench.config import number_formats, validation
from maxbench.config.errors import UserError
from maxbench.config.model import Model
from maxbench.config.run import Run
from maxbench.distributed import stragglers
from maxbench.model import layer_stack
from maxbench.run.checkpoint import INFO_FILE, CheckpointInfo, as_json, silence_orbax_shutdown
from maxbench.run.checksums import array_checksums

MAX_REASON = 300  # characters of an error of orbax or tensorstore


class Checkpoint(NamedTuple):
    """A checkpoint whose run.json is sound; its arrays may be damaged."""

    path: pathlib.Path
    info: CheckpointInfo


class Candidates(NamedTuple):
    """Checkpoints, newest first, and those that are unusable, each with its reason."""

    checkpoints: list[Checkpoint]
    skipped: list[str]


Read = Callable[[Checkpoint], Any]  # returns the arrays of a checkpoint


def find_checkpoints(path: str, run: Run) -> Candidates:
    """Finds the checkpoints at or below `path` that the run may resume from.

    Args:
      path: a checkpoint, a folder of them, a run's folder, or several joined by commas.

    Raises:
      UserError: there is none; one is of another model, or has reached the last step.
    """
    candidates = _find(path)
    for checkpoint in candidates.checkpoints:
        _check_fits(checkpoint, run)
    return candidates


def _check_fits(checkpoint: Checkpoint, run: Run) -> None:
    """Raises UserError if the run cannot continue from a checkpoint."""
    info, prefix = checkpoint.info, f"resume={checkpoint.path}"
    saved_model, model = info.run["model"], as_json(run.asdict()["model"])
    differences = [
        f"{name}={saved_model[name]} (this run: {value})"
        for name, value in model.items()
        if name in saved_model and saved_model[name] != value
    ]
    if differences:
        raise UserError(f"{prefix}: of another model: {', '.join(differences)}")
    precision = info.run["precision"]
    for name in ("weights", "moments"):
        if precision[name] != getattr(run.precision, name):
            raise UserError(
                f"{prefix}: its {name} are {precision[name]}; "
                f"use --config.precision.{name}={precision[name]}"
            )
    saved_optimizer = info.run["optim"].get("name", "adamw")  # before there was Muon
    if saved_optimizer != run.optim.name:
        raise UserError(
            f"{prefix}: its optimizer state is that of {saved_optimizer}; "
            f"use --config.optim.name={saved_optimizer}"
        )
    amax_history = number_formats.FORMATS[precision["scaling"]].amax_history
    saved_length = precision["history"] if amax_history else 0
    length = run.precision.amax_history_len
    if saved_length != length:
        scaling = (
            f"delayed --config.precision.history={saved_length} --dtype fp8"
            if saved_length
            else "current"
        )
        raise UserError(
            f"{prefix}: its amax history for delayed scaling has {saved_length} steps, and this "
            f"run's {length}; use --config.precision.scaling={scaling}"
        )
    if info.step >= run.train.steps:
        raise UserError(
            f"{prefix} is at step {info.step} and steps={run.train.steps}: nothing is left to "
            f"train; use --steps {info.step + 1} or more"
        )


def config_diff(info: CheckpointInfo, run: Run) -> list[str]:
    """Settings in which the run differs from the saved one; they are allowed, and logged."""
    saved, current = info.run, as_json(run.asdict())
    return [
        f"{section}.{name}={value} (saved: {saved[section].get(name)})"
        for section in ("layout", "train", "optim", "precision")
        for name, value in current[section].items()
        if saved[section].get(name) != value
    ]


def weights(path: str) -> tuple[Model, dict]:
    """The model of the newest checkpoint at or below `path`, and its weights.

    Returns:
      The weights are numpy arrays, with layers in their order whatever mesh saved them: the
      parameters of model.transformer.Transformer.

    Raises:
      UserError: no checkpoint is undamaged.
    """

    def read(checkpoint: Checkpoint) -> dict:
        folder = (checkpoint.path / "state").absolute()
        with ocp.PyTreeCheckpointer() as checkpointer:
            params = checkpointer.metadata(folder).item_metadata.tree["params"]
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), params)
            args = ocp.args.PyTreeRestore(
                {"params": params}, restore_args={"params": as_numpy}, partial_restore=True
            )
            return checkpointer.restore(folder, args=args)

    checkpoint, state = restore(_find(path), read)
    info, params = checkpoint.info, state["params"]
    model = validation.build(Model, "model", info.run["model"])
    source = layer_stack.stacks_from_json(model, info.stacks)
    layers = layer_stack.permute(params["layers"], layer_stack.stacks(model), source)
    return model, params | {"layers": layers}


def _find(path: str) -> Candidates:
    """find_checkpoints() for any run. All processes use what process 0 finds."""
    checkpoints, skipped = [], []
    for folder in _candidates(path):
        try:
            info = CheckpointInfo.from_json((folder / "about" / INFO_FILE).read_text())
            checkpoints.append((str(folder), dataclasses.asdict(info)))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
            reason = f"run.json is missing, damaged or foreign ({type(e).__name__}: {e})"
            skipped.append(f"{folder}: {reason}")
    seen = stragglers.allgather_json({"checkpoints": checkpoints, "skipped": skipped})[0]
    if not seen["checkpoints"]:
        exists = pathlib.Path(path).exists() or "," in path
        reason = "none is complete" if exists else "it does not exist"
        raise UserError(
            f"resume={path!r}: no checkpoint to start from: "
            f"{'; '.join(seen['skipped']) or reason}; give a run's folder or a checkpoint"
        )
    return Candidates(
        [Checkpoint(pathlib.Path(p), CheckpointInfo(**info)) for p, info in seen["checkpoints"]],
        seen["skipped"],
    )


def _candidates(path: str) -> list[pathlib.Path]:
    """Folders named as checkpoints, newest first; of equal steps, the last in `path` first."""
    folders: list[pathlib.Path] = []
    for root in map(pathlib.Path, path.split(",")):
        below = [*root.glob("[0-9]*"), *root.glob("checkpoints/[0-9]*")]
        is_checkpoint = (root / "about").exists() or (root / "state").exists()
        folders += [root] if is_checkpoint else [p for p in below if p.name.isdecimal()]
    step = lambda p: int(p.name) if p.name.isdecimal() else -1
    return sorted(reversed(folders), key=step, reverse=True)


def restore(candidates: Candidates, read: Read) -> tuple[Checkpoint, Any]:
    """Restores the newest checkpoint whose arrays have the checksums that were saved.

    All processes must call it, and agree. Damaged checkpoints are added to candidates.skipped.

    Returns:
      The checkpoint, and what `read` returned.

    Raises:
      UserError: all are damaged.
    """
    for checkpoint in candidates.checkpoints:
        state, damage = attempt(read, checkpoint)
        damage = _first_damage(damage) or _checksum_error(checkpoint.info, state)
        if not damage:
            return checkpoint, state
        state = None  # releases the memory before the next is read
        candidates.skipped.append(f"{checkpoint.path}: damaged, {damage}")
    raise UserError(f"resume: every checkpoint is damaged: {'; '.join(candidates.skipped)}")


def _first_damage(damage: str) -> str:
    """The first error of any process, or ''."""
    everywhere = stragglers.allgather_json({"damage": damage})
    return next((one["damage"] for one in everywhere if one["damage"]), "")


def _checksum_error(info: CheckpointInfo, state) -> str:
    checksums = array_checksums(state)
    wrong = [name for name, value in checksums.items() if info.fingerprints.get(name) != value]
    return f"checksum of {wrong[0]} is wrong" if wrong else ""


def read_onto(abstract: Callable[[Sequence], Any]) -> Read:
    """A function for restore() that reads a state onto devices.

    Args:
      abstract: the abstract state, with its shardings, for CheckpointInfo.stacks.
    """

    def read(checkpoint: Checkpoint):
        # Not a Checkpointer: on exit that waits for other processes, which may have failed.
        args = ocp.args.StandardRestore(abstract(checkpoint.info.stacks))
        folder = (checkpoint.path / "state").absolute()
        return ocp.StandardCheckpointHandler().restore(folder, args=args)

    return read


def attempt(read: Read, checkpoint: Checkpoint) -> tuple[Any, str]:
    """Reads a checkpoint; returns its arrays and '', or None and the error."""
    silence_orbax_shutdown()  # before the read, whose threads complain while it fails
    try:
        return read(checkpoint), ""
    except Exception as e:  # orbax and tensorstore raise anything on damaged files
        first_line = (str(e).strip() or "no reason").splitlines()[0]
        text = first_line.partition(" [tensorstore_spec")[0]
        damage = f"{type(e).__name__}: {text[:MAX_REASON]}"
    gc.collect()  # the traceback holds arrays
    return None, damage
