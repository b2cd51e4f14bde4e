"""Programs that call Transformer Engine, planned for absent GPUs; where it is installed."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

INSTALLED = importlib.util.find_spec("transformer_engine") is not None
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.gpu_compile,
    pytest.mark.skipif(not INSTALLED, reason="./install_te.sh not run"),
]
HEADS, SIZE, EMBED, MLP, SEQ = 32, 128, 4096, 14336, 4096  # of te_step.py


def plan(tmp_path, factory: str, gpu_type: str) -> subprocess.CompletedProcess[str]:
    """In a process without a driver, as a user's: it loads the file, and TE with it."""
    command = [sys.executable, "-m", "maxbench.plan", "--json", "--gpus", "8"]
    command += ["--program", f"tests/planning/te_step.py:{factory}", "--gpu_type", gpu_type]
    environment = os.environ | {"MAXBENCH_CACHE": str(tmp_path)}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(
    ("factory", "gpu_type"), [("delayed", "h100"), ("current", "h100"), ("mxfp8", "b200")]
)
def test_a_layer_of_transformer_engine_has_a_price(factory, gpu_type, tmp_path):
    done = plan(tmp_path, factory, gpu_type)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    qkv, others = 3 * EMBED**2, EMBED**2 + 3 * EMBED * MLP
    gemms = 2 * SEQ * (2 * qkv + 3 * others)  # nobody asks for the gradient of the first inputs
    attention = 7 * 2 * SIZE * HEADS * SEQ**2 / 2
    executed = found["executed_tflops_per_gpu"] * 1e12 * found["step_s"]
    assert executed == pytest.approx(gemms + attention, rel=0.01)
    assert found["format"] == "fp8"
    assert found["parts_s"]["attention"] > 0
    assert not found["unknown"]  # every kernel has a price
    weights = 4 * (qkv + others)
    assert found["memory"]["arguments"] == pytest.approx(weights, rel=0.1)


def test_transformer_engine_refuses_a_format_as_on_that_gpu(tmp_path):
    done = plan(tmp_path, "mxfp8", "h100")
    assert done.returncode == 2
    message = r"te_step\.py:\d+\): AssertionError: Device compute capability 9.9 or higher required"
    assert re.search(message, done.stderr)
    assert len(done.stderr.splitlines()) == 1
