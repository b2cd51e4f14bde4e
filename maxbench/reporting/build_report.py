"""Builds a report, runs with their figures in any format, for the command and the Python API."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from maxbench.config import command_line
from maxbench.config.errors import UserError, check_choice, escape_control
from maxbench.config.validation import parse_fields
from maxbench.metrics import records
from maxbench.reporting import compare, difference, export, page, suite, tables
from maxbench.reporting.compare import ReportOptions, RunSummary
from maxbench.reporting.predictions import add_predictions
from maxbench.run_logs import readers, suite_file
from maxbench.terminal import console

# Name of a format -> the function that renders rows and options in it.
FORMATS = {
    "table": tables.text,
    "csv": export.to_csv,
    "json": export.to_json,
    "md": tables.markdown,
    "html": page.html,
}
HEADS = ("Status", "Mean s", "Std s", "TFLOPS/GPU", "Tokens/s", "MFU %", "Loss", "Verdict")


@dataclasses.dataclass(frozen=True, repr=False)
class Report(records.Records):
    """Runs with their figures. Prints as a text table; in a notebook as an HTML table."""

    rows: Sequence[RunSummary]
    settings: ReportOptions

    @property
    def ok(self) -> bool:
        """Whether a run succeeded or is running; for a suite, whether all runs passed."""
        if self.settings.suite:
            return suite.judge(self.settings.suite, self.rows).ok
        return any(row.ok or row.record.status == "running" for row in self.rows)

    def text(self, form: str = "table", diff: bool = False) -> str:
        """The report in row of FORMATS, or the differences between its two runs.

        Raises:
          UserError: diff is set, and there are not two runs.
        """
        add_predictions(self.rows, self.settings.gpu_types, every=form == "html")
        make = difference.difference if diff else FORMATS[form]
        return "\n".join(map(escape_control, make(self.rows, self.settings).split("\n")))

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        cells = [tables.cells(row) for row in self.rows]
        heads = [head for head in HEADS if any(c.get(head, "-") != "-" for c in cells)]
        body = [
            [page.label(row), *(c.get(head, "") for head in heads), row.explanation]
            for row, c in zip(self.rows, cells, strict=True)
        ]
        return records.html_table(["Run", *heads, "Why"], body)

    def records(self) -> list[dict[str, Any]]:
        """Figures of each run: the columns of --format=csv."""
        return [tables.record(row) for row in self.rows]


def report_from_flags(fv: flags.FlagValues, argv: Sequence[str]) -> Report:
    """The runs that flags and paths of the command name.

    Raises:
      UserError: a flag is invalid; there is no run.
    """
    _, *paths = command_line.parse_flags(fv, argv)
    paths = _suite_folders(fv.suite, paths) if fv.suite else paths or ["experiments"]
    options = options_from(fv, paths)
    rows = [compare.summarize(r, options) for r in readers.read(paths, options.gpu_types)]
    if not (rows or fv.suite):
        raise UserError(f"no run and no log at or below {', '.join(paths)}")
    return Report(rows, options)


def _suite_folders(file: str, paths: Sequence[str]) -> list[str]:
    """Folders of a suite's runs."""
    if paths:
        raise UserError(f"--suite names its runs: leave {paths[0]!r} out")
    return [*map(str, suite.folders(suite_file.read(file)[1]))]


def options_from(fv: flags.FlagValues, paths: Sequence[str]) -> ReportOptions:
    """Options from flags.

    Raises:
      UserError: a flag is invalid.
    """
    check_choice("format", fv.format, FORMATS)
    gpu_types = command_line.gpu_types(fv.hardware)
    if fv.gpu_type:
        check_choice("gpu_type", fv.gpu_type, gpu_types)
    same_names = ("window", "cost", "gpu_type", "interval", "mtbf", "title", "suite")
    values: Mapping[str, Any] = {name: fv[name].value for name in same_names}
    width = 0 if fv.output else console.terminal_width()
    checked = parse_fields(ReportOptions, values)
    return ReportOptions(
        paths=tuple(paths), full_names=bool(fv["full-names"].value), width=width,
        gpu_types=gpu_types, **checked,
    )  # fmt: skip
