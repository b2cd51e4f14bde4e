"""The fit to published steps, its errors left out, and the band that they put around a plan."""

import csv
import json
import math
import types

import numpy as np
import pytest

from benchmarks import fit_constants
from maxbench.cost_model import compile_cache, hlo
from maxbench.hardware import published
from maxbench.hardware.published import Error, ErrorBand, error_band, quantile
from maxbench.planning import planner
from tests.conftest import KEPT_FIGURES_JAX

pytestmark = [
    pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning"),
    pytest.mark.xdist_group("plan"),
]


def row(workload: str, dtype: str, gpus: int, seconds: float, error: float, slope: float):
    """A published step, and a prediction of it that is off; `slope` of it goes with gemm_bf16."""
    told = types.SimpleNamespace(
        model=workload, size="1b", dtype=dtype, gpu_type="h100", gpus=gpus, step_s=seconds
    )
    predicted = seconds * (1 + error)
    slopes = [predicted * slope * fit_constants.standing()[0], 0.0, 0.0, 0.0]
    parts = {"compiled": np.array([predicted, *slopes]), "copies": np.array([0.0] * 5)}
    return fit_constants.Row(told, (workload, dtype), "pp", parts)


def test_a_constant_that_is_off_is_found_and_a_workload_predicted_without_its_own_rows():
    """All products 5 % slow: the rate that was too low is raised, also by the others alone."""
    rows = [row(w, "bf16", 8, 10.0, 0.05, 1.0) for w in "abcd"]
    assert max(abs(r.error(fit_constants.fit(rows))) for r in rows) < 0.01
    alone = [r.error(c) for r, c in zip(rows, fit_constants.left_out(rows), strict=True)]
    assert max(map(abs, alone)) < 0.01
    # One that is off for a reason of its own stays off when it is left out.
    rows[0] = row("a", "bf16", 8, 10.0, 0.25, 1.0)
    alone = [r.error(c) for r, c in zip(rows, fit_constants.left_out(rows), strict=True)]
    assert alone[0] == pytest.approx(0.25 - 0.05, abs=0.03)


def test_rows_that_repeat_a_program_count_as_one():
    rows = [row("a", "bf16", 8 * 2**i, 10.0, 0.1, 1.0) for i in range(9)]
    rows += [row(w, "bf16", 8, 10.0, 0.0, 1.0) for w in "bc"]
    assert sum(fit_constants.weights(rows)) == pytest.approx(3)
    assert quantile([0.1] * 9 + [0.0, 0.02], fit_constants.weights(rows), 0.5) == 0.02


def test_a_band_is_of_the_nearest_kind_that_has_enough_programs(monkeypatch):
    told = lambda model, dtype, kind, error: Error(model, "", dtype, "h100", 8, kind, 1.0, error)
    found = [told(m, "bf16", "pp", e) for m, e in (("a", 0.01), ("b", -0.02), ("b", 0.01))]
    found += [told("c", "bf16", "fsdp", e) for e in (0.001, 0.002, 0.003)]
    found += [told("c", "fp8", "fsdp", 0.5)]
    monkeypatch.setattr(published, "errors", lambda: tuple(found))
    assert error_band("h100", "bf16", "pp") == ErrorBand(
        pytest.approx(1 / 0.98), "h100 bf16 pp", 3, True
    )
    # One workload says little about another: not narrower than all of BF16.
    assert error_band("h100", "bf16", "fsdp") == ErrorBand(
        pytest.approx(1 / 0.98), "h100 bf16", 6, True
    )
    assert error_band("h100", "fp8", "fsdp") == ErrorBand(1.5, "h100", 7, True)
    assert error_band("gb200", "bf16", "pp") == ErrorBand(
        pytest.approx(1 / 0.98), "bf16 pp", 3, False
    )


def test_the_errors_that_stand_are_of_published_rows():
    rows = {(r.model, r.size, r.dtype, r.gpus): r for r in published.rows()}
    found = published.errors()
    assert {(e.model, e.size, e.dtype, e.gpus) for e in found} <= rows.keys()
    assert len({(e.model, e.size, e.dtype) for e in found}) == 12
    sizes = [abs(e.error) for e in found]
    weights = [e.weight for e in found]
    assert quantile(sizes, weights, 0.5) < 0.04
    assert quantile(sizes, weights, 0.9) < 0.11
    for e in found:  # nine of ten are within their band
        assert 1.02 < error_band(e.gpu_type, e.dtype, e.parallelism).factor < 1.2


@pytest.mark.skipif(
    not compile_cache.versions()["jax-cuda13-plugin"], reason="needs XLA's GPU compiler"
)
def test_the_errors_that_stand_are_what_their_constants_predict():
    """A row of the file, played with the constants beside it, which are fitted to the others."""
    with open(fit_constants.PATH, newline="") as f:
        lines = [x for x in csv.DictReader(f) if (x["model"], x["gpus"]) == ("llama2", "128")]
    line = next(x for x in lines if x["dtype"] == "bf16")
    told = next(r for r in published.rows() if r.model == "llama2" and r.gpus == 128)
    run = fit_constants.run_of(told)
    plan = planner.plan(run)
    found = fit_constants.play(told, run, hlo.parse(plan.compiled.text), plan.run.gpu.efficiency)
    constants = [float(line[name]) for name in fit_constants.FITTED]
    apart = 0.01 if KEPT_FIGURES_JAX else 0.04  # as rows of the table are
    assert found.error(constants) == pytest.approx(float(line["error"]), abs=apart)
    low, high = (planner.figures(plan)["band_s"][k] for k in ("low", "high"))
    assert low < told.step_s < high
    assert math.sqrt(low * high) == pytest.approx(plan.step_s)
    assert json.dumps(planner.figures(plan)["band_s"])
