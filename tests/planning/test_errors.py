"""The fit to published steps, and leave-one-out errors."""

import csv
import dataclasses
import json

import numpy as np
import pytest

from maxbench.cost_model import hlo
from maxbench.evidence import published
from maxbench.evidence.error_band import quantile
from maxbench.planning import planner
from tests.conftest import KEPT_FIGURES_JAX
from tools import fit_constants

pytestmark = [
    pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning"),
    pytest.mark.xdist_group("plan"),
]


def row(workload: str, dtype: str, gpus: int, seconds: float, error: float, slope: float):
    """A published step with a prediction; the fraction `slope` of it depends on gemm_bf16."""
    about = dict(model=workload, size="1b", dtype=dtype, gpu_type="h100", gpus=gpus)
    step = dataclasses.replace(published.rows()[0], **about, step_s=seconds)
    predicted = seconds * (1 + error)
    slopes = [predicted * slope * fit_constants.current()[0], 0.0, 0.0, 0.0]
    parts = {"compiled": np.array([predicted, *slopes]), "copies": np.array([0.0] * 5)}
    return fit_constants.Row(step, (workload, dtype), "pp", parts)


def test_fit_generalizes_to_a_workload_that_is_left_out():
    """All GEMMs are 5 % slow: the rate is raised, also when fitted to the others."""
    rows = [row(w, "bf16", 8, 10.0, 0.05, 1.0) for w in "abcd"]
    assert max(abs(r.error(fit_constants.fit(rows))) for r in rows) < 0.01
    errors = [r.error(c) for r, c in zip(rows, fit_constants.left_out(rows), strict=True)]
    assert max(map(abs, errors)) < 0.01
    # An error that is specific to a workload remains when it is left out.
    rows[0] = row("a", "bf16", 8, 10.0, 0.25, 1.0)
    errors = [r.error(c) for r, c in zip(rows, fit_constants.left_out(rows), strict=True)]
    assert errors[0] == pytest.approx(0.25 - 0.05, abs=0.03)


def test_rows_of_one_program_count_as_one():
    rows = [row("a", "bf16", 8 * 2**i, 10.0, 0.1, 1.0) for i in range(9)]
    rows += [row(w, "bf16", 8, 10.0, 0.0, 1.0) for w in "bc"]
    assert sum(fit_constants.weights(rows)) == pytest.approx(3)
    assert quantile([0.1] * 9 + [0.0, 0.02], fit_constants.weights(rows), 0.5) == 0.02


@pytest.mark.gpu_compile
def test_stored_errors_are_those_of_their_constants():
    """A row of errors.csv, simulated with its constants, which were fitted to the others."""
    with open(fit_constants.PATH, newline="") as f:
        lines = [
            x for x in csv.DictReader(f) if (x["workload"], x["gpus"]) == ("llama2 70b", "128")
        ]
    line = next(x for x in lines if x["dtype"] == "bf16")
    step = next(r for r in published.fitted_rows() if r.model == "llama2" and r.gpus == 128)
    run = fit_constants.run_of(step)
    plan = planner.plan(run)
    program = hlo.parse(plan.compiled.text)
    simulated = fit_constants.linearize(step, run, program, plan.run.gpu.efficiency)
    constants = [float(line[name]) for name in fit_constants.FITTED]
    tolerance = 0.01 if KEPT_FIGURES_JAX else 0.04
    assert simulated.error(constants) == pytest.approx(float(line["error"]), abs=tolerance)
    low, high = (plan.figures()["band_s"][k] for k in ("low", "high"))
    assert low < step.step_s < high
    assert low == pytest.approx(plan.band.low * plan.step_s)
    assert json.dumps(plan.figures()["band_s"])
