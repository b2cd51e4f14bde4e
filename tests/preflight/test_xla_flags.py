"""XLA flags and compiler options that the installed XLA does not know."""

import pytest

from maxbench.preflight import xla_flags
from tests.conftest import resolve


def test_unknown_flag_is_named_with_its_replacement():
    (error,) = xla_flags.lint({}, ["--xla_gpu_graph_level=0"])
    assert "use --xla_gpu_enable_command_buffer=" in error


def test_unknown_compiler_option_is_named():
    (error,) = xla_flags.lint({"xla_gpu_no_such_option": True}, [])
    assert "No such compile option: 'xla_gpu_no_such_option'" in error


def test_options_of_a_run_are_known(tmp_path, monkeypatch):
    """What one process has accepted, the next one takes from the cache."""
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
