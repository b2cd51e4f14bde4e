"""Rehearsals: rows of the recipe tables with each mesh axis at most 2 and toy sizes."""

import functools
import json
from typing import NamedTuple

import pytest

from maxbench.config import command_line, layout_table
from maxbench.config.run import Run
from maxbench.run import loop
from maxbench.sharding.mesh import make_mesh
from maxbench.step.train_step import Step
from tests.conftest import WORKLOADS, config, resolve


class Rehearsal(NamedTuple):
    """The toy run of a row, and the flags of the row."""

    run: Run
    flags: list[str]


@functools.cache
def rehearsals(workload: str) -> dict[str, Rehearsal]:
    """One rehearsal for each set of axes of a workload, by the name of its first row: rows with the
    same axes differ in sizes and number formats, which other tests hold."""
    by_axes = {}
    for row in layout_table.table(config(workload).layouts):
        flags = {k: row[k] for k in ("gpus", "gpu_type", "dtype")}
        strong = row["scaling"] == "strong"
        run = resolve(workload, "rehearse", strong_scaling=strong, **flags)
        axes = run.layout.describe().partition(", mbs")[0]
        words = [f"--{k}={v}" for k, v in flags.items()] + ["--strong_scaling"] * strong
        by_axes.setdefault(axes, (f"{row['dtype']}-{row['gpus']}", Rehearsal(run, words)))
    return dict(by_axes.values())


TRAINED = "grok1_314b", "bf16-1024"


@pytest.mark.parametrize("workload", WORKLOADS)
def test_no_axis_is_longer_than_two(workload):
    for rehearsal in rehearsals(workload).values():
        layout = rehearsal.run.layout
        sizes = {getattr(layout, axis) for axis in ("pp", "vp", "ep", "cp", "tp", "dp", "fsdp")}
        assert sizes <= {1, 2}


@pytest.mark.exhaustive
@pytest.mark.parametrize("workload", WORKLOADS)
def test_step_of_every_row_is_lowered(workload):
    for name, (run, _) in rehearsals(workload).items():
        if (workload, name) != TRAINED:
            assert "all_reduce" in Step(run, make_mesh(run.layout)).lower().as_text(), name


def trained() -> Rehearsal:
    workload, name = TRAINED
    return rehearsals(workload)[name]


@pytest.mark.exhaustive
def test_row_trains(tmp_path):
    """The run of TRAINED, with all axes at once."""
    words = ["--config", "configs/grok1_314b.py:rehearse", *trained().flags]
    run = command_line.run_of(
        [*words, "--steps", "2", "--seq", "16", "--output_dir", str(tmp_path)]
    )
    expected = trained().run
    assert (run.layout, run.model) == (expected.layout, expected.model)
    assert loop.train(run) == 0
    result = json.loads(next(tmp_path.rglob("result.json")).read_text())
    assert (result["status"], result["steps_done"]) == ("done", 2)
