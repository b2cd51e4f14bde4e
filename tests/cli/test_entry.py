"""cli/entry.py: exit codes, error lines and closed pipes, for every way to start a command."""

import ast
import importlib
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import maxbench
from maxbench.cli import entry
from maxbench.config.errors import UserError
from maxbench.config.options import COMMANDS

PIPES = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
MODULES = ("train", "plan", "report", "calibrate", "launch.__main__", "preflight.__main__")


@pytest.mark.parametrize(
    "words",
    [
        "maxbench",
        "maxbench configs",
        "maxbench completion bash",
        "maxbench plan --help",
        "maxbench.train --config llama31_8b:tiny --json",
        "maxbench.plan --help",
        "maxbench.report --help",
        "maxbench.launch --help",
        "maxbench.preflight --help",
        "maxbench.calibrate --help",
    ],
)
def test_closed_pipe_ends_a_command_without_traceback(words):
    script = f"set -o pipefail; {sys.executable} -m {words} | head -c 1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout[1:], done.stderr) == (0, "", "")


def test_closed_pipe_is_noticed_at_the_last_flush():
    """The reader closes the pipe while the output is still in Python's buffer."""
    code = "import sys; from maxbench.cli import entry\n"
    code += "entry.guard('x', lambda: print('text') or sys.stdin.read() and 0)"
    with subprocess.Popen([sys.executable, "-c", code], text=True, **PIPES) as process:
        process.stdout.close()
        process.stdin.write("closed")
        process.stdin.close()
        assert process.stderr.read() == ""
        assert process.wait() == 0


@pytest.mark.parametrize(
    "words", ["maxbench configs", "maxbench.train --config llama31_8b:tiny --json"]
)
def test_output_to_a_full_disk_is_one_line(words):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", *words.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert "error: the output cannot be written: No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


def test_broken_pipe_of_a_socket_is_no_closed_output():
    def lost_peer():
        raise BrokenPipeError("peer")

    with pytest.raises(BrokenPipeError, match="peer"):
        entry.guard("train", lost_peer)


def test_user_error_is_one_line_and_exit_code_2(capsys):
    def fail():
        raise UserError("a\n  b\x1b[2J" + "c" * 5000)

    assert entry.guard("plan", fail) == 2
    err = capsys.readouterr().err
    assert err.startswith("maxbench plan: error: a b\\x1b[2Jccc")
    assert err.count("\n") == 1
    assert len(err) < 1100


def test_defects_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        entry.guard("plan", lambda: 1 // 0)


def test_interrupt_is_one_line_and_exit_code_130():
    # In a background job of a shell, processes start with SIGINT ignored.
    code = "import signal, sys, time; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from maxbench.cli import entry\n"
    code += "sys.exit(entry.guard('plan', lambda: print('ready', flush=True) or time.sleep(60)))"
    with subprocess.Popen([sys.executable, "-c", code], text=True, **PIPES) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "maxbench plan: interrupted\n"
        assert process.wait() == 130


def test_every_command_is_a_module_of_cli():
    for name in COMMANDS:
        assert callable(importlib.import_module(f"maxbench.cli.{name}").main)


@pytest.mark.parametrize("name", MODULES)
def test_modules_for_python_m_only_call_the_entry_point(name):
    """A docstring, imports, and `if __name__ == "__main__": sys.exit(entry.run(...))`."""
    path = pathlib.Path("maxbench", *name.split(".")).with_suffix(".py")
    docstring, *others = ast.parse(path.read_text()).body
    assert isinstance(docstring, ast.Expr)
    others = [node for node in others if not isinstance(node, ast.Import | ast.ImportFrom)]
    command = name.partition(".")[0]
    expected = [
        f"if __name__ == '__main__':\n    sys.exit(entry.run('{command}', sys.argv[1:]))",
        *[f"sys.modules[__name__] = api.{command}"] * (name in maxbench.__all__),
    ]
    assert [*map(ast.unparse, others)] == expected


@pytest.mark.parametrize("name", ["plan", "train", "report"])
def test_importing_the_module_for_python_m_leaves_the_function(name):
    code = f"import maxbench as mb; before = mb.{name}; import maxbench.{name} as again\n"
    code += f"assert before is mb.{name} is again and callable(again), again"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
