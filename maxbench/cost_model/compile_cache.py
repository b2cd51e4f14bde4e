"""What compiling a run for GPUs that are not there leaves behind, and its cache on disk.

Loading one needs no jax. The key is all that can change the program: the run, the sources that
build it, compiler options and versions.
"""

import ast
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator

from maxbench.config import environment
from maxbench.config.errors import UserError
from maxbench.config.number_formats import FORMATS
from maxbench.config.run import Run
from maxbench.step import xla_options

# Programs depend on the code of the step and of all that it imports, of the modules that it loads
# by name (number_formats.FORMATS), and of what compiles it.
STEP_MODULE, COMPILES = "maxbench.step.train_step", "cost_model/aot.py"
NAMED_MODULES = tuple(f"maxbench.quantization.{f.arithmetic}" for f in FORMATS.values())
VERSIONS = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "optax", "transformer-engine")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled step, for one GPU of the layout. Sizes are bytes.

    Attributes:
      text: scheduled HLO.
      weights, optimizer: of the state that the step is given and returns.
      arguments, temporaries: the compiler's buffer assignment. Arguments are donated, so that
        results need no more.
      host: of the host's memory, what is offloaded to it.
      layer_shapes: dims of each stacked weight and gradient as the layers hold it.
      copy, gradients: all compute weights of this GPU, and their gradients.
    """

    text: str
    weights: int
    optimizer: int
    arguments: int
    temporaries: int
    host: int
    copy: int
    gradients: int
    layer_shapes: tuple[tuple[int, ...], ...]
    attention: str
    lower_s: float
    compile_s: float
    peak_rss_gib: float


@functools.cache
def versions() -> dict[str, str]:
    """Versions of what compiles; '' for what is not installed."""
    return {name: environment.version(name) for name in VERSIONS}


def require_compiler() -> None:
    """Raises UserError, naming the install command, when XLA's GPU compiler is not here."""
    if not versions()["jax-cuda13-plugin"]:
        raise UserError(
            "XLA's GPU compiler is not installed; pip install 'jax-cuda13-plugin' or, in a clone, "
            "'.[plan]' brings it (it needs no GPU)"
        )


@functools.cache
def program_sources() -> dict[pathlib.Path, ast.Module]:
    """Syntax trees of the files whose code can change a program: the import closure of the step,
    imports inside functions included, and what is loaded by name or compiles the step.
    """
    package = pathlib.Path(__file__).parent.parent
    found, pending = {}, [STEP_MODULE, *NAMED_MODULES]
    while pending:
        name = pending.pop()
        place = package.parent.joinpath(*name.split("."))
        path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if path in found or not path.is_file():  # `from module import name`: a name, no module
            continue
        found[path] = ast.parse(path.read_text())
        pending += _imports(found[path], package.name)
        pending.append(name.rpartition(".")[0] or package.name)  # its package runs first
    compiles = package / COMPILES
    return dict(sorted(found.items())) | {compiles: ast.parse(compiles.read_text())}


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Modules of the package that a module imports, and the names that it imports from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == package)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            yield from (node.module, *(f"{node.module}.{a.name}" for a in node.names))


def code_of(tree: ast.Module) -> str:
    """A syntax tree as text, without docstrings. Comments and line breaks are in no tree."""
    for node in ast.walk(tree):
        has_doc = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if has_doc and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256(pathlib.Path(__file__).with_name("target.pbtxt").read_bytes())
    for tree in program_sources().values():
        digest.update(code_of(tree).encode())
    return digest.hexdigest()


def key(run: Run) -> str:
    """Name of the run's program, the same wherever it is compiled."""
    about = {k: v for k, v in run.asdict().items() if k not in ("output", "runtime")}
    gpu = run.gpu  # of it, what the compiler sees; its options are among the options
    topology = gpu.topology(run.layout.gpus)
    about["target"] = dataclasses.asdict(gpu.chip), topology, gpu.bf16_tflops
    about |= {"options": xla_options.xla_options("gpu", run)}
    about |= {"sources": _sources(), "versions": versions()}
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]


def load(run: Run) -> Compiled | None:
    """The run's program from the cache; None when it is not there, or cannot be read."""
    try:
        with gzip.open(environment.cache_dir() / f"{key(run)}.json.gz", "rt") as f:
            values = json.load(f)
        values["layer_shapes"] = tuple(map(tuple, values["layer_shapes"]))
        return Compiled(**values)
    except (OSError, EOFError, ValueError, TypeError, KeyError):
        return None


def store(run: Run, compiled: Compiled) -> None:
    """Puts a program into the cache, whole or not at all; without a cache where none can be."""
    path = environment.cache_dir() / f"{key(run)}.json.gz"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        with gzip.open(part, "wt", compresslevel=3) as f:
            json.dump(dataclasses.asdict(compiled), f)
        os.replace(part, path)
