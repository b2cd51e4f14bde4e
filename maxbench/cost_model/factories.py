"""Compilation of anyone's JAX program for absent GPUs, from a factory of the program.

A factory takes compile-only devices, in the order of nodes, and returns a jitted function with its
abstract arguments, or the result of that function's lower(). A factory may also be a generator that
yields one of them; its contexts exit after the program is compiled.
"""

import contextlib
import itertools
import os
import re
import resource
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from maxbench.config.errors import UserError, one_line
from maxbench.cost_model import absent_gpus
from maxbench.cost_model.compile_cache import Compiled

Factory = Callable[..., Any]
ABSTRACT = "use jax.ShapeDtypeStruct with a sharding, of jax.eval_shape"
# Words of an exception -> remedy. The first that is found applies.
REMEDIES = {
    "compile-only": f"it allocates arrays on absent GPUs: {ABSTRACT}",
    "CompileOnly": f"it allocates arrays on absent GPUs: {ABSTRACT}",
    "non-addressable": f"it allocates arrays on absent GPUs: {ABSTRACT}",
    "not fully addressable": f"it allocates arrays on absent GPUs: {ABSTRACT}",
    "Executable' object has no attribute": f"it allocates arrays on absent GPUs: {ABSTRACT}",
    "incompatible devices": f"an argument is a real array: {ABSTRACT}",
    "Memory kinds passed": f"an argument is a real array: {ABSTRACT}",
    "Unknown backend": "it asks for GPUs that are present: use the devices that it is given",
    "requested, but": "it asks for GPUs that are present: use the devices that it is given",
    "cannot reshape array": "its mesh must have all devices that it is given, and no more",
    "Number of devices": "its mesh must have all devices that it is given, and no more",
    "evenly divide": "change the shape or the mesh",
    "Global mesh resource is not set": "yield what the factory returns, inside of te.autocast(...)",
    "CUDA_ERROR": "it runs something on a GPU: only lower it",
    "No such compile option": "remove the compiler option, or use the jax that has it",
}


class Found(NamedTuple):
    """A program that a factory's function compiled to.

    Attributes:
      axes: mesh axis -> size, the slowest first; {"": n} if they are not known.
      order: device id in the program -> place of its GPU in the order of nodes.
    """

    compiled: Compiled
    axes: Mapping[str, int]
    order: tuple[int, ...]


def compile_factory(
    factory: Factory, devices: Sequence[Any], layout: Mapping[str, Any] | None = None
) -> Found:
    """Compiles the program of factory(devices, **layout); within absent_gpus.absent_gpus().

    Compiler options are XLA's defaults, those of XLA_FLAGS, and those of the jitted function.

    Raises:
      UserError: it fails, does not lower or compile, or is of another number of GPUs.
    """
    name = getattr(factory, "__name__", "the factory")
    start = time.perf_counter()
    try:
        with _result(factory(devices, **(layout or {}))) as result:
            lowered = _lowered(name, result)
            traced = time.perf_counter()
            compiled = lowered.compile(compiler_options=absent_gpus.PROGRAM_ONLY)
    except UserError:
        raise
    except Exception as error:
        raise _refusal(name, error, len(devices)) from error
    sizes, axes, order = compiled.memory_analysis(), {"": len(devices)}, ()
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    used = set().union(*(s.device_set for s in shardings)) & {*devices}
    if len(used) != len(devices):
        raise UserError(
            f"{name} with {len(devices)} devices: its arguments and results are on {len(used)} of "
            "them; give each jax.ShapeDtypeStruct a NamedSharding on a mesh of all devices"
        )
    for mesh in (s.mesh for s in shardings if isinstance(s, jax.sharding.NamedSharding)):
        if mesh.size == len(devices):
            axes, order = dict(mesh.shape), tuple(d.id for d in mesh.devices.flat)
    record = Compiled(
        text=compiled.as_text(),
        arguments=sizes.argument_size_in_bytes,
        temporaries=sizes.temp_size_in_bytes,
        results=max(0, sizes.output_size_in_bytes - sizes.alias_size_in_bytes),
        host=sizes.host_temp_size_in_bytes + sizes.host_argument_size_in_bytes,
        lower_s=traced - start,
        compile_s=time.perf_counter() - traced,
        peak_rss_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )
    return Found(record, axes, order)


@contextlib.contextmanager
def _result(result: Any) -> Iterator[Any]:
    """Context of the result of a factory; on exit, a generator is closed and its contexts exit."""
    if not isinstance(result, Generator):
        yield result
        return
    with contextlib.closing(result):
        yield next(result, None)


def _lowered(name: str, result: Any) -> Any:
    """The lowered program of a factory's result."""
    if isinstance(result, jax.stages.Lowered):
        return result
    pair = isinstance(result, tuple) and len(result) == 2
    if not pair or not hasattr(result[0], "lower"):
        raise UserError(
            f"{name}(devices) must return a jitted function and a tuple of its abstract arguments, "
            f"or jitted.lower(...); it returned {one_line(repr(result))[:60]}"
        )
    step, arguments = result
    if isinstance(arguments, Mapping):
        return step.lower(**arguments)
    return step.lower(*arguments)


def _refusal(name: str, error: Exception, gpus: int) -> UserError:
    """The error of a program, in one line with its place and a remedy."""
    text = str(error) or type(error).__name__
    remedy = next((r for words, r in REMEDIES.items() if words in text), "")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    said = one_line(_without_frames(re.split(r"\n\s*\n", text.strip())[0]))
    said = said if len(said) <= 300 else f"{said[:300]}..."
    hint = f"; {remedy}" if remedy else ""
    return UserError(f"{name} with {gpus} devices{where}: {type(error).__name__}: {said}{hint}")


def _without_frames(text: str) -> str:
    """An error's text without the frames of a traceback that it repeats, as XLA's of a partitioner
    in Python do."""
    before, _, traced = text.partition("Traceback (most recent call last):\n")
    return before + "\n".join(itertools.dropwhile(lambda x: x[:1].isspace(), traced.split("\n")))


def _is_users(file: str) -> bool:
    """Whether a file is of the caller's code, not of an installed package or of this one."""
    ours = os.path.dirname(os.path.dirname(__file__))
    return not file.startswith((ours, sys.prefix, sys.base_prefix, "<")) and (
        "site-packages" not in file
    )
