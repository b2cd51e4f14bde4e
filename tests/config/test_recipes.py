"""Workload files: where they are found, and how errors in them are reported."""

import os
import shutil
import subprocess
import sys

import pytest

from maxbench.config import recipes
from tests.conftest import train_command


def test_workload_is_found_by_name_in_an_installation(tmp_path):
    """pip installs configs/ in the package, and there is no checkout."""
    site, folder = tmp_path / "site", tmp_path / "elsewhere"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree("maxbench", site / "maxbench", ignore=ignore)
    shutil.copytree("configs", site / "maxbench" / "configs", ignore=ignore)
    (site / "configs").mkdir()  # another package's
    folder.mkdir()
    code = "from maxbench.config import command_line, recipes\n"
    code += "print(command_line.run_of(['--config', 'llama31_8b:tiny']).name, *recipes.models())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("pretrain_llama31_8b-tiny_bf16_gpus1_"), done.stderr
    assert len(done.stdout.split()) == 1 + len(recipes.models())


try:
    compile("\0", "", "exec")
except (SyntaxError, ValueError) as e:  # depends on the version of Python
    NULL = type(e).__name__
FILES = {
    "x = 1\ndef get_config(p):\n  return (\n": ":3: SyntaxError: '(' was never closed",
    "\nimport nothing_like_it\n": ":2: ModuleNotFoundError: No module named 'nothing_like_it'",
    "a = 1\nraise RuntimeError('two\\nlines')\n": ":2: RuntimeError: two lines",
    "import sys\nsys.exit(0)\n": ":2: SystemExit: 0",
    "def get_config(p=''):\n  return {}['x']\n": ":2: KeyError: 'x'",
    "def get_config():\n  pass\n": ": its get_config(presets='') must return",
    "x = 1": ": its get_config(presets='') must return",
    "\0": f": {NULL}: source code string cannot contain null bytes",
    "train=dict(sep=1)": ":6: a field of train='sep' is not one of seq",
    "train=dict(seq='long')": ":6: train.seq=long must be a whole number, at least 1",
    "fp8=dict(optim=dict(lr=float('nan')))": ":6: optim.lr=nan must be a finite number",
    "launch=dict(gpus=-1)": ":6: launch.gpus=-1 must be a whole number, at least 0",
    "layouts='a b\\n1 2'": ":6: layouts has no column cp, dp, dtype",
    "model={}": ":6: model has no name, size, layers",
}
WHOLE = """from maxbench.config.recipes import workload
def get_config(presets=""):
    model = dict.fromkeys(("layers", "embed", "heads", "kv_heads", "head_dim", "mlp", "vocab"), 8)
    given = dict(model=model | dict(name="x", size="y"), train=dict(seq=8), layouts="gpus")
    given |= dict(optim=dict(lr=1, lr_min=0, warmup=0), {})
    return workload(presets, **given)
"""


@pytest.mark.parametrize("text", FILES)
def test_failing_workload_file_is_refused_with_its_line(text, tmp_path):
    path = tmp_path / "w.py"
    path.write_text(WHOLE.replace("{}", text) if FILES[text].startswith(":6") else text)
    code, out, err = train_command("--config", str(path), "--json")
    assert (code, out) == (2, "")
    assert err.startswith(f"maxbench train: error: {path}{FILES[text]}")
    assert err.count("\n") == 1
