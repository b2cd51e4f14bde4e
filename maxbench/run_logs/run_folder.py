"""Run folders of maxbench, complete or not: result.json, metrics.jsonl, files of the job."""

import collections
import contextlib
import dataclasses
import itertools
import pathlib
import re
from collections.abc import Iterable, Iterator

from maxbench.config.errors import UserError
from maxbench.config.number_formats import DTYPES, resolve_format
from maxbench.evidence import published
from maxbench.host import identity
from maxbench.run_logs import deaths, log_files
from maxbench.run_logs.record import (
    SETTINGS,
    Given,
    Origin,
    ReachedTarget,
    RunRecord,
    dig,
    parse_json,
)
from maxbench.run_logs.workload_name import complete

MARKERS = {"result.json", "job.json", "metrics.jsonl"}  # a folder with one may be of a run
MAX_JSON_BLOCKS = 16  # 64 MiB; files of maxbench have 10 KB
KILLED = "it was killed or crashed; if memory of the host ran out, dmesg -T names its process"
LAST_STEPS = 1 << 14  # bytes at the end of metrics.jsonl that read_state() reads: about 30 steps
STEP = b"completed step: "  # in each line of a step in the log of a job
JOB_LOG_END = 1 << 16  # bytes of each log of the job that are searched for the reason of a death
WATTS = re.compile(rb"^[^,\n]*,[^,\n]*, *(\d{1,4}(?:\.\d{1,9})?) *(?=[,\r\n]|\Z)", re.MULTILINE)


def read_run_folder(folder: pathlib.Path, files: list[str], given: Given) -> RunRecord | None:
    """Reads a run from its folder; None if it is another program's.

    Args:
      files: names of the files in the folder.
    """
    record, content = _read_result(folder)
    _read_program(record, given)
    _read_steps(record, _blocks(record, "metrics.jsonl"))
    if not record.result:  # in its preflight, refused by it, or damaged
        is_marked = not content and {"result.json", "job.json"} & {*files}
        if not (record.step_s or is_marked):
            return None
        if content:
            record.unread.append("result.json is damaged")
        record.started = dig(_read_json(record, "job.json"), "started", 0.0)
        complete(record, record.name, given)
    seconds = [dig(save, "seconds", 0.0) for save in dig(record.result, "checkpoint_saves", [])]
    record.saves = [*filter(None, seconds)]
    record.loads = [*filter(None, [dig(record.result, "checkpoint_load.seconds", 0.0)])]
    evaluations = dig(record.result, "evaluations", [])
    losses = {dig(e, "step", 0): dig(e, "loss", 0.0) for e in evaluations}
    record.eval_loss = {step: loss for step, loss in losses.items() if loss}
    if reached := dig(record.result, "target_reached", {}):
        record.reached = ReachedTarget(
            dig(record.result, "run.train.target_loss", 0.0),
            dig(reached, "step", 0),
            dig(reached, "tokens", 0),
            dig(reached, "elapsed_s", 0.0),
        )
    _read_power(record)
    _set_status(record)
    return record


def read_state(folder: pathlib.Path) -> RunRecord:
    """Status, reason and the last steps of a run, as read_run_folder() reads them, but at once."""
    record, _ = _read_result(folder)
    _read_steps(record, [_tail(record, "metrics.jsonl", LAST_STEPS)])
    _set_status(record)
    return record


def _read_result(folder: pathlib.Path) -> tuple[RunRecord, dict]:
    """The record of a folder with what result.json has, and the content of that file."""
    record = RunRecord(path=folder, name="", source="maxbench")
    content = _read_json(record, "result.json")
    record.result = content if "config" in content else {}
    for field in (f for f in dataclasses.fields(RunRecord) if f.metadata):
        setattr(record, field.name, dig(record.result, field.metadata["path"], field.default))
    record.origins = dict.fromkeys((x for x in SETTINGS if getattr(record, x)), Origin.LOG)
    without_stamp = folder.name.rpartition("_")[0] or folder.name
    record.name = dig(record.result, "name", "") or without_stamp
    return record, content


def _blocks(record: RunRecord, name: str) -> Iterator[bytes]:
    """Blocks of a file in the folder, if it exists; notes an error in the record."""
    try:
        yield from log_files.blocks(record.path / name)
    except FileNotFoundError:
        return
    except OSError as e:
        record.unread.append(f"{name} cannot be read: {e.strerror}")


def _read_json(record: RunRecord, name: str) -> dict:
    """A JSON object in the folder; {} if it is missing or damaged."""
    text = b"".join(itertools.islice(_blocks(record, name), MAX_JSON_BLOCKS))
    if not (content := parse_json(text)) and text:
        record.unread.append(f"{name} is damaged")
    return content


def _read_program(record: RunRecord, given: Given) -> None:
    """The layout, and the number format of GEMMs, of a finished run's configuration."""
    sizes = {axis: dig(record.result, f"run.layout.{axis}", 0) for axis in published.LAYOUT}
    record.layout = {axis: n for axis, n in sizes.items() if n}
    scaling = dig(record.result, "run.precision.scaling", "")
    if record.gpu_type in given.gpu_types and record.dtype in DTYPES:
        with contextlib.suppress(UserError):  # a GPU type without such GEMMs: it did not run them
            gpu = record.gpu_type, given.gpu_types
            record.format = resolve_format(record.dtype, scaling, *gpu).name


def _tail(record: RunRecord, name: str, size: int) -> bytes:
    """The end of a file in the folder, b'' if it does not exist; notes an error in the record."""
    try:
        return log_files.tail(record.path / name, size)
    except FileNotFoundError:
        return b""
    except OSError as e:
        record.unread.append(f"{name} cannot be read: {e.strerror}")
        return b""


def _read_steps(record: RunRecord, blocks: Iterable[bytes]) -> None:
    """Reads blocks of metrics.jsonl; counts damaged lines."""
    for line in (line for block in blocks for line in block.splitlines(True)):
        metrics = parse_json(line)
        step, step_s = dig(metrics, "step", -1), dig(metrics, "step_s", 0.0)
        if step < 0 or step_s == 0:
            # The last line of a running run may be incomplete.
            record.damaged += line.endswith(b"\n") or record.status != "running"
            continue
        record.step_s[step] = step_s
        for name, values in (("loss", record.loss), ("grad_norm", record.grad_norm)):
            with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
                values[step] = float(metrics[name])
        record.peak_bytes = max(record.peak_bytes, dig(metrics, "peak_bytes", 0))


def _set_status(record: RunRecord) -> None:
    """Completes status and reason: of a run that wrote no final result, from its job's files."""
    if record.status == "done":
        return
    cause = _cause(record)
    if record.status in ("", "running"):
        _infer_status(record, cause)
        return
    # A time limit or a lost node ends one process after another, and a later one may name the
    # first.
    is_cause = cause and "DUE TO" in cause.line and " died, see " in record.reason
    if record.status == "failed":
        record.remedy = deaths.of_reason(record.reason).remedy
    if cause and (record.status == "stopped" or is_cause):
        record.reason, record.remedy = f"{record.reason}: {cause.line}", cause.remedy


def _infer_status(record: RunRecord, cause: deaths.Cause | None) -> None:
    job_end = _read_json(record, "exit.json")
    code, reason = dig(job_end, "code", 0), dig(job_end, "reason", "").strip(" ;")
    if not reason and code:
        reason = f"exit code {code}" + (f" (signal {code - 128})" if code > 128 else "")
    if not cause and reason:
        cause = deaths.of_reason(reason)._replace(line=reason)
    has_started = bool(record.result or record.step_s)
    files = [record.path / name for name in ("metrics.jsonl", "result.json", "job.json")]
    if cause:
        record.die(cause)
        if dig(job_end, "phase", "") == "preflight":
            record.reason = f"preflight: {record.reason}"
    elif unread := [text for text in record.unread if not has_started or " cannot be " in text]:
        record.status, record.reason = "skipped", unread[0]
    elif job_end and not has_started:
        record.status, record.reason = "skipped", "its job is done, and its result is elsewhere"
    elif not job_end and not _is_killed(record) and record.may_be_running(*files):
        record.status = "running"
    elif cause := _cause(record, certain=True):
        record.die(cause)
    else:
        record.status = "died"
        record.reason = f"ended {'without an error message' if record.step_s else 'before step 0'}"
        record.remedy = KILLED


def _is_killed(record: RunRecord) -> bool:
    """Whether the process of a run that has no end is gone, or its job's where it has not begun."""
    job = {} if record.result else _read_json(record, "job.json")
    return identity.is_gone(dig(record.result or job, "process", {}))


def _cause(record: RunRecord, certain: bool = False) -> deaths.Cause | None:
    """The cause of a death in the logs of the job and of its steps.

    Args:
      certain: before the last step too, which may be of another process than the error.
    """
    patterns = ("srun-*.log", "node-*.log", "sbatch_*.out")
    names = [path.name for p in patterns for path in sorted(record.path.glob(p))]
    texts = [_tail(record, name, JOB_LOG_END) for name in names]
    texts = texts if certain else [text[max(text.rfind(STEP), 0) :] for text in texts]
    causes = (deaths.cause(text, certain) for text in texts)
    return min(filter(None, causes), default=None)


def _read_power(record: RunRecord) -> None:
    """Mean power of busy GPUs, from gpu-<host>.csv of launch/task.sh."""
    watts = collections.Counter(
        float(match[1])
        for path in record.path.glob("gpu-*.csv")
        for block in _blocks(record, path.name)
        for match in WATTS.finditer(block)
    )
    # GPUs are idle before and after the steps.
    highest = max(watts, default=0.0)
    busy = {w: count for w, count in watts.items() if w > highest / 2}
    if busy:
        record.power_w = sum(w * count for w, count in busy.items()) / sum(busy.values())
