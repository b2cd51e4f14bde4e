"""Checkpoints: orbax, sharded, restored onto any mesh.

    <folder>/<step>/state/     orbax
    <folder>/<step>/run.json   written last: a checkpoint without it was never finished

run.json holds the run, the order in which its layers are stacked, the size of every file and a
fingerprint of every array, so that a foreign or damaged checkpoint is refused, not trained on.
"""

import gc
import inspect
import json
import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from maxbench.spec.errors import UserError
from maxbench.spec.model import Model
from maxbench.spec.run import Precision, Run
from maxbench.step import slots


def save(folder: pathlib.Path, run: Run, state) -> tuple[int, float]:
    """Saves the state as its step; returns bytes and seconds. All processes must call it."""
    start, step = time.time(), int(state["step"])
    path = (folder / str(step)).absolute()
    path.mkdir(parents=True, exist_ok=True)
    (path / "run.json").unlink(missing_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", state, force=True)
    prints = fingerprints(state)
    _barrier("saved")
    sizes = _sizes(path / "state")
    if jax.process_index() == 0:
        a = run.layout
        about = {
            "run": run.asdict(),
            "step": step,
            "layer_order": slots.order(run.model.layers, a.pp, a.vp).tolist(),
            "files": sizes,
            "fingerprints": prints,
        }
        part = path / "run.json.part"
        part.write_text(json.dumps(about))
        os.replace(part, path / "run.json")
    _barrier("written")
    return sum(sizes.values()), time.time() - start


def locate(path: str, run: Run) -> tuple[pathlib.Path, dict]:
    """The newest complete checkpoint at or below path, and its run.json.

    `path` may be a checkpoint, a folder of them, or a run's folder.

    Raises:
      UserError: missing, incomplete, damaged, of another model, or already at the last step.
    """
    newest, about = _newest(path)
    theirs, ours = about["run"]["model"], json.loads(json.dumps(run.asdict()["model"]))
    other = [
        f"{k}={theirs.get(k)} (this run: {v})" for k, v in ours.items() if theirs.get(k, v) != v
    ]
    if other:
        raise UserError(f"resume={newest}: of another model: {', '.join(other)}")
    precision = about["run"]["precision"]
    for field in ("weights", "moments"):
        if precision[field] != getattr(run.precision, field):
            raise UserError(
                f"resume={newest}: its {field} are {precision[field]}; "
                f"use --config.precision.{field}={precision[field]}"
            )
    theirs, ours = Precision(**precision).remembered, run.precision.remembered
    if theirs != ours:
        need = f"delayed --config.precision.history={theirs} --dtype fp8" if theirs else "current"
        raise UserError(
            f"resume={newest}: it holds {theirs} steps of the largest magnitudes that delayed "
            f"scaling reads, and this run wants {ours}; use --config.precision.scaling={need}"
        )
    if about["step"] >= run.train.steps:
        raise UserError(
            f"resume={newest} is at step {about['step']} and steps={run.train.steps}: nothing is "
            f"left to train; use --steps {about['step'] + 1} or more"
        )
    return newest, about


def weights(path: str) -> tuple[Model, dict]:
    """The model of the newest checkpoint at or below path, and its weights as numpy arrays on this
    host, layers in their order: what network.Transformer takes, whatever mesh saved them.

    Raises:
      UserError: missing, incomplete or damaged.
    """
    newest, about = _newest(path)
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.metadata((newest / "state").absolute()).item_metadata.tree["params"]
        kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), found)
        how = ocp.args.PyTreeRestore(
            {"params": found}, restore_args={"params": kinds}, partial_restore=True
        )
        params = checkpointer.restore((newest / "state").absolute(), args=how)["params"]
    m = Model(**about["run"]["model"])
    layers = slots.move(params["layers"], range(m.layers), about["layer_order"])
    return m, params | {"layers": layers}


def _newest(path: str) -> tuple[pathlib.Path, dict]:
    root = pathlib.Path(path)
    if not root.exists():
        raise UserError(f"resume={path!r} does not exist; give a run's folder or a checkpoint")
    found = [root] if (root / "state").exists() else []
    found += [p.parent for p in (*root.glob("*/state"), *root.glob("checkpoints/*/state"))]
    complete = [p for p in found if (p / "run.json").exists()]
    if not complete:
        why = "only unfinished ones" if found else "none"
        raise UserError(f"resume={path!r}: no complete checkpoint there ({why})")
    newest = max(complete, key=lambda p: int(p.name) if p.name.isdecimal() else -1)
    return newest, _read(newest)


def _read(path: pathlib.Path) -> dict:
    """run.json, after a look at the files that it lists."""
    try:
        about = json.loads((path / "run.json").read_text())
        files = about["files"]
        _ = about["run"]["model"], about["step"], about["layer_order"], about["fingerprints"]
    except (ValueError, KeyError, TypeError) as e:
        raise UserError(f"resume={path}: run.json is damaged or foreign ({e!r})") from None
    for name, size in files.items():
        file = path / "state" / name
        if not file.exists():
            raise UserError(f"resume={path}: damaged, {file} is missing")
        if file.stat().st_size != size:
            raise UserError(
                f"resume={path}: damaged, {file} has {file.stat().st_size} bytes, saved were {size}"
            )
    return about


def restore(path: pathlib.Path, about: dict, abstract):
    """The state from a checkpoint that locate() found, placed as `abstract` says.

    Raises:
      UserError: what was read is not what was saved.
    """
    damage = ""
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            state = checkpointer.restore((path / "state").absolute(), abstract)
    except Exception as e:  # orbax and tensorstore raise whatever the damage makes them trip over
        damage = f"{type(e).__name__}: {str(e).strip().splitlines()[0][:300]}"
    if damage:
        # Orbax closes its loop under reads that are still under way. Each complains at length when
        # it is thrown away, now or at the end of the process: nobody waits for it, so it may not.
        hook = sys.unraisablehook
        sys.unraisablehook = lambda u: None if inspect.iscoroutine(u.object) else hook(u)
        gc.collect()
        raise UserError(f"resume={path}: damaged, {damage}")
    read = fingerprints(state)
    wrong = [name for name, value in about["fingerprints"].items() if read.get(name) != value]
    if wrong:
        raise UserError(f"resume={path}: damaged, other bits than were saved in {wrong[0]}")
    return state


def fingerprints(state) -> dict[str, int]:
    """For each array, the sum of its bits as unsigned integers: the same on every mesh."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    return {n: int(x) for n, x in zip(names, _bits([x for _, x in leaves]), strict=True)}


@jax.jit
def _bits(arrays: list[jax.Array]) -> list[jax.Array]:
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
    bits = lambda x: jax.lax.bitcast_convert_type(x, unsigned[x.dtype.itemsize])
    return [jnp.sum(bits(x), dtype=jnp.uint32) for x in arrays]


def _sizes(folder: pathlib.Path) -> dict[str, int]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.stat().st_size for p in files}


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"checkpoint {name}")
