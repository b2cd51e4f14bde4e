"""Short runs of tests/drills/answers.py and export_answers.py; the long ones are exhaustive."""

import random

import pytest

from tests.drills import answers, export_answers
from tools import log_samples


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_right_answers_of_generated_logs(count):
    verdicts = answers.answers(count, seed=0)
    assert {"-", "DIED"} < {*verdicts} <= {"-", "DIED", "PASS", "WARN", "FAIL"}


def test_a_generated_log_has_the_lines_of_its_steps():
    for i, program in enumerate(log_samples.LOGS):
        case = answers.make_case(random.Random(i), program)
        assert len(case.text.splitlines()) >= len(case.work)


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.exhaustive)])
def test_right_answers_of_generated_exports(count):
    assert export_answers.answers(count, seed=0) >= count
