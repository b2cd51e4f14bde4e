"""Causes of death: endings of public logs, and the order of causes."""

import pathlib
import re
import time
import tomllib

import pytest

from maxbench.run_logs import deaths, formats

FOLDER = pathlib.Path(__file__).parent
ENDINGS = tomllib.loads((FOLDER / "endings.toml").read_text())["ending"]
TABLE = tomllib.loads(pathlib.Path(deaths.__file__).with_suffix(".toml").read_text())


@pytest.mark.parametrize("ending", ENDINGS, ids=[ending["source"] for ending in ENDINGS])
def test_cause_is_named_and_not_the_last_wrapper(ending):
    cause = deaths.cause(ending["text"].encode())
    assert ending["cause"] in cause.line
    assert ending["remedy"] in cause.remedy
    assert bool(ending["remedy"]) == bool(cause.remedy)


def test_every_row_has_an_ending():
    found = {deaths.cause(ending["text"].encode()).rank for ending in ENDINGS}
    assert found == {*range(len(TABLE["cause"]))}


def test_a_remedy_is_no_cause():
    """`train` prints it below the error, and the log is read later."""
    for row in TABLE["cause"]:
        assert not deaths.cause(f"maxbench train: to do: {row['remedy']}\n".encode()), row["remedy"]


def test_every_text_has_a_hint():
    """A row whose texts have none would never be found."""
    for row in TABLE["cause"]:
        for text in row["texts"]:
            plain = re.sub(r"\[(\w)\w\]", r"\1", text).lower()
            assert any(hint in plain for hint in TABLE["hints"]) or "f\\d" in plain, text


NOISE = {
    "lines": b"[NeMo I 2026-01-01 12:00:00] a | 1/2, iteration time 3.4 s loss 2.3\n",
    "newlines": b"\n",
    "a word": b"a",
    "errors": b"error: ",
    "ends": b"Process 1 exits successfully. exits with return code\n",
}


@pytest.mark.parametrize("name", NOISE)
def test_quarter_of_a_megabyte_takes_a_moment(name):
    text = NOISE[name] * ((1 << 18) // len(NOISE[name]))
    began = time.process_time()
    deaths.cause(text)
    for source in formats.FORMATS:
        formats.FORMATS.end_of(source, text)
    assert time.process_time() - began < 3


LINES = {
    b"step 3\nValueError: no such thing\n": "ValueError: no such thing",
    b"RESOURCE_EXHAUSTED: Out of memory": "RESOURCE_EXHAUSTED: Out of memory",
    b"slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026 DUE TO TIME LIMIT ***": (
        "error: *** JOB 7 ON n1 CANCELLED AT 2026 DUE TO TIME LIMIT ***"
    ),
    b"srun: error: n1: task 3: Killed\nOSError: disk\n": "OSError: disk",
    b"OSError: disk\nslurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026 ***": "OSError: disk",
    b"x" * 300 + b" ValueError: " + b"y" * 300: "ValueError: " + "y" * 148,
    b"x" * 300 + b" an illegal memory access": "illegal memory access",
}


@pytest.mark.parametrize("text", LINES, ids=range(len(LINES)))
def test_line_is_shown_from_its_message_on(text):
    assert deaths.cause(text).line == LINES[text]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"all is well",
        b"wandb: Network error (ConnectionError), entering retry loop.",
        b"requests.exceptions.ConnectionError: HTTPSConnectionPool(host='api.wandb.ai', port=443)",
        b"WARNING: ConnectionError: the server did not answer",
        b"n1:1:2 [0] NCCL INFO NET/Plugin: libnccl-net.so: cannot open shared object file",
        b" [exiting program after 229.5 minutes] datetime: 2026-01-05 10:00:00",
    ],
)
def test_what_a_run_survives_is_no_cause(text):
    assert deaths.cause(text) is None


def test_certain_causes_are_those_that_no_run_survives():
    assert deaths.cause(b"ValueError: x\nsrun: error: n1: task 3: Killed", certain=True) is None
    assert deaths.cause(b"ValueError: x\nCUDA out of memory", certain=True).line
