"""The table of all recipe rows, docs/plan.csv, and its rows compiled again."""

import csv
import pathlib

import pytest

from maxbench.cost_model.memory import GIB
from tests.conftest import KEPT_FIGURES_JAX
from tests.planning.plans import planned
from tools import plan_table

pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
ROOT = pathlib.Path(__file__).parents[2]


def table() -> list[dict]:
    with open(ROOT / "docs" / "plan.csv", newline="") as f:
        return list(csv.DictReader(f))


def test_the_table_has_every_row():
    configs = sorted(str(path) for path in (ROOT / "configs").glob("*.py"))
    rows = [plan_table.key(row) for row in plan_table.rows(configs)]
    assert [{k: line[k] for k in rows[0]} for line in table()] == rows
    page = (ROOT / "docs/reference/plan_table.md").read_text()
    assert plan_table.as_markdown(table()) in page


@pytest.mark.gpu_compile
@pytest.mark.parametrize(
    ("workload", "gpus", "dtype", "gpu"),
    [
        pytest.param(*row, marks=[*marks, pytest.mark.xdist_group(group)])
        for *row, group, marks in (
            ("llama2_70b", 128, "bf16", "h100", "plan", []),
            ("grok1_314b", 16, "bf16", "h100", "plan", [pytest.mark.exhaustive]),
            ("llama31_405b", 64, "bf16", "h100", "plan 405b", [pytest.mark.exhaustive]),
            ("qwen3_30b_a3b", 8, "fp8", "b200", "plan qwen3", [pytest.mark.exhaustive]),
        )
    ],
)
def test_the_table_is_current(workload, gpus, dtype, gpu):
    """The programs are those of other tests. Figures by jax version: figures.json."""
    columns = {"workload": workload, "gpus": str(gpus), "dtype": dtype, "gpu_type": gpu}
    line = next(x for x in table() if (columns | {"scaling": "weak"}).items() <= x.items())
    row = f"--config configs/{workload}.py --gpus {gpus} --dtype {dtype} --gpu_type {gpu}"
    plan = planned(row)
    # The table was compiled by one jax version.
    time, size = (0.01, 0.02) if KEPT_FIGURES_JAX else (0.04, 0.08)
    assert plan["step_s"] == pytest.approx(float(line["step_s"]), rel=time)
    assert plan["memory"]["total"] / GIB == pytest.approx(float(line["memory_gib"]), rel=size)
