"""benchmarks/gpu.py without a GPU: its stages at toy sizes, and stages that fail, die or hang."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from benchmarks import gpu, gpu_stages
from tests.conftest import processes

pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
# Of stages whose cases are alike, those that are enough.
CASES = {
    "attention": "xla 192 ring|cudnn",
    "ceilings": "^bf16|^fp8 exact|copy|grok1_314b fp8",
    "fp8": "xla current|te",
    "families": "llama31_8b",
    "unrolled": "code",
}


@pytest.mark.parametrize("name", gpu.STAGES)
def test_stage(name):
    stage = gpu.STAGES[name][0]
    chosen = [case for case, _ in stage(True) if re.search(CASES.get(name, ""), case)]
    assert chosen
    for case in chosen:
        record = gpu_stages.record(stage, case, True)
        assert "error" not in json.loads(json.dumps(record)), record["error"]
        skipped = name in ("mocked", "maxtext") or case.startswith(("cudnn", "te"))
        assert ("needs a GPU" in record.get("skipped", "")) == skipped, record


def difficult(small):
    """A stage: what gpu.py must live with."""
    yield "raises", lambda: {}["no such key"]
    yield "dies", lambda: os.kill(os.getpid(), signal.SIGSEGV)
    yield "lives", lambda: {"figure": 1.5}
    yield "hangs", lambda: time.sleep(600)


def test_cases_that_fail_die_and_hang():
    far, names = time.monotonic() + 600, ["raises", "dies", "lives"]
    (_, raised), (_, died) = gpu.process(difficult, names, True, far)
    assert "Traceback" in raised["error"]
    assert "no such key" in raised["error"]
    assert "Segmentation fault" in died["error"]
    assert died["error"].endswith("the process died")
    ((_, late),) = gpu.process(difficult, ["hangs", "lives"], True, time.monotonic())
    assert late["error"].endswith("out of time")


def two(small):
    """A stage of two cases."""
    yield "raises", lambda: {}["no such key"]
    yield "lives", lambda: {"figure": 1.5, "list": [1]}


def test_what_a_stage_leaves_goes_on_and_all_is_kept(tmp_path, monkeypatch, capsys):
    def dies_after_one(stage, names, small, until):
        yield names[0], gpu_stages.record(stage, names[0], small)

    def main(*words):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
        return gpu.main(), capsys.readouterr().out

    monkeypatch.setattr(gpu, "process", dies_after_one)
    monkeypatch.setattr(gpu, "STAGES", {"two": (two, 1), "long": (two, 9)})
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name in ("XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION"):  # which main() sets
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("OUT", str(tmp_path))
    assert main()[0] == 2  # there is no GPU
    code, said = main("--small", "--minutes", "2")
    assert code == 1
    assert "two: 0 s, 2 of 2 cases, 1 failed" in said
    assert re.search("^two +raises +FAILED KeyError: 'no such key'$", said, re.M)
    assert re.search("^two +lives +figure 1.5$", said, re.M)
    assert re.search("^long +all +skipped takes some 9 minutes, 2.0 are left$", said, re.M)
    assert main("--small", "--minutes", "0.1", "--stages", "two")[0] == 0
    (file,) = tmp_path.glob("cpu-*.json")
    kept = json.loads(file.read_text())
    assert "Traceback" in kept["two"]["cases"]["raises"]["error"]
    assert kept["two"]["cases"]["lives"] == {"figure": 1.5, "list": [1]}


def test_a_signal_leaves_the_table(tmp_path):
    command = [sys.executable, "benchmarks/gpu.py", "--small", "--stages", "stamps"]
    env = processes() | {"OUT": str(tmp_path)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as script:
        begun = [next(script.stdout) for _ in range(3)]
        script.send_signal(signal.SIGTERM)
        rest = script.stdout.read()
        assert script.wait() == 130
    assert begun[2].startswith("stamps: some 1 minutes")
    assert re.fullmatch("machine +jax +device cpu .*\n", rest)
