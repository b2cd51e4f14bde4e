"""Key of a compiled program: code that builds programs changes it, and text does not."""

import pathlib
import re
import shutil

import pytest

from maxbench.config import command_line
from maxbench.cost_model import compile_cache

pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")


def run_of(arguments: str):
    return command_line.run_of(f"--config configs/{arguments}".split())


@pytest.fixture
def package(tmp_path):
    """A copy of the package's sources."""
    names = shutil.ignore_patterns("__pycache__", "configs")
    copy = shutil.copytree(compile_cache.PACKAGE, tmp_path / "maxbench", ignore=names)
    return pathlib.Path(copy)


def edit(path: pathlib.Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def source_hash(package: pathlib.Path) -> str:
    """The hash of an edited copy, computed anew: compile_cache.source_hash() caches its result."""
    return compile_cache.source_hash.__wrapped__(package)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("config/number_formats.py", "bytes=2", "bytes=3"),
        ("quantization/mxfp8.py", "import jax\n", "import jax\n\nUNUSED = 1\n"),
        ("quantization/fp8_per_tensor.py", "import jax\n", "import jax\n\nUNUSED = 1\n"),
        ("model/transformer.py", "import jax\n", "import jax\n\nUNUSED = 1\n"),
        ("cost_model/aot.py", "import jax\n", "import jax\n\nUNUSED = 1\n"),
        ("cost_model/target.pbtxt", "\n", "\n\n"),
    ],
)
def test_code_that_builds_programs_changes_the_key(package, file, old, new):
    before = compile_cache.source_hash()
    edit(package / file, old, new)
    assert source_hash(package) != before


def test_a_module_that_is_loaded_by_name_is_hashed(package):
    """No import statement names the modules of number formats."""
    sources = compile_cache.program_sources(package)
    assert package / "quantization/transformer_engine.py" in sources
    assert {package / "quantization/mxfp8.py", package / "config/number_formats.py"} <= {*sources}


@pytest.mark.parametrize("file", ["__init__.py", "reporting/compare.py", "planning/search.py"])
def test_other_code_does_not_change_the_key(package, file):
    before = compile_cache.source_hash()
    path = package / file
    path.write_text(path.read_text() + "\nUNUSED = 1\n")
    assert source_hash(package) == before


def test_docstrings_comments_and_line_breaks_do_not_change_the_key(package):
    before = compile_cache.source_hash()
    for path in (package / "model/attention.py", package / "config/number_formats.py"):
        text = path.read_text()
        reworded = re.sub(r'(\n *)"""\w', r'\1"""Reworded. X', text) + "\n# A comment.\n\n"
        assert reworded.count("Reworded.") > 1
        path.write_text(reworded)
    assert source_hash(package) == before


def test_the_key_depends_on_the_run_and_not_on_its_output():
    key = lambda arguments: compile_cache.key(run_of(arguments))
    base = key("llama2_70b.py --gpus 64")
    assert key("llama2_70b.py --gpus 64 --output_dir elsewhere") == base
    constants = "--config.train.seed=3 --config.train.window=3,4 --config.optim.lr=1e-5 --steps 9"
    constants += " --config.train.data=x.bin --config.train.eval_data=y.bin"
    assert key(f"llama2_70b.py --gpus 64 {constants}") == base
    assert key("llama2_70b.py --gpus 64 --gpu_type h200") != base
    assert key("llama2_70b.py --gpus 128") != base
    fp8 = "llama2_70b.py --gpus 64 --dtype fp8"  # precision.backend=auto is XLA here
    assert key(fp8) == key(f"{fp8} --config.precision.backend=xla")
    assert key(fp8) != key(f"{fp8} --config.precision.backend=te")


def test_a_damaged_cache_entry_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv("MAXBENCH_CACHE", str(tmp_path))
    run = run_of("llama2_70b.py --gpus 64")
    (tmp_path / f"{compile_cache.key(run)}.json.gz").write_bytes(b"\x1f\x8bnot gzip")
    assert compile_cache.load(run) is None


def test_missing_compiler_is_reported_with_the_install_command(monkeypatch):
    monkeypatch.setattr(compile_cache, "versions", lambda: {"jax-cuda13-plugin": ""})
    with pytest.raises(ValueError, match=r"in a clone, pip install '\.\[plan\]'"):
        compile_cache.require_compiler()
