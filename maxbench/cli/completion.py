"""Completion of commands, flags and workloads in bash and zsh: `maxbench completion bash`."""

from collections.abc import Iterable, Sequence

from maxbench.config import command_line, commands, recipes
from maxbench.config.errors import UserError, check_choice

# bash cuts words at = and :, zsh does not: a value of --config may be three words here, or one.
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
    if commands.print_help_if_asked("completion", argv):
        return 0
    with command_line.clear_errors("completion"):
        shells = command_line.flags_of(commands.define("completion"), argv)[1:]
        if len(shells) != 1:
            raise UserError("give one shell: maxbench completion bash, or zsh")
        check_choice("shell", shells[0], ("bash", "zsh"))
        print((ZSH if shells[0] == "zsh" else "") + script(), end="")
    return 0


def script() -> str:
    """What bash reads; zsh too, after ZSH."""
    every = commands.commands()
    values = {"config": sorted(path.stem for path in recipes.workloads())}
    values |= {name: command_line.options(name) for name in recipes.FLAGS}
    own = (each.own.items() for each in every.values())
    values |= {name: flag.choices for each in own for name, flag in each if flag.choices}
    flags = {name: [*commands.flag_names(name), "help"] for name in every}
    parts = {
        "commands": _words(every),
        "presets": _words(recipes.PRESETS),
        "values": _cases({f"--{n}": _words(told) for n, told in values.items() if any(told)}),
        "flags": _cases({n: _words(f"--{f}" for f in told) for n, told in flags.items()}),
    }
    made = SCRIPT
    for name, text in parts.items():
        made = made.replace(f"@{name}@", text)
    return made


def _words(words: Iterable[str]) -> str:
    return " ".join(filter(None, words))


def _cases(words: dict[str, str]) -> str:
    return "\n".join(f"      {name}) words='{told}' ;;" for name, told in words.items())
