"""The toy of every workload learns: its loss falls by half of the way to the floor in its steps."""

import pytest

from maxbench.step import data
from tests.conftest import WORKLOADS, resolve
from tests.run.conftest import folder_of, losses

DEFAULTS = {"precision.grads": "bf16", "train.data": "bigram"}
EARLY = ("llama31_8b",)


@pytest.mark.parametrize(
    "workload",
    [pytest.param(w, marks=[pytest.mark.exhaustive] * (w not in EARLY)) for w in WORKLOADS],
)
def test_the_loss_of_a_toy_falls_by_half_of_the_way_to_its_floor(train, tmp_path, workload):
    code, printed = train(workload=workload, overrides=DEFAULTS, dtype="bf16")
    assert code == 0, printed
    found = losses(folder_of(tmp_path))
    floor = data.entropy(resolve(workload, "tiny"))
    assert len(found) == 20
    assert found[0] - found[19] > 0.5 * (found[0] - floor)
