"""Steps of MLPerf submissions: rows that agree with themselves, and the noise that follows."""

import pathlib
import statistics

import pytest

from maxbench.config import recipes
from maxbench.evidence import mlperf


def test_rows_agree_with_themselves():
    sizes = {(w.model.name, w.model.size): w.model for w in recipes.workloads().values()}
    for row in mlperf.rows():
        assert sizes[row.model, row.size].layers == row.layers
        rate = row.gbs * row.seq / row.step_s / row.gpus
        assert rate == pytest.approx(row.tokens_per_s_per_gpu, rel=2e-3), row
        if row.step_s_max is not None:
            assert row.step_s_min <= row.step_s <= row.step_s_max
        if row.tp:
            assert row.tp * row.pp * row.cp * row.dp == row.gpus
        assert row.source
        assert row.system in row.source
    assert len({(r.round, r.system, r.work) for r in mlperf.rows()}) == len(mlperf.rows()) == 51


def test_noise_is_that_of_the_rows():
    n = mlperf.noise()
    b200 = [r.step_s for r in mlperf.rows() if r.dtype == "nvfp4" and r.gpu_type == "b200"
            and r.gpus == 8 and r.mbs == 2]  # fmt: skip
    assert len(b200) == 7
    assert n.systems == (max(b200) - min(b200)) / statistics.median(b200)
    below = [r for r in mlperf.rows() if r.step_s_max is not None
             and (r.step_s_max - r.step_s_min) / r.step_s <= n.runs_median]  # fmt: skip
    assert len(below) == (n.counted + 1) // 2
    assert 0 < n.runs_median < n.runs_p90 < n.runs_most


def test_criterion_follows_from_the_noise():
    n, criterion = mlperf.noise(), mlperf.noise_criterion()
    assert criterion.passes == 1 / (1 + n.systems) / (1 + n.runs_p90)
    assert criterion.warns == 1 / (1 + n.systems) / (1 + n.runs_most)
    assert f"{n.runs_most:.1%}" in criterion.reason


def test_systems_of_a_work():
    work = dict(gpus=8, gbs=16, seq=8192, layers=32)
    same = mlperf.systems("llama31", "8b", "nvfp4", "b200", **work)
    assert same.verdict(0.4505).startswith(
        "as fast as 6 of 7 MLPerf systems that ran this work (0.4437 to 0.4557 s); one program "
    )
    assert same.verdict(0.5).startswith("as fast as 0 of 7")
    assert same.share(same.rows[3].step_s) == 1
    newer = mlperf.systems("llama31", "8b", "nvfp4", "gb300", **work)
    assert [row.round for row in newer.rows] == ["6.0"]
    assert mlperf.systems("llama31", "8b", "bf16", "b200", **work) is None
    assert mlperf.systems("llama31", "8b", "nvfp4", "b200", **{**work, "layers": 4}) is None


def test_docs_have_the_shares_that_follow():
    text = pathlib.Path("docs/how-to/read_a_report.md").read_text()
    n, criterion = mlperf.noise(), mlperf.noise_criterion()
    for share in (criterion.passes, criterion.warns, n.systems, n.runs_p90, n.runs_most):
        assert f"{share:.1%}".replace("%", " %") in text.replace("\n", " ")
