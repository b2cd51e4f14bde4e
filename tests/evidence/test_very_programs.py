"""The fit to measured programs, and errors of rows that were left out."""

import re

import pytest

from tools import very_programs
from tools.very_programs import Case, Row, Step


def case(work: str, error: float, gpus: int = 8, source: str = "x", weight: float = 1.0) -> Case:
    """A measured step of 10 s. GEMMs are half of the predicted one, at half of peak."""
    step_s = 10 * (1 + error)
    seconds = (step_s * (1 + 0.25 / 2), step_s, step_s * (1 - 0.2 / 2))
    step = Step(10.0, 0, source, "a")
    return Case(Row(work, gpus, 1, ""), step, (0.4, 0.5, 0.625), seconds, weight)


def test_a_step_is_linear_in_the_inverse_of_the_share():
    one = case("a 1b bf16 h100", 0.1)
    assert one.error(0.5) == pytest.approx(0.1)
    for share in (0.4, 0.45, 0.55, 0.625):
        assert one.error(share) == pytest.approx(1.1 * (0.5 + 0.5 * 0.5 / share) - 1)


def test_the_fit_generalizes_to_a_workload_that_is_left_out():
    """All steps are 5 % slow: the share rises, also when fitted to the others."""
    types = ("h100", "b200")
    every = [case(f"{w} 1b bf16 {t}", 0.05, source=w + t) for w in "abcd" for t in types]
    share = very_programs.fitted(every, ("h100", "bf16"))
    assert share == pytest.approx(0.5 / (2 / 1.05 - 1), rel=1e-3)
    assert max(abs(e.error) for e in very_programs.left_out(every)) < 0.001
    # An error that is specific to a workload remains when it is left out.
    every[0] = case("a 1b bf16 h100", 0.25, source="ah100")
    first = next(e for e in very_programs.left_out(every) if e.left_out == "workload")
    assert first.error == pytest.approx(1.25 / 1.05 - 1, abs=0.01)


def test_a_family_is_near_the_share_of_all_rows():
    """A GPU type with one row of little weight is drawn to the others'."""
    every = [case(f"{w} 1b bf16 h100", 0.0) for w in "abcd"]
    every.append(case("e 1b bf16 b200", 0.2, weight=0.02))
    alone = very_programs.fit(every[-1:])
    found = very_programs.fitted(every, ("b200", "bf16"))
    assert 0.5 < found < alone


def test_stored_rows_are_measured_steps():
    results, known = very_programs.read(), very_programs.steps()
    every = very_programs.cases(results)
    assert len(every) == len(results) == len(very_programs.rows())
    assert {x.row.key for x in every} <= known.keys()
    for x in every:
        assert x.seconds == tuple(sorted(x.seconds, reverse=True))
    # As planning/plan_text.py says of the known steps.
    assert {word for x in every for word in re.findall(r"(\w+)_parallelism", x.row.flags)} == {
        "ici_fsdp", "dcn_fsdp", "dcn_data",
    }  # fmt: skip
    # Copies of one program weigh as one.
    llama = [x for x in every if x.row.work == "llama31 70b bf16 h100"]
    assert sum(x.weight for x in llama) == pytest.approx(2)
