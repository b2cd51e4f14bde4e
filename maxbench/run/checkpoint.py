"""Checkpoints, saved in the background by orbax.

    <folder>/<step>/state/            orbax; the folder is renamed to <step> once it is complete
    <folder>/<step>/about/run.json    CheckpointInfo

run.json has a checksum of every array, and one of itself: a damaged checkpoint is detected when it
is restored (run/restore.py).
"""

import dataclasses
import functools
import inspect
import json
import logging
import pathlib
import sys
import time
import zlib
from collections.abc import Callable
from concurrent import futures
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from maxbench.config.run import Run
from maxbench.distributed import runtime
from maxbench.model import layer_stack
from maxbench.pipeline import layer_order
from maxbench.run.checksums import array_checksums
from maxbench.run.result import CheckpointSave

INFO_FILE = "run.json"


@dataclasses.dataclass
class CheckpointInfo:
    """Contents of run.json."""

    config: dict[str, Any]  # of the run that saved it, as written
    run: dict[str, Any]  # as resolved
    step: int
    data: dict[str, Any]  # state of the iterator of batches
    stacks: list[Any]  # of the layers' weights: layer_stack.stacks_to_json()
    fingerprints: dict[str, int]  # array_checksums() of the state

    def to_json(self) -> dict[str, Any]:
        """The object that run.json contains: the fields, and a checksum of them."""
        fields = dataclasses.asdict(self)
        return fields | {"crc32": _crc32(fields)}

    @classmethod
    def from_json(cls, text: str) -> "CheckpointInfo":
        """Parses run.json.

        Raises:
          ValueError, TypeError, KeyError, AttributeError: it is damaged, or another program's.
        """
        fields = json.loads(text)
        if fields.pop("crc32") != _crc32(fields):
            raise ValueError("its checksum is wrong")
        info = cls(**fields)
        if not info.fingerprints:
            raise ValueError("no fingerprints")
        return info


def _crc32(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(as_json(fields), sort_keys=True).encode())


def as_json(value: Any) -> Any:
    """The value as JSON returns it: tuples become lists."""
    return json.loads(json.dumps(value))


class Saver:
    """Saves states in the background. All processes must create, call and close it.

    Args:
      folder: of the checkpoints.
      data_state: returns the state of the iterator of batches.
      on_saved: called in a background thread when a checkpoint is complete.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        run: Run,
        data_state: Callable[[], dict[str, Any]],
        on_saved: Callable[[CheckpointSave], None] = lambda save: None,
    ):
        policies = [checkpoint_managers.LatestN(run.output.max_to_keep)]
        if period := run.output.keep_period:
            policies.append(checkpoint_managers.EveryNSteps(period))
        policy = checkpoint_managers.AnyPreservationPolicy(policies)
        silence_orbax_shutdown()
        self.manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(preservation_policy=policy),
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "about": ocp.JsonCheckpointHandler(INFO_FILE),
            },
        )
        self.run, self.data_state, self.on_saved = run, data_state, on_saved
        self.closing_since = 0.0  # when the run began to wait for its last save; 0 before
        self.thread = futures.ThreadPoolExecutor(1)
        self.newest = self.thread.submit(lambda: None)

    def save(self, state: Any) -> None:
        """Saves the state as its step, unless that is saved already.

        Training may continue, and reuse the state's buffers, once this returns. The checkpoint is
        complete once on_saved() is called.
        """
        start, step = time.time(), int(state["step"])
        self.newest.result()
        if self.manager.latest_step() == step:
            return
        stacks = layer_stack.stacks_to_json(layer_order.stacks(self.run))
        asked, resolved = self.run.config.asdict(), self.run.asdict()
        batches, checksums = self.data_state(), array_checksums(state)
        info = CheckpointInfo(asked, resolved, step, batches, stacks, checksums)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(info.to_json())
        )
        self.manager.save(step, args=items, force=True)
        self.newest = self.thread.submit(self._finish, step, start, time.time())

    def _finish(self, step: int, start: float, returned: float) -> None:
        """Waits for a save; `returned` is when training went on."""
        self.manager.wait_until_finished()
        end, folder = time.time(), pathlib.Path(self.manager.directory / str(step))
        at_end_s = end - self.closing_since if self.closing_since else 0.0
        self.on_saved(
            CheckpointSave(
                step=step,
                start=start,
                seconds=returned - start + at_end_s,
                background_s=end - returned - at_end_s,
                bytes=size(folder),
            )
        )

    def check(self) -> None:
        """Raises the exception of a save that failed in the background."""
        if self.newest.done():
            self.newest.result()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_) -> None:
        """Waits for the save in progress; after an exception, not for other processes."""
        if kind and runtime.process_count() > 1:
            return
        self.closing_since = time.time()
        try:
            self.newest.result()
        except Exception:
            if kind is None:
                raise
        else:
            self.manager.close()
        finally:
            self.thread.shutdown()


def size(folder: pathlib.Path) -> int:
    """Bytes of the files of a checkpoint."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


@functools.cache
def silence_orbax_shutdown() -> None:
    """Silences what orbax logs of errors that it raises, too; other packages log as before.

    orbax also closes its event loop while reads and writes are in progress. Each of them complains
    at length when it is collected, at any time until the process ends, and nothing waits for it.
    """
    from_orbax = lambda record: "orbax" in pathlib.PurePath(record.pathname).parts
    logging.getLogger("absl").addFilter(lambda record: not from_orbax(record))
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    hook = sys.unraisablehook

    def filtered(unraisable) -> None:
        closed = str(unraisable.exc_value) == "Event loop is closed"
        if not (closed or inspect.iscoroutine(unraisable.object)):
            hook(unraisable)

    sys.unraisablehook = filtered
