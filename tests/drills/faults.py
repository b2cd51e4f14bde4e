"""Injects faults into a running program: functions raise, one at a time.

  python -m tests.drills.faults 1000 --seed 3

Each run must leave a complete result.json with the reason of its end, and every checkpoint that its
log reports. A small run is repeated in this process with one compiled step. In each, the n-th call
of one function raises, alone or with all later calls. The first run that ends in a wrong way is
shown with its number.
"""

import argparse
import collections
import contextlib
import dataclasses
import errno
import io
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from unittest import mock

import jax
import orbax.checkpoint as ocp

from maxbench.config import command_line
from maxbench.config.errors import UserError
from maxbench.distributed import messages, peer_watch, rendezvous, runtime, stragglers
from maxbench.host import environment
from maxbench.metrics import step_stats
from maxbench.run import (
    checkpoint,
    endings,
    log_writer,
    loop,
    process_stats,
    profile,
    restore,
    result,
    step_timer,
    terminal,
)
from maxbench.run.checksums import array_checksums
from maxbench.run_logs import folders
from maxbench.sharding import mesh
from maxbench.step.train_step import Step
from tests.drills import kills
from tests.drills.fuzz import Violation, check, short

STEPS = 3


class Once(Step):
    """A step that is compiled once in this process, and always starts from the same state."""

    step: Step | None = None
    compiled = state = None

    def __init__(self, run, mesh):
        if Once.step is None:
            Once.step = Step(run, mesh)
            Once.compiled, Once.state = Once.step.compile(), jax.device_get(Once.step.init())
        self.__dict__.update(Once.step.__dict__)
        self.run = dataclasses.replace(self.run, output=run.output)

    def compile(self):
        return Once.compiled

    def init(self):
        return jax.device_put(Once.state, jax.tree.map(lambda x: x.sharding, self.abstract))


# Functions of a run, from its start to its results, that may raise.
POINTS = (
    (mesh, "make_mesh"),
    (Once, "__init__"),
    (Once, "compile"),
    (loop, "compile_step"),
    (endings, "stop_requests"),
    (step_timer.StepTimer, "add"),
    (step_timer.StepTimer, "_record"),
    (jax, "block_until_ready"),
    (folders, "make_folder"),
    (process_stats, "since_start_s"),
    (process_stats, "memory_use"),
    (terminal, "summary_parts"),
    (step_stats, "measured_window"),
    (log_writer.Log, "line"),
    (log_writer.Log, "step"),
    (result.RunResult, "record_figures"),
    (log_writer.Log, "write_result"),
    (checkpoint, "array_checksums"),
    (restore, "array_checksums"),
    (restore, "restore"),
    (restore, "find_checkpoints"),
    (restore, "_candidates"),
    (checkpoint, "size"),
    (checkpoint, "_crc32"),
    (checkpoint.Saver, "save"),
    (checkpoint.Saver, "_finish"),
    (checkpoint.Saver, "check"),
    (ocp.CheckpointManager, "save"),
    (ocp.CheckpointManager, "wait_until_finished"),
    (ocp.CheckpointManager, "latest_step"),
    (ocp.StandardCheckpointHandler, "restore"),
    (ocp.StandardCheckpointHandler, "async_save"),
    (ocp.JsonCheckpointHandler, "async_save"),
    (stragglers, "allgather_json"),
    (runtime, "init_distributed"),
    (environment, "versions"),
    (profile.Window, "before_step"),
    (profile.Window, "close"),
    (pathlib.Path, "mkdir"),
    (pathlib.Path, "read_text"),
    (pathlib.Path, "write_text"),
    (tempfile, "TemporaryFile"),
    (os, "replace"),
    (os, "rename"),
    (os, "mkdir"),
    (os, "urandom"),
    (json, "dumps"),
)
ERRORS = (
    lambda: OSError(errno.ENOSPC, "No space left on device"),
    lambda: OSError(errno.EIO, "Input/output error"),
    lambda: PermissionError(errno.EACCES, "Permission denied"),
    lambda: RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes."),
    lambda: ValueError("injected"),
    lambda: MemoryError(),
)
# Without these no result can be written, so they fail once at most.
RESULTS = ((log_writer.Log, "write_result"), (os, "replace"), (pathlib.Path, "write_text"))
RESULTS += ((json, "dumps"),)


RENDEZVOUS_POINTS = (
    (messages, "receive"),
    (messages, "enable_keepalive"),
    (socket, "create_connection"),
    (socket, "create_server"),
    (socket.socket, "accept"),
    (socket.socket, "recv"),
    (socket.socket, "sendall"),
)


class Fault:
    """Makes the n-th call of a function raise, or that one and all later ones."""

    def __init__(self, n: int, error=None, always: bool = False):
        self.n, self.error, self.always = n, error, always
        self.calls, self.lock = 0, threading.Lock()

    @contextlib.contextmanager
    def at(self, owner, name: str) -> Iterator[None]:
        original = getattr(owner, name)

        def failing(*args, **kwargs):
            with self.lock:
                self.calls += 1
                due = self.calls >= self.n if self.always else self.calls == self.n
            if due and self.error:
                raise self.error()
            return original(*args, **kwargs)

        with mock.patch.object(owner, name, failing):
            yield


def train(out: pathlib.Path, *flags: str) -> tuple[int | BaseException, str]:
    """Trains in this process; returns the exit code or the exception, and the printed text."""
    flags = (*kills.FLAGS, "--steps", str(STEPS), *kills.SAVE_EVERY_STEP, *flags)
    run, printed = command_line.run_of([*flags, "--output_dir", str(out)]), io.StringIO()
    handler = signal.getsignal(signal.SIGTERM)
    with (
        mock.patch.object(loop, "Step", Once),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        try:
            return loop.train(run), printed.getvalue()
        except Exception as e:  # a defect keeps its traceback: exit code 1
            return e, printed.getvalue()
        finally:
            signal.signal(signal.SIGTERM, handler)


class Program:
    """A run that resumes after its first step, and its losses and weights without a fault."""

    def __init__(self, base: pathlib.Path):
        code, printed = train(base / "first", "--config.output.max_to_keep=9")
        check(code == 0, "a run without a fault", (code, printed))
        (folder,) = kills.run_folders(base / "first")
        self.losses, checkpoints = kills.losses(folder), folder / "checkpoints"
        steps = range(1, STEPS + 1)
        self.fingerprints = {i: kills.fingerprints(checkpoints, i) for i in steps}
        for i in range(2, STEPS + 1):
            shutil.rmtree(checkpoints / str(i))
        self.resume, self.out = ["--resume", str(folder)], base / "runs"
        self.calls: dict[tuple, int] = {}  # of each of POINTS in one run

    def count(self) -> None:
        """Counts the calls of each of POINTS."""
        for owner, name in POINTS:
            fault = Fault(0)
            with fault.at(owner, name):
                code, printed = train(self.out, *self.resume)
            check(code == 0 and fault.calls, f"{name} is not called", (code, printed))
            self.calls[owner, name] = fault.calls
            shutil.rmtree(self.out)

    def inject(self, rng: random.Random) -> str:
        """Runs with one fault; returns how the run ended."""
        owner, name = rng.choice(POINTS)
        calls = self.calls.get((owner, name), 3)
        always = rng.random() < 0.3 and (owner, name) not in RESULTS
        fault = Fault(rng.randint(1, calls), rng.choice(ERRORS), always)
        with fault.at(owner, name):
            code, printed = train(self.out, *self.resume)
        where = f"{owner.__name__}.{name}, call {fault.n}" + " and on" * always
        try:
            return self.judge(code, printed)
        except Violation as e:
            raise Violation(f"{where}: {fault.error()!r}: {e}") from None
        finally:
            shutil.rmtree(self.out, ignore_errors=True)

    def judge(self, code: int | BaseException, printed: str) -> str:
        """Checks how a run ended, and names it.

        Raises:
          Violation: its result is incomplete or lacks the reason, or a checkpoint is lost.
        """
        folder = next(iter(kills.run_folders(self.out)), None)
        result = json.loads((folder / "result.json").read_text()) if folder else {}
        status, reason = result.get("status"), result.get("reason", "")
        if folder:
            losses = kills.losses(folder)
            check(losses.items() <= self.losses.items(), "other losses", losses)
            self.check_checkpoints(folder)
        if code == 0 or status == "done":  # a fault after the end may still be reported
            check(status == "done" and not reason, f"exit {code!r}", result)
            check([*losses] == [*range(1, STEPS)], "done, and steps are missing", losses)
            return "whole"
        if not folder:
            reported = isinstance(code, Exception) or "error: " in printed
            check(reported, "ended without an error", (code, printed))
            return "failed before there was a result"
        check(status == "failed", f"exit {code!r} with status {status}", (reason, printed))
        check(reason and reason.isprintable(), "no reason", reason)
        return "failed with its reason"

    def check_checkpoints(self, folder: pathlib.Path) -> None:
        """Raises Violation unless the newest checkpoint that the log reports can be restored."""
        if step := kills.last_saved_step(folder):
            run = command_line.run_of([*kills.FLAGS, "--steps=9"])
            candidates = restore.find_checkpoints(str(folder), run)
            read = restore.read_onto(lambda order: Once.step.abstract)
            restored, state = restore.restore(candidates, read)
            at = restored.info.step
            check(
                at >= step and not candidates.skipped,
                f"step {step} was saved",
                (at, candidates.skipped),
            )
            check(array_checksums(state) == self.fingerprints[at], "other bits", at)


def connect_with_fault(rng: random.Random) -> str:
    """Three processes, here threads, rendezvous with a fault in one; returns how they ended."""
    owner, name = rng.choice(RENDEZVOUS_POINTS)
    error = rng.choice((ConnectionResetError, TimeoutError, lambda: OSError(errno.EIO, "broken")))
    fault, address = Fault(rng.randint(1, 6), error), kills.free_address()
    join = lambda i: rendezvous.rendezvous(address, 3, rendezvous.Member(i, f"n{i}"), 0.3)
    quiet = contextlib.redirect_stderr(io.StringIO())
    with quiet, fault.at(owner, name), futures.ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(join, i) for i in range(3)]
        outcomes = [call.exception(60) or call.result() for call in calls]
    connected = [x for x in outcomes if isinstance(x, peer_watch.PeerWatch)]
    wrong = [x for x in outcomes if not isinstance(x, (peer_watch.PeerWatch, UserError))]
    check(not wrong, f"{name}, call {fault.n}", wrong)
    for peers in connected:
        peers.close("the end of the test")
    return "all connected" if len(connected) == 3 else "not connected, with a reason"


def inject_faults(count: int, seed: int) -> collections.Counter:
    """Runs with `count` faults, counted by how they ended."""
    endings_seen = collections.Counter()
    no_exit = mock.patch.object(peer_watch.os, "_exit", return_value=None)
    grace = mock.patch.object(peer_watch, "GRACE_S", 0.05)
    with tempfile.TemporaryDirectory() as name, no_exit, grace:
        program = Program(pathlib.Path(name))
        if count > len(POINTS):
            program.count()
        for i in range(count):
            rng = random.Random(f"{seed} {i}")
            try:
                ending = connect_with_fault(rng) if rng.random() < 0.1 else program.inject(rng)
            except Exception as e:
                raise Violation(f"fault {i} of seed {seed}: {short(e)}") from e
            endings_seen[ending] += 1
            print(f"\r{endings_seen.total()}", end="", file=sys.stderr, flush=True)
    return endings_seen


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    start = time.process_time()
    counts = inject_faults(args.count, args.seed)
    text = ", ".join(f"{n} {ending}" for ending, n in sorted(counts.items()))
    print(f"{args.count} faults: {text}; {time.process_time() - start:.0f} CPU s")


if __name__ == "__main__":
    main()
