"""Reports on generated exports of trackers whose right answer is known: CSV histories, downloads of
TensorBoard, event files.

  python -m tests.drills.export_answers 1000

An export has step times or only the times of its rows, every step or every tenth, evaluations,
pauses, rows without a value, a slow first step, several runs. Every step time must be the right
one, and no verdict may follow, because an export names neither GPUs nor sequence length.
"""

import argparse
import dataclasses
import math
import pathlib
import random
import tempfile
from collections.abc import Mapping

import tensorboardX

from maxbench.reporting import build_report, compare
from maxbench.reporting.compare import ReportOptions
from maxbench.run_logs import readers
from tests.drills.answers import JUDGED
from tests.drills.fuzz import Violation, check

STEP_TAGS = ("train_step_timing in s", "iteration-time", "perf/step_time_seconds", "step_time_ms")
LOSS_TAGS = ("lm loss", "train/loss", "reduced_train_loss")
CLOSE = 0.005  # relative: cells have five digits


@dataclasses.dataclass
class Export:
    """A run as rows of a tracker, and the right answer."""

    tag: str  # of the step time; '' = rows have their times only
    loss: str  # tag
    every: int
    step_s: dict[int, float]  # mean over the steps that a row stands for
    time: dict[int, float]  # of a row
    evaluations: dict[int, float]  # step -> time
    late: set[int]  # steps after an evaluation or a pause, or before an evaluation

    @property
    def factor(self) -> float:
        return 1e3 if self.tag.endswith("_ms") else 1.0

    def scalars(self, step: int) -> dict[str, float]:
        """The values of a row."""
        values = {self.loss: 2.5}
        return values | ({self.tag: self.step_s[step] * self.factor} if self.tag else {})


def make_export(rng: random.Random) -> Export:
    """A run of random steps."""
    every, base = rng.choice([1, 1, 10]), rng.uniform(0.5, 20)
    run = Export(rng.choice([*STEP_TAGS, ""]), rng.choice(LOSS_TAGS), every, {}, {}, {}, set())
    now, disturbed = 1.7e9, False
    for step in range(every, 50 * every + 1, every):
        seconds = base * rng.uniform(0.99, 1.01) * (5 if step == every else 1)
        now += every * seconds
        if rng.random() < 0.03:
            now, disturbed = now + 50 * every * base, True
        run.step_s[step], run.time[step] = seconds, now
        if disturbed:
            run.late.add(step)
        disturbed = rng.random() < 0.05
        if disturbed:
            now += every * base * rng.uniform(0.5, 3)
            run.evaluations[step] = now
            run.late.add(step)
    return run


def history(rng: random.Random, runs: Mapping[str, Export]) -> dict[str, str]:
    """Histories of Weights & Biases, by name of the file."""
    texts = {}
    for name, run in runs.items():
        tags = [run.loss, *filter(None, [run.tag])]
        lines = [",".join(["_step", "_timestamp", *tags, "validation/loss"])]
        for step, time in run.time.items():
            values = run.scalars(step)
            lines.append(
                ",".join([f"{step}", f"{time:.3f}", *(f"{values[t]:.5g}" for t in tags), ""])
            )
            if step in run.evaluations:
                empty = [rng.choice(["", "NaN"]) for _ in tags]
                lines.append(",".join([f"{step}", f"{run.evaluations[step]:.3f}", *empty, "2.4"]))
        texts[f"{name}.csv"] = "\n".join(lines) + "\n"
    return texts


def downloads(_rng: random.Random, runs: Mapping[str, Export]) -> dict[str, str]:
    """Downloads of TensorBoard, by name of the file: of the step time, else of the loss."""
    texts = {}
    for name, run in runs.items():
        tag = run.tag or run.loss
        rows = (f"{run.time[i]:.3f},{i},{run.scalars(i)[tag]:.5g}\n" for i in run.time)
        file = f"run-{name}-tag-{tag.replace('/', '_')}.csv"
        texts[file] = "Wall time,Step,Value\n" + "".join(rows)
    return texts


def write_events(folder: pathlib.Path, runs: Mapping[str, Export]) -> None:
    """Event files of TensorBoard."""
    for name, run in runs.items():
        with tensorboardX.SummaryWriter(str(folder / name)) as writer:
            for step, time in run.time.items():
                for tag, value in run.scalars(step).items():
                    writer.add_scalar(tag, value, step, walltime=time)
                if step in run.evaluations:
                    writer.add_scalar("validation/loss", 2.4, step, run.evaluations[step])


def check_run(run: Export, row: compare.RunSummary, shape: str) -> None:
    """Raises Violation unless each step time that is named is right."""
    r = row.record
    check(r.status == "done", "status", (r.status, r.reason))
    check({*r.step_s} <= {*run.step_s}, "steps", {*r.step_s} - {*run.step_s})
    timed = bool(run.tag)
    # A download of TensorBoard has no evaluations: only a pause far above the steps is known.
    sure = {*run.step_s} if timed else {*run.step_s} - run.late - {run.every}
    if timed:
        check({*r.step_s} == sure, "steps that lack", sure - {*r.step_s})
    for step in sure & {*r.step_s}:
        good = math.isclose(r.step_s[step], run.step_s[step], rel_tol=CLOSE)
        check(good, f"step {step} of {shape}", (r.step_s[step], run.step_s[step]))
    if not timed and shape != "downloads":
        unsure = {*r.step_s} & run.late
        check(not unsure, f"steps with an evaluation or a pause, of {shape}", unsure)
    check(row.verdict not in JUDGED, "verdict", row.verdict)
    check(row.mfu is None or not row.mfu, "MFU without a sequence length", row.mfu)


def answers(count: int, seed: int) -> int:
    """Reports on `count` folders of exports; returns the number of their runs."""
    reported = 0
    for i in range(count):
        rng = random.Random(f"{seed} {i}")
        runs = {f"r{n}": make_export(rng) for n in range(rng.choice([1, 1, 3]))}
        shape = rng.choice(["history", "downloads", "events"])
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            if shape == "events":
                write_events(folder, runs)
            else:
                make = history if shape == "history" else downloads
                for file, text in make(rng, runs).items():
                    (folder / file).write_text(text)
            settings = ReportOptions(paths=(name,))
            records = [*readers.read([folder], settings.given)]
            rows = [compare.summarize(record, settings) for record in records]
            try:
                check(len(rows) == len(runs), "runs", [row.record.name for row in rows])
                for run, row in zip(runs.values(), rows, strict=True):
                    check_run(run, row, shape)
                build_report.Report(rows, settings).text(rng.choice([*build_report.FORMATS]))
            except Violation as e:
                raise Violation(f"folder {i} of seed {seed}: {e}") from e
            reported += len(rows)
    return reported


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{answers(options.count, options.seed)} runs")


if __name__ == "__main__":
    main()
