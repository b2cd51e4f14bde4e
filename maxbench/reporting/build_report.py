"""Builds a report, runs with their figures in any format, for the command and the Python API."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from maxbench.config import command_line, options
from maxbench.config.errors import UserError, check_choice, escape_control
from maxbench.metrics import records
from maxbench.reporting import compare, difference, export, page, suite, tables
from maxbench.reporting.compare import ReportOptions, RunSummary
from maxbench.reporting.predictions import add_predictions, add_profiles
from maxbench.run_logs import formats, readers, suite_file
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
        gpu_types, every = self.settings.gpu_types, form == "html"
        add_predictions(self.rows, gpu_types, every)
        add_profiles(self.rows, gpu_types, every)
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


def read(asked: options.ReportOptions, width: int | None = None) -> Report:
    """The runs that options name.

    Args:
      width: columns of the text; 0 = any, None = those of the terminal.

    Raises:
      UserError: an option is invalid; there is no run.
    """
    gpu_types = command_line.gpu_types(asked.hardware)
    if asked.gpu_type:
        check_choice("gpu_type", asked.gpu_type, gpu_types)
    table = formats.FORMATS
    if asked.format_table:
        table = formats.read(asked.format_table, table)
    values = {f.name: getattr(asked, f.name) for f in dataclasses.fields(options.ReportOptions)}
    if asked.suite:
        values["paths"] = _suite_folders(asked)
    width = console.terminal_width() if width is None else width
    settings = ReportOptions(**values, width=width, gpu_types=gpu_types, table=table)
    rows = [compare.summarize(r, settings) for r in readers.read(settings.paths, settings.given)]
    if not (rows or asked.suite):
        raise UserError(f"no run and no log at or below {', '.join(settings.paths)}")
    return Report(rows, settings)


def _suite_folders(asked: options.ReportOptions) -> list[str]:
    """Folders of a suite's runs."""
    if "paths" in asked.changed():
        raise UserError(f"--suite names its runs: leave {asked.paths[0]!r} out")
    return [*map(str, suite.folders(suite_file.read(asked.suite)[1]))]
