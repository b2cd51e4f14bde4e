"""`maxbench train --dry_run` and --json describe a run without jax."""

import csv
import json
import re
import subprocess
import sys

import pytest

from maxbench.cli import train
from maxbench.config import command_line
from tests.conftest import train_command
from tests.planning.plans import UNDERESTIMATED, key_of


def test_json_description_imports_no_jax():
    flags = ["--config", "configs/llama2_70b.py", "--gpus", "1024", "--json"]
    program = (
        "import sys; from maxbench.cli import entry\n"
        f"entry.run('train', {flags})\n"
        "assert not {'jax', 'numpy', 'flax'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    description = json.loads(done.stdout)
    assert description["parameters"] == 68_976_648_192
    assert description["flops_per_sequence"]["full"] == pytest.approx(1.82064e15, rel=1e-5)
    assert description["config"]["layout"]["fsdp"] == 128
    assert description["config"]["layout"]["dp"] == 8


def test_dry_run_prints_one_page():
    code, out, err = train_command("--config", "llama2_70b", "--gpus", "128", "--dry_run")
    assert (code, err) == (0, "")
    rows = dict(re.split("  +", line, maxsplit=1) for line in out.splitlines() if "  " in line)
    assert out.startswith("Llama 2 70B bf16 on 128 x H100\n")
    assert rows["model"].startswith("68,976,648,192 parameters, 80 layers")
    assert rows["layout"] == "fsdp 128"
    assert "256 sequences, 1,048,576 tokens per step: 1 microbatch of 2 on each" in rows["batch"]
    # plan compiles it to 71.4 GiB: docs/plan.csv
    assert 64 < float(re.match(r"about (\d+) of 74 GiB per GPU, estimated", rows["memory"])[1]) < 79
    assert rows["published"].startswith("7.072 s per step on 128 GPUs, NVIDIA recipe: MaxText")
    assert rows["results"].startswith("experiments/pretrain_llama2_70b_bf16_gpus128_")
    assert train_command("--config", "llama2_70b", "--layers", "8", "--dry_run")[1].count(
        "layers 8, publ"
    )
    assert "{" not in out


def test_dry_run_says_what_does_not_fit():
    code, out, _ = train_command("--config", "llama31_405b", "--fsdp", "64", "--dry_run")
    assert code == 0
    assert "of 74 GiB per GPU, estimated: does not fit;" in " ".join(out.split())


def test_dry_run_says_of_no_recipe_that_fits_that_it_does_not():
    """The estimate is within MEMORY_ERROR of the memory of compiled programs (docs/plan.csv), but
    for UNDERESTIMATED."""
    with open("docs/plan.csv", newline="") as f:
        rows = [row for row in csv.DictReader(f) if row["memory_gib"]]
    nearly_full = [r for r in rows if r["gpu_type"] == "h100" and float(r["memory_gib"]) > 73]
    for row in (r for r in rows[::5] + nearly_full if key_of(r) not in UNDERESTIMATED):
        flags = {"config": row["workload"], **{n: row[n] for n in ("gpus", "gpu_type", "dtype")}}
        words = [f"--{name}={value}" for name, value in flags.items()]
        strong = ["--strong_scaling"] * (row["scaling"] == "strong")
        text = train.memory_estimate(command_line.run_of(words + strong))
        estimated = float(re.match(r"about (\d+) of", text)[1])
        error = train.MEMORY_ERROR * float(row["memory_gib"])
        assert abs(estimated - float(row["memory_gib"])) < error + 0.5, row
        assert row["fits"] != "yes" or "does not fit" not in text, row


def test_dry_run_of_a_toy_mentions_no_gpu():
    for words in (["llama31_8b:tiny"], ["llama2_70b:rehearse", "--gpus", "64"]):
        code, out, _ = train_command("--config", *words, "--dry_run")
        assert code == 0
        assert "GiB" not in out
        assert "H100" not in out
