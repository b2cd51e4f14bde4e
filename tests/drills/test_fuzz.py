"""Short runs of tests/drills/fuzz.py; the long ones are exhaustive."""

import pytest

from tests.drills import fuzz

LONG = pytest.mark.exhaustive


@pytest.mark.parametrize("count", [60, pytest.param(400, marks=LONG)])
def test_command_lines_give_figures_or_a_one_line_error(count):
    codes = fuzz.commands(count, seed=0)
    assert {*codes} == {0, 2}
    assert codes[0] > count / 10


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=LONG)])
def test_damaged_logs_give_reports(monkeypatch, count):
    monkeypatch.delenv("MAXBENCH_CACHE")
    codes = {*fuzz.logs(count, seed=0)}
    assert codes <= {0, 1, 2}
    assert count < 200 or codes == {0, 1, 2}
