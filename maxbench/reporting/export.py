"""Reports for programs: CSV and JSON."""

import csv
import dataclasses
import io
import json
from collections.abc import Sequence

from maxbench.reporting import compare, suite, tables
from maxbench.reporting.compare import ReportOptions, RunSummary
from maxbench.run_logs.record import SETTINGS

# First word of a column -> how its figures are written.
FORMATS = {"time": ".3f", "tflops": ".2f", "tokens": ".1f", "days": ".2f", "peak": ".3f"}


def to_csv(rows: Sequence[RunSummary], options: ReportOptions) -> str:
    """One line per run; the first seven columns are those of the parser of NVIDIA's recipes."""
    out = io.StringIO()
    records = [tables.record(summary) for summary in rows]
    writer = csv.DictWriter(out, records[0] if records else (), lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerow({column: _csv_cell(column, x) for column, x in record.items()})
    counts = tables.counts(rows)
    total = (f"{n} {k.partition('_')[0]}, " for k, n in counts.items() if "rate" not in k)
    verdict = f"\n# {suite.judge(options.suite, rows).title}" if options.suite else ""
    return f"{out.getvalue()}# Summary: {''.join(total)}{len(rows)} total{verdict}"


def _csv_cell(column: str, value: object) -> object:
    if not isinstance(value, float):
        return value
    return format(value, FORMATS.get(column.partition("_")[0], ".6g"))


def to_json(rows: Sequence[RunSummary], options: ReportOptions) -> str:
    """All figures: the fields of NVIDIA's parser and ours for each run; scaling; repeats."""
    analysis = dict(zip(("min_iteration", "max_iteration"), options.window, strict=True))
    report = {
        "analysis": analysis | {"experiments_directory": ", ".join(options.paths)},
        "results": [_json_result(summary) for summary in rows],
        "scaling": [dataclasses.asdict(x) for x in compare.curves(rows)],
        "repeats": [dataclasses.asdict(x) for x in compare.repeats(rows)],
        "summary": tables.counts(rows),
    }
    if request := compare.request(rows, options):
        report["request"] = request
    if options.suite:
        report["suite"] = suite.judge(options.suite, rows)._asdict()
    return json.dumps(report, indent=1, allow_nan=False)


def _json_result(summary: RunSummary) -> dict:
    r, data = summary.record, tables.record(summary)
    result = data | {
        "time_mean": data["time_mean_seconds"],
        "path": str(r.path),
        "time_std_dev": data["time_std_dev_seconds"],
        "source": r.source,
        "program": r.program,
        "layout": r.layout,
        "steps_per_time": r.interval,
        "tflops_convention": summary.convention,
        "window": summary.window,
        "last_step": r.last,
        "gpus": r.gpus,
        "gbs": r.gbs,
        "origins": {name: r.origin(name) for name in SETTINGS},
    }
    if summary.baseline:
        published = {"step_s": summary.baseline.step_s, "source": summary.baseline.source}
        published["release"] = summary.baseline.release
        result["published"] = published
    if summary.trace:
        result["nccl"] = summary.trace
    return result
