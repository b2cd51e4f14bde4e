"""Makes functions fail inside a running program, one at a time: what is left must be a whole result
that says why, and every checkpoint that was told to be saved.

  python -m benchmarks.faults 1000 --seed 3

A small run is done again and again in this process, on what was compiled once. Each time the n-th
call of one function raises, or this one and all that follow. The first run that ends otherwise than
it should is shown, with its number.
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

from benchmarks import kills
from benchmarks.fuzz import Wrong, check, shown
from maxbench.config import command_line
from maxbench.config.errors import UserError
from maxbench.distributed import peer_watch, rendezvous, runtime, stragglers
from maxbench.run import checkpoint, log_writer, loop, profile, terminal
from maxbench.sharding import mesh
from maxbench.step.train_step import Step

STEPS = 3


class Once(Step):
    """A step that is traced and compiled once in this process, and begins with the same state."""

    made = None

    def __init__(self, run, mesh):
        if Once.made is None:
            made = Step(run, mesh)
            Once.made = made, made.compile(), jax.device_get(made.init())
        self.__dict__.update(Once.made[0].__dict__)
        self.run = dataclasses.replace(self.run, output=run.output)

    def compile(self):
        return Once.made[1]

    def init(self):
        return jax.device_put(Once.made[2], jax.tree.map(lambda x: x.sharding, self.abstract))


# What may fail, of a run on its way from nothing to its results.
POINTS = (
    (mesh, "make_mesh"),
    (Once, "__init__"),
    (Once, "compile"),
    (loop, "compile_step"),
    (loop, "stop_requests"),
    (loop.StepTimer, "add"),
    (loop.StepTimer, "_record"),
    (jax, "block_until_ready"),
    (log_writer, "make_folder"),
    (log_writer, "since_start_s"),
    (log_writer, "memory_bytes"),
    (terminal, "closing"),
    (log_writer, "window"),
    (log_writer.Log, "line"),
    (log_writer.Log, "step"),
    (log_writer.Log, "summary"),
    (log_writer.Log, "write_result"),
    (checkpoint, "fingerprints"),
    (checkpoint, "restore"),
    (checkpoint, "locate"),
    (checkpoint, "size"),
    (checkpoint, "_read"),
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
    (stragglers, "gather"),
    (runtime, "connect"),
    (runtime, "versions"),
    (profile.Window, "before"),
    (profile.Window, "switch"),
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
# Where these fail for good no result can be written.
RESULTS = ((log_writer.Log, "write_result"), (os, "replace"), (pathlib.Path, "write_text"))
RESULTS += ((json, "dumps"),)


MEETING = (
    (rendezvous, "_hear"),
    (rendezvous, "_keep"),
    (socket, "create_connection"),
    (socket, "create_server"),
    (socket.socket, "accept"),
    (socket.socket, "recv"),
    (socket.socket, "sendall"),
)


class Fault:
    """From the n-th call on, once or always, a function raises."""

    def __init__(self, n: int, error=None, always: bool = False):
        self.n, self.error, self.always = n, error, always
        self.calls, self.lock = 0, threading.Lock()

    @contextlib.contextmanager
    def at(self, owner, name: str) -> Iterator[None]:
        whole = getattr(owner, name)

        def failing(*args, **kwargs):
            with self.lock:
                self.calls += 1
                now = self.error and (self.calls >= self.n if self.always else self.calls == self.n)
            if now:
                raise self.error()
            return whole(*args, **kwargs)

        with mock.patch.object(owner, name, failing):
            yield


def run(out: pathlib.Path, *more: str) -> tuple[int | BaseException, str]:
    """A run in this process: its exit code or what it raised, and what it printed."""
    words = [*kills.WORDS, "--steps", str(STEPS), *kills.SAVES, "--output_dir", str(out), *more]
    made, said = command_line.run_of(words), io.StringIO()
    handler = signal.getsignal(signal.SIGTERM)
    with (
        mock.patch.object(loop, "Step", Once),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        try:
            return loop.train(made), said.getvalue()
        except Exception as e:  # a defect keeps its traceback: exit code 1
            return e, said.getvalue()
        finally:
            signal.signal(signal.SIGTERM, handler)


class Program:
    """A run that goes on from its first step, and what it gives without trouble."""

    def __init__(self, base: pathlib.Path):
        code, said = run(base / "first", "--config.output.max_to_keep=9")
        check(code == 0, "a run without a fault", (code, said))
        (folder,) = kills.folders(base / "first")
        self.losses, saves = kills.losses(folder), folder / "checkpoints"
        self.prints = {i: kills.last(saves, i) for i in range(1, STEPS + 1)}
        for i in range(2, STEPS + 1):
            shutil.rmtree(saves / str(i))
        self.resume, self.out, self.calls = ["--resume", str(folder)], base / "runs", {}

    def count(self) -> None:
        """How often each of POINTS is called."""
        for owner, name in POINTS:
            fault = Fault(0)
            with fault.at(owner, name):
                code, said = run(self.out, *self.resume)
            check(code == 0 and fault.calls, f"{name} is not called", (code, said))
            self.calls[owner, name] = fault.calls
            shutil.rmtree(self.out)

    def inject(self, rng: random.Random) -> str:
        """One run with one fault; how it ended."""
        owner, name = rng.choice(POINTS)
        calls = self.calls.get((owner, name), 3)
        always = rng.random() < 0.3 and (owner, name) not in RESULTS
        fault = Fault(rng.randint(1, calls), rng.choice(ERRORS), always)
        with fault.at(owner, name):
            code, said = run(self.out, *self.resume)
        where = f"{owner.__name__}.{name}, call {fault.n}" + " and on" * always
        try:
            return self.judge(code, said)
        except Wrong as e:
            raise Wrong(f"{where}: {fault.error()!r}: {e}") from None
        finally:
            shutil.rmtree(self.out, ignore_errors=True)

    def judge(self, code: int | BaseException, said: str) -> str:
        """Raises Wrong unless what is left is whole and says why."""
        there = kills.folders(self.out)
        result = json.loads((there[0] / "result.json").read_text()) if there else {}
        status, reason = result.get("status"), result.get("reason", "")
        if there:
            losses = kills.losses(there[0])
            check(losses.items() <= self.losses.items(), "other losses", losses)
            self.keeps(there[0])
        if code == 0 or status == "done":  # what fails after it is told all the same
            check(status == "done" and not reason, f"exit {code!r}", result)
            check([*losses] == [*range(1, STEPS)], "done, and steps are missing", losses)
            return "whole"
        if not there:
            told = isinstance(code, Exception) or "error: " in said
            check(told, "it ended without a word", (code, said))
            return "failed before there was a result"
        check(status == "failed", f"exit {code!r} with status {status}", (reason, said))
        check(reason and reason.isprintable(), "no reason", reason)
        return "failed with its reason"

    def keeps(self, folder: pathlib.Path) -> None:
        """Raises Wrong unless the newest checkpoint that was told to be saved is there, whole."""
        if step := kills.saved(folder):
            found, skipped = checkpoint.find_checkpoints(
                str(folder), command_line.run_of([*kills.WORDS, "--steps=9"])
            )
            read = checkpoint.read_onto(lambda order: Once.made[0].abstract)
            kept, state = checkpoint.restore(found, skipped, read)
            at = kept.about["step"]
            check(at >= step and not skipped, f"step {step} was saved", (at, skipped))
            check(checkpoint.array_checksums(state) == self.prints[at], "other bits", at)


def meeting(rng: random.Random) -> str:
    """Three processes that meet, here threads, with a fault in one of them; how they ended."""
    owner, name = rng.choice(MEETING)
    error = rng.choice((ConnectionResetError, TimeoutError, lambda: OSError(errno.EIO, "broken")))
    fault, address = Fault(rng.randint(1, 6), error), kills.free_address()
    quiet = contextlib.redirect_stderr(io.StringIO())
    with quiet, fault.at(owner, name), futures.ThreadPoolExecutor(3) as pool:
        calls = [
            pool.submit(rendezvous.rendezvous, address, 3, rendezvous.Member(i, f"n{i}"), 0.3)
            for i in range(3)
        ]
        told = [call.exception(60) or call.result() for call in calls]
    met = [one for one in told if isinstance(one, peer_watch.PeerWatch)]
    wrong = [one for one in told if not isinstance(one, (peer_watch.PeerWatch, UserError))]
    check(not wrong, f"{name}, call {fault.n}", wrong)
    for one in met:
        one.close("the end of the test")
    return "all met" if len(met) == 3 else "did not meet, with a reason"


def faults(count: int, seed: int) -> collections.Counter:
    """Runs with so many faults, counted by how they ended."""
    ended = collections.Counter()
    silent = mock.patch.object(peer_watch.os, "_exit", return_value=None)
    grace = mock.patch.object(rendezvous, "GRACE", 0.05)
    with tempfile.TemporaryDirectory() as name, silent, grace:
        program = Program(pathlib.Path(name))
        if count > len(POINTS):
            program.count()
        for i in range(count):
            rng = random.Random(f"{seed} {i}")
            try:
                ended[meeting(rng) if rng.random() < 0.1 else program.inject(rng)] += 1
                print(f"\r{ended.total()}", end="", file=sys.stderr, flush=True)
            except Exception as e:
                raise Wrong(f"fault {i} of seed {seed}: {shown(e)}") from e
    return ended


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    start = time.process_time()
    ended = faults(given.count, given.seed)
    told = ", ".join(f"{n} {how}" for how, n in sorted(ended.items()))
    print(f"{given.count} faults: {told}; {time.process_time() - start:.0f} CPU s")


if __name__ == "__main__":
    main()
