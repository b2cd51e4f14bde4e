"""Reads runs back: our folders, and text logs of NeMo, Megatron-Bridge and MaxText.

Whatever a file holds (half a line, another program's output, nothing), reading it raises no error:
what cannot be read is left out, and a Record says what that is. Logs may be of any size: no more
than a BLOCK of one is in memory.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from maxbench.config import recipes
from maxbench.config.errors import UserError, escape_control
from maxbench.hardware import published
from maxbench.hardware.gpus import GPU_TYPES, GpuTypes
from maxbench.run_logs import text_logs
from maxbench.run_logs.record import RunRecord, dig, parse_json

BLOCK = 4 << 20  # bytes
ENDING = 1 << 18  # bytes of a text log's end that may say why
FOREIGN = (".out", ".log", ".txt", ".err")
NOT_RUNS = re.compile(r"^(sbatch_|srun-|gpu-|nccl)|prepare_squad_dataset_exp|import_ckpt_exp")

WATTS = re.compile(rb"^[^,\n]*,[^,\n]*, *(\d{1,4}(?:\.\d{1,9})?) *(?=[,\r\n]|\Z)", re.MULTILINE)
GBS_NAMED = re.compile(r"_gbs(\d{1,7})")
OF_A_JOB = b"] maxbench: JOB_ID="  # slurm.sh: what follows is of a run that has a folder


def read(paths: Iterable[str | pathlib.Path], gpu_types: GpuTypes = GPU_TYPES) -> list[RunRecord]:
    """All runs at and below the paths, in the order of their names and start.

    Raises:
      UserError: a path does not exist.
    """
    records: dict[str, RunRecord] = {}

    def keep(record: RunRecord) -> None:
        record.name, record.reason = escape_control(record.name), escape_control(record.reason)
        records.setdefault(os.path.realpath(record.path), record)

    for path in map(pathlib.Path, paths):
        if not os.path.lexists(path):
            raise UserError(f"no such file or folder: {path}")
        for folder, files in _folders(path, lambda e: keep(_skipped(e.filename, e))):
            for record in _in_folder(folder, files, gpu_types):
                keep(record)
    return sorted(records.values(), key=lambda r: (_natural(r.name), r.started, str(r.path)))


def _skipped(path: str | pathlib.Path, error: OSError) -> RunRecord:
    """What stands in a report for a file or a folder that cannot be read."""
    path, why = pathlib.Path(path), f"cannot be read: {error.strerror}"
    return RunRecord(path=path, name=path.name, source="", status="skipped", reason=why)


def _natural(name: str) -> list:
    """A key that puts gpus8 before gpus16."""
    return [(int(x), "") if x.isdecimal() else (0, x) for x in re.split(r"([0-9]{1,18})", name)]


def _folders(
    path: pathlib.Path, failed: Callable[[OSError], Any]
) -> Iterator[tuple[pathlib.Path, list[str]]]:
    if not path.is_dir():
        yield path.parent, [path.name]
        return
    for folder, below, files in os.walk(path, onerror=failed):
        below[:] = sorted(d for d in below if d not in ("checkpoints", "nsys_profile", "xplane"))
        yield pathlib.Path(folder), sorted(files)


def _in_folder(folder: pathlib.Path, files: list[str], gpu_types: GpuTypes) -> Iterator[RunRecord]:
    if {"result.json", "job.json", "metrics.jsonl"} & {*files} and (
        record := _read_run_folder(folder, files, gpu_types)
    ):
        yield record
        return
    logs = (f for f in files if f.endswith(FOREIGN) and not NOT_RUNS.search(f))
    yield from filter(None, (_read_text_log(folder / f, gpu_types) for f in logs))


# --- files that may be damaged ---


def blocks(path: pathlib.Path) -> Iterator[bytes]:
    """A file in parts that end where a line does; a longer line is cut.

    Raises:
      OSError: it cannot be read, or is none: a pipe would wait for a writer.
    """
    with open(path, "rb", opener=_open) as f:
        rest = b""
        while read := f.read(BLOCK):
            rest += read
            cut = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1 or len(rest)
            yield rest[:cut]
            rest = rest[cut:]
        yield rest


def _open(path: str, flags: int) -> int:
    """open() for regular files alone."""
    found = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(0, "not a regular file")
    return found


def _ours_of(record: RunRecord, name: str) -> Iterator[bytes]:
    """blocks() of a file in a run's folder; what cannot be read is noted."""
    try:
        yield from blocks(record.path / name)
    except FileNotFoundError:
        return
    except OSError as e:
        record.unread.append(f"{name} cannot be read: {e.strerror}")


def _json_of(record: RunRecord, name: str) -> dict:
    """A JSON file in a run's folder; {} where there is none, or none that is whole."""
    text = b"".join(itertools.islice(_ours_of(record, name), 16))  # ours are 10 KB
    if not (found := parse_json(text)) and text:
        record.unread.append(f"{name} is damaged")
    return found


# --- our own folders ---


def _read_run_folder(
    folder: pathlib.Path, files: list[str], gpu_types: GpuTypes
) -> RunRecord | None:
    """A run's folder, whatever of it is left; None where it is not one of ours."""
    record = RunRecord(path=folder, name="", source="maxbench")
    found = _json_of(record, "result.json")
    result = record.result = found if "config" in found else {}
    name = folder.name.rpartition("_")[0] or folder.name  # without its timestamp
    record.name = name = dig(result, "name", "") or name
    for field in (f for f in dataclasses.fields(RunRecord) if f.metadata):
        setattr(record, field.name, dig(result, field.metadata["path"], field.default))
    _steps(record)
    if not result:  # in its preflight, refused by it, or cut off
        marked = not found and {"result.json", "job.json"} & {*files}
        if not (record.step_s or marked):
            return None
        record.unread += ["result.json is damaged"] * bool(found)
        record.started = dig(_json_of(record, "job.json"), "started", 0.0)
        _from_name(record, name, gpu_types)
    seconds = [dig(one, "seconds", 0.0) for one in dig(result, "checkpoint_saves", [])]
    record.saves = [*filter(None, seconds)]
    record.loads = [*filter(None, [dig(result, "checkpoint_load.seconds", 0.0)])]
    _power(record)
    if record.status in ("", "running"):
        _infer_death(record)
    elif record.status == "stopped" and (why := text_logs.death_reason(_job_text(record))):
        record.reason = f"{record.reason}: {why}"
    return record


def _steps(record: RunRecord) -> None:
    """Steps of metrics.jsonl; a damaged line is counted."""
    for line in (x for block in _ours_of(record, "metrics.jsonl") for x in block.splitlines(True)):
        one = parse_json(line)
        step, step_s = dig(one, "step", -1), dig(one, "step_s", 0.0)
        if step < 0 or step_s == 0:
            # The last line of a run that goes on may be on its way.
            record.damaged += line.endswith(b"\n") or record.status != "running"
            continue
        record.step_s[step] = step_s
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            record.loss[step] = float(one["loss"])
        record.peak_bytes = max(record.peak_bytes, dig(one, "peak_bytes", 0))


def _infer_death(record: RunRecord) -> None:
    """Why a run that never closed its result ended, from what the job left behind."""
    ended = _json_of(record, "exit.json")
    reason = text_logs.death_reason(_job_text(record)) or dig(ended, "reason", "").strip(" ;")
    code = dig(ended, "code", 0)
    if not reason and code:
        reason = f"exit code {code}" + (f" (signal {code - 128})" if code > 128 else "")
    files = [record.path / name for name in ("metrics.jsonl", "result.json", "job.json")]
    if not (ended or reason) and _still_running(record, *files):
        record.status = "running"
        return
    if reason and dig(ended, "phase", "") == "preflight":
        reason = f"preflight: {reason}"
    silent = "ended without a word" if record.result or record.step_s else "ended before step 0"
    record.status, record.reason = "died", reason or silent


def _still_running(record: RunRecord, *files: pathlib.Path) -> bool:
    """Whether a run wrote to its files so shortly ago that it may be about to again."""
    written = max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
    return time.time() - written < max(900.0, 10 * max(record.step_s.values(), default=0.0))


def _job_text(record: RunRecord) -> bytes:
    """The ends of what the job and its steps printed."""
    files = [*sorted(record.path.glob("srun-*.log")), *sorted(record.path.glob("sbatch_*.out"))]
    return b"".join(_end(_ours_of(record, path.name), 1 << 16) for path in files)


def _end(blocks: Iterable[bytes], size: int) -> bytes:
    return functools.reduce(lambda end, block: (end + block)[-size:], blocks, b"")


def _power(record: RunRecord) -> None:
    """Mean power of the GPUs from gpu-<host>.csv, which task.sh writes beside a run."""
    watts = collections.Counter(
        float(m[1])
        for path in record.path.glob("gpu-*.csv")
        for block in _ours_of(record, path.name)
        for m in WATTS.finditer(block)
    )
    high = max(watts, default=0.0)
    busy = {w: n for w, n in watts.items() if w > high / 2}  # idle before and after the steps
    if busy:
        record.power_w = sum(w * n for w, n in busy.items()) / sum(busy.values())


# --- text logs ---


def _read_text_log(path: pathlib.Path, gpu_types: GpuTypes) -> RunRecord | None:
    """A run from a text log; None where no line tells of a step or of training, and where a job of
    ours printed it: of a run that died it repeats the last lines."""
    record = RunRecord(path=path, name=_run_name(path), source="nemo")
    try:
        record.started = path.stat().st_mtime
        end = b""
        for block in blocks(path):
            if OF_A_JOB in block:
                return None
            text_logs.parse_block(record, block)
            end = (end + block)[-ENDING:]
    except FileNotFoundError:
        return None
    except OSError as e:
        return _skipped(path, e)
    looks = re.search(r"pretrain|nemo|maxtext|megatron|log-", path.name)
    if not record.step_s and not looks:
        return None
    _from_name(record, f"{path.parent}/{path.name}", gpu_types)
    tools = {"nccltrace": "nccltrace", "_nsys": "nsys"}
    record.profiled = next((tool for part, tool in tools.items() if part in str(path)), "")
    _ending(end, record)
    return record


def _run_name(path: pathlib.Path) -> str:
    name = path.name.removeprefix("log-").removeprefix("slurm-")
    name = name.rpartition(".")[0] if name.endswith(FOREIGN) else name
    name = name.removesuffix("_0")
    last = name.rpartition(".")[2]  # after the account that NeMo-Run puts before it
    return last if "pretrain_" in last else name


@functools.cache
def _named() -> re.Pattern:
    """A workload in a name: model and size, then as much of precision and GPUs as there is."""
    longest = lambda names: [re.escape(x) for x in sorted(names, key=len, reverse=True)]
    models, sizes = longest(recipes.model_names()), [*longest(recipes.sizes()), "[0-9]+b"]
    return re.compile(
        rf"(?P<model>{'|'.join(models)})[_-](?P<size>{'|'.join(sizes)})"
        r"(?P<preset>(?:-[a-z]+)*)(?:[_-](?P<dtype>bf16|fp8|fp32))?"
        r"(?:_(?:gpus)?(?P<gpus>\d{1,6})(?P<nodes>n?)(?=[_.g]|$))?"
    )


def _from_name(record: RunRecord, text: str, gpu_types: GpuTypes) -> None:
    """Model, size, precision, GPUs and batch from a name; the rest from the published row."""
    if matches := list(_named().finditer(text)):
        named = max(matches, key=lambda m: len(m.group(0)))
        record.model = recipes.model_names()[named["model"]]
        record.size = named["size"] + (named["preset"] or "")
        record.dtype = record.dtype or named["dtype"] or ""
        count = int(named["gpus"] or 0)
        record.gpus = record.gpus or (count * 8 if named["nodes"] else count)
    # results/<version>/<dtype>/<size>/<gpus>/
    for dtype, size, count in re.findall(r"(?:^|/)(bf16|fp8)/(\d{1,4}b)/(\d{1,6}(?=/))?", text):
        record.dtype, record.size = record.dtype or dtype, record.size or size
        record.gpus = record.gpus or int(count or 0)
    record.gpu_type = record.gpu_type or gpu_types.type_of(text)
    if not record.gbs and (gbs := GBS_NAMED.search(text)):
        record.gbs = int(gbs[1])
    near = [r for r in published.rows() if (r.model, r.size) == (record.model, record.size)]
    if not record.seq and record.gpus and near:
        row = min(near, key=lambda r: abs(r.gpus / record.gpus - 1))
        record.seq, record.layers = row.seq, row.layers
    if not record.gbs and record.seq:
        record.gbs = record.result.get("tokens", 0) // record.seq


def _ending(end: bytes, record: RunRecord) -> None:
    """Whether the run reached its end."""
    record.status, last = "done", record.last
    if record.planned and last >= record.planned - 1:
        return
    reason = text_logs.death_reason(end)
    if last >= 0 and record.planned and not reason and _still_running(record, record.path):
        record.status = "running"
    elif record.planned or last < 0 or reason:  # MaxText does not say how many steps are to be
        record.status = "died"
        record.reason = reason or ("the log ends here" if last >= 0 else "no step in the log")
