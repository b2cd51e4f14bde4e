"""The rules of the house: rooms whose imports point one way, sizes, where no jax may be."""

import ast
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from benchmarks import recipes_table

PACKAGE = sorted(pathlib.Path("maxbench").rglob("*.py"))
# A room may import from those above it here and from itself; doors, which are in none, from all.
# Beside each: how many lines it may have, and whether importing it may load jax and numpy.
ROOMS = {
    "hardware": (390, False),
    "spec": (1810, False),
    "logs": (690, False),
    "mesh": (305, True),
    "formats": (535, True),
    "model": (1750, True),
    "step": (1610, True),
    "machine": (1370, True),
    "run": (1510, True),
    "predict": (1950, True),
    "plan": (1820, True),
    "launch": (1620, False),
    "report": (1710, False),
}
PARSED = {p: ast.parse(p.read_text()) for p in PACKAGE}


def room(path: pathlib.Path) -> str:
    return path.parts[1] if len(path.parts) > 2 else ""


def imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return found


@pytest.mark.parametrize("path", PACKAGE, ids=str)
def test_imports_point_one_way(path):
    rooms = [*ROOMS]
    ours = {i.split(".")[1] for i in imports(PARSED[path]) if i.startswith("maxbench.")}
    if room(path):
        assert ours <= {*rooms[: rooms.index(room(path)) + 1]}
    # Transformer Engine is loaded by name, when asked for.
    assert "transformer_engine" not in {i.split(".")[0] for i in imports(PARSED[path])}


JAXLESS = [
    *(r for r, (_, jax) in ROOMS.items() if not jax),
    "train",
    "preflight",
    "calibrate",
    "sweep",
    "__main__",
]


@pytest.mark.parametrize("name", JAXLESS)
def test_a_wrong_flag_costs_no_time(name):
    """Neither jax nor numpy is imported by a door, or by what runs where neither is installed."""
    files = [p for p in PACKAGE if name == (room(p) or p.stem) and p.stem != "__init__"]
    modules = [".".join(p.with_suffix("").parts) for p in files]
    code = f"import sys, {', '.join(modules)}\n"
    code += "print({'jax', 'jaxlib', 'numpy', 'flax', 'optax', 'orbax'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize("words", ["check", "format --check"])
def test_lint(words):
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *words.split(), "."], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_sizes():
    lines = dict.fromkeys(ROOMS, 0)
    for path, tree in PARSED.items():
        text = path.read_text().splitlines()
        if room(path):
            lines[room(path)] += len(text)
        assert len(text) < 400, path
        assert ast.get_docstring(tree), f"{path} does not say what it owns"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name} is too long"
    assert {r: n for r, n in lines.items() if n > ROOMS[r][0]} == {}


def test_an_installation_has_every_package():
    """The workload files too, which a checkout has beside the package."""
    told = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["tool"]["setuptools"]
    there = {".".join(p.parent.parts) for p in PACKAGE}
    assert {*told["packages"]} == there | {*told["package-dir"]}
    assert told["package-dir"] == {"maxbench.configs": "configs"}


def test_files_that_are_named_are_there():
    """In README, docs and what the code says of itself; capitals and copies are examples."""
    named = r"(?<!/)\b(?:tests|maxbench|benchmarks|configs|docs)/[a-z0-9_./-]+\.[a-z]{2,4}\b"
    said = [pathlib.Path("README.md"), *pathlib.Path("docs").glob("*.md"), *PACKAGE]
    said += [p for room in ("benchmarks", "tests") for p in pathlib.Path(room).rglob("*.py")]
    examples = {"configs/copy.py", "configs/twin.py", "configs/llama2_7b.py"}
    examples |= {"configs/base.yml"}  # MaxText's
    found = {name for p in said for name in re.findall(named, p.read_text())} - examples
    assert {name for name in found if not pathlib.Path(name).exists()} == set()


def test_the_recipes_in_the_docs_are_of_this_revision():
    """If not: python -m benchmarks.recipes_table."""
    assert recipes_table.PAGE.read_text() == recipes_table.page()


@pytest.mark.parametrize("family", ["own"])
def test_a_family_of_tests_stays_on_one_worker(request, family):
    """If not, every worker makes every reference, and all tests pass, later."""
    if not hasattr(request.config, "workerinput"):
        pytest.skip("one process")
    assert request.node.nodeid.endswith(f"@test_house {family}")
