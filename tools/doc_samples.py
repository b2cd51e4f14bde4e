"""Writes the samples of output in the pages of docs/ again, from the commands above them.

python -m tools.doc_samples [PAGE ...]

A sample is a block of text below a block of commands. Its lines of '...' stand for lines that are
left out: every other run of lines starts at the line of the output that is most like its first one.
Only commands whose output depends on nothing but the revision are run: SHOWN.
"""

import contextlib
import difflib
import io
import os
import pathlib
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from unittest import mock

from maxbench.cli import entry

ROOT = pathlib.Path(__file__).parents[1]
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
CUT = "..."
# A sample without commands above it is of this one.
PLAN = "maxbench plan --config llama2_70b --gpus 128"
SHOWN = (
    r"maxbench (plan|configs)\b",
    r"maxbench train .*--dry_run$",
    r".*launch(/launch\.sh)? --dry_run\b",
    r"maxbench trace benchmarks/",
)
# Lines that differ from run to run, which no sample has.
VOLATILE = re.compile(r"compiled in|experiments/|submitted|saved")
LAUNCH = {"SBATCH_ACCOUNT": "acct", "SBATCH_PARTITION": "batch", "STAGE_PATH": ".../stage"}


def commands(block: str) -> Iterator[tuple[dict[str, str], list[str]]]:
    """The commands of a block: the variables that are set for each, and its words."""
    lines = [re.sub(r"(^|\s)#.*", "", x) for x in block.replace("\\\n", " ").splitlines()]
    whole = ""
    for line in lines:
        whole = f"{whole}\n{line}".strip()
        if whole.count("'") % 2 or whole.count('"') % 2:
            continue  # the next line is of the same word
        parts, whole = filter(None, whole.split("&&")), ""
        for part in parts:
            words = shlex.split(part)
            env = {}
            while words and re.fullmatch(r"\w+=.*", words[0], re.DOTALL):
                name, _, value = words.pop(0).partition("=")
                env[name] = os.path.expandvars(value)
            yield env, list(map(os.path.expandvars, words))


def files_of(page: str) -> dict[str, str]:
    """Files that a page tells the reader to write: name -> text."""
    blocks = {kind: text for _, kind, text in reversed(BLOCK.findall(page))}
    named = {kind: re.findall(rf"[\w/]+\.{suffix}", page) for kind, suffix in KINDS.items()}
    return {
        name: blocks[kind]
        for kind, names in named.items()
        for name in names
        if kind in blocks and "/" not in name
    }


KINDS = {"python": "py", "toml": "toml"}  # language of a block -> suffix of its file


def output(env: Mapping[str, str], words: list[str], folder: pathlib.Path) -> str:
    """What a command prints, in a folder."""
    words = ["maxbench", "launch", *words[1:]] if words[0] == "launch/launch.sh" else words
    text, here = io.StringIO(), pathlib.Path.cwd()
    known = LAUNCH if words[1] == "launch" else {}
    with mock.patch.dict(os.environ, known | dict(env)), contextlib.redirect_stdout(text):
        os.chdir(folder)
        try:
            code = entry.run(words[1], words[2:])
        finally:
            os.chdir(here)
    assert code in (0, 3), shlex.join(words)
    return text.getvalue().replace(f"{folder}/", "")


def filled(sample: str, lines: list[str]) -> str:
    """The sample, with lines of the output."""
    made, rest, first = [], lines, True
    for line in sample.splitlines():
        if line == CUT:
            made, first = [*made, CUT], True
            continue
        if first:
            likeness = [difflib.SequenceMatcher(None, line, x).ratio() for x in rest]
            rest = rest[likeness.index(max(likeness)) :]
        made, rest, first = [*made, rest[0]], rest[1:], False
    return "\n".join(made) + "\n"


def page(path: pathlib.Path) -> str:
    """The text of a page, with its samples as they must be."""
    text, ran = path.read_text(), PLAN

    def new(block: re.Match) -> str:
        nonlocal ran
        indent, kind, body = block.groups()
        if kind == "bash":
            ran = body
        shown = [
            (env, words)
            for env, words in commands(ran)
            if any(re.match(pattern, shlex.join(words)) for pattern in SHOWN)
        ]
        if kind != "text" or not shown:
            return block[0]
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "benchmarks").symlink_to(ROOT / "benchmarks")
            for name, content in files_of(text).items():
                (pathlib.Path(folder) / name).write_text(content)
            printed = "".join(output(*command, pathlib.Path(folder)) for command in shown)
        lines = [x for x in printed.splitlines() if not VOLATILE.search(x)]
        sample = filled("".join(x.removeprefix(indent) for x in body.splitlines(True)), lines)
        inside = "".join((indent + x).rstrip(" ") for x in sample.splitlines(True))
        return f"{indent}```text\n{inside}{indent}```"

    return BLOCK.sub(new, text)


def pages() -> list[pathlib.Path]:
    """The pages that have samples of SHOWN."""
    names = (
        "how-to/plan_a_purchase",
        "how-to/add_a_model",
        "how-to/read_a_trace",
        "explanation/the_band",
    )
    return [ROOT / f"docs/{name}.md" for name in (*names, "tutorial/laptop_to_report")]


if __name__ == "__main__":
    for path in map(pathlib.Path, sys.argv[1:] or pages()):
        path.write_text(page(path))
