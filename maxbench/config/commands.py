"""The commands, as commands.toml declares them: their flags, their help, and the list of them."""

import dataclasses
import functools
import pathlib
import shutil
import textwrap
import tomllib
from collections.abc import Mapping, Sequence

from absl import flags

import maxbench
from maxbench.config import command_line, recipes

NARROW, WIDE = 60, 110  # columns that a page of help may have
INDENT = 24  # columns before what a flag means


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag of a command's own."""

    text: str
    kind: str = "text"  # text | yes | whole (a number from 1)
    default: str | int | bool | None = None
    choices: tuple[str, ...] = ()
    also: str = ""  # another name of it

    @property
    def help_line(self) -> str:
        """What help says."""
        shown = f" ({self.default})" if self.default not in (None, "", False) else ""
        return self.text + (f": {' | '.join(self.choices)}" if self.choices else "") + shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """What is typed after `maxbench`."""

    module: str  # main(argv) does it and returns the exit code
    does: str
    examples: tuple[str, ...]
    words: str = ""  # what stands beside flags
    run: tuple[str, ...] = ()  # groups of recipes.GROUPS
    takes: tuple[str, ...] = ()  # further ones, which change nothing here
    flags: Mapping[str, Mapping[str, Flag]] = dataclasses.field(default_factory=dict)
    notes: str = ""
    own_help: bool = False  # of what its module knows

    @property
    def own(self) -> dict[str, Flag]:
        """All flags of its own, by name."""
        return {name: flag for group in self.flags.values() for name, flag in group.items()}

    def groups(self) -> dict[str, dict[str, str]]:
        """Of each group of flags, what each means."""
        named = {
            group: {n: f.help_line for n, f in each.items()} for group, each in self.flags.items()
        }
        runs = {g: {n: text for n, (_, text) in recipes.FLAG_GROUPS[g].items()} for g in self.run}
        return runs | named


@functools.cache
def commands() -> dict[str, Command]:
    """All of them, by name."""
    found = {}
    table = tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text())
    for name, given in table.items():
        groups = given.pop("flags", {})
        made = {g: {n: Flag(**f) for n, f in each.items()} for g, each in groups.items()}
        found[name] = Command(**given, flags=made)
    return found


def define(name: str) -> flags.FlagValues:
    """The flags of a command, those that describe its run included, with no value yet."""
    fv, command = flags.FlagValues(), commands()[name]
    if command.run:
        command_line.define(fv, (*command.run, *command.takes))
    for flag_name, flag in command.own.items():
        if flag.kind == "yes":
            flags.DEFINE_bool(flag_name, False, flag.text, flag_values=fv)
        elif flag.kind == "whole":
            flags.DEFINE_integer(flag_name, flag.default, flag.text, 1, flag_values=fv)
        else:
            flags.DEFINE_string(flag_name, flag.default, flag.text, flag_values=fv)
        if flag.also:
            flags.DEFINE_alias(flag.also, flag_name, flag_values=fv)
    return fv


def flag_names(name: str) -> list[str]:
    """All that help tells of, in its order."""
    return [flag for each in commands()[name].groups().values() for flag in each]


def help_requested(words: Sequence[str]) -> bool:
    """Whether the words after a command's name ask for its help."""
    return bool({"--help", "-h", "-help"} & {*words})


def help_text(name: str) -> str:
    """A command's page of help, as wide as the terminal."""
    command = commands()[name]
    width = min(max(shutil.get_terminal_size().columns, NARROW), WIDE)
    usage = ["maxbench", name, "[flags]" * bool(command.groups()), command.words]
    lines = [f"usage: {' '.join(filter(None, usage))}", "", *textwrap.wrap(command.does, width), ""]
    lines += [f"  {line}" for line in command.examples]
    if command.notes:
        lines += ["", *textwrap.wrap(command.notes, width)]
    for group, each in command.groups().items():
        lines += ["", group]
        for flag, text in each.items():
            lines += row(f"--{flag}", text, width)
    if "workload" in command.run:
        lines += ["", "any other setting; `maxbench train --config NAME --json` prints all"]
        lines += ["  --config.SECTION.FIELD=VALUE"]
    return "\n".join(lines)


def row(name: str, text: str, width: int) -> list[str]:
    """A name, and beside it what it means."""
    head = f"  {name}".ljust(INDENT)
    return textwrap.wrap(head + text, width, subsequent_indent=" " * INDENT) or [head]


def command_list() -> str:
    """All commands, with a sentence and an example each."""
    width = min(max(shutil.get_terminal_size().columns, NARROW), WIDE)
    lines = [
        *textwrap.wrap(maxbench.__doc__.splitlines()[0], width),
        "",
        "usage: maxbench COMMAND [flags]",
        "",
    ]
    for name, command in commands().items():
        lines += textwrap.wrap(f"  {name:<12}{command.does}", width, subsequent_indent=" " * 14)
        lines += [f"              $ {command.examples[0]}"]
    more = "`maxbench COMMAND --help` has all flags of one; `maxbench --version` says what runs."
    return "\n".join([*lines, "", *textwrap.wrap(more, width)])
