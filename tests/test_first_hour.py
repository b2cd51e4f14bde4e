"""benchmarks/gpu.py without a GPU: its stages at toy sizes, and cases that fail, crash or hang."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from benchmarks import gpu, gpu_stages
from maxbench.config import gpu_files
from tests.conftest import processes

pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
# Of stages with many similar cases, the ones to run.
CASES = {
    "attention": "xla 192 ring|cudnn",
    "ceilings": "^bf16|^fp8 exact|copy|grok1_314b fp8",
    "fp8": "xla current|te",
    "families": "llama31_8b",
    "unrolled": "code",
}


# stages that take 4 s or more
LONG = ("stamps", "families", "fp8", "options", "profile", "calibrate", "ceilings", "unrolled")


@pytest.mark.parametrize(
    "name",
    [pytest.param(s, marks=pytest.mark.exhaustive) if s in LONG else s for s in gpu.STAGES],
)
def test_stage_passes_at_toy_sizes(name, tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    stage = gpu.STAGES[name][0]
    chosen = [case for case, _ in stage(True) if re.search(CASES.get(name, ""), case)]
    assert chosen
    for case in chosen:
        record = gpu_stages.record(stage, case, True)
        assert "error" not in json.loads(json.dumps(record)), record["error"]
        skipped = name in ("mocked", "maxtext") or case.startswith(("cudnn", "te"))
        assert ("needs a GPU" in record.get("skipped", "")) == skipped, record
    if name == "calibrate":
        (file,) = tmp_path.glob("*-constants.toml")
        name = file.name.partition("-")[0]
        efficiency = dataclasses.asdict(gpu_files.read(file)[name].efficiency)
        shown = {k: v for k, v in record.items() if k in efficiency}  # plausible ones alone
        assert shown
        assert shown.items() <= efficiency.items()


def test_two_parts_name_stages_of_twelve_minutes():
    names = [name for part in gpu.PARTS.values() for name in part.split(",")]
    assert len({*names}) == len(names)
    assert {*names} <= {*gpu.STAGES}
    for part in gpu.PARTS.values():  # a stage starts if half of its minutes are left
        *first, last = (gpu.STAGES[name][1] for name in part.split(","))
        assert sum(first) + last / 2 <= gpu.PART_MINUTES


def failing_stage(small):
    """Cases that raise, crash, pass and hang."""
    yield "raises", lambda: {}["no such key"]
    yield "crashes", lambda: os.kill(os.getpid(), signal.SIGSEGV)
    yield "passes", lambda: {"figure": 1.5}
    yield "hangs", lambda: time.sleep(600)


@pytest.mark.exhaustive
def test_exceptions_crashes_and_hangs_are_recorded():
    end, names = time.monotonic() + 600, ["raises", "crashes", "passes"]
    (_, raised), (_, crashed) = gpu.process(failing_stage, names, True, end)
    assert "Traceback" in raised["error"]
    assert "no such key" in raised["error"]
    assert "Segmentation fault" in crashed["error"]
    assert crashed["error"].endswith("the process died")
    ((_, late),) = gpu.process(failing_stage, ["hangs", "passes"], True, time.monotonic())
    assert late["error"].endswith("out of time")


def two_cases(small):
    yield "raises", lambda: {}["no such key"]
    yield "passes", lambda: {"figure": 1.5, "list": [1]}


def test_cases_after_a_crash_run_and_old_results_are_kept(tmp_path, monkeypatch, capsys):
    def crash_after_one(stage, names, small, until):
        yield names[0], gpu_stages.record(stage, names[0], small)

    def main(*words):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
        return gpu.main(), capsys.readouterr().out

    monkeypatch.setattr(gpu, "process", crash_after_one)
    monkeypatch.setattr(gpu, "STAGES", {"two": (two_cases, 1), "long": (two_cases, 9)})
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name in ("XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION"):  # which main() sets
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("OUT", str(tmp_path))
    assert main()[0] == 2  # there is no GPU
    code, output = main("--small", "--minutes", "2")
    assert code == 1
    assert "two: 0 s, 2 of 2 cases, 1 failed" in output
    assert re.search("^two +raises +FAILED KeyError: 'no such key'$", output, re.M)
    assert re.search("^two +passes +figure 1.5$", output, re.M)
    assert re.search("^long +all +skipped takes about 9 minutes, 2.0 are left$", output, re.M)
    assert main("--small", "--minutes", "0.1", "--stages", "two")[0] == 0
    (file,) = tmp_path.glob("cpu-*.json")
    record = json.loads(file.read_text())
    assert "Traceback" in record["two"]["cases"]["raises"]["error"]
    assert record["two"]["cases"]["passes"] == {"figure": 1.5, "list": [1]}


@pytest.mark.exhaustive
def test_sigterm_prints_the_table(tmp_path):
    command = [sys.executable, "benchmarks/gpu.py", "--small", "--stages", "stamps"]
    env = processes() | {"OUT": str(tmp_path)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as script:
        first_lines = [next(script.stdout) for _ in range(3)]
        script.send_signal(signal.SIGTERM)
        rest = script.stdout.read()
        assert script.wait() == 130
    assert first_lines[2].startswith("stamps: about 1 minutes")
    assert re.fullmatch("machine +jax +device cpu .*\n", rest)
