"""Tables of private log formats: --format_table."""

import dataclasses
import json
import pathlib

import pytest

from maxbench.cli import entry
from maxbench.config.errors import UserError
from maxbench.run_logs import formats, readers
from maxbench.run_logs.record import Given
from tools import log_formats_table

LOG = "[acme] global batch 128\n" + "".join(
    f"[acme] step {i}/50: loss=2.31 step_time={9400 + i}ms\n" for i in range(1, 51)
)


def table(folder: pathlib.Path, text: str) -> pathlib.Path:
    path = folder / "my_formats.toml"
    path.write_text(text)
    return path


def test_example_of_the_docs_reads_its_log(tmp_path, capsys):
    path = table(tmp_path, log_formats_table.EXAMPLE)
    log = tmp_path / "run.log"
    log.write_text(LOG)
    (r,) = readers.read([log], Given(table=formats.read(path, formats.FORMATS)))
    assert (r.source, r.program, r.status, r.gbs) == ("acme", "Acme", "done", 128)
    assert (sorted(r.step_s), r.step_s[0], r.loss[0]) == ([*range(50)], 9.401, 2.31)
    assert entry.run("report", ["--format=json", f"--format_table={path}", str(log)]) == 0
    (run,) = json.loads(capsys.readouterr().out)["results"]
    assert run["status"] == "Success"
    assert entry.run("report", ["--format=json", str(log)]) == 1
    (run,) = json.loads(capsys.readouterr().out)["results"]
    assert run["status"] == "Not read"


def test_a_format_of_the_file_comes_before_the_built_in_ones(tmp_path):
    text = (
        '[mine]\nprogram = "Fork"\nlike = "maxtext"\n[[mine.lines]]\nfirst = 0\n'
        "has = ['completed step: ']\npattern = 'completed step: (?P<step>\\d+)[^\\n]*'\n"
    )
    log = tmp_path / "run.log"
    log.write_text("".join(f"completed step: {i}, seconds: 9.4, loss: 2.5\n" for i in range(9)))
    (r,) = readers.read([log], Given(table=formats.read(table(tmp_path, text), formats.FORMATS)))
    assert (r.source, r.program, r.step_s[8], r.loss[8]) == ("mine", "Fork", 9.4, 2.5)


LINES = "[[a.lines]]\nhas = ['x']\npattern = '(?P<step>\\d+)'\n"
ERRORS = {
    "[a": "(at ",
    "a = 1": "[a] must be a table with program and [[NAME.lines]]",
    "[a]\nprogram = 'A'": "[a] must be a table with program and [[NAME.lines]]",
    LINES: "[a] the table has no program",
    f"[a]\nprogram = ''\n{LINES}": "[a] program='' must be the program's name",
    f"[a]\nprogram = 'A'\nmeans = 1\n{LINES}": "[a] means=1 must be true or false",
    f"[a]\nprogram = 'A'\nlike = 'b'\n{LINES}": "[a] like='b'",
    f"[a]\nprogram = 'A'\ncolour = 1\n{LINES}": "[a] a field='colour'",
    "[a]\nprogram = 'A'\n[[a.lines]]\nhas = ['x']": "[a] lines[0] has no pattern",
    "[a]\nprogram = 'A'\n[[a.lines]]\nhas = []\npattern = '(?P<step>1)'": "lines[0].has=[] must be",
    "[a]\nprogram = 'A'\n[[a.lines]]\nhas = ['x']\npattern = '('": "lines[0].pattern='(' must be a",
    "[a]\nprogram = 'A'\n[[a.lines]]\nhas = ['x']\npattern = '1'": "has no group (?P<step>...)",
    "[a]\nprogram = 'A'\n[[a.lines]]\nhas = ['x']\npattern = '(?P<time>1)'": "lines[0].pattern",
    f"[a]\nprogram = 'A'\n{LINES}adds_to = 'all'": "lines[0].adds_to='all'",
    f"[a]\nprogram = 'A'\n{LINES}[a.fields]\nx = 'speed'": "[a] fields=",
    f"[a]\nprogram = 'A'\n{LINES}[[a.ends]]\npattern = '('": "ends[0].pattern",
}  # fmt: skip


@pytest.mark.parametrize("text", ERRORS)
def test_invalid_table_is_refused_with_file_entry_and_field(tmp_path, text):
    path = table(tmp_path, text)
    with pytest.raises(UserError) as error:
        formats.read(path, formats.FORMATS)
    assert ERRORS[text] in str(error.value)
    assert str(error.value).startswith(f"format_table={str(path)!r}")


def test_file_that_cannot_be_read_is_named(tmp_path, capsys):
    assert entry.run("report", [f"--format_table={tmp_path}/no.toml", str(tmp_path)]) == 2
    assert "no.toml' cannot be read: No such file or directory" in capsys.readouterr().err


def test_docs_explain_every_key():
    keys = {f.name for f in dataclasses.fields(formats.LogFormat)}
    keys |= {f"lines.{f.name}" for f in dataclasses.fields(formats.StepLine)}
    assert {key for row in log_formats_table.KEYS for key in row.split(", ")} == keys
