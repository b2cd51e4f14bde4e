"""Measured steps: rows that can be planned, with sources and figures that agree."""

import pytest

from maxbench.config import command_line
from maxbench.evidence import measured
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.metrics import flops


def test_rows_describe_runs_that_can_be_planned():
    for row in measured.rows():
        run = command_line.run_of(row.words)
        a = run.layout
        assert (a.gpus, a.gbs, run.train.seq) == (row.gpus, row.gbs, row.seq)
        assert row.work.startswith(f"{run.model.name} {run.model.size}")
        assert run.config.precision.scaling == (row.scaling or None)


def test_rows_have_grades_sources_and_plausible_speeds():
    rows = measured.rows()
    assert len({(tuple(r.words), r.network_gbytes_per_s, r.software) for r in rows}) == len(rows)
    for row in rows:
        assert row.grade in measured.GRADES
        assert row.source
        assert (row.grade == "a") == (row.date >= "2025" and row.framework == "maxtext"
                                      and "agenticdaily" not in row.source)  # fmt: skip
        run = command_line.run_of(row.words)
        work = flops.per_sequence(run.model, row.seq, "causal") * row.gbs / row.gpus / 1e12
        peak = GPU_TYPES[row.gpu_type].peak_tflops(run.format.peak)
        assert 0.2 < work / row.step_s / peak < 0.7
    assert len({r.gpu_type for r in rows}) >= 6


def test_figures_in_tflops_are_steps():
    """492 TFLOP/s per GPU of Llama 2 7B with all scores counted, 4 x 4,096 tokens per GPU."""
    row = next(r for r in measured.rows() if "492 TFLOP/s" in r.source)
    model = command_line.run_of(row.words).model
    assert flops.params(model) == pytest.approx(6.74e9, rel=0.001)
    assert row.step_s == pytest.approx(4 * flops.per_sequence(model, 4096) / 492e12, rel=1e-3)
