"""A part of benchmarks/fuzz.py, which is run at length by hand."""

from benchmarks import fuzz


def test_command_lines_end_in_figures_or_in_one_line():
    answers = fuzz.commands(400, seed=0)
    assert {*answers} == {0, 2}
    assert answers[0] > 40


def test_damaged_logs_give_reports(monkeypatch):
    monkeypatch.delenv("MAXBENCH_CACHE")
    assert {*fuzz.logs(200, seed=0)} == {0, 1, 2}
