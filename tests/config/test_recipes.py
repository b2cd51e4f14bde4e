"""Workload files: where they are found, and how errors in them are reported."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from maxbench.config import command_line, recipes
from maxbench.config.errors import UserError
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
    "train=dict(sep=1)": ":6: train: a field='sep' is not one of seq",
    "train=dict(seq='long')": ":6: train.seq=long must be a whole number, at least 1",
    "fp8=dict(optim=dict(lr=float('nan')))": ":6: optim.lr=nan must be a finite number",
    "launch=dict(gpus=-1)": ":6: launch.gpus=-1 must be a whole number, at least 0",
    "layouts='a b\\n1 2'": ":5:66: a column of layouts='a' is not one of",
    "model={}": ":6: model has no name, size, layers",
}
WHOLE = """from maxbench.config.recipes import workload
def get_config(presets=""):
    model = dict.fromkeys(("layers", "embed", "heads", "kv_heads", "head_dim", "mlp", "vocab"), 8)
    given = dict(model=model | dict(name="x", size="y"), train=dict(seq=8), layouts="")
    given |= dict(optim=dict(lr=1, lr_min=0, warmup=0), {})
    return workload(presets, **given)
"""


@pytest.mark.parametrize("text", FILES)
def test_failing_workload_file_is_refused_with_its_line(text, tmp_path):
    path = tmp_path / "w.py"
    inserted = "=" in text and text.split("=")[0].isidentifier() and "x = 1" not in text
    path.write_text(WHOLE.replace("{}", text) if inserted else text)
    code, out, err = train_command("--config", str(path), "--json")
    assert (code, out) == (2, "")
    assert err.startswith(f"maxbench train: error: {path}{FILES[text]}")
    assert err.count("\n") == 1
    assert err.count(path.name) == 1  # a syntax error repeats its file


HEADER = "gpu_type dtype scaling gpus layers seq pp vp dp fsdp ep cp tp mbs gbs remat format"
ROW = "h100 bf16,fp8 weak 8 16 8192 1 1 1 8 1 1 1 2 64 none auto"


@pytest.mark.parametrize(
    ("old", "new", "word", "message"),
    [
        ("h100", "b201", "b201", "gpu_type='b201' is not one of .*; did you mean 'b200'?"),
        ("h100", "h100,b200", "h100,b200", "gpu_type='h100,b200' is not one of"),
        ("fp8", "fp9", "bf16,fp9", "dtype='fp9' is not one of .*; did you mean 'fp8'?"),
        ("weak", "week", "week", "scaling='week' is not one of weak, strong; did you mean 'weak'?"),
        ("weak 8", "weak 0", "0 16", "gpus=0 must be a whole number, at least 1"),
        (" 16 ", " many ", "many", "model.layers=many must be a whole number"),
        (" 8192", " 1e3", "1e3", "train.seq=1e3 must be a whole number, at least 1"),
        (" 8 1 1 1 2", " 4 1 1 1 2", "8 16", r"gpus=8, but its axes \(fsdp=4\) are 4"),
        (" 8192 1 1 ", " 8192 1 2 ", "2 1 8", "vp=2 needs pp > 1"),
        ("none", "noone", "noone", "train.remat='noone' is not one of .*; did you mean 'none'?"),
        ("none auto", "none best", "best", "precision.scaling='best' is not one of"),
        ("none auto", "none", "none", "the row has 16 cells, its header has 17"),
        ("mbs", "mbz", "mbz", "a column of layouts='mbz' is not one of .*; did you mean"),
        (" gbs", "", "gpu_type", "layouts has no column gbs"),
    ],
)
def test_invalid_cell_of_a_table_is_named_with_its_place(old, new, word, message, tmp_path):
    assert (HEADER + ROW).count(old) == 1
    header, row = HEADER.replace(old, new), ROW.replace(old, new)
    first, *others = WHOLE.replace("{}", "layouts=TABLE").splitlines()
    path = tmp_path / "w.py"
    path.write_text("\n".join([first, f'TABLE = """\n{header}\n{row}"""', *others]))
    line, text = (3, header) if header != HEADER else (4, row)
    place = f"{path}:{line}:{text.index(word) + 1}: "
    with pytest.raises(UserError, match=f"^{place}{message}"):
        recipes.load_workload(str(path))


def test_a_table_may_name_the_gpu_types_of_a_file(tmp_path):
    text = (recipes.CONFIGS / "llama31_8b.py").read_text().replace("\nb300 ", "\nh300 ")
    (tmp_path / "w.py").write_text(text)
    types = tmp_path / "types.toml"
    types.write_text('[h300]\nlike = "h100"\nrecipes = "h300"\n')
    words = f"--config {tmp_path}/w.py --gpus 8 --gpu_type h300 --hardware {types}".split()
    assert command_line.run_of(words).layout.mbs == 4
    with pytest.raises(UserError, match="gpu_type='h300' is not one of"):
        recipes.load_workload(str(tmp_path / "w.py"))


LLAMA32_1B = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256,
    "rope_theta": 500000.0, "tie_word_embeddings": True,
}  # fmt: skip


def test_config_file_of_hugging_face_is_a_workload(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA32_1B))
    code, out, err = train_command("--config", str(path), "--fsdp", "8", "--json")
    assert code == 0, err
    config = json.loads(out)["config"]
    assert (config["model"]["layers"], config["model"]["tied"]) == (16, True)
    assert config["model"]["rope_base"] == 500_000.0
    assert config["train"]["seq"] == 8192
    toy = command_line.run_of(["--config", f"{path}:tiny", "--seq", "32"])
    assert (toy.model.embed, toy.model.size, toy.train.seq) == (128, "16-layers-tiny", 32)
    for text, message in (
        ('{"model_type": "gemma3"}', "config.json has model_type='gemma3'; understood are llama"),
        ("{'model_type': True}", f"{path} cannot be read as JSON"),
    ):
        path.write_text(text)
        code, out, err = train_command("--config", str(path), "--fsdp", "8", "--json")
        assert (code, out) == (2, "")
        assert err.startswith(f"maxbench train: error: {message}")
        assert err.count("\n") == 1
