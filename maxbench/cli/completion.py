"""Completion of commands, flags and workloads in bash and zsh: `maxbench completion bash`."""

import itertools
from collections.abc import Iterable, Sequence

from maxbench.config import command_line, commands, options, recipes
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
    shells = command_line.read(options.Completion, argv).words
    if len(shells) != 1:
        raise UserError("name one shell: maxbench completion bash, or zsh")
    check_choice("shell", shells[0], ("bash", "zsh"))
    print((ZSH if shells[0] == "zsh" else "") + script(), end="")
    return 0


def script() -> str:
    """The completion script for bash; zsh needs ZSH before it."""
    values: dict[str, Iterable[str]] = {"config": sorted(p.stem for p in recipes.workloads())}
    flags = {}
    for name, command in options.COMMANDS.items():
        for flag, field in command.flags().items():
            values.setdefault(flag, field.metadata.get("options", ()))
        flags[name] = [*itertools.chain(*commands.groups(command).values()), "help"]
    parts = {
        "commands": _words(options.COMMANDS),
        "presets": _words(recipes.PRESETS),
        "values": _cases({f"--{n}": _words(x) for n, x in values.items() if x}),
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
