"""Plans measured steps of other programs with ours in their layout, and compares the two steps.

  python -m tools.measured [--cached] [--check]

Rows: those of maxbench/evidence/measured.csv, and the published dense rows of Megatron-Bridge if
the recipe has the same layout. Each is planned with its own layout, recomputation, GPU type and
network. Writes tools/results/measured.csv and the table of docs/reference/prediction_errors.md.
The column "over measured" is our predicted step over the measured one of another program, less 1:
a comparison of two programs, not an error of the prediction (tools/very_programs.py has those).
--cached: only programs in the cache; the lines of other rows stay. --check: plans nothing;
exits with the problems of the stored table.
"""

import argparse
import csv
import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Sequence

from maxbench.config import command_line, gpu_files, recipes, resolve
from maxbench.config.errors import UserError
from maxbench.config.run import Run
from maxbench.cost_model import compile_cache
from maxbench.evidence import measured, published
from maxbench.planning import planner
from tools import markdown

TABLE = pathlib.Path("tools/results/measured.csv")
PAGE = pathlib.Path("docs/reference/prediction_errors.md")
KEY = ("work", "framework", "gpus", "measured_s")


@dataclasses.dataclass(frozen=True)
class Case:
    """A step that was measured, and the run that plans it."""

    run: Run
    work: str
    framework: str
    software: str
    grade: str
    step_s: float

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
        about = (row.work, row.framework, row.software, row.grade, row.step_s)
        cases.append(Case(run, *about))
    return cases


def published_cases() -> list[Case]:
    """Dense rows of Megatron-Bridge where the recipe has the published layout."""
    cases = []
    newest = {}  # a row of each work
    for row in sorted(published.rows(), key=lambda r: r.age, reverse=True):
        if row.framework == "megatron-bridge" and row.model.startswith("llama"):
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
            cases.append(Case(run, *about, row.release, "a", row.step_s))
    return cases


def line_of(case: Case) -> dict[str, str]:
    """A line of TABLE."""
    step_s = planner.plan(case.run).step_s
    return dict(zip(KEY, case.key, strict=True)) | {
        "layout": case.run.layout.describe().replace(",", ";"),
        "software": case.software,
        "grade": case.grade,
        "predicted_s": f"{step_s:.3f}",
        "over_measured_pct": f"{100 * (step_s / case.step_s - 1):+.1f}",
        "jax": compile_cache.versions()["jax"],
    }


def read() -> list[dict[str, str]]:
    """Lines of TABLE."""
    with TABLE.open(newline="") as f:
        return [*csv.DictReader(f)]


def page(text: str, lines: Sequence[dict[str, str]]) -> str:
    """The page with the table of these lines."""
    shown = ("work", "gpus", "framework", "grade", "measured_s", "predicted_s", "over_measured_pct")
    heads = ["work", "GPUs", "program", "grade", "measured s", "ours, predicted s"]
    rows = ([x[name] for name in shown] for x in lines)
    return markdown.replaced(
        text, "measured steps", markdown.table([*heads, "over measured %"], rows)
    )


def problems() -> Iterator[str]:
    """Measured rows without a line, lines of no row, and a page with another table."""
    keys = {tuple(x[k] for k in KEY) for x in read()}
    known = {(m.work, m.framework, str(m.gpus), f"{m.step_s:g}") for m in measured.rows()}
    for key in sorted(known - keys):
        yield f"{TABLE}: {' '.join(key)} is not planned"
    for key in sorted(k for k in keys - known if k[1] != "bridge"):
        yield f"{TABLE}: {' '.join(key)} is no measured step"
    if page(PAGE.read_text(), read()) != PAGE.read_text():
        yield f"{PAGE}: its table is not that of {TABLE}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cached", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        sys.exit("\n".join(problems()) or 0)
    lines = {tuple(x[k] for k in KEY): x for x in read()}
    cases = [*measured_cases(), *published_cases()]
    for case in cases:
        if not options.cached or compile_cache.load(case.run):
            lines[case.key] = line_of(case)
            print(*lines[case.key].values(), file=sys.stderr, flush=True)
    with TABLE.open("w", newline="") as f:
        writer = csv.DictWriter(f, next(iter(lines.values())), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines[case.key] for case in cases if case.key in lines)
    PAGE.write_text(page(PAGE.read_text(), read()))
    sys.exit("\n".join(problems()) or 0)


if __name__ == "__main__":
    main()
