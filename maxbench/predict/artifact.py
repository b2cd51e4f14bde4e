"""What compiling a run for GPUs that are not there leaves behind, and its cache on disk.

Loading one needs no jax. The key is all that can change the program: the run, the sources that
build it, compiler options and versions.
"""

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import json
import os
import pathlib

from maxbench.machine import runtime
from maxbench.spec.errors import UserError
from maxbench.spec.run import Run
from maxbench.step import compiler

# What builds the step: everything else reads it, runs it, or never sees it.
BUILDERS = ("spec/model.py", "spec/program.py", "spec/run.py", "mesh/*.py", "formats/*.py")
BUILDERS += ("model/*.py", "step/*.py")
BUILDERS += ("predict/aot.py", "predict/target.pbtxt")
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
    return {name: runtime.version(name) for name in VERSIONS}


def require_compiler() -> None:
    """Raises UserError, naming the install command, when XLA's GPU compiler is not here."""
    if not versions()["jax-cuda13-plugin"]:
        raise UserError(
            "XLA's GPU compiler is not installed; pip install 'jax-cuda13-plugin' or, in a clone, "
            "'.[plan]' brings it (it needs no GPU)"
        )


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    package = pathlib.Path(__file__).parent.parent
    for path in sorted(path for pattern in BUILDERS for path in package.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def key(run: Run) -> str:
    """Name of the run's program, the same wherever it is compiled."""
    about = {k: v for k, v in run.asdict().items() if k not in ("output", "runtime")}
    gpu = run.layout.gpu  # of it, what the compiler sees; its options are among the options
    topology = gpu.topology(run.layout.gpus)
    about["target"] = dataclasses.asdict(gpu.chip), topology, gpu.bf16_tflops
    about |= {"options": compiler.xla_options("gpu", run)}
    about |= {"sources": _sources(), "versions": versions()}
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]


def load(run: Run) -> Compiled | None:
    """The run's program from the cache; None when it is not there, or cannot be read."""
    try:
        with gzip.open(runtime.cache() / f"{key(run)}.json.gz", "rt") as f:
            values = json.load(f)
        values["layer_shapes"] = tuple(map(tuple, values["layer_shapes"]))
        return Compiled(**values)
    except (OSError, EOFError, ValueError, TypeError, KeyError):
        return None


def store(run: Run, compiled: Compiled) -> None:
    """Puts a program into the cache, whole or not at all; without a cache where none can be."""
    path = runtime.cache() / f"{key(run)}.json.gz"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        with gzip.open(part, "wt", compresslevel=3) as f:
            json.dump(dataclasses.asdict(compiled), f)
        os.replace(part, path)
