"""Commands on a machine without Linux's interfaces, as a laptop with macOS."""

import os
import re
import subprocess
import sys

import pytest

from maxbench.cost_model import compile_cache
from tests.conftest import processes
from tests.run.conftest import result_of

# Python runs it at its start, and in the processes that it starts.
SITECUSTOMIZE = """
import os, select, signal, socket, sys

for module, names in {
    os: "memfd_create sched_getaffinity pidfd_open eventfd posix_fadvise posix_fallocate",
    select: "epoll",
    signal: "SIGRTMIN SIGRTMAX pidfd_send_signal",
    socket: "TCP_KEEPIDLE TCP_USER_TIMEOUT",
}.items():
    for name in names.split():
        delattr(module, name)


def refuse(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and arguments:
        if str(arguments[0]).startswith(("/proc", "/sys", "/dev/shm")):
            raise FileNotFoundError(2, "No such file or directory", str(arguments[0]))


sys.addaudithook(refuse)
"""
TOY = ("--config", "llama31_8b:tiny", "--layers", "1", "--steps", "2")
WATCH = """
import os, socket
from maxbench.distributed import messages, stacks
from maxbench.launch import hosts
messages.enable_keepalive(socket.socket())
print(hosts._alive(os.getpid()), hosts._alive(2**22 + 1), stacks.main_thread_stack())
"""


@pytest.fixture
def command(tmp_path):
    """Starts Python with some words on such a machine."""
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)

    def start(*words: str) -> subprocess.Popen:
        path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', os.getcwd())}"
        env = processes() | {"PYTHONPATH": path, "JAX_NUM_CPU_DEVICES": "1"}
        pipe, out = subprocess.PIPE, subprocess.STDOUT
        return subprocess.Popen(
            [sys.executable, *words], env=env, stdout=pipe, stderr=out, text=True
        )

    return start


def test_toy_trains_and_is_reported(command, tmp_path):
    train = command("-m", "maxbench.train", *TOY, "--output_dir", str(tmp_path))
    printed = train.communicate()[0]
    assert train.returncode == 0, printed
    result = result_of(tmp_path)
    assert result["steps_done"] == 2
    assert 1e7 < result["peak_bytes"] < 1e11
    assert 0 < result["start_to_first_step_s"] < 600
    report = command("-m", "maxbench.report", str(tmp_path))
    printed = report.communicate()[0]
    assert report.returncode == 0, printed
    assert "llama31_8b" in printed


def test_processes_are_watched(command):
    """Keepalive of connections, the driver of a job on hosts, the stack of a stuck process."""
    watch = command("-c", WATCH)
    printed = watch.communicate()[0]
    assert watch.returncode == 0, printed
    assert re.match(r"True False (.*\n)+.*stacks.py\", line \d+ in main_thread_stack", printed)


def test_plan_says_that_the_compiler_is_for_linux(monkeypatch):
    monkeypatch.setattr(compile_cache.sys, "platform", "darwin")
    monkeypatch.setattr(compile_cache, "versions", lambda: {"jax-cuda13-plugin": ""})
    with pytest.raises(compile_cache.UserError, match="exists for Linux alone: run plan there"):
        compile_cache.require_compiler()
