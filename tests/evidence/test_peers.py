"""The comparison with MaxText: its stored rows, and the layouts that are tried."""

import pytest

from tools import peers

ROW = ("llama31_70b", "h100", "64", "bf16")


def test_every_row_is_planned_and_the_page_shows_it():
    """If not: python -m tools.peers, where MaxText is installed."""
    assert [*peers.problems()] == []


def test_microbatches_divide_a_rows_sequences_and_a_layout_may_fix_them():
    def tried(layout, per_gpu, dtype="bf16"):
        every = [x for flags in peers.flags_of(layout, dtype, 4096, per_gpu) for x in flags]
        return [dict(x.split("=") for x in words.split()) for words in every]

    free = tried("model_name=a", 6)
    assert [x["remat_policy"] for x in free] == [*peers.REMATS] * 3
    pairs = [(x["per_device_batch_size"], x["gradient_accumulation_steps"]) for x in free]
    assert [*dict.fromkeys(pairs)] == [("3", "2"), ("2", "3"), ("1", "6")]
    assert all(x["attention"] == "cudnn_flash_jax" for x in free)
    assert {x["per_device_batch_size"] for x in tried("model_name=a", 0.5)} == {"0.5"}
    words = "model_name=a per_device_batch_size=8 remat_policy=full attention=dot_product"
    (fixed,) = tried(f"{words} --price=kernel=1e-3", 16, "fp8")
    assert fixed == {
        "model_name": "a", "per_device_batch_size": "8", "remat_policy": "full",
        "attention": "dot_product", "gradient_accumulation_steps": "2", "quantization": "fp8",
        "max_target_length": "4096", "scan_layers": "true",
    }  # fmt: skip


def test_the_fastest_that_fits_counts_with_the_least_recomputation(monkeypatch):
    """Steps in seconds, and whether they fit, by microbatch and policy."""
    known = {("2", "minimal_with_context"): (7.0, False), ("2", "full"): (10.0, True),
             ("1", "minimal_with_context"): (9.0, True)}  # fmt: skip
    asked = []

    def plan(words, gpu_type, theirs):
        flags = dict(x.split("=") for x in words[0].removeprefix("--maxtext=").split())
        asked.append((flags["per_device_batch_size"], flags["remat_policy"]))
        assert words[3:] == ["--price=kernel=1"]
        step_s, fits = known.get(asked[-1], (8.0, False))
        return {"step_s": step_s, "fits": fits}

    monkeypatch.setattr(peers, "plan", plan)
    best = peers.fastest(ROW, ["model_name=a --price=kernel=1"], 2, 4096)
    assert best["step_s"] == 9.0
    assert best["flags"].startswith("model_name=a per_device_batch_size=1 ")
    assert best["flags"].endswith(" --price=kernel=1")
    assert "attention" not in best["flags"]  # as in every row
    assert asked == [*(("2", x) for x in peers.REMATS), ("1", peers.REMATS[0])]


def test_a_row_without_a_layout_that_fits_says_why(monkeypatch):
    monkeypatch.setattr(peers, "plan", lambda *_, **__: "the compiler was killed")
    with pytest.raises(SystemExit, match="no layout of MaxText's fits: the compiler was killed"):
        peers.fastest(ROW, ["model_name=a"], 1, 4096)
