"""A suite that was launched: each of its runs beside what it was to reach, and one PASS or FAIL.

`maxbench launch --suite` has left the list of its runs in experiments/suite_<name>_<time>.json.
"""

import contextlib
import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from maxbench.config.errors import UserError
from maxbench.launch.variables import Expectation
from maxbench.reporting.compare import RunSummary


class Asked(NamedTuple):
    """A run of a suite."""

    name: str
    folder: pathlib.Path | None  # where its job was to put it; None where none was submitted
    expect: Expectation


class Verdict(NamedTuple):
    """What became of a suite."""

    title: str
    ok: bool
    runs: list[dict[str, str]]  # run, verdict (PASS | FAIL | - of one that has not ended), why

    def lines(self) -> list[str]:
        """A line per run."""
        return [f"{one['verdict']:<4}  {one['run']}: {one['why']}" for one in self.runs]


def read(file: str) -> tuple[str, list[Asked]]:
    """The name of a suite and its runs.

    Raises:
      UserError: the file cannot be read, or is no such list.
    """
    path = pathlib.Path(file)
    if not path.is_file():
        raise UserError(f"suite={file!r}: there is no such file; maxbench launch --suite makes one")
    try:
        data = json.loads(path.read_text())
        place = lambda one: path.parent / one["folder"] if "folder" in one else None
        each = (Asked(one["run"], place(one), Expectation(**one["expect"])) for one in data["runs"])
        return f"{data['suite']}", [one for one in each if one.name]
    except OSError as e:
        raise UserError(f"suite={file!r} cannot be read: {e.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError(
            f"suite={file!r} is no list of runs as maxbench launch --suite makes it: "
            "experiments/suite_<name>_<time>.json"
        ) from None


def folders(runs: Sequence[Asked]) -> list[pathlib.Path]:
    """Those of runs that have begun."""
    return [folder for one in runs if (folder := _last_start(one)) and folder.is_dir()]


def _last_start(one: Asked) -> pathlib.Path | None:
    """The folder of a run; of a job that was requeued, the last one."""
    if one.folder:
        with contextlib.suppress(OSError, IndexError):
            job = (one.folder / "job_id").read_text().strip()
            stamp = (one.folder.parent / f".job_{job}").read_text().split()[-1]
            return one.folder.with_name(f"{one.folder.parent.name}_{stamp}")
    return one.folder


def judge(file: str, rows: Sequence[RunSummary]) -> Verdict:
    """A suite's runs beside what was expected of them.

    Raises:
      UserError: as read().
    """
    name, runs = read(file)
    found = {os.path.realpath(row.record.path): row for row in rows}
    made = []
    for one in runs:
        row = found.get(os.path.realpath(_last_start(one))) if one.folder else None
        verdict, why = _judge(one, row)
        made.append({"run": row.record.path.name if row else one.name, "verdict": verdict})
        made[-1]["why"] = why
    short, left = (sum(x["verdict"] == verdict for x in made) for verdict in ("FAIL", "-"))
    said = [f"{short} of {len(made)} runs did not reach what was expected"] if short else []
    said += [f"{left} of {len(made)} runs have not ended"] if left else []
    ok = bool(made) and not said
    why = " and ".join(said) or f"{len(made)} of {len(made)} runs reached what was expected"
    return Verdict(f"Suite {name}: {'PASS' if ok else 'FAIL'}, {why}", ok, made)


def _judge(one: Asked, row: RunSummary | None) -> tuple[str, str]:
    """PASS, FAIL or '-', and why."""
    if row is None:
        return ("-", "has not begun") if one.folder else ("FAIL", "was not submitted")
    at = f"step {row.record.last}" if row.record.step_s else "before the first step"
    if row.record.status == "running":
        return "-", f"still running, {at}"
    if not (row.ok and row.step and row.record.last >= row.record.planned - 1):
        why = row.why if not row.ok else "not all of its steps are in its log"
        return "FAIL", f"{why}, {at}"
    asked, step_s = one.expect, row.step["mean"]
    loss = row.record.loss.get(row.record.last, math.nan)
    beside = f"{row.why}, " if row.share or asked.published else ""
    reached = f"{beside}{step_s:.4g} s a step, loss {loss:.4g}"
    short = asked.published and not (row.share or 0) >= asked.published
    slow = asked.step_s and step_s > asked.step_s
    high = asked.loss and not loss <= asked.loss
    if short or slow or high:
        return "FAIL", f"{reached}; expected {asked}"
    return "PASS", reached
