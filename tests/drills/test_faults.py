"""Faults that are injected into a running program; tests/drills/faults.py injects more."""

import pytest

from tests.drills import faults


def test_functions_that_may_fail_exist():
    points = (*faults.POINTS, *faults.RENDEZVOUS_POINTS)
    assert [f"{owner.__name__}.{name}" for owner, name in points if not hasattr(owner, name)] == []


@pytest.mark.exhaustive
def test_fault_leaves_a_complete_result_with_its_reason():
    assert faults.inject_faults(4, seed=48).total() == 4
