"""A factory of MaxText's own train step, from an installed MaxText and its own flags.

MaxText's ahead-of-time compilation runs as it is, with two of its functions answered in this
process: the mesh is made of absent GPUs, and the step is lowered, not compiled.
"""

import contextlib
import importlib
import os
import pathlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

from maxbench.config.errors import UserError
from maxbench.hardware.gpus import Gpu

MODULES = ("maxtext.trainers.pre_train.train_compile", "MaxText.train_compile")  # newest first
# Flags that planning needs. Slices are NVLink domains, as jax counts them on GPUs.
NEEDED = (
    "run_name=plan",
    "hardware=gpu",
    "dataset_type=synthetic",
    "enable_checkpointing=false",
    "compile_topology=a3",
    "internal_compile=true",
    "internal_compile_num_devices={gpus}",
    "compile_topology_num_slices={slices}",
)


class _Lowered(BaseException):
    """Ends MaxText's main function once the step is lowered."""


def factory(flags: str, gpu: Gpu) -> Callable[[Sequence[Any]], Any]:
    """The factory of the step that MaxText's flags describe: 'model_name=llama3-70b ...'. The first
    word may be a configuration file.

    Raises:
      UserError: MaxText is not installed, or flags are no words.
    """
    words, train_compile = words_of(flags), _module()

    def maxtext(devices: Sequence[Any]) -> Any:
        gpus = len(devices)
        slices = gpu.topology(gpus).partition("x")[0]
        given = {word.partition("=")[0] for word in words}
        needed = (word.format(gpus=gpus, slices=slices) for word in NEEDED)
        own = [word for word in needed if word.partition("=")[0] not in given]
        files, rest = [w for w in words[:1] if "=" not in w], [w for w in words if "=" in w]
        argv = ["train_compile", *(files or [_base(train_compile)]), *own, *rest]
        with _on(train_compile, devices):
            try:
                train_compile.main(argv)
            except _Lowered as end:
                return end.args[0]
        raise UserError("maxtext: its train_compile ended without a step")

    return maxtext


def words_of(flags: str) -> list[str]:
    """Flags as words.

    Raises:
      UserError: they are no words of a shell.
    """
    try:
        return shlex.split(flags)
    except ValueError as e:
        raise UserError(f"maxtext={flags!r:.60}: {e}") from None


def _module() -> ModuleType:
    """MaxText's module of ahead-of-time compilation.

    Raises:
      UserError: it is not installed, or does not import.
    """
    os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")  # without Google's diagnostics
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as e:
            if not name.startswith(f"{e.name}.") and e.name != name:
                raise UserError(f"MaxText does not import: {e}; install what it requires") from None
        except Exception as e:
            raise UserError(f"MaxText does not import: {type(e).__name__}: {e}") from e
    raise UserError(
        "MaxText is not installed in this environment: install it from its repository "
        "(github.com/AI-Hypercomputer/maxtext), or set PYTHONPATH to its src folder"
    )


def _base(train_compile: ModuleType) -> str:
    """Path of MaxText's base.yml."""
    assert train_compile.__file__
    folders = pathlib.Path(train_compile.__file__).parents
    places = (folder / "configs" / "base.yml" for folder in folders)
    return str(next(place for place in places if place.is_file()))


@contextlib.contextmanager
def _on(train_compile: ModuleType, devices: Sequence[Any]) -> Iterator[None]:
    """Inside, MaxText builds its mesh of these devices, and stops at the lowered step."""

    def get_topology_mesh(config: Any) -> Any:
        import jax

        shape = train_compile.maxtext_utils.create_device_mesh(config, devices)
        explicit = str(getattr(config, "shard_mode", "auto")).lower().endswith("explicit")
        kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
        types = (kind,) * len(config.mesh_axes)
        return jax.sharding.Mesh(shape, config.mesh_axes, axis_types=types)

    def jit_and_compile(
        func: Any, args: Any, kwargs: Any, mesh: Any, in_shardings: Any, out_shardings: Any,
        static_argnums: Any, donate_argnums: Any, config: Any, rules: Any,
    ) -> None:  # fmt: skip
        import jax

        flags = getattr(config, "compile_xla_flags", "")
        options = train_compile.max_utils.parse_libtpu_flags_to_dict(flags) if flags else {}
        with jax.set_mesh(mesh), mesh, rules:
            step = jax.jit(
                func, in_shardings=in_shardings, out_shardings=out_shardings,
                static_argnums=static_argnums, donate_argnums=donate_argnums,
                compiler_options=options,
            )  # fmt: skip
            raise _Lowered(step.lower(*args, **kwargs))

    patch = mock.patch.object
    with (
        patch(train_compile, "get_topology_mesh", get_topology_mesh),
        patch(train_compile, "jit_and_compile", jit_and_compile),
        patch(train_compile.max_utils, "print_system_information"),
    ):
        yield
