"""The published row of a workload, and what makes a run incomparable with it."""

from maxbench.hardware import published


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
