"""The list of commands, their help pages and flags, the version, and shell completion."""

import dataclasses
import itertools
import re
import subprocess
import sys
from typing import Any

import pytest

from maxbench import __main__ as overview
from maxbench.cli import completion
from maxbench.config import command_line, commands, options, recipes
from maxbench.config.errors import UserError
from maxbench.config.options import COMMANDS
from maxbench.reporting import build_report


def maxbench(capsys, monkeypatch, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `maxbench ...`, in this process."""
    monkeypatch.setattr(sys, "argv", ["maxbench", *words])
    return overview.main(), *capsys.readouterr()


@pytest.mark.parametrize("words", [(), ("--help",), ("help",)])
def test_commands_are_listed_with_a_sentence_and_an_example(words, capsys, monkeypatch):
    code, out, err = maxbench(capsys, monkeypatch, *words)
    assert (code, err) == (0, "")
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} +{command.__doc__.split()[0]}", out, re.M)
        assert f"$ {command.EXAMPLES[0]}\n" in out


def test_unknown_command_is_refused_with_the_closest_name(capsys, monkeypatch):
    code, out, err = maxbench(capsys, monkeypatch, "trian")
    assert (code, out) == (2, "")
    assert err.startswith("maxbench: error: no command 'trian'; did you mean train? commands: ")


def test_version(capsys, monkeypatch):
    code, out, _ = maxbench(capsys, monkeypatch, "--version")
    assert code == 0
    version = r"(\d\S+|\(not installed\))"
    assert re.fullmatch(rf"maxbench {version}, jax {version}, Python 3\.\d+\.\d+\n", out)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_page_lists_the_flags_of_a_command(name, capsys, monkeypatch):
    command = COMMANDS[name]
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = maxbench(capsys, monkeypatch, name, "--help")
    assert (code, err) == (0, "")
    if command.OWN_HELP:
        assert "maxbench" in out or "launch.sh" in out
        return
    listed = re.findall(r"^  --([\w-]+)", out, re.M)
    shown = itertools.chain(*(group for title, group in command.groups().items() if title != "run"))
    shown = [*shown] if name != "train" else [*command.flags()]
    if command.INSTEAD:
        shown += [flag for flag in command.INSTEAD.flags() if flag not in shown]
    assert listed == [*shown, *["config"] * issubclass(command, options.RunOptions)]
    assert max(map(len, out.splitlines())) <= 80
    for title in commands.groups(command):
        assert f"\n{title}\n" in out
    for example in command.EXAMPLES:
        assert example in out


def test_examples_are_valid():
    """The flags of an example are flags of its command, and its workload exists."""
    for command in COMMANDS.values():
        for example in command.EXAMPLES:
            words = example.replace('")"', "").split()
            assert "maxbench" in words or words[0] == "eval"
            if not command.OWN_HELP and "maxbench" in words:
                words = ["maxbench", *words[words.index("maxbench") + 2 :]]
                asked = command_line.read(command.taking(words), words)
                if isinstance(asked, options.RunOptions):
                    recipes.load_workload(asked.config)


def test_plan_refuses_flags_without_effect(capsys, monkeypatch):
    _, out, _ = maxbench(capsys, monkeypatch, "plan", "--help")
    for flag in ("steps", "output_dir", "checkpoint", "resume", "coordinator", "cpu_devices"):
        assert not re.search(rf"--{flag}\b", out)
        with pytest.raises(UserError, match=f"--{flag} is a flag of maxbench train"):
            command_line.read(options.Plan, ["maxbench", f"--{flag}", "1"])
    for flag in options.FLAGS:  # one line of flags serves train and preflight
        is_bool = options.type_of(options.Preflight.flags()[flag]) is bool
        words = ["maxbench", "--config=x", f"--{flag}" if is_bool else f"--{flag}=1"]
        assert flag in command_line.read(options.Preflight, words).changed()


def test_formats_of_a_report_are_those_that_it_has():
    assert (*build_report.FORMATS,) == options.FORMATS


@pytest.mark.parametrize("command", COMMANDS.values())
def test_an_option_has_the_type_of_the_setting_that_it_sets(command):
    for field in dataclasses.fields(command):
        if path := field.metadata.get("sets"):
            assert options.type_of(field) is options.type_of(options.SETTINGS[path]), field.name
            assert field.default is None


def test_values_of_flags_are_parsed_by_their_fields():
    words = ["x", "--config=a", "--search", "--compiled=3", "--tokens=15e12", "--best-remat"]
    words += ["--config.optim.lr=1e-3", "--notp_overlap", "--nvlink_gpus", "72"]
    asked = command_line.read(options.Plan, words)
    assert asked.changed() == {
        "config": "a", "search": True, "compiled": 3, "tokens": 15e12, "best_remat": True,
        "tp_overlap": False, "nvlink_gpus": 72, "settings": {"optim.lr": "1e-3"},
    }  # fmt: skip
    assert options.Plan(**asked.changed()).changed() == asked.changed()
    again = command_line.read(options.Plan, ["x", *command_line.words_of(asked)])
    assert again.changed() == asked.changed()
    for flag, message in {
        "--compiled=0": "compiled=0 must be a whole number, at least 1",
        "--search=maybe": "flag --search=maybe must be true or false",
        "--memory_margin=0.99": "memory_margin=0.99 must be a finite number, below 0.94",
        "--gpus=8.5": "gpus=8.5 must be a whole number, at least 1",
        "--network=ib4000": "network='ib4000' is not one of ",
        "--gpu_watts=700": "gpu_watts needs a token budget: give --tokens",
    }.items():
        with pytest.raises(UserError, match=re.escape(message)):
            command_line.read(options.Plan, ["x", "--config=a", flag])


@pytest.mark.parametrize("command", COMMANDS.values())
def test_every_flag_has_an_alias_with_hyphens(command):
    def outcome(*words: str) -> Any:
        try:
            return command_line.read(command, ["x", *words]).changed()
        except UserError as e:
            return str(e)

    assert "unknown flag" in str(outcome("--no-such-flag"))
    for flag, field in command.flags().items():
        words, alias = [f"--{flag}", "1"], flag.replace("_", "-")
        if options.type_of(field) is bool:
            words = words[:1]
            assert outcome(f"--no-{alias}") == outcome(f"--no{flag}")
        assert outcome(f"--{alias}", *words[1:]) == outcome(*words)
        assert "unknown flag" not in str(outcome(*words))


COMPLETED = {
    ("maxbench", "pl"): "plan",
    ("maxbench", "plan", "--best"): "--best_remat",
    ("maxbench", "plan", "--steps"): "",
    ("maxbench", "train", "--config", "llama31_8"): "llama31_8b",
    ("maxbench", "train", "--config", "llama31_8b", ":", "ti"): "tiny",
    ("maxbench", "train", "--config", "llama31_8b:ti"): "llama31_8b:tiny",
    ("maxbench", "train", "--config", "=", "grok"): "grok1_314b",
    ("maxbench", "train", "--gpu_type", "gb3"): "gb300",
    ("maxbench", "report", "--format", "h"): "html",
    ("maxbench", "report", "experim"): "",
}


def test_bash_completes_commands_flags_and_workloads():
    calls = [
        f"COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}; _maxbench; "
        'echo "${COMPREPLY[*]}"\n'
        for words in COMPLETED
    ]
    script = completion.script() + "".join(calls)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stderr == ""
    assert dict(zip(COMPLETED, done.stdout.splitlines(), strict=True)) == COMPLETED


def test_completion_refuses_other_shells(capsys, monkeypatch):
    bash, zsh = (maxbench(capsys, monkeypatch, "completion", shell)[1] for shell in ("bash", "zsh"))
    assert zsh == completion.ZSH + bash
    code, out, err = maxbench(capsys, monkeypatch, "completion", "fish")
    assert (code, out) == (2, "")
    assert "shell='fish' is not one of bash, zsh" in err


def test_configs_lists_workloads_with_their_recipes(capsys, monkeypatch):
    code, out, _ = maxbench(capsys, monkeypatch, "configs")
    assert code == 0
    blocks = re.split(r"\n(?=\S)", out)
    eight, grok = (next(b for b in blocks if b.startswith(n)) for n in ("llama31_8b", "grok1"))
    assert "8.0 billion parameters, 32 layers, seq 8192" in eight
    assert "h100 bf16, fp8: 8* 16* 32* 64* 128*" in eight
    assert "presets of this workload: xai" in grok
    assert "b200 bf16, fp8, --strong_scaling: 128 256 512 1024\n" in out
    named = [line.split()[0] for line in itertools.takewhile(bool, out.splitlines())]
    assert {path.stem for path in recipes.workloads()} <= {*named}
