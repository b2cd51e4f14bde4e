"""The command line: words -> options -> Run. Imports no jax, so that a wrong flag is refused at
once."""

import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from absl import flags

from maxbench.config import gpu_files, ineffective, options, precedence, recipes, resolve
from maxbench.config.errors import UserError
from maxbench.config.options import FLAGS, SETTINGS, Options, RunOptions
from maxbench.config.run import LayoutConfig, Run, RunConfig
from maxbench.hardware.gpus import GPU_TYPES, GpuTypes

Command = TypeVar("Command", bound=Options)
PREFIX = "config."  # of the flag of a setting


class _Once(flags.Flag):
    """A flag whose values are the same where it is given several times."""

    def parse(self, argument: Any) -> None:
        if self.present and (second := self._parse(argument)) != self.value:
            both = f"{self._word(self.value)} and {self._word(second)}"
            raise flags.Error(f"{both} contradict each other; leave one of them out")
        super().parse(argument)

    def _word(self, value: Any) -> str:
        return f"--{self.name}={value}"


class _BoolOnce(_Once, flags.BooleanFlag):
    """A flag without a value, or with "no" before its name."""

    def _word(self, value: Any) -> str:
        return f"--{self.name}" if value else f"--no{self.name}"


def read(command: type[Command], argv: Sequence[str]) -> Command:
    """The options that argv (program name first) gives.

    Raises:
      UserError: an unknown flag or word, or an invalid value.
    """
    fv, by_flag = flags.FlagValues(), command.flags()
    settings = SETTINGS if issubclass(command, RunOptions) else {}
    # Values stay text: the fields that the flags set parse and check them.
    for name, field in {**by_flag, **{PREFIX + path: f for path, f in settings.items()}}.items():
        if "values" in field.metadata:  # NAME=VALUE, given several times
            flags.DEFINE_multi_string(name, None, "", flag_values=fv)
        elif options.type_of(field) is bool:
            flags.DEFINE_flag(_BoolOnce(name, None, ""), fv)
        else:
            parser: Any = flags.ArgumentParser()
            flags.DEFINE_flag(_Once(parser, None, name, None, ""), fv)
    words = _parse(fv, argv)
    values = fv.flag_values_dict()
    given = {name: values[name] for name in by_flag if values[name] is not None}
    by_path = {path: values[PREFIX + path] for path in settings}
    if present := {path: value for path, value in by_path.items() if value is not None}:
        given["settings"] = present
    if settings and "config" not in given:
        raise UserError("--config is missing; for example --config llama31_8b:tiny")
    if words and not command.WORDS:
        raise UserError(f"unexpected argument {words[0]!r}: {command.HINT}")
    if words:
        given[options.positional(command)] = words
    return command(**given)


def _parse(fv: flags.FlagValues, argv: Sequence[str]) -> list[str]:
    """Parses argv (program name first) into fv; returns the words that are no flags.

    Raises:
      UserError: an unknown flag, or a value that absl refuses.
    """
    fv.set_gnu_getopt()  # flags may follow paths
    cut = argv.index("--") if "--" in argv else len(argv)
    spelled = lambda flag: f"--{_spelled(flag[1], fv)}"
    words = [re.sub(r"^--([\w.-]+)", spelled, word) for word in argv[:cut]]
    try:
        rest = fv([*words, *argv[cut:]], known_only=True)
    except (flags.Error, ValueError) as e:  # ValueError: --flagfile may name any file
        text = re.sub(r": \('Non-boolean.*", " must be true or false", str(e))
        raise UserError(text) from None
    cut = rest.index("--") if "--" in rest else len(rest)
    if name := next((word for word in rest[1:cut] if word.startswith("-")), ""):
        name = name.lstrip("-").partition("=")[0]
        if name.removeprefix("no") in FLAGS or name in FLAGS:
            raise UserError(f"--{name} is a flag of maxbench train and has no effect here")
        hint = options.did_you_mean(f"--{name}", [f"--{flag}" for flag in fv])
        raise UserError(f"unknown flag {name!r}{hint}")
    return rest[1:cut] + rest[cut + 1 :]


def _spelled(name: str, known: flags.FlagValues) -> str:
    """A flag's name for its alias: dry_run for dry-run, nowait for no-wait."""
    name = name.replace("-", "_")
    return name.replace("no_", "no", 1) if name.removeprefix("no_") in known else name


def words_of(asked: RunOptions) -> list[str]:
    """Options as words of a command line, for people: ['--config', 'mixtral', '--notp_overlap']."""
    values: dict[str, Any] = asked.changed()
    settings: Mapping[str, Any] = values.pop("settings", {})
    given = {name: value for name, value in values.items() if name in asked.flags()}
    words = []
    for name, value in (given | {PREFIX + path: x for path, x in settings.items()}).items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no{name}")
        else:
            words += [f"--{name}", str(value)]
    return words


def words_for(run: Run, asked: RunOptions) -> list[str]:
    """Words of a command line that describe a run by its axes, without --gpus: what options give,
    and the settings in which the run differs from it."""
    of_run = {**RunOptions.flags(), **options.Cluster.flags()}
    by_row = {"gpus", "strong_scaling", *LayoutConfig.__dataclass_fields__} - {"gpu_type"}
    given = {n: x for n, x in asked.changed().items() if n in of_run and n not in by_row}
    settings = dict(asked.settings or {})
    base = precedence.build_config(
        recipes.load_workload(asked.config, gpu_types(asked.hardware)),
        flags={name: value for name, value in given.items() if name in FLAGS},
        overrides={path: x for path, x in settings.items() if not path.startswith("layout.")},
        gpu_types=gpu_types(asked.hardware),
    )
    flag_of = {path: name for name, path in FLAGS.items()}
    for path, value in _settings_of(run.config).items():
        if value != _settings_of(base)[path]:
            text = "auto" if value is None else str(value)
            (given if path in flag_of else settings)[flag_of.get(path, path)] = text
        elif path.startswith("layout."):
            settings.pop(path, None)
    return words_of(type(asked)(**given, settings=settings))


def _settings_of(config: RunConfig) -> dict[str, Any]:
    """The settings that a row or a search determines: 'section.field' -> value."""
    sections = {name: vars(getattr(config, name)) for name in ("layout", "train", "precision")}
    each = {
        f"{name}.{field}": x for name, fields in sections.items() for field, x in fields.items()
    }
    return {"model.layers": config.model.layers, **each}


def resolve_run(asked: RunOptions, row: precedence.RowKey | None = None) -> Run:
    """The Run that options describe.

    Args:
      row: replaces the row of the table of layouts that they select.

    Raises:
      UserError: a run that cannot be, or a setting without effect in it.
    """
    given, settings = asked.changed(), dict(asked.settings or {})
    shorthands = {name: value for name, value in given.items() if name in FLAGS}
    hardware = gpu_types(asked.hardware)
    config = precedence.build_config(
        recipes.load_workload(asked.config, hardware),
        gpus=asked.gpus,
        strong_scaling=asked.strong_scaling,
        row=row,
        flags=shorthands,
        overrides=settings,
        gpu_types=hardware,
    )
    run = resolve.resolve(config, hardware)
    ineffective.check_effective(run, [*(FLAGS[name] for name in shorthands), *settings])
    return run


def run_of(words: Sequence[str]) -> Run:
    """The Run that flags describe: run_of(["--config", "llama2_70b", "--gpus", "64"]).

    Raises:
      UserError: an invalid flag or value, or a run that cannot be.
    """
    return resolve_run(read(options.TrainOptions, ["maxbench", *words]))


def gpu_types(path: str | None) -> GpuTypes:
    """The built-in GPU types, and those of the file of --hardware, if there is one.

    Raises:
      UserError: the file cannot be read, or an entry of it is invalid.
    """
    return gpu_files.read(path) if path else GPU_TYPES


def writable(name: str, text: str | None, suffix: str) -> pathlib.Path | None:
    """The file that an option names for writing, or None without one.

    Raises:
      UserError: another suffix, or a folder that cannot be written.
    """
    if text is None:
        return None
    path = pathlib.Path(text)
    if path.suffix != suffix or not os.access(path.parent, os.W_OK):
        raise UserError(f"{name}={text!r} must be a {suffix} file in a folder that can be written")
    return path
