"""Factories of programs that a command line names: of a Python file, and of MaxText."""

import importlib.util
import pathlib
import sys
from typing import Any

from maxbench.config.errors import UserError, one_line
from maxbench.config.options import PlanProgram
from maxbench.host import environment
from maxbench.planning import maxtext, program_result


def factory_of(asked: PlanProgram) -> tuple[Any, str]:
    """The factory that options name, and a title for its plan.

    Raises:
      UserError: there is none, or its file does not load.
    """
    environment.compile_only_if_first()  # before the file imports jax
    from maxbench.cost_model import absent_gpus

    gpu = program_result.gpu_of(asked)[1]
    absent_gpus.prepare_transformer_engine(gpu)  # before the file imports it
    if asked.maxtext is not None:
        return maxtext.factory(asked.maxtext, gpu), "MaxText"
    assert asked.program
    file, _, name = asked.program.rpartition(":")
    return from_file(file, name), f"{name} of {pathlib.Path(file).name}"


def from_file(file: str, name: str) -> Any:
    """A function of a Python file, which is loaded as a module; its folder may be imported from.

    Raises:
      UserError: the file does not load, or has no such function.
    """
    path = pathlib.Path(file)
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"program={file}:{name}: must be FILE.py:FACTORY, and the file must exist")
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that its classes can be found by name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        said = one_line(f"{type(error).__name__}: {error}")[:300]
        raise UserError(f"{file} does not load: {said}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        functions = [n for n, x in vars(module).items() if callable(x) and not n.startswith("_")]
        raise UserError(f"{file} has no function {name!r}; it has {', '.join(functions) or 'none'}")
    return factory
