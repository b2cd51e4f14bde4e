"""The published row of a workload, and what makes a run incomparable with it."""

import re

import pytest

from maxbench.config import number_formats
from maxbench.config.run import REMATS
from maxbench.evidence import published


def test_newest_release_of_the_layout_is_the_one_to_be_held_against():
    work = dict(gpus=256, gbs=4096, seq=4096, layers=61)
    compare = lambda **known: published.compare(
        "deepseek_v3", "671b", "mxfp8", "gb300", **work, **known
    )
    newest = compare()
    assert (newest.row.release, newest.notes, newest.refusal) == ("26.08", (), "")
    assert newest.verdict(2 * newest.row.step_s) == "50.0% of published 10.42 s (26.08)"
    assert compare(release="26.04.01").row.mbs == 2
    other = compare(layout={"pp": 4, "tp": 1})
    assert other.notes == ("pp 4, published 2",)
    assert other.verdict(10.42).endswith("of published 10.42 s (26.08; pp 4, published 2)")
    assert "in 25.11" in compare(release="25.11").refusal


def test_layout_and_number_format_choose_among_rows_of_the_same_work():
    work = dict(gpus=256, gbs=1536, seq=8192, layers=126)
    compare = lambda dtype, **known: published.compare(
        "llama31", "405b", dtype, "gb300", **work, **known
    )
    assert compare("fp8").row.format == "current"  # a log that says no more than FP8
    assert compare("fp8", format="mxfp8").row.layout["cp"] == 2
    assert compare("mxfp8").row == compare("fp8", format="mxfp8").row
    assert compare("nvfp4").row.format == "nvfp4"
    assert compare("fp8", format="delayed").refusal == ""  # GEMMs like those of current scaling
    only_mxfp8 = published.compare(
        "qwen3", "30b_a3b", "fp8", "b300", gpus=8, gbs=512, seq=4096, layers=48, format="current"
    )
    assert only_mxfp8.refusal == "not comparable: number format current, published mxfp8"


def test_rows_have_formats_sources_and_figures_that_agree():
    keys = [(r.release, r.gbs, r.layers, r.gpus, r.gpu_type, r.scaling, r.model, r.size, r.format)
            for r in published.rows()]  # fmt: skip
    assert len({*keys}) == len(keys) == 181
    for row in published.rows():
        if f := number_formats.FORMATS.get(row.format):
            assert f.dtype == row.dtype
        assert row.framework in re.sub(r"\W", "-", row.source.lower())
        assert row.remat in REMATS
        assert row.gpus % (row.pp * row.cp * row.tp * row.fsdp) == 0
        assert row.layers >= row.pp * row.vp - 2
        assert row.step_s == pytest.approx(row.gbs * row.seq / row.tokens_per_s, rel=1.5e-3)
    megatron_bridge = [r for r in published.rows() if r not in published.step_time_rows()]
    assert len(megatron_bridge) == 107
    assert all(bool(r.rounding) == (r.release != "26.06") for r in megatron_bridge)


def test_nearest_published_row_and_its_differences():
    work = {"seq": 8192, "layers": 32}
    compare = lambda gpu, gpus, gbs: published.compare(
        "llama31", "8b", "bf16", gpu, gpus=gpus, gbs=gbs, **work
    )
    assert compare("h100", 24, 128).row.gpus in (16, 32)
    missing = compare("b200", 8, 128)
    assert (missing.row, missing.about, missing.share(1.0)) == (None, {}, None)
    assert missing.refusal == "nothing published for llama31 8b bf16 on b200"
    same = compare("h100", 8, 128)
    assert (same.differences, same.refusal) == ([], "")
    assert same.share(2 * same.row.step_s) == 0.5
    other = compare("h100", 8, 64)
    assert other.differences == ["GBS 64, published 128"]
    assert (other.refusal, other.share(1.0)) == ("not comparable: GBS 64, published 128", None)
