"""Every row of the recipe tables, every mesh axis shrunk to at most 2 and sizes to toys: its step
is made, and one trains."""

import functools
import itertools
import json

import pytest

from maxbench.config import command_line, recipes
from maxbench.cost_model import hlo
from maxbench.run import loop
from maxbench.sharding.mesh import make_mesh
from maxbench.step.train_step import Step
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


def test_a_cpu_runs_communication_in_one_order():
    """What a stage decides to run, and a loop, depend on every collective beside them, or it on
    them: else devices may wait for each other for ever."""
    run, _ = CASES[TRAINED]
    program = hlo.parse(Step(run, make_mesh(run.layout)).compile()[0].as_text())

    @functools.cache
    def speaks(name):
        return any(map(talks, program.computations[name].ops))

    def talks(op):
        called = [*op.branches, *map(op.attr, ("body", "calls", "to_apply"))]
        return op.base in hlo.COLLECTIVES or any(speaks(name) for name in called if name)

    conditions = 0
    for where in program.computations.values():
        said, before = [op for op in where.ops if talks(op)], {}
        names = {op.name for op in said}
        for op in where.ops:  # what it needs, of those that talk
            needs = [before[x] | ({x} & names) for x in op.operands]
            before[op.name] = set().union(*needs)
        for a, b in itertools.combinations(said, 2):
            plain = a.base in hlo.COLLECTIVES and b.base in hlo.COLLECTIVES
            assert plain or a.name in before[b.name] or b.name in before[a.name], (a, b)
        decided = [op for op in said if op.opcode in ("conditional", "while")]
        conditions += sum(not program.counts(op) for op in decided)
    assert conditions >= 3  # of the embedding, its gradient, the loss


def test_a_row_trains(tmp_path):
    """A pipeline with experts, all axes at once."""
    expected, flags = CASES[TRAINED]
    words = ["--config", "configs/grok1_314b.py:rehearse", *flags]
    run = command_line.run_of(
        [*words, "--steps", "2", "--seq", "16", "--output_dir", str(tmp_path)]
    )
    assert (run.layout, run.model) == (expected.layout, expected.model)
    with keeping():
        assert loop.train(run) == 0
    result = json.loads(next(tmp_path.rglob("result.json")).read_text())
    assert (result["status"], result["steps_done"]) == ("done", 2)
