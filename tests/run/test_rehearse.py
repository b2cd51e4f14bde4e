"""Rehearsals: rows of the recipe tables with each mesh axis at most 2 and toy sizes."""

import functools
import itertools
import json
import pathlib
from typing import NamedTuple

import pytest

from maxbench.config import command_line, layout_table
from maxbench.config.run import Run
from maxbench.cost_model import hlo
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


@pytest.fixture(scope="module")
def pipeline_with_experts(tmp_path_factory) -> Run:
    """The run of TRAINED, with all axes at once. Both tests compile it, the second from cache."""
    out = str(tmp_path_factory.mktemp("rehearsal"))
    words = ["--config", "configs/grok1_314b.py:rehearse", *trained().flags]
    return command_line.run_of([*words, "--steps", "2", "--seq", "16", "--output_dir", out])


@pytest.mark.exhaustive
@pytest.mark.xdist_group("pipeline_with_experts")
def test_collectives_on_a_cpu_are_ordered(pipeline_with_experts):
    """Branches and loops with collectives depend on every other collective, or it on them.

    XLA:CPU would run independent ones in another order on each device, and deadlock.
    """
    run = pipeline_with_experts
    program = hlo.parse(Step(run, make_mesh(run.layout)).compile()[0].as_text())

    @functools.cache
    def computation_communicates(name):
        return any(map(communicates, program.computations[name].ops))

    def communicates(op):
        called = [*op.branches, *map(op.attr, ("body", "calls", "to_apply"))]
        return op.base in hlo.COLLECTIVES or any(computation_communicates(c) for c in called if c)

    branches = 0
    for computation in program.computations.values():
        communicating = [op for op in computation.ops if communicates(op)]
        names = {op.name for op in communicating}
        predecessors: dict[str, set[str]] = {}  # communicating ops that an op depends on
        for op in computation.ops:
            needs = [predecessors[x] | ({x} & names) for x in op.operands]
            predecessors[op.name] = set().union(*needs)
        for a, b in itertools.combinations(communicating, 2):
            both_plain = a.base in hlo.COLLECTIVES and b.base in hlo.COLLECTIVES
            ordered = a.name in predecessors[b.name] or b.name in predecessors[a.name]
            assert both_plain or ordered, (a, b)
        control_flow = [op for op in communicating if op.opcode in ("conditional", "while")]
        branches += sum(not program.counts(op) for op in control_flow)
    assert branches >= 3  # of the embedding, its gradient, the loss


@pytest.mark.exhaustive
@pytest.mark.xdist_group("pipeline_with_experts")
def test_row_trains(pipeline_with_experts):
    run, expected = pipeline_with_experts, trained().run
    assert (run.layout, run.model) == (expected.layout, expected.model)
    assert loop.train(run) == 0
    result = json.loads(next(pathlib.Path(run.output.dir).rglob("result.json")).read_text())
    assert (result["status"], result["steps_done"]) == ("done", 2)
