"""The list of commands, their help pages and flags, the version, and shell completion."""

import importlib
import itertools
import re
import subprocess
import sys

import pytest

from maxbench import __main__ as overview
from maxbench.cli import completion
from maxbench.config import command_line, commands, recipes, run_flags
from maxbench.config.errors import UserError

NAMES = [*commands.commands()]


def maxbench(capsys, monkeypatch, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `maxbench ...`, in this process."""
    monkeypatch.setattr(sys, "argv", ["maxbench", *words])
    return overview.main(), *capsys.readouterr()


@pytest.mark.parametrize("words", [(), ("--help",), ("help",)])
def test_commands_are_listed_with_a_sentence_and_an_example(words, capsys, monkeypatch):
    code, out, err = maxbench(capsys, monkeypatch, *words)
    assert (code, err) == (0, "")
    for name, command in commands.commands().items():
        assert re.search(rf"^  {name} +{command.does.split()[0]}", out, re.M)
        assert f"$ {command.examples[0]}\n" in out


def test_unknown_command_is_refused_with_the_closest_name(capsys, monkeypatch):
    code, out, err = maxbench(capsys, monkeypatch, "trian")
    assert (code, out) == (2, "")
    assert err.startswith("maxbench: error: no command 'trian'; did you mean train? commands: ")


def test_version(capsys, monkeypatch):
    code, out, _ = maxbench(capsys, monkeypatch, "--version")
    assert code == 0
    version = r"(\d\S+|\(not installed\))"
    assert re.fullmatch(rf"maxbench {version}, jax {version}, Python 3\.\d+\.\d+\n", out)


@pytest.mark.parametrize("name", NAMES)
def test_help_page_lists_the_flags_of_a_command(name, capsys, monkeypatch):
    command = commands.commands()[name]
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = maxbench(capsys, monkeypatch, name, "--help")
    assert (code, err) == (0, "")
    if command.own_help:
        assert "maxbench" in out or "launch.sh" in out
        return
    listed = re.findall(r"^  --([\w-]+)", out, re.M)
    assert listed == [n for n in commands.flag_names(name)] + ["config"] * (
        "workload" in command.run
    )
    assert max(map(len, out.splitlines())) <= 80
    for group in command.groups():
        assert f"\n{group}\n" in out
    for example in command.examples:
        assert example in out


def test_examples_are_valid():
    """The flags of an example are flags of its command, and its workload exists."""
    for name, command in commands.commands().items():
        assert callable(importlib.import_module(command.module).main)
        for example in command.examples:
            words = example.replace('")"', "").split()
            assert "maxbench" in words or words[0] == "eval"
            if not command.own_help and "maxbench" in words:
                fv = commands.define(name)
                command_line.parse_flags(fv, ["maxbench", *words[words.index("maxbench") + 2 :]])
                if "workload" in command.run and fv["config"].present:
                    recipes.load_workload(fv["config"].value)


def test_plan_refuses_flags_without_effect(capsys, monkeypatch):
    _, out, _ = maxbench(capsys, monkeypatch, "plan", "--help")
    for flag in ("steps", "output_dir", "checkpoint", "resume", "coordinator", "cpu_devices"):
        assert not re.search(rf"--{flag}\b", out)
        with pytest.raises(UserError, match=f"--{flag} is a flag of maxbench train"):
            command_line.parse_flags(commands.define("plan"), ["maxbench", f"--{flag}", "1"])
    for flag in run_flags.FLAGS:  # one line of flags serves train and preflight
        text = [f"--{flag}"] if command_line.is_bool(flag) else [f"--{flag}=1"]
        assert command_line.parse_flags(commands.define("preflight"), ["maxbench", *text]) == [
            "maxbench"
        ]


COMPLETED = {
    ("maxbench", "pl"): "plan",
    ("maxbench", "plan", "--best"): "--best_remat",
    ("maxbench", "plan", "--steps"): "",
    ("maxbench", "train", "--config", "llama31_8"): "llama31_8b",
    ("maxbench", "train", "--config", "llama31_8b", ":", "ti"): "tiny",
    ("maxbench", "train", "--config", "llama31_8b:ti"): "llama31_8b:tiny",
    ("maxbench", "train", "--config", "=", "grok"): "grok1_314b",
    ("maxbench", "train", "--gpu_type", "h1"): "h100",
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
