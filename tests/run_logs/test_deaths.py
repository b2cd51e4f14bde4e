"""Causes of death: endings of public logs, and the order of causes."""

import pathlib
import tomllib

import pytest

from maxbench.run_logs import deaths

FOLDER = pathlib.Path(__file__).parent
ENDINGS = tomllib.loads((FOLDER / "endings.toml").read_text())["ending"]
ROWS = tomllib.loads(pathlib.Path(deaths.__file__).with_suffix(".toml").read_text())["cause"]


@pytest.mark.parametrize("ending", ENDINGS, ids=[ending["source"] for ending in ENDINGS])
def test_cause_is_named_and_not_the_last_wrapper(ending):
    cause = deaths.cause(ending["text"].encode())
    assert ending["cause"] in cause.line
    assert ending["remedy"] in cause.remedy
    assert bool(ending["remedy"]) == bool(cause.remedy)


def test_every_row_has_an_ending():
    found = {deaths.cause(ending["text"].encode()).rank for ending in ENDINGS}
    assert found == {*range(len(ROWS))}


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
