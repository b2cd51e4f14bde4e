"""Checkpoints: orbax's manager, in the background, restored onto any mesh.

    <folder>/<step>/state/            orbax; a step's folder gets its name when all of it is written
    <folder>/<step>/about/run.json    the run, the order in which its layers are stacked, ...

run.json holds a fingerprint of every array, and one of itself: what is not as it was saved is
passed over, with its reason, for the newest checkpoint that is.
"""

import functools
import gc
import inspect
import json
import logging
import pathlib
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from maxbench.config.errors import UserError
from maxbench.config.model import Model
from maxbench.config.run import Precision, Run
from maxbench.distributed import runtime, stragglers
from maxbench.pipeline import layer_order

PLACE = 0x9E3779B1  # a place in an array: its indices, each added to what this makes of the last


class Saver:
    """Saves states while training goes on. All processes must make it, call it, and leave it.

    Args:
      tell: is given what each save took, when it is complete: step, start, seconds that training
        waited, background_s after that, bytes.
    """

    def __init__(self, folder: pathlib.Path, run: Run, tell: Callable[[dict], None] = lambda _: 0):
        keep = [checkpoint_managers.LatestN(run.output.max_to_keep)]
        if every := run.output.keep_period:
            keep.append(checkpoint_managers.EveryNSteps(every))
        policy = checkpoint_managers.AnyPreservationPolicy(keep)
        _silence_orbax_shutdown()
        self.manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(preservation_policy=policy),
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "about": ocp.JsonCheckpointHandler("run.json"),
            },
        )
        self.run, self.tell, self.closing = run, tell, 0.0
        self.thread = futures.ThreadPoolExecutor(1)
        self.newest = self.thread.submit(lambda: None)

    def save(self, state) -> None:
        """Saves the state as its step, if it is not saved yet. When this returns the state may be
        trained on; it is complete when tell() says so, and no sooner."""
        start, step = time.time(), int(state["step"])
        self.newest.result()
        if self.manager.latest_step() == step:
            return
        a = self.run.layout
        about = {
            "run": self.run.asdict(),
            "step": step,
            "layer_order": layer_order.layer_order(self.run.model.layers, a.pp, a.vp).tolist(),
            "fingerprints": array_checksums(state),
        }
        about = ocp.args.JsonSave(about | {"crc32": _crc32(about)})
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), about=about)
        self.manager.save(step, args=args, force=True)
        self.newest = self.thread.submit(self._finish, step, start, time.time())

    def _finish(self, step: int, start: float, free: float) -> None:
        self.manager.wait_until_finished()
        end, folder = time.time(), pathlib.Path(self.manager.directory / str(step))
        waited = end - self.closing if self.closing else 0.0
        took = {"seconds": free - start + waited, "background_s": end - free - waited}
        self.tell({"step": step, "start": start, **took, "bytes": size(folder)})

    def check(self) -> None:
        """Raises what a save in the background has failed with."""
        if self.newest.done():
            self.newest.result()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_) -> None:
        """Waits for the save under way, but not in vain: for other processes after a failure."""
        if kind and runtime.process_count() > 1:
            return
        self.closing = time.time()
        try:
            self.newest.result()
        except Exception:
            if kind is None:
                raise
        else:
            self.manager.close()
        finally:
            self.thread.shutdown()


class Saved(NamedTuple):
    """A checkpoint, and what its run.json says."""

    path: pathlib.Path
    about: dict


def find_checkpoints(path: str, run: Run) -> tuple[list[Saved], list[str]]:
    """Checkpoints at or below path that the run may start from, newest first; and, of those that
    were passed over, why.

    `path` may be a checkpoint, a folder of them, a run's folder, or several with commas between.

    Raises:
      UserError: there is none, or one is of another model, or already at the last step.
    """
    found, skipped = _find(path)
    for saved in found:
        _fits(saved, run)
    return found, skipped


def _fits(saved: Saved, run: Run) -> None:
    """Raises UserError where the run cannot go on from a checkpoint that is sound."""
    about, at = saved.about, f"resume={saved.path}"
    theirs, ours = about["run"]["model"], _plain(run.asdict()["model"])
    other = [
        f"{k}={theirs.get(k)} (this run: {v})" for k, v in ours.items() if theirs.get(k, v) != v
    ]
    if other:
        raise UserError(f"{at}: of another model: {', '.join(other)}")
    precision = about["run"]["precision"]
    for field in ("weights", "moments"):
        if precision[field] != getattr(run.precision, field):
            raise UserError(
                f"{at}: its {field} are {precision[field]}; "
                f"use --config.precision.{field}={precision[field]}"
            )
    theirs, ours = Precision(**precision).amax_history_len, run.precision.amax_history_len
    if theirs != ours:
        need = f"delayed --config.precision.history={theirs} --dtype fp8" if theirs else "current"
        raise UserError(
            f"{at}: it holds {theirs} steps of the largest magnitudes that delayed "
            f"scaling reads, and this run wants {ours}; use --config.precision.scaling={need}"
        )
    if about["step"] >= run.train.steps:
        raise UserError(
            f"{at} is at step {about['step']} and steps={run.train.steps}: nothing is "
            f"left to train; use --steps {about['step'] + 1} or more"
        )


def config_diff(about: dict, run: Run) -> list[str]:
    """What the run does otherwise than the one that saved: allowed, but not to be overlooked."""
    theirs, ours = about["run"], _plain(run.asdict())
    return [
        f"{section}.{field}={value} (saved: {theirs[section].get(field)})"
        for section in ("layout", "train", "optim", "precision")
        for field, value in ours[section].items()
        if theirs[section].get(field) != value
    ]


def weights(path: str) -> tuple[Model, dict]:
    """The model of the newest checkpoint at or below path, and its weights as numpy arrays on this
    host, layers in their order: what network.Transformer takes, whatever mesh saved them.

    Raises:
      UserError: there is none that is whole.
    """

    def read(saved: Saved) -> dict:
        folder = (saved.path / "state").absolute()
        with ocp.PyTreeCheckpointer() as checkpointer:
            found = checkpointer.metadata(folder).item_metadata.tree["params"]
            kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), found)
            how = ocp.args.PyTreeRestore(
                {"params": found}, restore_args={"params": kinds}, partial_restore=True
            )
            return checkpointer.restore(folder, args=how)

    saved, state = restore(*_find(path), read)
    m, params = Model(**saved.about["run"]["model"]), state["params"]
    layers = layer_order.permute(params["layers"], range(m.layers), saved.about["layer_order"])
    return m, params | {"layers": layers}


def _find(path: str) -> tuple[list[Saved], list[str]]:
    """As locate(), for any run. All processes go by what process 0 sees."""
    found, skipped = [], []
    for place in _places(path):
        try:
            found.append((str(place), _read(place)))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
            why = f"run.json is missing, damaged or foreign ({type(e).__name__}: {e})"
            skipped.append(f"{place}: {why}")
    seen = stragglers.allgather_json({"found": found, "skipped": skipped})[0]
    if not seen["found"]:
        there = pathlib.Path(path).exists() or "," in path
        why = "; ".join(seen["skipped"]) or ("none is complete" if there else "it does not exist")
        raise UserError(
            f"resume={path!r}: no checkpoint to start from: {why}; give a run's folder or a "
            "checkpoint"
        )
    return [Saved(pathlib.Path(p), about) for p, about in seen["found"]], seen["skipped"]


def _places(path: str) -> list[pathlib.Path]:
    """Folders that are checkpoints by their names, newest first; of one step, the last named."""
    found = []
    for root in map(pathlib.Path, path.split(",")):
        below = [*root.glob("[0-9]*"), *root.glob("checkpoints/[0-9]*")]
        one = (root / "about").exists() or (root / "state").exists()
        found += [root] if one else [p for p in below if p.name.isdecimal()]
    step = lambda p: int(p.name) if p.name.isdecimal() else -1
    return sorted(reversed(found), key=step, reverse=True)


def _read(place: pathlib.Path) -> dict:
    """What run.json says; raises whatever is wrong with it."""
    about = json.loads((place / "about/run.json").read_text())
    if about.pop("crc32") != _crc32(about):
        raise ValueError("not what was written")
    if not about["fingerprints"]:
        raise ValueError("no fingerprints")
    return about


def restore(
    found: Sequence[Saved], skipped: list[str], read: Callable[[Saved], Any]
) -> tuple[Saved, Any]:
    """The newest checkpoint whose arrays are the bits that were saved, and what `read` makes of it;
    to `skipped` is added why others are not. All processes agree.

    Raises:
      UserError: none is.
    """
    for saved in found:
        state, damage = _attempt(read, saved)
        damage = next(
            filter(None, (x["damage"] for x in stragglers.allgather_json({"damage": damage}))), ""
        )
        if not damage:
            prints = saved.about["fingerprints"]
            wrong = [n for n, value in array_checksums(state).items() if prints.get(n) != value]
            if not wrong:
                return saved, state
            damage = f"other bits than were saved in {wrong[0]}"
        state = None
        skipped.append(f"{saved.path}: damaged, {damage}")
    raise UserError(f"resume: no checkpoint is whole: {'; '.join(skipped)}")


def read_onto(abstract: Callable[[list[int]], Any]) -> Callable[[Saved], Any]:
    """For restore(): reads a state placed as the abstract one of its order of layers says."""

    def read(saved: Saved):
        # The handler itself: a Checkpointer waits at its end for processes that may have failed.
        args = ocp.args.StandardRestore(abstract(saved.about["layer_order"]))
        folder = (saved.path / "state").absolute()
        return ocp.StandardCheckpointHandler().restore(folder, args=args)

    return read


def _attempt(read: Callable[[Saved], Any], saved: Saved) -> tuple[Any, str]:
    """What was read, or None and why not."""
    _silence_orbax_shutdown()  # before the read: its threads complain while it fails
    try:
        return read(saved), ""
    except Exception as e:  # orbax and tensorstore raise whatever the damage makes them trip over
        said = (str(e).strip() or "no reason").splitlines()[0].partition(" [tensorstore_spec")[0]
        damage = f"{type(e).__name__}: {said[:300]}"
    gc.collect()
    return None, damage


@functools.cache
def _silence_orbax_shutdown() -> None:
    """What fails in orbax is raised, and need not be logged too; what others log is heard as
    before. It also closes its loop under reads and writes that are still under way. Each complains
    at length, when it is done or thrown away, now or at the end of the process: nobody waits for
    it, so it may not."""
    of_orbax = lambda record: "orbax" in pathlib.PurePath(record.pathname).parts
    logging.getLogger("absl").addFilter(lambda record: not of_orbax(record))
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    hook, closed = sys.unraisablehook, "Event loop is closed"
    quiet = lambda u: inspect.iscoroutine(u.object) or str(u.exc_value) == closed
    sys.unraisablehook = lambda u: None if quiet(u) else hook(u)


def size(folder: pathlib.Path) -> int:
    """Bytes of a checkpoint's files."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def array_checksums(state) -> dict[str, int]:
    """For each array, a sum over its elements of their bits hashed with their place: the same on
    every mesh, and another when elements change, or change places."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    arrays = [x for _, x in leaves]
    here = all(isinstance(x, np.ndarray) for x in arrays)  # those of a host stay there
    sums = map(_sum_here, arrays) if here else _sums(arrays)
    return {n: int(x) for n, x in zip(names, sums, strict=True)}


@jax.jit
def _sums(arrays: list[jax.Array]) -> list[jax.Array]:
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
    bits = lambda x: jax.lax.bitcast_convert_type(x, unsigned[x.dtype.itemsize])
    return [_sum(bits(x), 0, jnp) for x in arrays]


def _sum_here(x: np.ndarray, at: int = 0) -> int:
    """As _sum(); of an array of many dimensions, one by one, for the memory that hashing needs."""
    if x.ndim > 2:
        return sum(_sum_here(row, (at + i) * PLACE) for i, row in enumerate(x)) % (1 << 32)
    return int(_sum(np.atleast_1d(x).view(f"u{x.dtype.itemsize}"), at, np))


def _sum(bits, at: int, xp):
    """The sum modulo 2**32 of unsigned integers, each hashed with its place (as MurmurHash3 ends:
    a sum that is linear in the bits would not see two signs that change). `at` is the place of the
    array in one that it is a part of."""
    place = xp.full((1,) * bits.ndim, at % (1 << 32), xp.uint32)
    for axis, size in enumerate(bits.shape):
        index = xp.arange(size, dtype=xp.uint32).reshape(size, *[1] * (bits.ndim - 1 - axis))
        place = (place + index) * xp.uint32(PLACE)
    x = bits.astype(xp.uint32) ^ place
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ x >> shift) * xp.uint32(factor)
    return xp.sum(x ^ x >> 16, dtype=xp.uint32)


def _crc32(about: dict) -> int:
    return zlib.crc32(json.dumps(_plain(about), sort_keys=True).encode())


def _plain(about: dict) -> dict:
    """As JSON gives it back."""
    return json.loads(json.dumps(about))
