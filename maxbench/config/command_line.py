"""The command line: flags -> Run. Imports no jax, so that a wrong flag costs no time."""

import contextlib
import difflib
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

from absl import flags

from maxbench.config import recipes
from maxbench.config.errors import UserError, escape_control
from maxbench.config.number_formats import DTYPES
from maxbench.config.run import Run
from maxbench.hardware.gpus import GPU_TYPES, GpuTypes

# Of each setting, --config.section.field, its field.
SETTINGS = {
    f"config.{section}.{name}": field
    for section, cls in recipes.SECTIONS.items()
    for name, field in cls.__dataclass_fields__.items()
}


def define(fv: flags.FlagValues, groups: Iterable[str] = recipes.FLAG_GROUPS) -> None:
    """Defines the flags that describe a run, of some groups, and every setting.

    They keep the text that they are given: what it may be is known to the fields they set.
    """
    given = {name: told for group in groups for name, told in recipes.FLAG_GROUPS[group].items()}
    for name, (_, text) in (given | dict.fromkeys(SETTINGS, ("", ""))).items():
        kind = flags.DEFINE_bool if is_bool(name) else flags.DEFINE_string
        kind(name, None, text, flag_values=fv)


def is_bool(flag: str) -> bool:
    """Whether a flag that describes a run stands alone, or with `no` before it."""
    path = f"config.{recipes.FLAGS.get(flag.removeprefix('no'))}"
    field = SETTINGS.get(flag) or SETTINGS.get(path)
    return flag == "strong_scaling" or (field is not None and field.type is bool)


def parse(fv: flags.FlagValues, argv: Sequence[str], gpus: int | None = None) -> Run:
    """Parses argv (program name first) with the flags in fv and builds the Run.

    `gpus` is taken in the place of --gpus.

    Raises:
      UserError: input that cannot be, with what would work.
    """
    rest = flags_of(fv, argv)
    no_words(rest)
    if fv["config"].value is None:
        raise UserError("--config is missing; for example --config llama31_8b:tiny")
    given = lambda names: {n: fv[n].value for n in names if n in fv and fv[n].present}
    return recipes.build_run(
        recipes.load_workload(fv["config"].value),
        gpus=gpus or fv["gpus"].value,
        strong_scaling=fv["strong_scaling"].value,
        flags=given(recipes.FLAGS),
        overrides={k.removeprefix("config."): value for k, value in given(SETTINGS).items()},
        gpu_types=gpu_types(fv["hardware"].value),
    )


def no_words(rest: Sequence[str]) -> None:
    """Raises UserError where something stands beside the command's name and its flags."""
    if rest[1:]:
        raise UserError(f"unexpected argument {rest[1]!r}: every setting is a flag, --name value")


def gpu_types(path: str | None) -> GpuTypes:
    """The built-in GPU types, and those of the file of --hardware, if there is one.

    Raises:
      UserError: the file cannot be read, or an entry of it is invalid.
    """
    try:
        return GPU_TYPES.read(path) if path else GPU_TYPES
    except OSError as e:
        raise UserError(f"hardware={path!r} cannot be read: {e.strerror}") from None
    except ValueError as e:
        raise UserError(f"hardware={path!r}: {e}") from None


def writable(flag: str, text: str | None, suffix: str) -> pathlib.Path | None:
    """The file that a flag names, to be written; None where it was not given.

    Raises:
      UserError: another kind of file, or a folder that cannot be written.
    """
    if text is None:
        return None
    path = pathlib.Path(text)
    if path.suffix != suffix or not os.access(path.parent, os.W_OK):
        raise UserError(f"{flag}={text!r} must be a {suffix} file in a folder that can be written")
    return path


def run_of(words: Sequence[str]) -> Run:
    """The Run that flags describe: run_of(["--config", "llama2_70b", "--gpus", "64"]).

    Raises:
      UserError: input that cannot be, with what would work.
    """
    fv = flags.FlagValues()
    define(fv)
    return parse(fv, ["maxbench", *words])


def flags_of(fv: flags.FlagValues, argv: Sequence[str]) -> list[str]:
    """What no flag took of argv.

    Raises:
      UserError: a flag that there is not, or what cannot be of absl's own kinds.
    """
    fv.set_gnu_getopt()  # flags may stand behind paths
    try:
        rest = fv(list(argv), known_only=True)
    except (flags.Error, ValueError) as e:  # a file of flags may hold anything
        text = re.sub(r": \('Non-boolean.*", " must be true or false", str(e))
        raise UserError(re.sub(r": invalid literal.*", " must be a whole number", text)) from None
    cut = rest.index("--") if "--" in rest else len(rest)
    if name := next((word for word in rest[1:cut] if word.startswith("-")), ""):
        name = name.lstrip("-").partition("=")[0]
        if name.removeprefix("no") in recipes.FLAGS or name in recipes.FLAGS:
            raise UserError(f"--{name} is of train alone, and changes nothing here")
        raise UserError(f"unknown flag {name!r}{_meant(name, [*fv])}")
    return rest[:cut] + rest[cut + 1 :]


def options(flag: str) -> tuple[str, ...]:
    """What a flag that describes a run may be, where these are few names."""
    path = recipes.FLAGS[flag]
    known = {"precision.dtype": DTYPES} | {"layout.gpu_type": GPU_TYPES}
    return tuple(known.get(path) or SETTINGS[f"config.{path}"].metadata.get("options", ()))


def _meant(name: str, known: Sequence[str]) -> str:
    """A hint at the flag that was meant: a field of another section, or what is spelt alike."""
    field = name.rpartition(".")[2]
    same = [path for path in SETTINGS if path in known and path.endswith(f".{field}")]
    near = same or difflib.get_close_matches(name, known, n=1)
    return f"; did you mean --{' or --'.join(near)}?" if near else ""


@contextlib.contextmanager
def clear_errors(command: str) -> Iterator[None]:
    """Turns an error of the user's input into one message on stderr and exit code 2.

    Whatever else is raised is a defect of the program, and keeps its traceback.
    """
    try:
        yield
    except (UserError, flags.Error) as e:
        text = escape_control(" ".join(str(e).split()))
        text = text if len(text) < 1000 else f"{text[:800]} ... {text[-150:]}"
        print(f"maxbench {command}: error: {text}", file=sys.stderr)
        sys.exit(2)
