"""Compilation of a run's program in another process: XLA cannot be interrupted, a process can.

The compiler's settings, memory and devices stay out of the process that plans.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from maxbench.config.errors import UserError
from maxbench.config.run import Run
from maxbench.cost_model import compile_cache
from maxbench.cost_model.compile_cache import CompiledStep
from maxbench.host import environment, xla_flags

CHILD = "from maxbench.planning import compile_process; compile_process.answer()"
POLL_S = 0.5  # between a child's looks at its parent
PROGRESS_S = 20  # between lines that tell how long a compilation takes
FULL = ("No space left on device", "Disk quota exceeded")


class CompileError(RuntimeError):
    """The compiler failed; the message has its output."""


class CompileProcess:
    """A process that compiles a program into the cache. As a context, it is killed at the end."""

    def __init__(self, run: Run):
        """Starts the process.

        Raises:
          UserError: XLA's GPU compiler is not installed.
        """
        compile_cache.require_compiler()
        path = os.pathsep.join(filter(None, sys.path))  # kinds of sublayers may be of user's files
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches this process alone, which kills the other
        )
        self._name, self._started = run.layout.describe(), time.monotonic()
        self._answer, self._printed = b"", b""
        # Not Thread.join(), which takes a thread for ended once Ctrl-C interrupts it (bpo-45274).
        self._ended = threading.Event()
        threading.Thread(target=self._read, args=[pickle.dumps(run)], daemon=True).start()

    def __enter__(self) -> "CompileProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _read(self, run: bytes) -> None:
        self._answer, self._printed = self._process.communicate(run)
        self._ended.set()

    @property
    def running(self) -> bool:
        return not self._ended.is_set()

    def kill(self) -> None:
        """Ends the process, if it still runs."""
        self._process.kill()
        self._ended.wait()

    def result(self) -> CompiledStep:
        """The program, once it is compiled; progress goes to stderr.

        Raises:
          UserError: the run cannot be compiled here, or a disk is full.
          CompileError: the compiler failed.
        """
        while not self._ended.wait(PROGRESS_S):
            seconds = time.monotonic() - self._started
            print(f"compiling {self._name}: {seconds:.0f} s", file=sys.stderr, flush=True)
        printed = self._printed.decode(errors="replace")
        if self._process.returncode:
            raise _error(self._process.returncode, printed)
        sys.stderr.write(printed)  # warnings
        answer: CompiledStep | UserError = pickle.loads(self._answer)
        if isinstance(answer, UserError):
            raise answer
        return answer


def _error(code: int, printed: str) -> Exception:
    """The exception for a process that failed."""
    if any(text in printed for text in FULL):
        folder = os.environ.get("TMPDIR", "/tmp")
        return UserError(
            f"the compiler cannot write its files: no space is left in TMPDIR={folder!r}; free "
            "some, or set TMPDIR to another folder"
        )
    if code == -signal.SIGKILL:
        return UserError(
            "the compiler was killed, as a system out of host memory does; a search compiles "
            "several programs at a time, which `taskset -c 0` limits to one"
        )
    if errors := xla_flags.errors(printed):
        return UserError(f"XLA_FLAGS: {'; '.join(errors)}")
    return CompileError(f"the compiler ended with exit code {code}:\n{printed}")


def answer() -> None:
    """Compiles the run that stdin has, stores its program in the cache, and writes it to stdout."""
    out = os.dup(1)
    os.dup2(2, 1)  # what else prints must not be in the answer
    threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    environment.set_for_compile_only()
    run = pickle.load(sys.stdin.buffer)
    result: Any
    try:
        from maxbench.cost_model import aot  # late: jax reads its environment

        result = aot.compile_run(run)
        compile_cache.store(run, result)
    except UserError as e:
        result = UserError(str(e))
    with open(out, "wb") as f:
        pickle.dump(result, f)


def _end_with(parent: int) -> None:
    """Ends this process when its parent has ended, however that was."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(1)
