"""MaxText programs whose step was measured, planned unchanged; their errors, and the fit to them.

    PYTHONPATH=MAXTEXT/src:. python -m tools.very_programs [--fit] [--check] [PATTERN ...]

in an environment that has MaxText. Each row of tools/very_programs.csv names a measured step of
maxbench/evidence (measured.csv or published.csv) by its work, GPUs and sequences per GPU, and has
the flags of its program. Writes tools/results/very_programs.csv, the errors of
maxbench/evidence/errors.csv, from which error bands are computed, and the tables of
docs/reference/prediction_errors.md. PATTERN chooses rows by 'WORK GPUS', 'llama2 70b fp8 h100 *';
the others keep their result. --fit plans nothing, and writes errors and tables from the results.
--check plans and writes nothing; exits with the problems of the stored results. Neither needs
MaxText.

Fit: the share of peak that GEMMs reach, one for the GPU types of a family and a number format.
Everything else comes from its source in gpus.toml. A step is linear in the inverse of the share; it
is planned at gpus.toml's share and at FACTORS of it. The share of all families together is the
prior of each family's. Each row is predicted three times with a share that was fitted without some
rows: without its workload, its GPU type, or its source. Rows that differ only in the number of
copies of a program count as one.
"""

import argparse
import collections
import csv
import fnmatch
import functools
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from scipy import optimize

from maxbench.evidence import error_band, measured, published
from maxbench.evidence.error_band import Error
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.planning import prediction
from tools import markdown

PROGRAMS = pathlib.Path("tools/very_programs.csv")
RESULTS = pathlib.Path("tools/results/very_programs.csv")
PAGE = pathlib.Path("docs/reference/prediction_errors.md")
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
ERRORS = pathlib.Path(error_band.__file__).with_name("errors.csv")
FACTORS = (0.8, 1.25)  # of prediction.FACTORS: of the share of peak that GEMMs reach
FAMILIES = {"h200": "h100"}  # GPU types that have another's share; all others have their own
WEIGHTS = {"a": 1.0, "b": 0.25, "c": 0.25}  # of a row, by measured.GRADES
PRIOR = 0.02  # weight of a family's distance from the share of all, in logarithms
FIT_PCT = 3  # gpus.toml's shares are within this of the fit: a step moves less than they do


class Step(NamedTuple):
    """A measured step."""

    step_s: float
    network_gbytes_per_s: float
    source: str
    grade: str  # a key of measured.GRADES


class Row(NamedTuple):
    """A program and what was measured of it."""

    work: str  # model, size, dtype and GPU type
    gpus: int
    mbs: int  # sequences per GPU
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
            "--sensitivity",
            f"--maxtext={self.flags} {ALWAYS}",
        ]
        words += [f"--gpu_type={self.gpu_type}", f"--gpus={self.gpus}"]
        if step.network_gbytes_per_s:
            words.append(f"--network_gbytes_per_s={step.network_gbytes_per_s}")
        return words


def rows() -> list[Row]:
    """All programs."""
    with PROGRAMS.open(newline="") as f:
        return [Row(x["work"], int(x["gpus"]), int(x["mbs"]), x["flags"])
                for x in csv.DictReader(f)]  # fmt: skip


def steps() -> dict[str, Step]:
    """Measured steps, by Row.key; of a network with GPU types' own rate, 0."""
    found = {}
    for p in published.rows():
        if "MaxText" in p.source:
            key = f"{p.model} {p.size} {p.dtype} {p.gpu_type} {p.gpus} {p.mbs}"
            found[key] = Step(p.step_s, 0, p.source, "a")
    for m in measured.rows():
        found[f"{m.work} {m.gpus} {m.mbs}"] = Step(
            m.step_s, m.network_gbytes_per_s, m.source, m.grade
        )
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
    at = dict(zip(prediction.FACTORS, found["sensitivity_s"]["GEMMs"], strict=True))
    slower, faster = (at[factor] for factor in FACTORS)
    return {
        "work": row.work, "gpus": str(row.gpus), "mbs": str(row.mbs), "share": f"{share(row):g}",
        "measured_s": f"{step.step_s:g}", "predicted_s": f"{found['step_s']:.4f}",
        "slower_s": f"{slower:.4f}", "faster_s": f"{faster:.4f}",
        "memory_gib": f"{found['memory']['total'] / 2**30:.1f}",
    }  # fmt: skip


def share(row: Row) -> float:
    """The share of peak of a row's GEMMs in gpus.toml."""
    return getattr(GPU_TYPES[row.gpu_type].efficiency, f"gemm_{row.work.split()[-2]}")


class Case(NamedTuple):
    """A planned row, with the step at other shares of peak.

    `shares` are those of gpus.toml when it was planned, times FACTORS, and that share itself.
    """

    row: Row
    step: Step
    shares: tuple[float, float, float]  # slower, current, faster
    seconds: tuple[float, float, float]
    weight: float

    @property
    def workload(self) -> str:
        return " ".join(self.row.work.split()[:2])

    @property
    def dtype(self) -> str:
        return self.row.work.split()[-2]

    @property
    def family(self) -> tuple[str, str]:
        """Rows with the same share: a GPU type, and a number format."""
        return FAMILIES.get(self.row.gpu_type, self.row.gpu_type), self.dtype

    @property
    def source(self) -> str:
        """The document of the measured step."""
        return re.split("[:,]", self.step.source)[0]

    def error(self, share: float) -> float:
        """Predicted over measured, less 1, where GEMMs reach this share of peak."""
        slower, current, faster = (1 / x for x in self.shares)
        ends = (slower, current) if 1 / share > current else (faster, current)
        at = self.seconds[0] if 1 / share > current else self.seconds[2]
        slope = (at - self.seconds[1]) / (ends[0] - ends[1])
        return (self.seconds[1] + slope * (1 / share - current)) / self.step.step_s - 1


def cases(results: Sequence[dict[str, str]]) -> list[Case]:
    """All planned rows. Rows of a work, a source and an fsdp degree share one program's weight."""
    stored, known = {f"{x['work']} {x['gpus']} {x['mbs']}": x for x in results}, steps()

    def program(row: Row) -> tuple:
        fsdp = re.findall(r"(?:ici|dcn)_fsdp_parallelism=(\d+)", row.flags)
        return row.work, row.mbs, math.prod(map(int, fsdp))

    every = [row for row in rows() if row.key in stored]
    count = collections.Counter(map(program, every))
    found = []
    for row in every:
        x, step = stored[row.key], known[row.key]
        shares = (FACTORS[0] * float(x["share"]), float(x["share"]), FACTORS[1] * float(x["share"]))
        seconds = (float(x["slower_s"]), float(x["predicted_s"]), float(x["faster_s"]))
        weight = WEIGHTS[step.grade] / count[program(row)]
        found.append(Case(row, step, shares, seconds, weight))
    return found


def fit(chosen: Sequence[Case], prior: float | None = None) -> float:
    """The share of peak that predicts some rows best, near `prior`."""

    def loss(share: float) -> float:
        near = PRIOR * math.log(share / prior) ** 2 if prior else 0.0
        return near + sum(x.weight * math.log1p(x.error(share)) ** 2 for x in chosen)

    return float(optimize.minimize_scalar(loss, bounds=(0.3, 0.95), method="bounded").x)


def fitted(every: Sequence[Case], family: tuple[str, str]) -> float:
    """The share of peak of a family, fitted to its rows and near that of all rows of the format, or
    of all rows where none of the format is left."""
    of_format = [x for x in every if x.dtype == family[1]] or every
    common = fit(of_format)
    return fit([x for x in every if x.family == family], common)


def left_out(every: Sequence[Case]) -> Iterator[Error]:
    """Errors of each row with a share fitted to the rows of another workload, type or source."""
    ways: dict[str, Callable[[Case], str]] = {
        "workload": lambda x: x.workload,
        "gpu_type": lambda x: x.row.gpu_type,
        "source": lambda x: x.source,
    }
    share = functools.cache(
        lambda way, name, family: fitted([x for x in every if ways[way](x) != name], family)
    )
    for x in every:
        for way, name_of in ways.items():
            error = x.error(share(way, name_of(x), x.family))
            yield Error(
                x.workload, x.dtype, x.row.gpu_type, x.source, x.row.gpus, way,
                round(x.weight, 3), round(error, 4),
            )  # fmt: skip


def table(results: Sequence[dict[str, str]]) -> str:
    """The page's tables: a summary by GPU type and dtype, the fit, and all rows."""
    every = cases(results)
    errors = [*left_out(every)]
    ways = len(error_band.WAYS)
    without = [f"without its {way.replace('gpu_type', 'GPU type')}" for way in error_band.WAYS]
    groups: list[tuple[str, ...]] = [*sorted({(x.row.gpu_type, x.dtype) for x in every}), ()]
    summary = []
    for group in groups:
        chosen = [i for i, x in enumerate(every) if (x.row.gpu_type, x.dtype) == group or not group]
        columns = [[every[i].error(every[i].shares[1]) for i in chosen]]
        columns += [[errors[ways * i + way].error for i in chosen] for way in range(ways)]
        cells = [" ".join(group) or "all", str(len(chosen))]
        for found in columns:
            median, worst = statistics.median(map(abs, found)), max(found, key=abs)
            cells.append(f"{100 * median:.1f}, {100 * worst:+.1f}")
        summary.append(cells)
    shares = []
    for family in sorted({x.family for x in every}):
        current = getattr(GPU_TYPES[family[0]].efficiency, f"gemm_{family[1]}")
        shares.append([" ".join(family), f"{current:.3f}", f"{fitted(every, family):.3f}"])
    stored = {f"{x['work']} {x['gpus']} {x['mbs']}": x for x in results}
    rows = []
    for i, x in enumerate(every):
        result = stored[x.row.key]
        cells = [x.row.work, str(x.row.gpus), result["measured_s"], result["predicted_s"]]
        cells.append(f"{100 * x.error(x.shares[1]):+.1f}")
        cells += [f"{100 * e.error:+.1f}" for e in errors[ways * i : ways * (i + 1)]]
        rows.append([*cells, result["memory_gib"]])
    heads = ["work", "GPUs", "measured s", "predicted s", "error %"]
    heads += [*(f"{text} %" for text in without), "memory GiB"]
    parts = (
        markdown.table(["programs", "steps", "median of \\|error\\|, worst %", *without], summary),
        markdown.table(["GEMMs of", "share of peak in gpus.toml", "fitted to the rows"], shares),
        markdown.table(heads, rows),
    )
    return "\n".join(parts)


def read() -> list[dict[str, str]]:
    """Stored results."""
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as f:
        return [*csv.DictReader(f)]


def page(text: str, results: Sequence[dict[str, str]]) -> str:
    """The page with the tables of the results."""
    return markdown.replaced(text, "very programs", table(results))


def errors_csv(results: Sequence[dict[str, str]]) -> str:
    """Text of ERRORS."""
    lines = [",".join(Error._fields), *(",".join(map(str, e)) for e in left_out(cases(results)))]
    return "\n".join(lines) + "\n"


def problems() -> Iterator[str]:
    """Rows without a measured step or a result; errors, a page and constants of other results."""
    results, known = read(), steps()
    stored = {f"{x['work']} {x['gpus']} {x['mbs']}": x for x in results}
    for row in rows():
        if row.key not in known:
            yield f"{PROGRAMS}: {row.key} is no measured step"
        elif row.key not in stored or float(stored[row.key]["measured_s"]) != known[row.key].step_s:
            yield f"{RESULTS}: {row.key} is not planned, or its measured step has changed"
        elif float(stored[row.key]["share"]) != round(share(row), 3):
            yield f"{RESULTS}: {row.key} was planned with another share of peak than gpus.toml's"
    if ERRORS.read_text() != errors_csv(results):
        yield f"{ERRORS}: not those of {RESULTS}"
    if page(PAGE.read_text(), results) != PAGE.read_text():
        yield f"{PAGE}: its table is not that of {RESULTS}"
    every = cases(results)
    for gpu_type, dtype in sorted({x.family for x in every}):
        current = getattr(GPU_TYPES[gpu_type].efficiency, f"gemm_{dtype}")
        found = fitted(every, (gpu_type, dtype))
        if abs(found / current - 1) > FIT_PCT / 100:
            yield f"gpus.toml: gemm_{dtype} of {gpu_type} is {current}, fitted {found:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("patterns", nargs="*")
    options = parser.parse_args()
    if options.check:
        sys.exit("\n".join(problems()) or 0)
    known, found = steps(), {f"{x['work']} {x['gpus']} {x['mbs']}": x for x in read()}
    for row in [] if options.fit else rows():
        chosen = not options.patterns or any(
            fnmatch.fnmatch(f"{row.work} {row.gpus}", pattern) for pattern in options.patterns
        )
        if chosen:
            found[row.key] = plan(row, known[row.key])
            print(*found[row.key].values(), flush=True)
            store([found[row.key] for row in rows() if row.key in found])
    ERRORS.write_text(errors_csv(read()))
    PAGE.write_text(page(PAGE.read_text(), read()))
    sys.exit("\n".join(problems()) or 0)


def store(results: Sequence[dict[str, str]]) -> None:
    """Writes results."""
    with RESULTS.open("w", newline="") as f:
        writer = csv.DictWriter(f, results[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(results)


if __name__ == "__main__":
    main()
