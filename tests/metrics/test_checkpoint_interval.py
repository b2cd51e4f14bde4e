"""Optimal interval between checkpoints, against Daly's figures."""

import pytest

from maxbench.metrics.checkpoint_interval import best_interval_s, goodput


@pytest.mark.parametrize("mtbf_s", [2e3, 4e4, 1e6])
def test_the_best_interval_maximizes_goodput(mtbf_s):
    at = lambda work_s: goodput(work_s, 30, 300, mtbf_s)
    best_s = best_interval_s(30, mtbf_s)
    assert at(best_s) >= max(at(best_s * 1.1), at(best_s / 1.1))


@pytest.mark.parametrize(("hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_the_best_interval_is_dalys(hours, minutes):
    """Figures 3 to 5 of the paper: a dump takes 5 minutes, failures are `hours` apart."""
    assert best_interval_s(300, hours * 3600) / 60 == pytest.approx(minutes, rel=6e-3)


def test_young_is_the_first_order():
    """Saves of 5 minutes and a failure each 4 hours: Young's interval is 2,939 s."""
    assert best_interval_s(300, 4 * 3600) == pytest.approx(2743, abs=0.5)
    assert best_interval_s(1e-3, 4 * 3600) == pytest.approx((2e-3 * 4 * 3600) ** 0.5, rel=1e-3)
