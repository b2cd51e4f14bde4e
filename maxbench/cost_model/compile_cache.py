"""Compiled steps, and their cache on disk.

A cached step loads without jax. Its key hashes everything that can change the program: the run, the
code that builds it, compiler options and versions.
"""

import ast
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import inspect
import json
import os
import pathlib
import sys
from collections.abc import Iterator

from maxbench.config.errors import UserError
from maxbench.config.number_formats import FORMATS
from maxbench.config.run import Run
from maxbench.config.sublayers import REGISTRY
from maxbench.host import environment
from maxbench.step import xla_options

# A program depends on the step's import closure, on the modules that it loads by name
# (number_formats.FORMATS, sublayers.REGISTRY), and on the modules that compile it.
PACKAGE = pathlib.Path(__file__).parent.parent
STEP_MODULE = "maxbench.step.train_step"
COMPILERS = ("cost_model/aot.py", "cost_model/absent_gpus.py")
TARGET = "cost_model/target.pbtxt"
LOADED_BY_NAME = tuple(f"maxbench.quantization.{f.arithmetic}" for f in FORMATS.values())
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
VERSIONS = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "optax", "transformer-engine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """A compiled program, whoever wrote it. Sizes are bytes on one GPU.

    Attributes:
      text: scheduled HLO.
      arguments, temporaries: the compiler's buffer assignment.
      results: those that need memory of their own, because no argument is donated for them.
      host: host memory of offloaded arrays.
      peak_rss_gib: host memory of the process that compiled it, GiB.
    """

    text: str
    arguments: int
    temporaries: int
    host: int
    lower_s: float
    compile_s: float
    peak_rss_gib: float
    results: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep(Compiled):
    """The compiled step of a run, whose arguments are donated.

    Attributes:
      weights, optimizer: of the step's state.
      copy, gradients: the compute copy of the weights, and the gradients.
      attention: the attention kernel that was selected.
    """

    weights: int
    optimizer: int
    copy: int
    gradients: int
    attention: str


@functools.cache
def versions() -> dict[str, str]:
    """Versions of the packages that determine a program; '' where one is not installed."""
    return {name: environment.version(name) for name in VERSIONS}


def require_compiler() -> None:
    """Raises UserError, with the remedy, if XLA's GPU compiler is not installed."""
    if versions()["jax-cuda13-plugin"]:
        return
    if sys.platform != "linux":
        raise UserError("XLA's GPU compiler exists for Linux alone: run plan there, or in Docker")
    raise UserError(
        "XLA's GPU compiler is not installed; run pip install 'jax-cuda13-plugin' or, in a clone, "
        "pip install '.[plan]' (no GPU is needed)"
    )


def program_sources(package: pathlib.Path = PACKAGE) -> dict[pathlib.Path, ast.Module]:
    """Syntax trees of the files whose code can change a program, by path, sorted.

    They are the import closure of the step, with imports inside functions, the modules that it
    loads by name, and the compiler modules themselves (their imports are in the closure).

    Args:
      package: folder of the package.
    """
    trees = {package / name: ast.parse((package / name).read_text()) for name in COMPILERS}
    pending = [STEP_MODULE, *LOADED_BY_NAME]
    bodies = [kind.module.partition(":")[0] for kind in REGISTRY.values()]
    pending += [name for name in bodies if name.split(".")[0] == package.name]
    while pending:
        module = pending.pop()
        folder = package.parent.joinpath(*module.split("."))
        path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        # In `from module import name`, name may be no module. The root package is the Python API.
        if module == package.name or path in trees or not path.is_file():
            continue
        trees[path] = ast.parse(path.read_text())
        pending += _imports(trees[path], package.name)
        pending.append(module.rpartition(".")[0])  # importing it runs its package
    return dict(sorted(trees.items()))


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Modules of the package that a file imports, and what it imports from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == package)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.split(".")[0] == package:
                yield from (module, *(f"{module}.{a.name}" for a in node.names))


def code_of(tree: ast.Module) -> str:
    """A module's code as text, without docstrings. A syntax tree has no comments or line breaks.

    Removes the docstrings from the tree.
    """
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


@functools.cache
def source_hash(package: pathlib.Path = PACKAGE) -> str:
    """Hash of the code that builds and compiles programs, and of the compile target's template."""
    digest = hashlib.sha256((package / TARGET).read_bytes())
    for path, tree in program_sources(package).items():
        digest.update(f"{path.relative_to(package)} {code_of(tree)}".encode())
    return digest.hexdigest()


def key(run: Run) -> str:
    """Key of the run's program, the same on every machine."""
    gpu = run.gpu  # only what the compiler sees of it
    topology = gpu.topology(run.layout.gpus)
    inputs = {
        "run": run.program(),
        "target": (dataclasses.asdict(gpu.chip), topology, gpu.bf16_tflops),
        "options": xla_options.xla_options("gpu", run),
        "sources": source_hash(),
        "kinds": _kinds_elsewhere(run),
        "versions": versions(),
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:24]


def _kinds_elsewhere(run: Run) -> list[str]:
    """Code of the modules outside of the package that have kinds of sublayers of a run."""
    parts = [type(part) for layer in run.model.all_layers for _, part in layer.parts()]
    modules = {name for kind in parts for name in (kind.__module__, kind.module.partition(":")[0])}
    elsewhere = sorted(name for name in modules if name.split(".")[0] != PACKAGE.name)
    return [code_of(ast.parse(inspect.getsource(sys.modules[name]))) for name in elsewhere]


def program_file(run: Run) -> pathlib.Path:
    """The file of the run's program in the cache, which may not exist."""
    return environment.cache_dir() / f"{key(run)}.json.gz"


def load(run: Run) -> CompiledStep | None:
    """The run's program from the cache; None if it is absent or unreadable."""
    try:
        with gzip.open(program_file(run), "rt") as f:
            return CompiledStep(**json.load(f))
    except (OSError, EOFError, ValueError, TypeError, KeyError):
        return None


def store(run: Run, compiled: CompiledStep) -> None:
    """Writes a program to the cache atomically. A cache that cannot be written is not an error."""
    file = program_file(run)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}.part")
        with gzip.open(part, "wt", compresslevel=3) as f:
            json.dump(dataclasses.asdict(compiled), f)
        os.replace(part, file)
