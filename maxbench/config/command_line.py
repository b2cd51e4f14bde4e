"""The command line: flags -> Run. Imports no jax, so that a wrong flag is refused at once."""

import difflib
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from absl import flags

from maxbench.config import gpu_files, ineffective, precedence, recipes, resolve, run_flags
from maxbench.config.errors import UserError
from maxbench.config.number_formats import DTYPES
from maxbench.config.run import SECTIONS, Run
from maxbench.hardware.gpus import GPU_TYPES, GpuTypes

# Flag of each setting, config.SECTION.FIELD -> its dataclass field.
SETTINGS = {
    f"config.{section}.{name}": field
    for section, cls in SECTIONS.items()
    for name, field in cls.__dataclass_fields__.items()
}


def define(fv: flags.FlagValues, groups: Iterable[str] = run_flags.FLAG_GROUPS) -> None:
    """Defines every setting as a flag, and the shorthand flags of some groups.

    Values stay text: the fields that the flags set parse and check them (config/validation.py).
    """
    texts = {
        name: text for group in groups for name, (_, text) in run_flags.FLAG_GROUPS[group].items()
    }
    for name, text in (texts | dict.fromkeys(SETTINGS, "")).items():
        define_flag = flags.DEFINE_bool if is_bool(name) else flags.DEFINE_string
        define_flag(name, None, text, flag_values=fv)


def is_bool(flag: str) -> bool:
    """Whether a flag that describes a run takes no value: --NAME or --noNAME."""
    path = f"config.{run_flags.FLAGS.get(flag.removeprefix('no'))}"
    field = SETTINGS.get(flag) or SETTINGS.get(path)
    return flag == "strong_scaling" or (field is not None and field.type is bool)


def parse(fv: flags.FlagValues, argv: Sequence[str], gpus: int | None = None) -> Run:
    """Parses argv (program name first) with the flags in fv and builds the Run.

    Args:
      fv: flags of a command.
      argv: program name, then flags.
      gpus: replaces the value of --gpus.

    Raises:
      UserError: an invalid flag or value, a run that cannot be, or a setting without effect in it.
    """
    refuse_positional(parse_flags(fv, argv))
    if fv["config"].value is None:
        raise UserError("--config is missing; for example --config llama31_8b:tiny")

    def present(names: Iterable[str]) -> dict[str, Any]:
        return {name: fv[name].value for name in names if name in fv and fv[name].present}

    shorthands = present(run_flags.FLAGS)
    overrides = {name.removeprefix("config."): x for name, x in present(SETTINGS).items()}
    hardware = gpu_types(fv["hardware"].value)
    config = precedence.build_config(
        recipes.load_workload(fv["config"].value),
        gpus=gpus or fv["gpus"].value,
        strong_scaling=fv.strong_scaling,
        flags=shorthands,
        overrides=overrides,
        gpu_types=hardware,
    )
    run = resolve.resolve(config, hardware)
    ineffective.check_effective(run, [*(run_flags.FLAGS[name] for name in shorthands), *overrides])
    return run


def parse_flags(fv: flags.FlagValues, argv: Sequence[str]) -> list[str]:
    """Parses argv (program name first) into fv; returns the program name and what is no flag.

    Raises:
      UserError: an unknown flag, or a value that absl refuses.
    """
    fv.set_gnu_getopt()  # flags may follow paths
    try:
        rest = fv(list(argv), known_only=True)
    except (flags.Error, ValueError) as e:  # ValueError: --flagfile may name any file
        text = re.sub(r": \('Non-boolean.*", " must be true or false", str(e))
        raise UserError(re.sub(r": invalid literal.*", " must be a whole number", text)) from None
    cut = rest.index("--") if "--" in rest else len(rest)
    if name := next((word for word in rest[1:cut] if word.startswith("-")), ""):
        name = name.lstrip("-").partition("=")[0]
        if name.removeprefix("no") in run_flags.FLAGS or name in run_flags.FLAGS:
            raise UserError(f"--{name} is a flag of maxbench train and has no effect here")
        raise UserError(f"unknown flag {name!r}{_did_you_mean(name, [*fv])}")
    return rest[:cut] + rest[cut + 1 :]


def refuse_positional(rest: Sequence[str]) -> None:
    """Raises UserError if parse_flags() returned more than the program name."""
    if rest[1:]:
        raise UserError(f"unexpected argument {rest[1]!r}: every setting is a flag, --name value")


def flag_words(values: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> list[str]:
    """Keywords as words of a command line: {'gpus': 8, 'wandb': True} -> ['--gpus=8', '--wandb'].

    Args:
      values: flags by name; None stands for a flag that is not set.
      settings: any setting by its path, as {'train.remat': 'full'}.
    """
    every = {**values, **{f"config.{path}": value for path, value in (settings or {}).items()}}
    words = []
    for name, value in every.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no{name}")
        elif value is not None:
            words.append(f"--{name}={value}")
    return words


def run_of(words: Sequence[str]) -> Run:
    """The Run that flags describe: run_of(["--config", "llama2_70b", "--gpus", "64"]).

    Raises:
      UserError: an invalid flag or value, or a run that cannot be.
    """
    fv = flags.FlagValues()
    define(fv)
    return parse(fv, ["maxbench", *words])


def gpu_types(path: str | None) -> GpuTypes:
    """The built-in GPU types, and those of the file of --hardware, if there is one.

    Raises:
      UserError: the file cannot be read, or an entry of it is invalid.
    """
    return gpu_files.read(path) if path else GPU_TYPES


def writable(flag: str, text: str | None, suffix: str) -> pathlib.Path | None:
    """The file that a flag names for writing, or None without the flag.

    Raises:
      UserError: another suffix, or a folder that cannot be written.
    """
    if text is None:
        return None
    path = pathlib.Path(text)
    if path.suffix != suffix or not os.access(path.parent, os.W_OK):
        raise UserError(f"{flag}={text!r} must be a {suffix} file in a folder that can be written")
    return path


def options(flag: str) -> tuple[str, ...]:
    """The values of a flag that describes a run, where it is one of a few names."""
    path = run_flags.FLAGS[flag]
    known = {"precision.dtype": DTYPES} | {"layout.gpu_type": GPU_TYPES}
    return tuple(known.get(path) or SETTINGS[f"config.{path}"].metadata.get("options", ()))


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    """A hint at flags of similar names: the same field in another section, or a close spelling."""
    field = name.rpartition(".")[2]
    same = [path for path in SETTINGS if path in known and path.endswith(f".{field}")]
    near = same or difflib.get_close_matches(name, known, n=1)
    return f"; did you mean --{' or --'.join(near)}?" if near else ""
