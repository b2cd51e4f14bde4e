"""Every row of the recipe tables trains, every mesh axis shrunk to at most 2 and sizes to toys."""

import json
import os
import subprocess
import sys

import pytest

from maxbench.spec import recipes
from tests.conftest import WORKLOADS, config, resolve


def rehearsals() -> dict[str, list[str]]:
    """Flags of a rehearsal for each program that the rows come down to, and its row's name."""
    found = {}
    for workload in WORKLOADS:
        for row in recipes.table(config(workload).layouts):
            flags = {k: row[k] for k in ("gpus", "gpu_type", "dtype")}
            strong = row["scaling"] == "strong"
            run = resolve(workload, "rehearse", strong_scaling=strong, **flags)
            key = workload, run.layout.describe(), run.precision, run.model, run.train
            words = [f"--{k}={v}" for k, v in flags.items()] + ["--strong_scaling"] * strong
            found.setdefault(key, (f"{workload}-{row['dtype']}-{row['gpus']}", workload, words))
    return {name: [workload, *words] for name, workload, words in found.values()}


CASES = rehearsals()


@pytest.mark.parametrize("name", CASES)
def test_row_trains(name, tmp_path):
    workload, *flags = CASES[name]
    command = [
        sys.executable,
        "-m",
        "maxbench.train",
        "--config",
        f"configs/{workload}.py:rehearse",
    ]
    command += [*flags, "--steps", "3", "--output_dir", str(tmp_path)]
    environment = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(next(tmp_path.rglob("result.json")).read_text())
    assert (result["status"], result["steps_done"]) == ("done", 3)
    degrees = {a: result["config"]["layout"][a] for a in ("pp", "vp", "ep", "cp", "tp")}
    assert set(degrees.values()) <= {1, 2}
