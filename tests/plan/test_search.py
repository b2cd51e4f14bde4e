"""The arithmetic that decides what --search compiles."""

import csv
import pathlib

import pytest

from maxbench.plan import memory, search
from maxbench.plan.memory import GIB
from maxbench.spec import cli
from maxbench.step.schedule import schedule

pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")


def run_of(arguments: str):
    words = f"--config configs/{arguments}".split()
    return cli.run_of(words)


def test_pipelines_divide_the_layers_or_the_layers_and_two_slots():
    assert search.pipelines(4, 4) == [(1, 1), (2, 1), (2, 2), (2, 3), (4, 1)]
    of_405b = search.pipelines(126, 8)
    assert (8, 8) in of_405b  # 126 + 2 slots
    assert (2, 63) in of_405b
    assert (8, 9) not in of_405b


@pytest.mark.parametrize(
    "arguments", ["llama31_405b.py --gpus 512", "nemotron4_340b.py --gpus 128"]
)
def test_the_published_layout_is_among_the_legal_ones(arguments):
    run = run_of(arguments)
    found = set(search.layouts(run))
    assert run in found
    assert len(found) > 1000
    assert {x.layout.pp for x in found} == {1, 2, 4, 8, 16}
    assert all(x.layout.gpus == run.layout.gpus for x in found)
    assert all(x.layout.gbs == run.layout.gbs for x in found)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("vp", [1, 2, 4])
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_work_in_flight_is_the_schedules(pp, vp, name):
    axes = f"--pp {pp} --vp {vp} --layers 32 --gbs {2 * 4 * pp} --mbs 2"
    run = run_of(f"llama2_70b.py:tiny {axes} --config.train.schedule={name}")
    assert run.layout.microbatches == 4 * pp
    assert memory.in_flight(run) == schedule(name, pp, vp, 4 * pp).keep


def test_the_arithmetic_is_near_what_was_compiled():
    """Every row of the table: time within a third, memory within a fifth."""
    with pathlib.Path("docs/plan.csv").open(newline="") as f:
        table = [row for row in csv.DictReader(f) if row["gpu_type"] == "h100"]
    assert len(table) == 74
    for row in table:
        flags = f"--gpus {row['gpus']} --dtype {row['dtype']}"
        run = run_of(f"{row['workload']}.py {flags}")
        assert search.seconds(run) == pytest.approx(float(row["step_s"]), rel=0.33), flags
        assert search.held(run) / GIB == pytest.approx(float(row["memory_gib"]), rel=0.2), flags


def test_candidates_fit_by_arithmetic_and_differ():
    run = run_of("llama31_8b.py --gpus 8")
    found = search.candidates(run, 4)
    assert found[0] == run
    assert len(set(found)) == 5
    assert all(search.held(one) < memory.capacity("h100") for one in found[1:])
    assert [search.seconds(one) for one in found[1:]] == sorted(map(search.seconds, found[1:]))
