"""A part of benchmarks/fuzz.py and faults.py, which are run at length by hand."""

from benchmarks import faults, fuzz
from tests.conftest import keeping


def test_command_lines_end_in_figures_or_in_one_line():
    answers = fuzz.commands(400, seed=0)
    assert {*answers} == {0, 2}
    assert answers[0] > 40


def test_damaged_logs_give_reports(monkeypatch):
    monkeypatch.delenv("MAXBENCH_CACHE")
    assert {*fuzz.logs(200, seed=0)} == {0, 1, 2}


def test_what_shall_fail_is_there():
    assert not [f"{of.__name__}.{name}" for of, name in faults.POINTS if not hasattr(of, name)]


def test_functions_that_fail_leave_a_whole_result_and_its_reason():
    with keeping():
        assert faults.faults(4, seed=48).total() == 4
