"""Reports on generated logs whose right answer is known.

  python -m tests.drills.answers 10000
  python -m tests.drills.answers 1000 --seed 7 --program nemo

A log is of any program of run_logs/formats.py: with a slow first step, a batch that grows, a spike,
evaluations, retried errors, two processes, lines of its head left out, a wrong GPU type, an earlier
run in its file, the start of a run that was resumed, or an early end. Each setting of the report
must be the right one or unknown, each figure right or missing, and no verdict may follow from an
unknown. The first violation is printed with its seed.
"""

import argparse
import collections
import dataclasses
import functools
import math
import os
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence

from maxbench.hardware.gpus import GPU_TYPES
from maxbench.metrics import flops
from maxbench.reporting import build_report, compare
from maxbench.reporting.compare import ReportOptions, RunSummary
from maxbench.run_logs import formats, readers
from maxbench.run_logs.record import SETTINGS
from tests.drills.fuzz import Violation, check
from tools import log_samples
from tools.log_samples import Work

DEVICES = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA B200": "b200", "NVIDIA L40S": ""}
# Number formats of the samples; those of the other programs name none, and are of bf16.
DTYPES = dict.fromkeys(
    ("nemo", "megatron", "megatron-bridge", "megatron-deepspeed", "primus"), "fp8"
)
NOISE = (
    " validation loss at iteration 10 | lm loss value: 1.0E+01 | lm loss PPL: 2.2E+04 |",
    "Validation: iteration 1/8 | validation_step_timing in s: 3.2",
    "could not find the monitored key in the returned metrics: ['lr', 'train_step_timing in s']",
    "[titan] 2026-01-01 00:00:00,000 - root - INFO - validate step:  9  loss:  8.0  tps: 9,000",
    "requests.exceptions.ConnectionError: HTTPSConnectionPool: retrying in 2 s (attempt 1)",
    "[rank0]: RuntimeError: NCCL error, the step is repeated",
)
DEATH = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
LOSS = "2.5000"
CLOSE = 0.015  # relative: programs print rates and times with three or four digits
JUDGED = ("PASS", "WARN", "FAIL")


@dataclasses.dataclass(kw_only=True)
class Case:
    """A log and its right answer."""

    program: str
    text: str
    work: Mapping[int, Work]  # of each step of the log
    gpu_type: str  # that the report may name; '' = unknown
    dtype: str
    complete: bool  # whether the head has all its lines
    given: Mapping[str, object]  # options of the report
    status: str
    impossible: bool  # whether the steps are faster than the GPUs of that type
    spike: int  # a step; -1 = none
    window: tuple[int, int]


def lines_of(program: str, steps: Sequence[int], total: int, of: Work) -> tuple[list[str], list]:
    """Lines of the head, and of the steps, of a sample."""
    make = log_samples.LOGS[program]
    texts = (make(x, total, LOSS, of).replace("\r", "\n") for x in (steps, []))
    whole, rest = (text.splitlines(True) for text in texts)
    same = next((k for k, (a, b) in enumerate(zip(whole, rest, strict=False)) if a != b), len(rest))
    return rest[:same], whole[same : len(whole) - (len(rest) - same)]


@functools.cache
def least_s(seq: int, gbs: int, gpus: int, gpu_type: str, dtype: str) -> float:
    """Seconds of a step's FLOPs at the peak."""
    model = compare.model_of("llama31", "8b")
    return flops.seconds_at_peak(model, seq, gbs, gpus, GPU_TYPES[gpu_type].peak_tflops(dtype))


def make_case(rng: random.Random, program: str) -> Case:
    """A log of a program, and its right answer."""
    format, dtype = formats.FORMATS[program], DTYPES.get(program, "bf16")
    gpus, device, impossible = rng.choice([8, 8, 16]), rng.choice([*DEVICES]), rng.random() < 0.15
    gpu_type = "h100" if impossible else DEVICES[device] or "h100"
    run = Work(gbs=gpus * rng.choice([8, 16, 16]), seq=rng.choice([4096, 8192, 8192]), gpus=gpus)
    run = dataclasses.replace(run, device=device)
    base = least_s(run.seq, run.gbs, gpus, gpu_type, dtype)
    base *= rng.uniform(0.3, 0.6) if impossible else rng.uniform(1.6, 4.0)
    every = 10 if format.means and rng.random() < 0.2 else 1
    ends = [(0, 50, "done")] * 3 + [(0, 40, "died"), (0, 40, "running"), (100, 150, "died")]
    start, stop, status = rng.choice(ends)
    total = 50 if status == "done" else 400
    steps = [i for i in range(start, stop) if (i + 1) % every == 0]
    shows_batch = {"gbs", "tokens"} & {*format.fields.values()}
    grows = rng.choice(steps) if shows_batch and rng.random() < 0.3 else math.inf
    spike = rng.choice(steps) if every == 1 and rng.random() < 0.2 else -1
    slow = steps[0] if rng.random() < 0.7 else -1
    work = timeline(rng, run, base, steps, every, grows, {spike: 6, slow: 5})

    head, _ = lines_of(program, [], total, work[steps[-1]])
    complete = rng.random() < 0.5 and not impossible
    kept = head if complete else leave_out(rng, head, device if impossible else "")
    named = any(device in line for line in kept)
    body = [(i, x) for i in steps for x in lines_of(program, [i], total, work[i])[1]]
    text = "".join([*kept, *with_noise(rng, body)])
    if start == 0 and rng.random() < 0.15:  # an earlier, slower run in the same file
        slower = timeline(rng, run, 1.5 * base, steps[: 5 + 4 * rng.randrange(5)], every, grows, {})
        text = (
            "".join(x for i in slower for x in lines_of(program, [i], total, slower[i])[1]) + text
        )
    text += DEATH if (status, start) == ("died", 0) else ""
    known: dict[str, object] = {
        "gpus": gpus,
        "seq": run.seq,
        "dtype": dtype,
        "config": "llama31_8b",
    }
    known |= {"gpu_type": gpu_type} | ({"gbs": run.gbs} if grows == math.inf else {})
    given = {name: x for name, x in known.items() if rng.random() < 0.4}
    given |= {"gpu_type": gpu_type} if impossible else {}
    return Case(
        program=program, text=text, work=work, dtype=dtype, complete=complete, given=given,
        gpu_type=(named and DEVICES[device]) or str(given.get("gpu_type", "")), status=status,
        impossible=impossible, spike=spike,
        window=rng.choice([(35, 44), (35, 44), (5, 14), (20, 39)]),
    )  # fmt: skip


def timeline(
    rng: random.Random, run: Work, base: float, steps: Sequence[int], every: int, grows: float,
    slower: Mapping[int, float],
) -> dict[int, Work]:  # fmt: skip
    """Step -> its work: the batch doubles at the step `grows`; `slower` steps take a multiple."""
    work, now, before = {}, 60.0, run.gbs * (steps[0] - every + 1)
    for i in steps:
        factor = 2 if i >= grows else 1
        seconds = base * factor * slower.get(i, 1) * rng.uniform(0.99, 1.01)
        seconds, gbs = max(0.5, round(seconds, 1)), run.gbs * factor
        now, before = now + every * seconds, before + every * gbs
        work[i] = dataclasses.replace(
            run, step_s=seconds, gbs=gbs, start_s=now - seconds * (i + 1),
            before=before - gbs * (i + 1),
        )  # fmt: skip
    return work


def leave_out(rng: random.Random, head: Sequence[str], device: str) -> list[str]:
    """Some lines of a head, none with the device; of a dump of settings all or none."""
    dump = rng.random() < 0.7
    left = (x for x in head if not (device and device in x))
    return [x for x in left if (dump if "...." in x else rng.random() < 0.7)]


def with_noise(rng: random.Random, body: Sequence[tuple[int, str]]) -> list[str]:
    """Lines of steps: of two processes, or with evaluations and retried errors between steps."""
    lines = [x for _, x in body]
    if rng.random() < 0.2:
        prefixes = rng.choice([("0: ", "1: "), ("[rank0]:", "[rank1]:")])
        return [f"{prefix}{x}" for x in lines for prefix in rng.sample(prefixes, 2)]
    if rng.random() < 0.5:
        between = [at for at in range(1, len(body)) if body[at][0] != body[at - 1][0]]
        for at in sorted(rng.sample(between, min(3, len(between))), reverse=True):
            lines.insert(at, f"{rng.choice(NOISE)}\n")
    return lines


def check_case(case: Case, row: RunSummary) -> None:
    """Raises Violation unless a run's summary has the right answer, as far as it has one."""
    r = row.record
    check_settings(case, row)
    check((r.source, r.damaged) == (case.program, 0), "program, damaged", (r.source, r.damaged))
    check(row.loss in ((2.5, 2.5), (None, None)), "loss", row.loss)
    check({*r.step_s} <= {*case.work}, "steps", {*r.step_s} - {*case.work})
    if r.total_steps and r.step_s:
        check(r.status == case.status, "status", (r.status, r.reason))
    if row.step:
        check_figures(case, row)
    else:
        check(row.verdict not in JUDGED, "verdict without figures", row.verdict)


def check_settings(case: Case, row: RunSummary) -> None:
    """Raises Violation unless each setting is right or unknown; those that are named, right."""
    r, run = row.record, case.work[min(case.work)]
    truth = {"model": "llama31", "seq": run.seq, "gpus": run.gpus, "dtype": case.dtype}
    truth |= {"gpu_type": case.gpu_type, "gbs": r.gbs}
    lacking = compare.unknown(r, GPU_TYPES)
    for name, right in truth.items():
        value = getattr(r, name)
        check(not value or value == right, f"{name} is not {right}", value)
        if {"model": "config"}.get(name, name) in case.given:
            check(bool(value), f"{name} is given and unknown", r.origins)
    batches = {work.gbs for work in case.work.values()}
    check(not r.gbs or r.gbs in batches, "gbs", (r.gbs, batches))
    named = {*formats.FORMATS[case.program].dumps} & {*SETTINGS} if case.complete else {*()}
    named -= {"gpu_type"} if not case.gpu_type else {*()}
    check(not named & {*lacking}, "settings that the log names are unknown", named & {*lacking})


def check_figures(case: Case, row: RunSummary) -> None:
    """Raises Violation unless figures are those of the steps of the window."""
    r, (first, last) = row.record, row.window
    steps = [i for i in sorted(r.step_s) if first <= i <= last]
    run, lacking = case.work[steps[-1]], compare.unknown(r, GPU_TYPES)
    shows = {work.gbs for work in case.work.values()}
    check(len({case.work[i].gbs for i in steps}) == 1, "several batches", (steps, shows))
    right_s = statistics.fmean(case.work[i].step_s for i in steps)
    rounding = 1.1 / right_s if case.program == "lightning" else CLOSE  # its clock has seconds
    close = lambda a, b: abs(a / b - 1) < rounding
    check(close(row.step["mean"], right_s), "mean", (row.step["mean"], right_s, row.window))
    if row.tokens_s:
        check(close(row.tokens_s, run.gbs * run.seq / right_s), "tokens/s", row.tokens_s)
    check(bool(row.tokens_s) or not (r.gbs and r.seq), "no tokens/s", (r.gbs, r.seq))
    known = not lacking and not case.impossible
    check(bool(row.mfu) == known, "MFU", (row.mfu, lacking, case.impossible))
    if row.mfu:
        least = least_s(run.seq, run.gbs, run.gpus, case.gpu_type, case.dtype)
        check(close(row.mfu["causal"], least / right_s), "MFU", (row.mfu, least / right_s))
    check(known or row.verdict not in JUDGED, "verdict from an unknown", (row.verdict, lacking))
    ended = case.status == "done" or not r.total_steps  # some programs do not log their end
    check(row.verdict not in JUDGED or ended, "verdict", row.verdict)
    if row.verdict in JUDGED and case.spike not in steps:
        check(close(row.share * right_s, row.baseline.step_s), "share", (row.share, row.baseline))
    noted = any(note.startswith(f"step {case.spike} takes ") for note in row.notes)
    check(noted == (case.spike in steps), "spike", (case.spike, row.notes))


def answers(count: int, seed: int, programs: Sequence[str] = ()) -> collections.Counter:
    """Reports on `count` logs; counts their verdicts."""
    verdicts: collections.Counter = collections.Counter()
    programs = programs or [*log_samples.LOGS]
    with tempfile.TemporaryDirectory() as name:
        path = pathlib.Path(name, "train.log")
        for i in range(count):
            rng = random.Random(f"{seed} {i}")
            case = make_case(rng, programs[i % len(programs)])
            path.write_text(case.text)
            if case.status == "died":
                os.utime(path, (1e9, 1e9))
            try:
                settings = ReportOptions(paths=(str(path),), window=case.window, **case.given)
                (record,) = readers.read([path], settings.given)
                row = compare.summarize(record, settings)
                check_case(case, row)
                form = rng.choice([*build_report.FORMATS])
                build_report.Report([row], settings).text(form)
            except Exception as e:
                if not isinstance(e, Violation):
                    raise
                raise Violation(f"log {i} of seed {seed}, {case.program}: {e}") from e
            verdicts[row.verdict] += 1
    return verdicts


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--program", choices=[*log_samples.LOGS], action="append", default=[])
    args = parser.parse_args(argv)
    start = time.process_time()
    verdicts = answers(args.count, args.seed, args.program)
    summary = ", ".join(f"{n} {verdict}" for verdict, n in sorted(verdicts.items()))
    print(f"{args.count} logs: {summary}; {time.process_time() - start:.0f} CPU s")


if __name__ == "__main__":
    main()
