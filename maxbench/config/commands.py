"""The commands of commands.toml: their flags, their help, and the list of them."""

import dataclasses
import functools
import pathlib
import shutil
import textwrap
import tomllib
from collections.abc import Mapping, Sequence

from absl import flags

import maxbench
from maxbench.config import command_line, run_flags
from maxbench.terminal import console

NARROW, WIDE = 60, 110  # columns of a help page, at least and at most
FLAG_COLUMN = 22  # columns of a flag's name on a help page
HELP_FLAGS = {"--help", "-h", "-help"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag of one command."""

    text: str
    kind: str = "text"  # text | bool | int (from 1)
    default: str | int | bool | None = None
    choices: tuple[str, ...] = ()
    also: str = ""  # an alias

    @property
    def help_line(self) -> str:
        """The help text, with choices and default."""
        default = f" ({self.default})" if self.default not in (None, "", False) else ""
        return self.text + (f": {' | '.join(self.choices)}" if self.choices else "") + default


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A command `maxbench NAME`."""

    module: str  # its main(argv) returns the exit code
    does: str
    examples: tuple[str, ...]
    words: str = ""  # positional arguments
    run: tuple[str, ...] = ()  # groups of run_flags.FLAG_GROUPS
    takes: tuple[str, ...] = ()  # further groups, accepted without effect
    flags: Mapping[str, Mapping[str, Flag]] = dataclasses.field(default_factory=dict)
    notes: str = ""
    own_help: bool = False  # its module prints the help page

    @property
    def own(self) -> dict[str, Flag]:
        """The command's own flags by name, without those that describe a run."""
        return {name: flag for group in self.flags.values() for name, flag in group.items()}

    def groups(self) -> dict[str, dict[str, str]]:
        """Help texts of all flags: group -> flag -> text."""
        run = {g: {n: text for n, (_, text) in run_flags.FLAG_GROUPS[g].items()} for g in self.run}
        own = {g: {n: flag.help_line for n, flag in each.items()} for g, each in self.flags.items()}
        return run | own


@functools.cache
def commands() -> dict[str, Command]:
    """All commands by name."""
    table = tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text())
    return {name: _command(fields) for name, fields in table.items()}


def _command(fields: dict) -> Command:
    groups = fields.pop("flags", {})
    flag_groups = {g: {n: Flag(**f) for n, f in each.items()} for g, each in groups.items()}
    return Command(**fields, flags=flag_groups)


def define(name: str) -> flags.FlagValues:
    """The flags of a command, including those that describe its run, without values."""
    fv, command = flags.FlagValues(), commands()[name]
    if command.run:
        command_line.define(fv, (*command.run, *command.takes))
    for flag_name, flag in command.own.items():
        if flag.kind == "bool":
            flags.DEFINE_bool(flag_name, False, flag.text, flag_values=fv)
        elif flag.kind == "int":
            flags.DEFINE_integer(flag_name, flag.default, flag.text, 1, flag_values=fv)
        else:
            default = None if flag.default is None else str(flag.default)
            flags.DEFINE_string(flag_name, default, flag.text, flag_values=fv)
        if flag.also:
            flags.DEFINE_alias(flag.also, flag_name, flag_values=fv)
    return fv


def flag_names(name: str) -> list[str]:
    """The flags on a command's help page, in its order."""
    return [flag for each in commands()[name].groups().values() for flag in each]


def help_requested(words: Sequence[str]) -> bool:
    """Whether the words after a command's name ask for its help page."""
    return bool(HELP_FLAGS & {*words})


def help_text(name: str) -> str:
    """A command's help page, as wide as the terminal."""
    command, width = commands()[name], _page_width()
    usage = ["maxbench", name, "[flags]" * bool(command.groups()), command.words]
    lines = [f"usage: {' '.join(filter(None, usage))}", "", *textwrap.wrap(command.does, width), ""]
    lines += [f"  {line}" for line in command.examples]
    if command.notes:
        lines += ["", *textwrap.wrap(command.notes, width)]
    for group, each in command.groups().items():
        flag_texts = ((f"--{flag}", text) for flag, text in each.items())
        lines += ["", group, *console.definitions(flag_texts, width=width, column=FLAG_COLUMN)]
    if "workload" in command.run:
        lines += ["", "any other setting; `maxbench train --config NAME --json` prints all"]
        lines += ["  --config.SECTION.FIELD=VALUE"]
    return "\n".join(lines)


def command_list() -> str:
    """All commands, with a sentence and an example each."""
    width = _page_width()
    title = (maxbench.__doc__ or "").splitlines()[0]
    lines = [*textwrap.wrap(title, width), "", "usage: maxbench COMMAND [flags]", ""]
    for name, command in commands().items():
        pairs = [(name, command.does), ("", f"$ {command.examples[0]}")]
        lines += console.definitions(pairs, width=width, column=12)
    more = (
        "`maxbench COMMAND --help` lists a command's flags; `maxbench --version` prints versions."
    )
    return "\n".join([*lines, "", *textwrap.wrap(more, width)])


def _page_width() -> int:
    return min(max(shutil.get_terminal_size().columns, NARROW), WIDE)
