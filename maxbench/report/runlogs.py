"""Reads runs back: our folders, and text logs of NeMo, Megatron-Bridge and MaxText.

Whatever a file holds (half a line, another program's output, nothing), reading it raises no error:
what cannot be read is left out, and a Record says what is missing.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import statistics
import time
from collections.abc import Iterable, Iterator

from maxbench.hardware import gpus, published
from maxbench.report import textlogs
from maxbench.report.record import Record, at
from maxbench.spec import recipes
from maxbench.spec.errors import UserError

LARGEST = 64 << 20  # bytes of a text log that are read, half from its start, half from its end
FOREIGN = (".out", ".log", ".txt", ".err")
NOT_RUNS = re.compile(r"^(sbatch_|srun-|gpu-|nccl)|prepare_squad_dataset_exp|import_ckpt_exp")

WATTS = re.compile(rb"^[^,\n]*,[^,\n]*, *(\d{1,4}(?:\.\d{1,9})?) *(?=[,\r\n]|\Z)", re.MULTILINE)
GBS_NAMED = re.compile(r"_gbs(\d{1,7})")


def read(paths: Iterable[str | pathlib.Path]) -> list[Record]:
    """All runs at and below the paths, in the order of their names and start.

    Raises:
      UserError: a path does not exist.
    """
    records: dict[pathlib.Path, Record] = {}
    for path in map(pathlib.Path, paths):
        if not path.exists():
            raise UserError(f"no such file or folder: {path}")
        for folder, files in _folders(path):
            for record in _in_folder(folder, files):
                records.setdefault(record.path.resolve(), record)
    return sorted(records.values(), key=lambda r: (_natural(r.name), r.started, str(r.path)))


def _natural(name: str) -> list:
    """A key that puts gpus8 before gpus16."""
    return [(int(x), "") if x.isdecimal() else (0, x) for x in re.split(r"([0-9]{1,18})", name)]


def _folders(path: pathlib.Path) -> Iterator[tuple[pathlib.Path, list[str]]]:
    if path.is_file():
        yield path.parent, [path.name]
        return
    for folder, below, files in os.walk(path):
        below[:] = sorted(d for d in below if d not in ("checkpoints", "nsys_profile", "xplane"))
        yield pathlib.Path(folder), sorted(files)


def _in_folder(folder: pathlib.Path, files: list[str]) -> Iterator[Record]:
    if {"result.json", "job.json"} & {*files} and (record := _ours(folder)):
        yield record
        return
    logs = (f for f in files if f.endswith(FOREIGN) and not NOT_RUNS.search(f))
    yield from filter(None, (_text(folder / f) for f in logs))


# --- files that may be damaged ---


def _bytes(path: pathlib.Path, most: int = 1 << 40) -> bytes:
    """The last `most` bytes of a file; b'' where it cannot be read."""
    try:
        with open(path, "rb") as f:
            f.seek(max(0, path.stat().st_size - most))
            return f.read()
    except OSError:
        return b""


def _json(text: bytes) -> dict:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


# --- our own folders ---


def _ours(folder: pathlib.Path) -> Record | None:
    """A run's folder; None where result.json is not one of ours."""
    result = _json(_bytes(folder / "result.json"))
    if "config" not in result and result:
        return None
    name = folder.name.rpartition("_")[0] or folder.name  # without its timestamp
    name = at(result, "name", "") or name
    record = Record(path=folder, name=name, source="maxbench", result=result)
    for field in (f for f in dataclasses.fields(Record) if f.metadata):
        setattr(record, field.name, at(result, field.metadata["path"], field.default))
    if not result:  # in its preflight, refused by it, or cut off
        record.started = at(_json(_bytes(folder / "job.json")), "started", 0.0)
        _from_name(record, name)
    _steps(_bytes(folder / "metrics.jsonl"), record)
    seconds = [at(one, "seconds", 0.0) for one in at(result, "checkpoint_saves", [])]
    record.saves = [*filter(None, seconds)]
    record.loads = [*filter(None, [at(result, "checkpoint_load.seconds", 0.0)])]
    _power(folder, record)
    if record.status in ("", "running"):
        _died(folder, record)
    elif record.status == "stopped" and (why := textlogs.reason(_job_text(folder))):
        record.reason = f"{record.reason}: {why}"
    return record


def _steps(text: bytes, record: Record) -> None:
    """Steps of metrics.jsonl; a damaged line is left out."""
    for one in map(_json, text.splitlines()):
        step, step_s = at(one, "step", -1), at(one, "step_s", 0.0)
        if step < 0 or step_s == 0:
            continue
        record.step_s[step] = step_s
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            record.loss[step] = float(one["loss"])
        record.peak_bytes = max(record.peak_bytes, at(one, "peak_bytes", 0))


def _died(folder: pathlib.Path, record: Record) -> None:
    """Why a run that never closed its result ended, from what the job left behind."""
    ended = _json(_bytes(folder / "exit.json"))
    reason = textlogs.reason(_job_text(folder)) or at(ended, "reason", "").strip(" ;")
    code = at(ended, "code", 0)
    if not reason and code:
        reason = f"exit code {code}" + (f" (signal {code - 128})" if code > 128 else "")
    files = [folder / name for name in ("metrics.jsonl", "result.json", "job.json")]
    silent_s = time.time() - max(file.stat().st_mtime for file in files if file.exists())
    usual_s = max(900.0, 10 * max(record.step_s.values(), default=0.0))
    if not (ended or reason) and silent_s < usual_s:
        record.status = "running"
        return
    if reason and at(ended, "phase", "") == "preflight":
        reason = f"preflight: {reason}"
    silent = "ended without a word" if record.result else "ended before step 0"
    record.status, record.reason = "died", reason or silent


def _job_text(folder: pathlib.Path) -> bytes:
    """The ends of what the job and its steps printed."""
    files = [*sorted(folder.glob("srun-*.log")), *sorted(folder.glob("sbatch_*.out"))]
    return b"".join(_bytes(p, 1 << 16) for p in files)


def _power(folder: pathlib.Path, record: Record) -> None:
    """Mean power of the GPUs from gpu-<host>.csv, which task.sh writes beside a run."""
    logs = folder.glob("gpu-*.csv")
    watts = [float(m[1]) for path in logs for m in WATTS.finditer(_bytes(path, 4 << 20))]
    high = max(watts, default=0.0)
    if busy := [w for w in watts if w > high / 2]:  # idle before and after the steps
        record.power_w = statistics.fmean(busy)


# --- text logs ---


def _text(path: pathlib.Path) -> Record | None:
    """A run from a text log; None where no line tells of a step or of training."""
    try:
        about = path.stat()
        with open(path, "rb") as f:
            data = f.read(LARGEST if about.st_size <= LARGEST else LARGEST // 2)
    except OSError:
        return None
    if about.st_size > LARGEST:
        data += b"\n" + _bytes(path, LARGEST // 2)
    record = Record(path=path, name=_run_name(path), source="nemo", started=about.st_mtime)
    textlogs.fill(record, data)
    looks = re.search(r"pretrain|nemo|maxtext|megatron|log-", path.name)
    if not record.step_s and not looks:
        return None
    _from_name(record, f"{path.parent}/{path.name}")
    tools = {"nccltrace": "nccltrace", "_nsys": "nsys"}
    record.profiled = next((tool for part, tool in tools.items() if part in str(path)), "")
    _ending(data, record)
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


def _from_name(record: Record, text: str) -> None:
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
    record.gpu_type = record.gpu_type or gpus.named(text)
    if not record.gbs and (gbs := GBS_NAMED.search(text)):
        record.gbs = int(gbs[1])
    near = [r for r in published.rows() if (r.model, r.size) == (record.model, record.size)]
    if not record.seq and record.gpus and near:
        row = min(near, key=lambda r: abs(r.gpus / record.gpus - 1))
        record.seq, record.layers = row.seq, row.layers
    if not record.gbs and record.seq:
        record.gbs = record.result.get("tokens", 0) // record.seq


def _ending(data: bytes, record: Record) -> None:
    """Whether the run reached its end."""
    record.status, last = "done", record.last
    if record.planned and last >= record.planned - 1:
        return
    reason = textlogs.reason(data[-(1 << 18) :])
    if record.planned or last < 0 or reason:  # MaxText does not say how many steps are to be
        record.status = "died"
        record.reason = reason or ("the log ends here" if last >= 0 else "no step in the log")
