"""MaxText programs whose step was measured, planned unchanged, and their errors.

    PYTHONPATH=MAXTEXT/src:. python tools/very_programs.py [--check] [PATTERN ...]

in an environment that has MaxText. Each row of tools/very_programs.csv names a measured step of
maxbench/evidence (measured.csv or published.csv) by its work, GPUs and sequences per GPU, and has
the flags of its program. Writes tools/results/very_programs.csv and the table of
docs/reference/prediction_errors.md. PATTERN chooses rows by 'WORK GPUS', 'llama2 70b fp8 h100 *';
the others keep their result. --check plans nothing; exits with what is not current.
"""

import argparse
import csv
import fnmatch
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from maxbench.evidence import measured, published

PROGRAMS = pathlib.Path("tools/very_programs.csv")
RESULTS = pathlib.Path("tools/results/very_programs.csv")
PAGE = pathlib.Path("docs/reference/prediction_errors.md")
BEGIN, END = "<!-- very programs -->\n", "<!-- end of very programs -->\n"
# XLA's options of the recipes: latency hiding, pipelined collectives, no rematerialization.
XLA = (
    "--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_enable_triton_gemm=false "
    "--xla_gpu_enable_command_buffer= --xla_gpu_enable_highest_priority_async_stream=true "
    "--xla_gpu_all_reduce_combine_threshold_bytes={0} "
    "--xla_gpu_all_gather_combine_threshold_bytes={1} "
    "--xla_gpu_reduce_scatter_combine_threshold_bytes={2} "
    "--xla_gpu_enable_pipelined_all_gather=true --xla_gpu_enable_pipelined_reduce_scatter=true "
    "--xla_gpu_enable_pipelined_all_reduce=true "
    "--xla_gpu_enable_while_loop_double_buffering=true "
    "--xla_disable_hlo_passes=rematerialization"
)
COMBINE = {"b200": (16 << 30, 16 << 30, 16 << 30)}  # bytes, of a recipe's GPU type
HOPPER = (8 << 30, 2 << 30, 32 << 20)
ALWAYS = "attention=cudnn_flash_jax scan_layers=true"


class Step(NamedTuple):
    """A measured step."""

    step_s: float
    network_gbytes_per_s: float
    source: str


class Row(NamedTuple):
    """A program and what was measured of it."""

    work: str  # model, size, dtype and GPU type
    gpus: int
    mbs: int  # sequences per GPU
    fitted: str  # 'yes' if a constant of the GPU type was fitted to this row or its program
    flags: str  # MaxText's

    @property
    def gpu_type(self) -> str:
        return self.work.split()[-1]

    @property
    def key(self) -> str:
        return f"{self.work} {self.gpus} {self.mbs}"

    def command(self, step: Step) -> list[str]:
        """The command that plans it."""
        words = [
            sys.executable,
            "-m",
            "maxbench.plan",
            "--json",
            f"--maxtext={self.flags} {ALWAYS}",
        ]
        words += [f"--gpu_type={self.gpu_type}", f"--gpus={self.gpus}"]
        if step.network_gbytes_per_s:
            words.append(f"--network_gbytes_per_s={step.network_gbytes_per_s}")
        return words


def rows() -> list[Row]:
    """All programs."""
    with PROGRAMS.open(newline="") as f:
        return [Row(x["work"], int(x["gpus"]), int(x["mbs"]), x["fitted"], x["flags"])
                for x in csv.DictReader(f)]  # fmt: skip


def steps() -> dict[str, Step]:
    """Measured steps, by Row.key; of a network with GPU types' own rate, 0."""
    found = {}
    for p in published.rows():
        if "MaxText" in p.source:
            key = f"{p.model} {p.size} {p.dtype} {p.gpu_type} {p.gpus} {p.mbs}"
            found[key] = Step(p.step_s, 0, p.source)
    for m in measured.rows():
        found[f"{m.work} {m.gpus} {m.mbs}"] = Step(m.step_s, m.network_gbytes_per_s, m.source)
    return found


def plan(row: Row, step: Step) -> dict[str, str]:
    """The result of a row."""
    flags = XLA.format(*COMBINE.get(row.gpu_type, HOPPER))
    done = subprocess.run(
        row.command(step), capture_output=True, text=True, env=os.environ | {"XLA_FLAGS": flags}
    )
    if done.returncode:
        sys.exit(f"{row.key}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout)
    low, high = (found["band_s"][end] for end in ("low", "high"))
    return {
        "work": row.work, "gpus": str(row.gpus), "mbs": str(row.mbs), "fitted": row.fitted,
        "measured_s": f"{step.step_s:g}", "predicted_s": f"{found['step_s']:.3f}",
        "error_pct": f"{100 * (found['step_s'] / step.step_s - 1):+.1f}",
        "in_band": "yes" if low <= step.step_s <= high else "no",
        "memory_gib": f"{found['memory']['total'] / 2**30:.1f}",
    }  # fmt: skip


def table(results: Sequence[dict[str, str]]) -> str:
    """The page's tables: a summary by GPU type and dtype, and all rows."""
    heads = ["programs", "steps", "median of \\|error\\| %", "worst %", "in band"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    kind = lambda x: (x["work"].split()[-1], x["work"].split()[-2], x["fitted"])
    for gpu_type, dtype, fitted in sorted({*map(kind, results)}):
        chosen = [x for x in results if kind(x) == (gpu_type, dtype, fitted)]
        name = f"{gpu_type} {dtype}" + (", fitted to" if fitted == "yes" else "")
        lines.append(summary(name, chosen))
    lines += [
        summary("all that nothing was fitted to", [x for x in results if not x["fitted"]]),
        "",
    ]
    shown = ("work", "gpus", "measured_s", "predicted_s", "error_pct", "in_band", "memory_gib")
    heads = ["work", "GPUs", "measured s", "predicted s", "error %", "in band", "memory GiB"]
    lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    lines += ["| " + " | ".join(x[name] for name in shown) + " |" for x in results]
    return "\n".join(lines) + "\n"


def summary(name: str, results: Sequence[dict[str, str]]) -> str:
    """A line of a table: the errors of some results."""
    errors = [float(x["error_pct"]) for x in results]
    worst = max(errors, key=abs)
    inside = sum(x["in_band"] == "yes" for x in results)
    median = statistics.median(map(abs, errors))
    return f"| {name} | {len(errors)} | {median:.1f} | {worst:+.1f} | {inside} of {len(errors)} |"


def read() -> list[dict[str, str]]:
    """Stored results."""
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as f:
        return [*csv.DictReader(f)]


def page(text: str, results: Sequence[dict[str, str]]) -> str:
    """The page with the tables of the results."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n" + table(results) + "\n" + END + rest.split(END)[1]


def problems() -> Iterator[str]:
    """What is not current: rows without a measured step or a result, and the page."""
    results, known = read(), steps()
    stored = {f"{x['work']} {x['gpus']} {x['mbs']}": x for x in results}
    for row in rows():
        if row.key not in known:
            yield f"{PROGRAMS}: {row.key} is no measured step"
        elif row.key not in stored or float(stored[row.key]["measured_s"]) != known[row.key].step_s:
            yield f"{RESULTS}: {row.key} is not planned, or its measured step has changed"
    if page(PAGE.read_text(), results) != PAGE.read_text():
        yield f"{PAGE}: its table is not that of {RESULTS}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("patterns", nargs="*")
    options = parser.parse_args()
    if options.check:
        sys.exit("\n".join(problems()) or 0)
    known, found = steps(), {f"{x['work']} {x['gpus']} {x['mbs']}": x for x in read()}
    for row in rows():
        chosen = not options.patterns or any(
            fnmatch.fnmatch(f"{row.work} {row.gpus}", pattern) for pattern in options.patterns
        )
        if chosen:
            found[row.key] = plan(row, known[row.key])
            print(*found[row.key].values(), flush=True)
            store([found[row.key] for row in rows() if row.key in found])
    PAGE.write_text(page(PAGE.read_text(), read()))


def store(results: Sequence[dict[str, str]]) -> None:
    """Writes results."""
    with RESULTS.open("w", newline="") as f:
        writer = csv.DictWriter(f, results[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(results)


if __name__ == "__main__":
    main()
