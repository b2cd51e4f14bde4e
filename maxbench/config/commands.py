"""Help pages: the list of commands, and a page per command, from config/options.py."""

import inspect
import shutil
import textwrap
from collections.abc import Sequence

import maxbench
from maxbench.config import options
from maxbench.config.options import COMMANDS, Options
from maxbench.terminal import console

NARROW, WIDE = 60, 110  # columns of a help page, at least and at most
FLAG_COLUMN = 22  # columns of a flag's name on a help page
HELP_FLAGS = {"--help", "-h", "-help"}


def help_requested(words: Sequence[str]) -> bool:
    """Whether the words after a command's name ask for its help page."""
    return bool(HELP_FLAGS & {*words})


def about(command: type[Options]) -> tuple[str, str]:
    """Summary and notes of a command, from its class's docstring."""
    does, _, notes = (inspect.getdoc(command) or "").partition("\n\n")
    return " ".join(does.split()), " ".join(notes.split())


def groups(command: type[Options]) -> dict[str, dict[str, str]]:
    """The groups of a command's help page: flag -> help text; last, the flags that it takes instead
    of others."""
    found = {
        title: {name: options.help_line(field) for name, field in group.items()}
        for title, group in command.groups().items()
        if title not in command.HIDDEN
    }
    if command.INSTEAD:
        known = {flag for group in found.values() for flag in group}
        others = (pair for group in groups(command.INSTEAD).values() for pair in group.items())
        found[command.INSTEAD.TITLE] = {f: text for f, text in others if f not in known}
    return found


def help_text(name: str) -> str:
    """A command's help page, as wide as the terminal."""
    command, width = COMMANDS[name], _page_width()
    (does, notes), flags = about(command), groups(command)
    usage = ["maxbench", name, "[flags]" * bool(flags), command.WORDS]
    lines = [f"usage: {' '.join(filter(None, usage))}", "", *textwrap.wrap(does, width), ""]
    lines += [f"  {line}" for line in command.EXAMPLES]
    if notes:
        lines += ["", *textwrap.wrap(notes, width)]
    for title, each in flags.items():
        pairs = ((f"--{flag}", text) for flag, text in each.items())
        lines += ["", title, *console.definitions(pairs, width=width, column=FLAG_COLUMN)]
    if issubclass(command, options.RunOptions):
        lines += ["", "any other setting; `maxbench train --config NAME --json` prints all"]
        lines += ["  --config.SECTION.FIELD=VALUE"]
    return "\n".join(lines)


def command_list() -> str:
    """All commands, with a sentence and an example each."""
    width = _page_width()
    title = (maxbench.__doc__ or "").splitlines()[0]
    lines = [*textwrap.wrap(title, width), "", "usage: maxbench COMMAND [flags]", ""]
    for name, command in COMMANDS.items():
        pairs = [(name, about(command)[0]), ("", f"$ {command.EXAMPLES[0]}")]
        lines += console.definitions(pairs, width=width, column=12)
    more = (
        "`maxbench COMMAND --help` lists a command's flags; `maxbench --version` prints versions."
    )
    return "\n".join([*lines, "", *textwrap.wrap(more, width)])


def _page_width() -> int:
    return min(max(shutil.get_terminal_size().columns, NARROW), WIDE)
