"""Compilation in another process: interrupts, failures, and what its output says."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from maxbench.config.errors import UserError
from maxbench.cost_model import compile_cache
from maxbench.planning import compile_process, planner
from tests.conftest import resolve

pytestmark = pytest.mark.gpu_compile


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("MAXBENCH_CACHE", str(tmp_path))
    return resolve("llama31_8b", "tiny", {"model.layers": 1}, gpu_type="h100")


def child(monkeypatch, code: str) -> None:
    monkeypatch.setattr(compile_process, "CHILD", code)


def test_ctrl_c_ends_a_compilation(run, monkeypatch):
    child(monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(compile_process, "PROGRESS_S", 0.2)
    processes, interrupted = [], []
    start = compile_process.CompileProcess.__init__

    def init(self, run):
        start(self, run)
        processes.append(self._process)
        threading.Timer(0.5, interrupt).start()

    def interrupt():
        interrupted.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(compile_process.CompileProcess, "__init__", init)
    # In a background job of a shell, processes start with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            planner.compile_program(run)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - interrupted[0] < 20  # of 60
    assert processes[0].poll() == -signal.SIGKILL


def test_a_long_compilation_says_how_long(run, monkeypatch, capsys):
    child(monkeypatch, "import time; time.sleep(1)")
    monkeypatch.setattr(compile_process, "PROGRESS_S", 0.3)
    with pytest.raises(EOFError):
        compile_process.CompileProcess(run).result()
    assert "compiling 1 device, mbs 2, gbs 2 (1 microbatch): 0 s\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("import sys; sys.exit('INTERNAL: No space left on device')", UserError, "left in TMPDIR"),
        ("import os; os.kill(os.getpid(), 9)", UserError, "out of host memory"),
        ("raise ValueError('of the compiler')", compile_process.CompileError, "of the compiler"),
    ],
)
def test_a_compiler_that_fails(run, monkeypatch, code, error, message):
    child(monkeypatch, code)
    with pytest.raises(error, match=message):
        planner.compile_program(run)
    assert compile_cache.load(run) is None


def test_a_process_ends_with_its_parent():
    code = "import os; from maxbench.planning import compile_process as c; c._end_with({})"
    words = [sys.executable, "-c", code.format("os.getppid() + 1")]
    assert subprocess.run(words, timeout=60).returncode == 1
    with pytest.raises(subprocess.TimeoutExpired):  # the parent is there
        subprocess.run([*words[:2], code.format("os.getppid()")], timeout=5)
