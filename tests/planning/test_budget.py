"""Days, failures, checkpoints, cost and energy of a token budget, against figures by hand."""

import pytest

from maxbench.config.errors import UserError
from maxbench.config.options import TokenBudget
from maxbench.cost_model.simulate import Timeline
from maxbench.metrics import checkpoint_interval
from maxbench.planning import budget
from maxbench.planning.planner import Plan
from tests.conftest import resolve


def plan(step_s=20.0, **output) -> Plan:
    overrides = {f"output.{name}": value for name, value in output.items()}
    run = resolve("llama31_405b", gpus=512, overrides=overrides)
    return Plan(
        run=run,
        compiled=None,
        memory=None,
        timeline=Timeline(seconds=step_s),
        published=None,
    )


def test_budget_without_failures():
    """gbs 256 x seq 8192 = 2,097,152 tokens a step."""
    power = dict(usd_per_gpu_hour=2, gpu_watts=1000)
    options = dict(tokens=2_097_152e3, mtbf_hours_per_gpu=1e12, checkpoint_s=1e-6) | power
    found = budget.budget(plan(), TokenBudget(**options))
    assert (found["steps"], found["goodput"]) == (1000, pytest.approx(1, abs=1e-4))
    assert found["days"] == pytest.approx(20_000 / 86400, rel=1e-4)
    hours = 512 * 20_000 / 3600
    assert found["usd"] == pytest.approx(2 * hours, rel=1e-4)
    assert found["mwh"] == pytest.approx(hours / 1e3, rel=1e-4)


def test_failures_cost_work_and_restarts():
    found = budget.budget(plan(checkpoint_every=90), TokenBudget(tokens=15e12))
    assert found["hours_between_failures"] == pytest.approx(54 * 24 * 16384 / 419 / 512)
    assert found["checkpoint_every_s"] == 90 * 20
    # First order: a checkpoint each half hour, and half of one and a restart for each failure.
    lost = 10 / 1800 + (905 + 600) / (found["hours_between_failures"] * 3600)
    assert found["goodput"] == pytest.approx(1 - lost, abs=1e-3)
    assert found["failures"] == pytest.approx(found["days"] * 24 / found["hours_between_failures"])


def test_interval_is_the_best_one_in_whole_steps():
    found = budget.budget(plan(), TokenBudget(tokens=15e12))
    mtbf_s = found["hours_between_failures"] * 3600
    best_s = checkpoint_interval.best_interval_s(TokenBudget(tokens=1).checkpoint_s, mtbf_s)
    assert found["checkpoint_every_s"] == pytest.approx(best_s, abs=10)


def test_budget_as_text():
    found = budget.budget(plan(), TokenBudget(tokens=15e12, usd_per_gpu_hour=2.5))
    first, second, third = budget.budget_lines(found)
    assert first.startswith("15T tokens: 1,6")
    assert "goodput 99." in second
    assert "steps)" in second
    assert "$5" in third
    assert "1,275 W per GPU" in third


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_watts": "700"}, "give --tokens"),
        ({"tokens": "nan"}, "tokens=nan must be a finite number"),
        ({"tokens": "1e9", "mtbf_hours_per_gpu": "1e-3"}, "fail every 0.007"),
    ],
)
def test_bad_budget_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        budget.budget(plan(), TokenBudget(**options))
