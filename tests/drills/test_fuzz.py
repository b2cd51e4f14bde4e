"""Short runs of tests/drills/fuzz.py and faults.py; the long ones are exhaustive."""

import pytest

from tests.drills import faults, fuzz

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


def test_fault_points_exist():
    assert not [f"{of.__name__}.{name}" for of, name in faults.POINTS if not hasattr(of, name)]


@LONG
def test_runs_with_faults_leave_a_complete_result_with_the_reason():
    assert faults.inject_faults(4, seed=48).total() == 4
