"""The command line: flags -> Run. Imports no jax, so that a wrong flag costs no time."""

import contextlib
import difflib
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence

from absl import flags
from ml_collections import config_flags

from maxbench.hardware import gpus
from maxbench.spec import recipes
from maxbench.spec.errors import UserError
from maxbench.spec.run import Run

DEFINE = {int: flags.DEFINE_integer, bool: flags.DEFINE_bool, str: flags.DEFINE_string}


def define(fv: flags.FlagValues, argv: Sequence[str]) -> None:
    """Defines the flags that describe a run, the same for every command.

    argv is where --config.section.field flags are looked for.
    """
    config_flags.DEFINE_config_file(
        "config",
        None,
        "Workload, FILE[:preset,preset]; presets: " + ", ".join(recipes.PRESETS),
        flag_values=fv,
        sys_argv=list(argv),
    )
    define = lambda kind, name, text: DEFINE[kind](name, None, text, flag_values=fv)
    define(int, "gpus", "take the recipe's row for this many GPUs")
    define(bool, "strong_scaling", "rows whose global batch stays constant")
    define(str, "hardware", "file of further GPU types, as maxbench/hardware/gpus.toml")
    for name, (path, text) in recipes.FLAGS.items():
        section, _, field = path.partition(".")
        define(recipes.SECTIONS[section].__dataclass_fields__[field].type, name, text)


def parse(fv: flags.FlagValues, argv: Sequence[str]) -> Run:
    """Parses argv (program name first) with the flags in fv and builds the Run.

    Raises:
      UserError: input that cannot be, with what would work.
    """
    _config_exists(argv)
    rest = flags_of(fv, argv)
    if rest[1:]:
        raise UserError(f"unexpected argument {rest[1]!r}: every setting is a flag, --name value")
    if fv["config"].value is None:
        raise UserError(f"--config is missing; for example --config {_workloads()[0]}:tiny")
    if fv["hardware"].value:
        add_hardware(fv["hardware"].value)
    given = {name: fv[name].value for name in recipes.FLAGS if fv[name].present}
    return recipes.resolve(
        fv["config"].value,
        gpus=fv["gpus"].value,
        strong_scaling=fv["strong_scaling"].value,
        flags=given,
        overrides=config_flags.get_override_values(fv["config"]),
    )


def add_hardware(path: str) -> None:
    """Adds the GPU types of a user's file to those that gpu_type may name.

    Raises:
      UserError: there is no such file, or a key of it cannot be.
    """
    try:
        gpus.add(path)
    except OSError as e:
        raise UserError(f"hardware={path!r} cannot be read: {e.strerror}") from None
    except ValueError as e:
        raise UserError(f"hardware={path!r}: {e}") from None


def run_of(words: Sequence[str]) -> Run:
    """The Run that flags describe: run_of(["--config", "configs/llama2_70b.py", "--gpus", "64"]).

    Raises:
      UserError: input that cannot be, with what would work.
    """
    fv, argv = flags.FlagValues(), ["maxbench", *words]
    define(fv, argv)
    return parse(fv, argv)


def flags_of(fv: flags.FlagValues, argv: Sequence[str]) -> list[str]:
    """What no flag took of argv; absl and ConfigDict raise whatever they trip over."""
    try:
        return fv(list(argv))
    except flags.Error as e:
        raise UserError(str(e).replace("Unknown command line flag ", "unknown flag ")) from None
    except (KeyError, AttributeError) as e:  # how ConfigDict says that a field does not exist
        near = re.search(r'mean "(\w+)" instead of "(\w+)"', str(e))
        text = f"no setting {near[2]!r}; did you mean {near[1]!r}?" if near else f"no setting {e}"
        raise UserError(text) from None
    except (ValueError, TypeError) as e:  # of a setting's value
        raise UserError(str(e)) from None


def _config_exists(argv: Sequence[str]) -> None:
    """The loader's own message for a missing file is a page long."""
    for arg, after in zip(argv, (*argv[1:], ""), strict=True):
        name, is_set, value = arg.partition("=")
        if name in ("--config", "-config"):
            path = (value if is_set else after).split(":")[0]
            if not pathlib.Path(path).is_file():
                near = difflib.get_close_matches(path, _workloads(), n=1, cutoff=0.4)
                there = f"there are {', '.join(_workloads())}"
                hint = f"did you mean {near[0]}?" if near else there
                raise UserError(f"no such file: {path}; {hint}")


def _workloads() -> list[str]:
    here = pathlib.Path("configs").glob("*.py")
    return sorted(map(str, here)) or sorted(map(str, recipes.ROOT.glob("configs/*.py")))


@contextlib.contextmanager
def clear_errors(command: str) -> Iterator[None]:
    """Turns an error of the user's input into one message on stderr and exit code 2.

    Whatever else is raised is a defect of the program, and keeps its traceback.
    """
    try:
        yield
    except (UserError, flags.Error) as e:
        print(f"maxbench {command}: error: {e}", file=sys.stderr)
        sys.exit(2)


def help_text(doc: str, fv: flags.FlagValues) -> str:
    """The command's docstring and its flags, a line each."""
    found = (f for _, each in sorted(fv.flags_by_module_dict().items()) for f in each)
    lines = [f"  --{f.name:<15} {f.help.split(': ' + chr(10))[0]}" for f in found]
    lines.append("  --config.section.field=value: any other setting; --dry_run prints them all")
    return doc + "\n\nflags:\n" + "\n".join(lines)
