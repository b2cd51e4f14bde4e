"""XLA flags and compiler options that the installed XLA does not know."""

import subprocess
import sys

import pytest

from maxbench.host import xla_flags as host_flags
from maxbench.preflight import xla_flags
from tests.conftest import processes, resolve


def test_unknown_flag_is_named_with_its_replacement():
    (error,) = xla_flags.lint({}, ["--xla_gpu_graph_level=0"])
    assert "use --xla_gpu_enable_command_buffer=" in error


FLAG = "--xla_no_such_flag=1"
LINE = f"XLA_FLAGS: this XLA does not know {FLAG}, and would abort; leave it out\n"


LATE = [pytest.param(c, marks=pytest.mark.exhaustive) for c in ("calibrate", "plan --program")]


@pytest.mark.core
@pytest.mark.parametrize("command", ["train", "plan", *LATE])
def test_command_names_an_unknown_flag_before_it_uses_a_device(tmp_path, command):
    (tmp_path / "factory.py").write_text("def make(devices, **_):\n    raise NotImplementedError\n")
    words = {
        "train": f"train --config llama31_8b:tiny --output_dir {tmp_path}",
        "calibrate": "calibrate --small --cpu_devices 2",
        "plan": "plan --config llama31_8b:tiny --gpus 1",
        "plan --program": f"plan --program {tmp_path}/factory.py:make --gpus 8 --gpu_type h100",
    }[command]
    done = subprocess.run(
        [sys.executable, "-m", "maxbench", *words.split()],
        env=processes() | {"XLA_FLAGS": FLAG}, capture_output=True, text=True,
    )  # fmt: skip
    error = done.stderr.splitlines(True)[-1]
    assert (done.returncode, error) == (2, f"maxbench {command.split()[0]}: error: {LINE}")
    assert "Traceback" not in done.stderr
    assert not [*tmp_path.rglob("result.json")]


def test_flags_that_xla_knows_are_no_error(monkeypatch):
    for flags in ("--xla_gpu_autotune_level=3", " ", ""):
        monkeypatch.setenv("XLA_FLAGS", flags)
        assert host_flags.Check().errors() == []


def test_unknown_compiler_option_is_named():
    (error,) = xla_flags.lint({"xla_gpu_no_such_option": True}, [])
    assert "No such compile option: 'xla_gpu_no_such_option'" in error


def test_options_of_a_run_are_known(tmp_path, monkeypatch):
    """A second call reads the cache and starts no process."""
    monkeypatch.setenv("MAXBENCH_CACHE", str(tmp_path))
    run = resolve("llama31_8b", gpus=8)
    assert xla_flags.lint_runs(run) == []
    monkeypatch.setattr(xla_flags, "TRY_OPTIONS", "raise SystemExit(1)")
    assert xla_flags.lint_runs(run) == []
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_graph_level=0")
    assert xla_flags.lint_runs(run)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            "--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_autotune_level=fast",
            "XLA_FLAGS: Couldn't interpret value fast for flag xla_gpu_autotune_level; this XLA",
        ),
        (
            "--xla_gpu_enable_command_buffer=FUSIO",
            "XLA_FLAGS: Illegal value for --xla_gpu_enable_command_buffer 'FUSIO'; this XLA would",
        ),
        (
            "xla_gpu_autotune_level=3",
            "XLA_FLAGS: 'xla_gpu_autotune_level=3' does not begin with --",
        ),
        ("--xla_gpu_autotune_level 3", "does not know --xla_gpu_autotune_level, and would abort; "),
    ],
)
def test_malformed_value_is_named(flags, text):
    (error,) = xla_flags.lint({}, flags.split())
    assert text in error
