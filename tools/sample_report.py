"""Writes docs/report.html, a sample of the report's page, from synthetic logs.

  python -m tools.sample_report

Its figures are not measured: step times are noise around the published ones, chosen to show every
verdict. Predictions are those of maxbench plan, stored in tools/results/sample_plans.json.
"""

import dataclasses
import json
import pathlib
import random
import re
import tempfile
from collections.abc import Callable

from maxbench.config import precedence, recipes, resolve
from maxbench.config.run import Run
from maxbench.evidence import published
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.planning import plan_text, planner
from maxbench.reporting import compare, page
from maxbench.run_logs import readers

PAGE = pathlib.Path(__file__).parents[1] / "docs/report.html"
PLANS = pathlib.Path(__file__).with_name("results") / "sample_plans.json"
TITLE = "Sample report of GPU runs, from synthetic logs"
START = 1_790_000_000  # of the first run, seconds since 1970
STEPS = 50


@dataclasses.dataclass(frozen=True)
class SyntheticRun:
    """A recipe, its share of the published speed, and its problems."""

    workload: str
    gpus: int
    share: float
    dtype: str = "bf16"
    overrides: dict = dataclasses.field(default_factory=dict)
    step_factor: Callable[[int], float] = lambda step: 1.0  # step time relative to the mean
    steps: int = STEPS
    result: dict = dataclasses.field(default_factory=dict)


DEAD = "error: *** STEP 7.0 ON node017 CANCELLED AT 2026-03-01T10:00:00 DUE TO TIME LIMIT ***"
RUNS = (
    SyntheticRun("llama31_8b", 8, 0.996),
    SyntheticRun("llama31_8b", 8, 0.991),
    SyntheticRun("llama31_8b", 16, 0.961, overrides={"layout.cp": 1, "layout.dp": 16}),
    SyntheticRun("llama31_8b", 32, 0.973),
    SyntheticRun("llama31_8b", 64, 0.923, result={"slow_hosts": ["node006"]}),
    SyntheticRun("llama31_8b", 128, 0.826),
    SyntheticRun("llama31_8b", 8, 0.977, "fp8", step_factor=lambda i: 1.05 if i % 4 == 3 else 0.98),
    SyntheticRun("llama31_8b", 8, 0.97, "fp8", overrides={"layout.gbs": 64}),
    SyntheticRun("llama2_70b", 128, 0.98),
    SyntheticRun("llama31_70b", 64, 0.9, "fp8", step_factor=lambda i: 1 + 0.003 * (i - 39)),
    SyntheticRun(
        "llama31_70b", 64, 0.9, "fp8", steps=31, result={"status": "died", "reason": DEAD}
    ),
)
PLANNED = (0, 5, 6)  # indices of RUNS


def config_of(run: SyntheticRun) -> Run:
    """The configuration of a synthetic run."""
    config = recipes.load(recipes.CONFIGS / f"{run.workload}.py")
    flags, overrides = {"dtype": run.dtype}, {"precision.backend": "xla"} | run.overrides
    asked = precedence.build_config(config, gpus=run.gpus, flags=flags, overrides=overrides)
    return resolve.resolve(asked, GPU_TYPES)


def readable(name: str) -> str:
    """A run's name without its hash."""
    return name.rpartition("_")[0]


def plans() -> dict[str, dict]:
    """Predictions of the PLANNED runs by name; compiles programs that are not cached."""
    found = {}
    for run in (config_of(RUNS[i]) for i in PLANNED):
        f = planner.plan(run).figures()
        parts_s = {name: round(s, 3) for name, s in f["parts_s"].items() if s > 0}
        found[readable(run.name)] = {"step_s": round(f["step_s"], 3), "parts_s": parts_s}
    return found


def write(folder: pathlib.Path, number: int, run: SyntheticRun) -> None:
    """Writes result.json and metrics.jsonl of a run."""
    noise, start, config = random.Random(number), START + 3600 * number, config_of(run)
    row = published.compare(
        config.model.name, config.model.size, run.dtype, "h100", gpus=run.gpus,
        gbs=config.layout.gbs, seq=config.train.seq, layers=config.model.layers,
    ).row  # fmt: skip
    mean = row.step_s * config.layout.gbs / row.gbs / run.share
    path = folder / "experiments" / config.name / f"{config.name}_{start}"
    path.mkdir(parents=True)
    hosts = {
        f"node{i:03}": {
            "step_s": mean,
            "gemm_tflops": [round(noise.gauss(705, 4)) for _ in "12345678"],
        }
        for i in range(1, run.gpus // 8 + 1)
    }
    for slow in run.result.get("slow_hosts", []):
        hosts[slow]["gemm_tflops"][5] = 612
    result = {
        "schema": 1, "name": config.name, "status": "done", "reason": "",
        "config": config.config.asdict(), "run": config.asdict(),
        "device": {"platform": "gpu", "kind": "NVIDIA H100 80GB HBM3", "gpu_type": "h100"},
        "started": start, "ended": start + 60 + round(STEPS * mean), "hosts": hosts,
        "start_to_first_step_s": 60.0, "lower_s": 2.0, "compile_s": 14.0, "peak_bytes": 62 << 30,
        "versions": {"jax": "0.10.2"},
        "environment": {"NCCL_NVLS_ENABLE": "0"}, "command": ["maxbench", "train"],
    }  # fmt: skip
    result["device"]["count"] = run.gpus
    (path / "result.json").write_text(json.dumps(result | run.result))
    with (path / "metrics.jsonl").open("w") as f:
        for i in range(run.steps):
            step_s = mean * run.step_factor(i) * noise.gauss(1, 0.003) + (8.0 if i == 0 else 0.0)
            loss = 2.2 + 9.5 / (1 + 0.18 * i) + noise.gauss(0, 0.02)
            f.write(json.dumps({"step": i, "step_s": step_s, "loss": loss, "time": start}) + "\n")


def html() -> str:
    """The page, without its creation time."""
    plans = json.loads(PLANS.read_text())
    for plan in plans.values():
        labels = plan_text.PARTS.items()
        plan["parts"] = {text: s for name, text in labels if (s := plan["parts_s"].get(name))}
    with tempfile.TemporaryDirectory() as name:
        for number, run in enumerate(RUNS):
            write(pathlib.Path(name), number, run)
        options = compare.ReportOptions(paths=(name,), cost=2.5, title=TITLE)
        rows = [compare.summarize(record, options) for record in readers.read([name])]
        for row in rows:
            row.planned = plans.get(readable(row.record.name)) if row.step else None
            row.unplanned = "" if row.planned else "not planned for this sample"
        return re.sub(r", created [-0-9: ]+ UTC", "", page.html(rows, options)) + "\n"


if __name__ == "__main__":
    PLANS.write_text(json.dumps(plans(), indent=1) + "\n")
    PAGE.write_text(html(), encoding="utf-8")
