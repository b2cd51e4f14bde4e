"""The rules of the house: sizes, and imports that point one way."""

import ast
import pathlib
import subprocess
import sys

import pytest

PACKAGE = sorted(pathlib.Path("maxbench").glob("*.py"))
# Each may import from the rooms before its own, and from nothing after.
ORDER = [
    {"hardware", "hlo", "__init__"},
    {"config"},
    {"flops", "published"},
    {"recipes"},
    {"cli", "runtime"},
    {"mesh", "profile", "runlogs", "plots", "variables", "nccl", "hosts"},
    {"mxfp8"},
    {"te"},
    {"precision"},
    {"artifact", "costs", "schedule"},
    {"simulate", "memory", "attention", "loss", "optim", "data", "checkpoint", "metrics"},
    {"compare", "preflight", "runai", "search", "sweep", "terms", "trace"},
    {"tables"},
    {"page"},
    {"layers"},
    {"moe"},
    {"model"},
    {"pipeline"},
    {"step"},
    {"aot", "loop"},
    {"train", "plan", "launch"},
    {"report"},
]
JAXLESS = {
    "hardware",
    "config",
    "flops",
    "published",
    "recipes",
    "cli",
    "runtime",
    "metrics",
    "train",
    *("profile", "runlogs", "plots", "variables", "nccl", "compare", "preflight", "runai"),
    *("tables", "page", "report", "launch", "artifact", "search", "sweep", "trace"),
}
PARSED = {p: ast.parse(p.read_text()) for p in PACKAGE}


def imports(tree: ast.AST, only_top: bool) -> set[str]:
    found = set()
    for node in tree.body if only_top else ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return found


def test_every_file_has_its_room():
    assert {p.stem for p in PACKAGE} == set().union(*ORDER)


@pytest.mark.parametrize("path", PACKAGE, ids=lambda p: p.stem)
def test_imports_point_one_way(path):
    room = next(i for i, names in enumerate(ORDER) if path.stem in names)
    before = set().union(*ORDER[:room])
    # train.py imports the loop late: jax must not start before the run is known.
    ours = {i.split(".")[1] for i in imports(PARSED[path], False) if i.startswith("maxbench.")}
    assert ours <= before, f"{path.stem} may not import {ours - before}"


@pytest.mark.parametrize("path", PACKAGE, ids=lambda p: p.stem)
def test_jax_is_imported_only_where_it_may_be(path):
    heavy = {"jax", "flax", "optax", "orbax", "numpy"}
    found = {i.split(".")[0] for i in imports(PARSED[path], True)} & heavy
    assert not (path.stem in JAXLESS and found)
    # te.py loads Transformer Engine by name, when asked for.
    assert path.stem == "te" or "transformer_engine" not in path.read_text()
    assert "transformer_engine" not in {i.split(".")[0] for i in imports(PARSED[path], False)}


def test_sizes():
    lines = {p: len(p.read_text().splitlines()) for p in PACKAGE}
    assert sum(lines.values()) < 9700
    for path, tree in PARSED.items():
        assert lines[path] < 500, path
        assert ast.get_docstring(tree), f"{path} does not say what it owns"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name} is too long"


def test_the_readme_has_the_tables_of_the_workload_files():
    done = subprocess.run(
        [sys.executable, "-m", "maxbench.recipes"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() in pathlib.Path("README.md").read_text()
