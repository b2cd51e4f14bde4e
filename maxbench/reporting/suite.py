"""Verdict on a suite: each of its runs against what was expected of it, and one PASS or FAIL."""

import math
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from maxbench.reporting.compare import RunSummary
from maxbench.run_logs import suite_file
from maxbench.run_logs.suite_file import SuiteRun
from maxbench.terminal import console


class Verdict(NamedTuple):
    """Whether a suite reached what was expected of it."""

    title: str
    ok: bool
    runs: list[dict[str, str]]  # run, verdict (PASS, FAIL, or - if it has not ended), why

    def lines(self) -> list[str]:
        """A line per run."""
        rows = ([run["verdict"], f"{run['run']}: {run['why']}"] for run in self.runs)
        return console.table((), rows, text=(0, 1))


def folders(runs: Sequence[SuiteRun]) -> list[pathlib.Path]:
    """Folders of the runs that have started."""
    return [folder for run in runs if (folder := run.last_start()) and folder.is_dir()]


def judge(file: str, rows: Sequence[RunSummary]) -> Verdict:
    """Compares a suite's runs with what was expected of them.

    Raises:
      UserError: as suite_file.read().
    """
    name, runs = suite_file.read(file)
    summaries = {os.path.realpath(row.record.path): row for row in rows}
    judged = []
    for run in runs:
        folder = run.last_start()
        row = summaries.get(os.path.realpath(folder)) if folder else None
        verdict, why = _judge(run, row)
        run_name = row.record.path.name if row else run.name
        judged.append({"run": run_name, "verdict": verdict, "why": why})
    failed, unfinished = (sum(x["verdict"] == verdict for x in judged) for verdict in ("FAIL", "-"))
    problems = [f"{failed} of {len(judged)} runs did not reach what was expected"] if failed else []
    problems += [f"{unfinished} of {len(judged)} runs have not ended"] if unfinished else []
    ok = bool(judged) and not problems
    all_reached = f"{len(judged)} of {len(judged)} runs reached what was expected"
    why = " and ".join(problems) or all_reached
    return Verdict(f"Suite {name}: {'PASS' if ok else 'FAIL'}, {why}", ok, judged)


def _judge(run: SuiteRun, row: RunSummary | None) -> tuple[str, str]:
    """PASS, FAIL or '-', and why."""
    if row is None:
        return ("-", "has not started") if run.folder else ("FAIL", "was not submitted")
    at = f"step {row.record.last}" if row.record.step_s else "before the first step"
    if row.record.status == "running":
        return "-", f"still running, {at}"
    if not (row.ok and row.step and row.record.last >= row.record.total_steps - 1):
        why = row.why if not row.ok else "not all of its steps are in its log"
        return "FAIL", f"{why}, {at}"
    expected, step_s = run.expect, row.step["mean"]
    loss = row.record.loss.get(row.record.last, math.nan)
    compared = [row.why] if row.share or expected.published else []
    compared += filter(None, [expected.share_of_baseline(step_s)])
    reached = ", ".join([*compared, f"{step_s:.4g} s a step", f"loss {loss:.4g}"])
    below_published = expected.published and not (row.share or 0) >= expected.published
    below_baseline = expected.baseline_s < expected.share * step_s
    slow = expected.step_s and step_s > expected.step_s
    high_loss = expected.loss and not loss <= expected.loss
    if below_published or below_baseline or slow or high_loss:
        return "FAIL", f"{reached}; expected {expected}"
    return "PASS", reached
