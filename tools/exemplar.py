"""Writes the suites of NVIDIA's Exemplar Performance 26.08, maxbench/launch/suites/exemplar_*.toml.

python -m tools.exemplar

exemplar_26_08.csv has NVIDIA's list: the workloads of each GPU type on 512 GPUs, and their layouts;
an empty cell is one that the list does not give. NVIDIA publishes no baselines for 512 GPUs. The
baseline of a run is NVIDIA's newest published step of the same work per GPU, in the same number
format, on another number of GPUs (weak scaling); else the step that `maxbench plan` predicts
(docs/plan.csv).
"""

import csv
import pathlib
from collections.abc import Mapping

from ml_collections import ConfigDict

from maxbench.config import layout_table, recipes
from maxbench.evidence import published

ROOT = pathlib.Path(__file__).parents[1]
SUITES = ROOT / "maxbench/launch/suites"
GPUS, SHARE = 512, 0.95
# Axes of rows that differ from the list, and why.
OTHER = {
    ("llama31_70b", "gb300", "fp8"): (
        ("fsdp",),
        "512 ways leave 16 of 8192 values, and a block of MXFP8 has 32",
    ),
    ("llama31_70b", "gb200", "fp8"): (("fsdp",), "as on GB300"),
    ("nemotron_h_56b", "gb200", "fp8"): (
        ("fsdp",),
        "gradients in float32, whole on each GPU, do not fit",
    ),
    ("nemotron_h_56b", "b200", "fp8"): (("fsdp",), "as on GB200"),
}
# Rows that a recipe has with another batch: the step that is predicted with the list's, by
# maxbench plan --config llama31_70b --gpus 512 --gpu_type h100 --dtype bf16 --mbs 1 --gbs 2048
PLANNED = {("llama31_70b", "h100", "bf16"): 28.306}
HEAD = """\
# NVIDIA's Exemplar Performance 26.08 on {gpus} {gpu}, by python -m tools.exemplar: each workload
# once, at {share:.0%} of its baseline or more. NVIDIA publishes no baselines for {gpus} GPUs;
# `baseline` is the origin of the step time that stands for it.
#
#   maxbench launch --suite exemplar_{gpu_type} --dry_run      prints the {count} runs
#   maxbench launch --suite exemplar_{gpu_type}                submits them
#
# The latter prints the `maxbench report --suite` command, which reports PASS or FAIL.

[defaults]
GPU_TYPE = "{gpu_type}"
JOB_TOTAL_GPUS = {gpus}
"""
JOB = """
[[jobs]]
MODEL = "{model}"
MODEL_SIZE = "{size}"
DTYPE = "{dtype}"
{more}expect = {{ share = {share}, baseline_s = {step_s:g}, baseline = "{origin}" }}
"""


def listed() -> list[dict[str, str]]:
    """NVIDIA's list, a row per run."""
    with (ROOT / "tools/exemplar_26_08.csv").open(newline="") as f:
        return list(csv.DictReader(f))


def recipe(row: Mapping[str, str]) -> dict:
    """The recipe's layout for a row of the list."""
    config = recipes.load_workload(row["workload"])
    key = (GPUS, row["dtype"], "weak", row["gpu_type"])
    found = [x for x in layout_table.table(config.layouts)
             if tuple(x[name] for name in layout_table.KEYS) == key]  # fmt: skip
    return found[0]


def baseline(row: Mapping[str, str], config: ConfigDict) -> tuple[float, str]:
    """The step time that a run is compared with, and its origin.

    Raises:
      LookupError: there is neither a published nor a predicted step.
    """
    model = config.model
    format = "mxfp8" if row["gpu_type"] != "h100" and row["dtype"] == "fp8" else row["dtype"]
    key = (model.name, model.size, row["dtype"], row["gpu_type"], int(row["seq"]), model.layers)
    same = [
        x
        for x in published.rows()
        if (x.model, x.size, x.dtype, x.gpu_type, x.seq, x.layers) == key
        and published.gemms(x.format) == published.gemms(format)
        and x.gbs * GPUS == int(row["gbs"]) * x.gpus
    ]
    if same:
        newest = min(same, key=lambda x: (x.age, abs(x.gpus - GPUS)))
        return newest.step_s, f"published for {newest.gpus} GPUs in {newest.release}"
    if step_s := PLANNED.get((row["workload"], row["gpu_type"], row["dtype"])):
        return step_s, "predicted by maxbench plan"
    with (ROOT / "docs/plan.csv").open(newline="") as f:
        wanted = {"gpus": str(GPUS), "scaling": "weak"} | {
            n: row[n] for n in ("workload", "gpu_type", "dtype")
        }
        for x in csv.DictReader(f):
            if wanted.items() <= x.items() and x["fits"] == "yes":
                return float(x["step_s"]), "predicted by maxbench plan"
    raise LookupError(f"{row['workload']} {row['gpu_type']} {row['dtype']} has no baseline")


def job(row: Mapping[str, str]) -> str:
    """The job of a row of the list, in TOML."""
    config, ours = recipes.load_workload(row["workload"]), recipe(row)
    other = {x: int(row[x]) for x in ("mbs", "gbs") if row[x] and int(row[x]) != ours[x]}
    more = "".join(f"{name.upper()} = {value}\n" for name, value in other.items())
    step_s, origin = baseline(row, config)
    model, size = config.model.name, config.model.size
    return JOB.format(
        model=model, size=size, dtype=row["dtype"], more=more, share=SHARE, step_s=step_s,
        origin=origin,
    )  # fmt: skip


def suite(gpu_type: str) -> str:
    """The text of a GPU type's suite."""
    rows = [row for row in listed() if row["gpu_type"] == gpu_type]
    about = {"gpu_type": gpu_type, "gpu": gpu_type.upper(), "gpus": GPUS, "share": SHARE}
    return HEAD.format(count=len(rows), **about) + "".join(map(job, rows))


def main() -> None:
    for gpu_type in dict.fromkeys(row["gpu_type"] for row in listed()):
        (SUITES / f"exemplar_{gpu_type}.toml").write_text(suite(gpu_type))


if __name__ == "__main__":
    main()
