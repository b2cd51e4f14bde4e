"""Bands around predicted steps, and how many held-out steps are inside them."""

import math
import random

import pytest

from maxbench.config import command_line
from maxbench.evidence import error_band
from maxbench.evidence.error_band import Error
from maxbench.hardware.gpus import GPU_TYPES


def error(measured_over_predicted, workload="a", **about):
    values = dict(dtype="bf16", gpu_type="h100", source="x", gpus=8)
    values |= dict(left_out="workload", weight=1.0, error=1 / measured_over_predicted - 1)
    return Error(workload, **values | about)


def test_nine_of_ten_held_out_steps_are_inside_the_band():
    """And most of the tenth with the largest errors. Wider bands would contain more than 96 %."""
    rows = error_band.errors()
    shares = error_band.covered(rows)
    assert 0.85 <= shares["all"] <= 0.96
    for way in error_band.WAYS:
        assert shares[way] >= 0.80, way
    worst = sorted(rows, key=lambda e: -abs(e.log_ratio))[: len(rows) // 10]
    assert sum(error_band.is_covered(e, rows) for e in worst) >= 0.8 * len(worst)


def test_band_covers_nine_of_ten_steps_of_its_kind():
    draw = random.Random(0)
    ratio = lambda: math.exp(draw.gauss(0.1, 0.05))
    rows = [error(ratio(), str(i)) for i in range(400)]
    band = error_band.error_band("h100", "bf16", rows)
    assert band.low == pytest.approx(math.exp(0.1 - 1.645 * 0.05), rel=0.02)
    assert band.high == pytest.approx(math.exp(0.1 + 1.645 * 0.05), rel=0.02)
    assert (band.like, band.programs, band.validated) == ("h100 bf16", 400, True)
    inside = 0  # also with few rows
    for first in range(0, 390, 13):
        few = error_band.error_band("h100", "bf16", rows[first : first + 12])
        assert few.programs == 12
        inside += sum(few.low <= ratio() <= few.high for _ in range(100))
    assert inside / 3000 == pytest.approx(0.9, abs=0.04)


def test_kinds_with_few_programs_or_workloads_have_the_band_of_a_wider_kind():
    rows = [error(1.0, "abc"[i % 3]) for i in range(9)]
    rows += [error(1.2, "d", dtype="fp8") for _ in range(9)]
    band = lambda dtype: error_band.error_band("h100", dtype, rows)
    assert band("bf16").like == "h100 bf16"
    assert band("fp8").like == "h100"  # one workload
    assert band("fp8").high >= 1.2
    assert band("nvfp4").like == "h100"  # no program


def test_a_gpu_type_without_rows_has_a_wider_centered_band():
    on = lambda gpu, ratio: error(ratio, gpu_type=gpu, left_out="gpu_type")
    rows = [error(1.0, "abc"[i % 3]) for i in range(9)]
    rows += [on("h200", 1.1), on("b200", 1.2), on("a100", 1.0), on("gb200", 1.1)]
    band = error_band.error_band("h20", "bf16", rows)
    assert math.sqrt(band.low * band.high) == pytest.approx(1.1, rel=0.01)
    known = error_band.error_band("h100", "bf16", rows)
    assert band.high / band.low > 1.3 > known.high / known.low
    assert (band.validated, known.validated) == (False, True)


def test_prediction_interval_covers_nine_of_ten_further_ratios():
    draw, inside = random.Random(1), 0
    for _ in range(2000):
        *known, further = (draw.gauss(0.05, 0.1) for _ in range(5))
        low, high = error_band.prediction_interval(known)
        inside += low <= math.exp(further) <= high
    assert inside / 2000 == pytest.approx(0.9, abs=0.03)


def test_a_fitted_file_has_a_band_of_its_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[h100]\nlike = "h100"\nband = [0.97, 1.04]\n')
    run = command_line.run_of(["--config", "llama2_70b", "--gpus", "64", "--hardware", str(path)])
    assert run.gpu.band == (0.97, 1.04)
    assert GPU_TYPES["h100"].band == ()
