"""Plans measured steps of JAX programs, and newer published ones, and stores errors and fits.

  python tools/measured.py [--cached]

Rows: those of maxbench/evidence/measured.csv, and the published dense rows of releases that nothing
is fitted to, if the recipe has the same layout. Each program is planned with its own layout and
recomputation on its GPU type and network, and compared as compiled, without deltas. Prints a table
of measured and predicted steps; writes it to tools/results/measured.csv, and errors of
predictions that were fitted to other rows to maxbench/evidence/measured_errors.csv, from which
maxbench/evidence/error_band.py computes bands. --cached: only programs in the cache; the lines of
other rows stay.

Left out by workload: a row of use 'check' is predicted with the constants of gpus.toml, a row of
use 'fit' with its GPU type's GEMM fractions fitted to the other workloads. By GPU type: Hopper's
GEMM fractions. By framework: for MaxText on Hopper, the constants that were fitted to NeMo's steps
alone; for other frameworks on Hopper, those of gpus.toml, which were fitted to NeMo's and
MaxText's.

Fit: the GEMM fraction of a GPU type and number format that predicts the type's rows of use 'fit'
best. It is printed, and copied to gpus.toml by hand. A weak prior keeps it near Hopper's, and near
B200's for the other Blackwell types. Rows of Megatron-Bridge are not fitted to: they are other
programs.
"""

import argparse
import collections
import csv
import dataclasses
import math
import pathlib
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence

from scipy import optimize

from maxbench.calibration.fit import PLAUSIBLE
from maxbench.config import command_line, gpu_files, recipes, resolve
from maxbench.config.errors import UserError
from maxbench.config.run import Run
from maxbench.cost_model import compile_cache, hlo
from maxbench.evidence import error_band, measured, published
from maxbench.hardware.gpus import GPU_TYPES, Efficiency
from maxbench.planning import planner

PACKAGE = pathlib.Path(error_band.__file__).parent
TABLE = pathlib.Path("tools/results/measured.csv")
ERRORS = PACKAGE / "measured_errors.csv"
HOPPER = ("h100", "h200", "gh200", "h20")  # GPU types with H100's constants
PRIOR = 0.02  # weight of the distance from the prior's fraction, in logarithms
WEIGHTS = {"a": 1.0, "b": 0.25, "c": 0.25}  # of a row, by grade
BEFORE = {"gemm_bf16": 0.701, "gemm_fp8": 0.66, "gemm_fp4": 0.66}  # Hopper's, for all types
KEY = ("work", "framework", "gpus", "measured_s")


@dataclasses.dataclass(frozen=True)
class Case:
    """A step that was measured, and the run that plans it."""

    run: Run
    work: str
    framework: str
    software: str
    grade: str
    use: str
    step_s: float

    @property
    def workload(self) -> str:
        return f"{self.run.model.name} {self.run.model.size}"

    @property
    def constant(self) -> str:
        """The constant of its GEMMs."""
        return f"gemm_{self.run.format.peak}"

    @property
    def key(self) -> tuple[str, ...]:
        return (self.work, self.framework, str(self.run.layout.gpus), f"{self.step_s:g}")


def measured_cases() -> list[Case]:
    cases = []
    for row in measured.rows():
        run = command_line.run_of(row.words)
        figures = {"network_gbytes_per_s": row.network_gbytes_per_s}
        hardware = gpu_files.override(run.hardware, row.gpu_type, figures)
        run = resolve.resolve(run.config, hardware, run.device)
        about = (row.work, row.framework, row.software, row.grade, row.use, row.step_s)
        cases.append(Case(run, *about))
    return cases


def published_cases() -> list[Case]:
    """Dense rows of releases without deltas, where the recipe has the published layout."""
    cases = []
    newest = {}  # a row of each work
    for row in sorted(published.rows(), key=lambda r: r.age, reverse=True):
        if row not in published.fitted_rows() and row.model.startswith("llama"):
            newest[row.model, row.size, row.format, row.gpu_type, row.gpus] = row
    for row in newest.values():
        (config,) = recipes.find_workloads(row.model, row.size)
        words = f"--config {config} --gpus {row.gpus} --gpu_type {row.gpu_type} --dtype {row.dtype}"
        try:
            run = planner.as_published(command_line.run_of(words.split()))
        except UserError:  # no row of the recipe
            continue
        found = published.compare_run(run, row.gpu_type)
        if found.row is row and not found.refusal and not found.notes:
            about = (f"{row.model} {row.size} {row.format} {row.gpu_type}", "bridge")
            cases.append(Case(run, *about, row.release, "a", "check", row.step_s))
    return cases


class Program:
    """A compiled case, simulated with any constants."""

    def __init__(self, case: Case):
        plan = planner.plan(case.run)
        self.case, self.plan = case, plan
        self.program = hlo.parse(plan.compiled.text)
        self.seconds_at: dict[tuple, float] = {}

    def seconds(self, **constants: float) -> float:
        """The predicted step with these constants, and gpus.toml's others."""
        key = tuple(sorted(constants.items()))
        if key not in self.seconds_at:
            efficiency: Efficiency = dataclasses.replace(self.case.run.gpu.efficiency, **constants)
            t = planner.simulate_plan(self.case.run, self.program, efficiency=efficiency)
            self.seconds_at[key] = t.seconds
        return self.seconds_at[key]

    def error(self, **constants: float) -> float:
        return self.seconds(**constants) / self.case.step_s - 1

    def linear(self, name: str, value: float) -> float:
        """error() at another GEMM fraction, by interpolation: steps are linear in its inverse."""
        a, b = 0.5, 0.7
        at_a, at_b = self.seconds(**{name: a}), self.seconds(**{name: b})
        seconds = at_a + (at_b - at_a) * (1 / value - 1 / a) / (1 / b - 1 / a)
        return seconds / self.case.step_s - 1


def fit(programs: Sequence[Program], name: str) -> float:
    """The GEMM fraction that predicts the programs, of one GPU type, best."""
    prior = BEFORE[name]
    if programs[0].case.run.layout.gpu_type in ("b300", "gb200", "gb300"):
        prior = getattr(GPU_TYPES["b200"].efficiency, name)

    def loss(value: float) -> float:
        weights = [WEIGHTS[p.case.grade] for p in programs]
        errors = [math.log1p(p.linear(name, value)) ** 2 for p in programs]
        fit = sum(w * e for w, e in zip(weights, errors, strict=True))
        return fit + PRIOR * math.log(value / prior) ** 2

    return float(optimize.minimize_scalar(loss, bounds=PLAUSIBLE[name], method="bounded").x)


def left_out(program: Program, programs: Sequence[Program]) -> dict[str, float]:
    """Errors of a program's prediction, by error_band.WAYS."""
    case, name = program.case, program.case.constant
    hoppers = {name: BEFORE[name]}
    errors = {"gpu_type": program.error(**hoppers)}
    gpu_type = case.run.layout.gpu_type
    if gpu_type in HOPPER:
        errors["workload"] = program.error()
        errors["framework"] = program.error(**_fitted_to_nemo())
        if case.framework != "maxtext":
            errors["framework"] = program.error()
        if gpu_type == "h100":  # the type that the constants were fitted to
            del errors["gpu_type"]
        return errors
    alike = [p for p in programs if p.case.use == "fit" and p.case.constant == name
             and p.case.run.layout.gpu_type == gpu_type]  # fmt: skip
    for way in ("workload", "framework"):
        others = [p for p in alike if getattr(p.case, way) != getattr(case, way)]
        if others:
            errors[way] = program.error(**{name: fit(others, name)})
    return errors


def _fitted_to_nemo() -> dict[str, float]:
    """Constants fitted to all published rows but those of Llama 2 70B, the only ones of MaxText."""
    with (PACKAGE / "errors.csv").open(newline="") as f:
        row = next(x for x in csv.DictReader(f) if x["workload"] == "llama2 70b")
    return {name: float(row[name]) for name in ("gemm_bf16", "gemm_fp8", "nvlink_us")}


def lines_of(program: Program, errors: Mapping[str, float]) -> tuple[dict, list[dict]]:
    """A line of TABLE, and those of ERRORS without their weight."""
    case, a = program.case, program.case.run.layout
    key = dict(zip(KEY, case.key, strict=True))
    before = program.error(**{case.constant: BEFORE[case.constant]})
    table = key | {
        "layout": a.describe().replace(",", ";"),
        "software": case.software,
        "grade": case.grade,
        "use": case.use,
        "predicted_s": f"{program.seconds():.3f}",
        "error_pct": f"{program.error() * 100:+.1f}",
        "before_pct": f"{before * 100:+.1f}",
        "left_out_pct": f"{100 * errors['workload']:+.1f}" if "workload" in errors else "",
        "jax": compile_cache.versions()["jax"],
    }
    kind = error_band.parallelism(bool(case.run.model.experts), a.pp, a.tp, a.fsdp)
    about = {"workload": case.workload, "dtype": case.run.precision.dtype, "gpu_type": a.gpu_type}
    about |= {"framework": case.framework, "gpus": a.gpus, "parallelism": kind}
    about |= {"grade": case.grade, "software": case.software}
    lines = [key | about | {"left_out": way, "error": f"{e:.4f}"} for way, e in errors.items()]
    return table, lines


def store(path: pathlib.Path, lines: Iterable[dict], kept: Sequence[dict]) -> list[dict]:
    """Writes lines to a CSV, after those of other rows that it had."""
    every = [*kept, *lines]
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, every[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(every)
    return every


def read(path: pathlib.Path) -> list[dict]:
    if not path.exists():
        return []
    with path.open(newline="") as f:
        return [*csv.DictReader(f)]


def weighted(lines: Sequence[dict]) -> list[dict]:
    """Lines with a weight: that of the row's grade over the rows of the same work and software."""
    about = lambda x: (x["work"], x["framework"], x["left_out"], x["software"])
    count = collections.Counter(map(about, lines))
    weight = lambda x: WEIGHTS[x["grade"]] / count[about(x)]
    return [x | {"weight": f"{weight(x):.3f}"} for x in lines]


def problems() -> list[str]:
    """Reasons not to publish measured_errors.csv: errors of no row of measured.csv, and weights and
    ways of leaving out that cannot be."""
    found, works = [], {row.work for row in measured.rows()}
    errors = [*error_band.read(ERRORS.name)]
    for e in errors:
        if (work := f"{e.workload} {e.dtype} {e.gpu_type}") not in works:
            found.append(f"not a measured row: {work}")
        if not 0 < e.weight <= 1:
            found.append(f"{work}: weight {e.weight}")
        if e.left_out not in error_band.WAYS:
            found.append(f"{work}: left out by {e.left_out}")
        if e.gpu_type == "h100" and e.left_out == "gpu_type":
            found.append(f"{work}: constants were fitted to H100")
    absent = {*error_band.WAYS} - {e.left_out for e in errors}
    found += [f"nothing is left out by {way}" for way in sorted(absent)]
    return [f"{ERRORS}: {text}" for text in found]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cached", action="store_true", help="only programs in the cache")
    parser.add_argument(
        "--check", action="store_true", help="plans nothing; exits with the problems of the errors"
    )
    options = parser.parse_args()
    if options.check:
        sys.exit("\n".join(problems()) or 0)
    cases = [*measured_cases(), *published_cases()]
    if options.cached:
        cases = [case for case in cases if compile_cache.load(case.run)]
    programs = []
    for case in cases:
        programs.append(Program(case))
        print(f"{case.work} on {case.run.layout.gpus}: {programs[-1].seconds():.3f} s",
              file=sys.stderr, flush=True)  # fmt: skip
    for gpu_type in GPU_TYPES:
        for name in BEFORE:
            alike = [p for p in programs if p.case.use == "fit" and p.case.constant == name
                     and p.case.run.layout.gpu_type == gpu_type]  # fmt: skip
            if alike:
                print(f"{gpu_type} {name}: {fit(alike, name):.3f} of {len(alike)} rows")
    pairs = [lines_of(p, left_out(p, programs)) for p in programs]
    new = {p.case.key for p in programs}
    keep = lambda lines: [x for x in lines if tuple(x[k] for k in KEY) not in new]
    table = store(TABLE, (table for table, _ in pairs), keep(read(TABLE)))
    # Errors of Megatron-Bridge's rows contain the differences between the two programs.
    errors = [x for _, lines in pairs for x in lines if x["framework"] != "bridge"]
    store(ERRORS, weighted([*keep(read(ERRORS)), *errors]), [])
    shown = ("work", "gpus", "framework", "grade", "measured_s", "predicted_s")
    shown += ("before_pct", "error_pct", "left_out_pct")
    print("| " + " | ".join(shown) + " |\n" + "|---" * len(shown) + "|")
    for x in table:
        print("| " + " | ".join(x[k] for k in shown) + " |")
    sizes = [abs(float(x["error_pct"])) for x in table]
    print(f"{len(table)} rows: median {statistics.median(sizes):.1f} %, worst {max(sizes):.1f} %")
    for way, share in error_band.covered(error_band.errors()).items():
        print(f"left out by {way}: {share:.0%} inside the band")
    sys.exit("\n".join(problems()) or 0)


if __name__ == "__main__":
    main()
