"""CSV exports of Weights & Biases, TensorBoard and similar: columns of steps and of scalars.

Three shapes are read: a run's history (`_step,train/loss,throughput/duration`); the export of a
chart, whose columns are runs (`Step,run-a - train/loss,run-a - train/loss__MIN`); and TensorBoard's
downloads (`Wall time,Step,Value`), one file per tag, which is in its name. Without a column of step
times they follow from the times of the rows.
"""

import csv
import math
import pathlib
import re
from collections.abc import Iterator, Sequence

from maxbench.run_logs import log_files
from maxbench.run_logs.event_files import fill
from maxbench.run_logs.record import Given, RunRecord
from maxbench.run_logs.scalar_tags import fields_of, has_step_time, is_evaluation
from maxbench.run_logs.step_series import StepSeries

STEPS = ("_step", "step", "global_step", "trainer/global_step", "iteration", "train/global_step")
TIMES = ("_timestamp", "wall time", "wall_time", "_runtime", "relative time (process)")
_BOUND = re.compile(r"__(?:MIN|MAX)$")
_DOWNLOAD = re.compile(r"run-(?P<run>.+)-tag-(?P<tag>.+?)(?: \(\d+\))?\.csv$")
_DOWNLOAD_HEADS = ["wall time", "step", "value"]


def read_csv(path: pathlib.Path, given: Given, named: bool = False) -> Iterator[RunRecord]:
    """The runs of an export; none if it has no column of steps or of step times.

    Args:
      named: whether the user named the file itself: then it is a run whatever its columns are.

    Raises:
      OSError: the file cannot be read.
    """
    lines = _lines(path)
    heads = next(_rows(lines), [])
    download = _DOWNLOAD.match(path.name)
    if download and [head.strip().lower() for head in heads] == _DOWNLOAD_HEADS:
        heads = [*heads[:2], download["tag"]]
    step_at = next((i for i, head in enumerate(heads) if head.strip().lower() in STEPS), -1)
    if step_at < 0:
        if named:
            yield _unusable(path, f"no column of steps: {' or '.join(STEPS[:3])}")
        return
    runs = _runs(heads, step_at)
    time_at = next((i for i, head in enumerate(heads) if head.strip().lower() in TIMES), -1)
    timed = has_step_time if time_at < 0 else fields_of
    if not (named or any(timed(columns.values()) for columns in runs.values())):
        return
    series = {run: StepSeries(means=True) for run in runs}
    fields = {run: fields_of(columns.values()) for run, columns in runs.items()}
    damaged = 0
    for row in _rows(lines):
        step = _number(row[step_at]) if len(row) == len(heads) else None
        if step is None or not 0 <= step < 1e12 or step != int(step):
            damaged += any(cell.strip() for cell in row)
            continue
        time = _number(row[time_at]) if time_at >= 0 else None
        for run, columns in runs.items():
            values = {}
            for at, tag in columns.items():
                cell = row[at].strip()
                if cell and tag in fields[run]:
                    name, factor = fields[run][tag]
                    if (value := _number(cell)) is None:
                        damaged += 1
                    else:
                        values[name] = value * factor
                elif cell and cell.lower() != "nan" and is_evaluation(tag):
                    series[run].evaluations.add(int(step))
            if int(step) in series[run].steps:  # NaN of an evaluation's row is no value
                values = {name: value for name, value in values.items() if not math.isnan(value)}
            if values:
                values |= {"elapsed": time} if time else {}
                series[run].steps.setdefault(int(step), {}).update(values)
    for run, columns in runs.items():
        name = run or (download["run"] if download else path.stem)
        record = RunRecord(path=path, name=name, source="wandb", status="done")
        if len(runs) > 1:
            record.path = path / run  # a path of its own: runs are told apart by it
        record.started, record.damaged = path.stat().st_mtime, damaged
        series[run].drop_placeholders()
        fill(record, series[run], sorted(columns.values()), given)
        yield record


def _unusable(path: pathlib.Path, reason: str) -> RunRecord:
    return RunRecord(path=path, name=path.name, source="", status="skipped", reason=reason)


def _runs(heads: Sequence[str], step_at: int) -> dict[str, dict[int, str]]:
    """Run ('' = the file's) -> column -> tag."""
    runs: dict[str, dict[int, str]] = {}
    for at, head in enumerate(heads):
        if at == step_at or _BOUND.search(head):
            continue
        run, separator, tag = head.rpartition(" - ")
        if tag.strip().lower() not in (*TIMES, *STEPS):
            runs.setdefault(run.strip() if separator else "", {})[at] = tag.strip()
    named = {run: columns for run, columns in runs.items() if fields_of(columns.values())}
    return named or {"": {at: tag for columns in runs.values() for at, tag in columns.items()}}


def _lines(path: pathlib.Path) -> Iterator[str]:
    for block in log_files.log_blocks(path):
        for line in block.decode("utf-8", "replace").replace("\0", "").splitlines():
            if line.strip():
                yield line


def _rows(lines: Iterator[str]) -> Iterator[list[str]]:
    """Cells of each line; a line that is no CSV has one cell."""
    for line in lines:
        try:
            yield next(csv.reader([line]), [])
        except csv.Error:
            yield [line]


def _number(cell: str) -> float | None:
    """The number of a cell; None if it is none."""
    try:
        return float(cell.strip().replace("NaN", "nan").replace("Infinity", "inf"))
    except ValueError:
        return None
