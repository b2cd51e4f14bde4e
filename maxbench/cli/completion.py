"""Completion of commands, flags and workloads in bash and zsh: `maxbench completion bash`."""

from collections.abc import Iterable, Sequence

from maxbench.config import command_line, commands, recipes, run_flags
from maxbench.config.errors import UserError, check_choice

# bash splits words at = and :, zsh does not: --config=NAME:PRESET is five words or one.
SCRIPT = """\
_maxbench() {
  local word=${COMP_WORDS[COMP_CWORD]} last=${COMP_WORDS[COMP_CWORD-1]} words=
  if [[ $word == [=:] ]]; then last=$word word=; fi
  if [[ $last == = ]]; then last=${COMP_WORDS[COMP_CWORD-2]}; fi
  if [[ $COMP_CWORD == 1 ]]; then
    words='@commands@'
  elif [[ $last == : ]]; then
    words='@presets@'
  elif [[ $last == --config && $word == *:* ]]; then
    for last in @presets@; do words+=\" ${word%%:*}:$last\"; done
  else
    case $last in
@values@
      *) if [[ $word == -* ]]; then case ${COMP_WORDS[1]} in
@flags@
      esac; fi ;;
    esac
  fi
  COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))
}
complete -o default -F _maxbench maxbench
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def main(argv: Sequence[str]) -> int:
    """Prints the script for a shell; returns the exit code."""
    shells = command_line.parse_flags(commands.define("completion"), argv)[1:]
    if len(shells) != 1:
        raise UserError("name one shell: maxbench completion bash, or zsh")
    check_choice("shell", shells[0], ("bash", "zsh"))
    print((ZSH if shells[0] == "zsh" else "") + script(), end="")
    return 0


def script() -> str:
    """The completion script for bash; zsh needs ZSH before it."""
    all_commands = commands.commands()
    values: dict[str, Iterable[str]] = {"config": sorted(p.stem for p in recipes.workloads())}
    values |= {name: command_line.options(name) for name in run_flags.FLAGS}
    for command in all_commands.values():
        values |= {name: flag.choices for name, flag in command.own.items() if flag.choices}
    flags = {name: [*commands.flag_names(name), "help"] for name in all_commands}
    parts = {
        "commands": _words(all_commands),
        "presets": _words(recipes.PRESETS),
        "values": _cases({f"--{n}": _words(options) for n, options in values.items() if options}),
        "flags": _cases({n: _words(f"--{f}" for f in names) for n, names in flags.items()}),
    }
    text = SCRIPT
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    return text


def _words(words: Iterable[str]) -> str:
    return " ".join(filter(None, words))


def _cases(words: dict[str, str]) -> str:
    return "\n".join(f"      {name}) words='{text}' ;;" for name, text in words.items())
