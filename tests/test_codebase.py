"""Structure of the code: imports between packages, where jax is not imported, what is installed."""

import ast
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from tools import recipes_table

PACKAGE = sorted(pathlib.Path("maxbench").rglob("*.py"))
# Package -> the packages that it may import, besides itself: docs/explanation/architecture.md.
IMPORTS = {
    "host": "",
    "terminal": "",
    "hardware": "",
    "config": "host terminal hardware",
    "metrics": "hardware config",
    "distributed": "host hardware config",
    "sharding": "config",
    "quantization": "config sharding",
    "model": "config sharding quantization",
    "pipeline": "terminal config sharding quantization model",
    "step": "config sharding quantization model pipeline",
    "cost_model": "host hardware config metrics sharding quantization pipeline step",
    "evidence": "hardware config metrics pipeline cost_model",
    "run_logs": "host hardware config metrics evidence",
    "run": "host terminal hardware config metrics distributed sharding model pipeline step "
    "evidence run_logs",
    "planning": "host terminal hardware config metrics pipeline cost_model evidence",
    "traces": "terminal hardware config metrics cost_model run_logs planning",
    "preflight": "host terminal hardware config run_logs distributed sharding model step",
    "calibration": "host terminal hardware config metrics distributed sharding quantization model "
    "step cost_model evidence run_logs planning traces preflight",
    "launch": "host hardware config metrics run_logs",
    "reporting": "terminal hardware config metrics cost_model evidence run_logs planning traces",
}
ABOVE = {"cli", "api", "__main__"}  # may import all
WITHOUT_JAX = (
    *("host", "terminal", "hardware", "config", "metrics", "run_logs"),
    *("launch", "reporting", "cli"),
)
PARSED = {p: ast.parse(p.read_text()) for p in PACKAGE}


def package(path: pathlib.Path) -> str:
    return path.parts[1] if len(path.parts) > 2 else path.stem


def imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return found


@pytest.mark.parametrize("name", IMPORTS)
def test_packages_import_only_what_the_table_allows(name):
    allowed = {name, *IMPORTS[name].split()}
    for path in (p for p in PACKAGE if package(p) == name and p.stem != "__main__"):
        ours = {i.split(".")[1] for i in imports(PARSED[path]) if i.startswith("maxbench.")}
        assert ours <= allowed, path


def test_the_table_has_every_package_and_no_cycle():
    assert {package(p) for p in PACKAGE if len(p.parts) > 2} == {*IMPORTS, "cli"}
    order = [*IMPORTS]
    for name, allowed in IMPORTS.items():
        assert all(order.index(other) < order.index(name) for other in allowed.split())


@pytest.mark.parametrize("name", WITHOUT_JAX)
def test_importing_it_loads_neither_jax_nor_numpy(name):
    """A wrong flag is refused, and a report read, where neither is installed or loaded."""
    files = [p for p in PACKAGE if package(p) == name and p.stem not in ("__init__", "__main__")]
    modules = [".".join(p.with_suffix("").parts) for p in files]
    code = f"import sys, {', '.join(modules)}\n"
    code += "print({'jax', 'jaxlib', 'numpy', 'flax', 'optax', 'orbax'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_grain_is_loaded_by_runs_that_read_files_alone():
    """It takes a second."""
    at_import = lambda tree: ast.Module([x for x in tree.body if "Import" in type(x).__name__], [])
    assert [str(p) for p, tree in PARSED.items() if "grain" in imports(at_import(tree))] == []


# Names that a release of jax or of Transformer Engine may change -> the only file that uses them.
UNSTABLE = {
    r"jax\._src": "sharding/jax_compat.py",
    r"jaxlib_version|version\(\"jax(lib)?\"\)|jax\.__version": "sharding/jax_compat.py",
    r"transformer_engine[._]jax|_te_gemm": "quantization/transformer_engine.py",
}


@pytest.mark.parametrize("pattern", UNSTABLE)
def test_names_that_a_release_may_change_are_in_one_file(pattern):
    users = [p for p in PACKAGE if re.search(pattern, p.read_text())]
    assert users == [pathlib.Path("maxbench", UNSTABLE[pattern])]


def test_every_module_has_a_docstring():
    assert [str(p) for p, tree in PARSED.items() if not ast.get_docstring(tree)] == []


def test_an_installation_has_every_package():
    """The workload files too, which a checkout has outside the package."""
    tool = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["tool"]["setuptools"]
    there = {".".join(p.parent.parts) for p in PACKAGE}
    assert {*tool["packages"]} == there | {*tool["package-dir"]}
    assert tool["package-dir"] == {"maxbench.configs": "configs"}


def test_files_that_are_named_exist():
    """In README, docs, docstrings and comments; capitals and copies are examples."""
    named = r"(?<!/)\b(?:maxbench|tests|benchmarks|tools|configs|docs)/[a-z0-9_./-]+\.[a-z]{2,4}\b"
    texts = [*pathlib.Path().glob("*.md"), *pathlib.Path("docs").rglob("*.md"), *PACKAGE]
    scripts = ("benchmarks", "tests", "tools")
    texts += [p for folder in scripts for p in pathlib.Path(folder).rglob("*.py")]
    examples = {"configs/copy.py", "configs/twin.py", "configs/llama2_7b.py"}
    examples |= {"configs/base.yml"}  # MaxText's
    found = {name for p in texts for name in re.findall(named, p.read_text())} - examples
    assert {name for name in found if not pathlib.Path(name).exists()} == set()


def test_the_recipes_in_the_docs_are_of_this_revision():
    """If not: python -m tools.recipes_table."""
    assert recipes_table.PAGE.read_text() == recipes_table.page()


@pytest.mark.parametrize("family", ["own"])
def test_tests_of_one_family_run_on_one_worker(request, family):
    """Otherwise every worker computes every reference, and all tests pass, later."""
    if not hasattr(request.config, "workerinput"):
        pytest.skip("one process")
    assert request.node.nodeid.endswith(f"@test_codebase {family}")


def unannotated(function: ast.FunctionDef, is_method: bool) -> list[str]:
    """Arguments without a type, and 'return' without one; self and cls need none."""
    a = function.args
    named = [*a.posonlyargs, *a.args]
    static = any(
        isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list
    )
    named = named[1:] if is_method and not static else named
    every = [*named, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    returns = ["return"] if function.returns is None else []
    return [arg.arg for arg in every if arg.annotation is None] + returns


def test_public_functions_and_methods_are_annotated():
    """mypy checks the annotations (.ci/run); private functions may have none."""
    missing = {}
    for path, tree in PARSED.items():
        functions = [(node, False) for node in tree.body]
        for cls in tree.body:
            if isinstance(cls, ast.ClassDef) and not cls.name.startswith("_"):
                functions += [(node, True) for node in cls.body]
        for node, is_method in functions:
            is_public = isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
            if is_public and (names := unannotated(node, is_method)):
                missing[f"{path}: {node.name}"] = names
    assert missing == {}
