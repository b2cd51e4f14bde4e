"""Every row of the recipe tables, every mesh axis shrunk to at most 2 and sizes to toys: its step
is made, and one trains."""

import json

import pytest

from maxbench.mesh.axes import make_mesh
from maxbench.run import loop
from maxbench.spec import cli, recipes
from maxbench.step.step import Step
from tests.conftest import WORKLOADS, config, keeping, resolve


def rehearsals() -> dict[str, tuple]:
    """For each program that the rows come down to, its row's name: the Run, and its flags."""
    found = {}
    for workload in WORKLOADS:
        for row in recipes.table(config(workload).layouts):
            flags = {k: row[k] for k in ("gpus", "gpu_type", "dtype")}
            strong = row["scaling"] == "strong"
            run = resolve(workload, "rehearse", strong_scaling=strong, **flags)
            key = workload, run.layout.describe(), run.precision, run.model, run.train
            words = [f"--{k}={v}" for k, v in flags.items()] + ["--strong_scaling"] * strong
            found.setdefault(key, (f"{workload}-{row['dtype']}-{row['gpus']}", run, words))
    return {name: (run, words) for name, run, words in found.values()}


CASES = rehearsals()
TRAINED = "grok1_314b-bf16-1024"


@pytest.mark.parametrize("name", CASES)
def test_no_axis_is_longer_than_two(name):
    run, _ = CASES[name]
    degrees = {getattr(run.layout, axis) for axis in ("pp", "vp", "ep", "cp", "tp", "dp", "fsdp")}
    assert degrees <= {1, 2}


@pytest.mark.parametrize("name", [name for name in CASES if name != TRAINED])
def test_the_step_of_a_row_is_made(name):
    run, _ = CASES[name]
    step = Step(run, make_mesh(run.layout))
    assert "all_reduce" in step.lower().as_text()


def test_a_row_trains(tmp_path):
    """A pipeline with experts, all axes at once."""
    expected, flags = CASES[TRAINED]
    words = ["--config", "configs/grok1_314b.py:rehearse", *flags]
    run = cli.run_of([*words, "--steps", "2", "--seq", "16", "--output_dir", str(tmp_path)])
    assert (run.layout, run.model) == (expected.layout, expected.model)
    with keeping():
        assert loop.train(run) == 0
    result = json.loads(next(tmp_path.rglob("result.json")).read_text())
    assert (result["status"], result["steps_done"]) == ("done", 2)
