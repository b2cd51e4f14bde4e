"""Reads runs back: our folders, and text logs of NeMo, Megatron-Bridge and MaxText.

Whatever a file holds (half a line, another program's output, nothing), reading it raises no error:
what cannot be read is left out, and a Record says what is missing.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import statistics
import time
from collections.abc import Iterable, Iterator

from maxbench.hardware import gpus, published
from maxbench.spec import recipes
from maxbench.spec.errors import UserError

LARGEST = 64 << 20  # bytes of a text log that are read, half from its start, half from its end
FOREIGN = (".out", ".log", ".txt", ".err")
NOT_RUNS = re.compile(r"^(sbatch_|srun-|gpu-|nccl)|prepare_squad_dataset_exp|import_ckpt_exp")

_INT, _FLOAT = rb"(\d{1,9})", rb"([-+]?(?:\d[\d.]{0,30}(?:[eE][-+]?\d{1,3})?|nan|inf))"
NEMO = re.compile(rb"iteration " + _INT + rb"/" + _INT + rb"\b([^\r\n]*)")
BAR = re.compile(rb"\| *" + _INT + rb"/" + _INT + rb" \[([^\r\n\]]*)")
MEGATRON = re.compile(rb"iteration +" + _INT + rb"/ +" + _INT + rb" \|([^\r\n]*)")
MAXTEXT = re.compile(
    rb"completed step: " + _INT + rb", seconds: " + _FLOAT + rb"(?:, TFLOP/s/device: " + _FLOAT
    + rb")?(?:, Tokens/s/device: " + _FLOAT + rb")?(?:, total_weights: " + _INT
    + rb")?(?:, loss: " + _FLOAT + rb")?"
)  # fmt: skip
FIELDS = {
    "step_s": re.compile(rb"train_step_timing in s[:=] ?" + _FLOAT),
    "step_ms": re.compile(rb"elapsed time per iteration \(ms\): ?" + _FLOAT),
    "tflops": re.compile(rb"(?:TFLOPS_per_GPU: ?|throughput per GPU \(TFLOP/s/GPU\): ?)" + _FLOAT),
    "loss": re.compile(rb"(?:reduced_train_loss|lm loss)[:=] ?" + _FLOAT),
    "gbs": re.compile(rb"(?:global_batch_size|global batch size)[:=] *" + _INT),
    "peak": re.compile(rb"peak_memory_usage: (\d{1,15})"),
    "step": re.compile(rb"global_step=" + _FLOAT),
    "samples": re.compile(rb"consumed_samples[:=] ?" + _FLOAT),
}
MODEL_TFLOPS = re.compile(_FLOAT + rb" ?MODEL_TFLOP/s/GPU")
SAVED = re.compile(
    rb"Checkpoint Save[^\r\n]*Save duration: " + _FLOAT + rb"s(?: : " + _FLOAT + rb" GB)?"
)
LOADED = re.compile(rb"Time spent in load_checkpoint: " + _FLOAT + rb"s(?: : " + _FLOAT + rb" GB)?")
REASON = re.compile(
    rb"F\d{4} \d\d:\d\d:[^\]\r\n]{0,80}\] [^\r\n]*|"  # absl: the process ends itself
    rb"DUE TO TIME LIMIT|DUE TO NODE FAILURE|NODE FAILURE|CANCELLED AT [^*\r\n]*|"
    rb"[oO]ut of memory[^\r\n]*|RESOURCE_EXHAUSTED[^\r\n]*|oom-kill[^\r\n]*|"
    rb"Watchdog caught[^\r\n]*|Segmentation fault|Bus error|"
    rb"(?:^|(?<=[\r\n :]))[A-Za-z_.]*(?:Error|Exception): [^\r\n]*|error: [^\r\n]*",
    re.MULTILINE,
)
WATTS = re.compile(rb"^[^,\n]*,[^,\n]*, *(\d{1,4}(?:\.\d{1,9})?) *(?=[,\r\n]|\Z)", re.MULTILINE)
GBS_NAMED = re.compile(r"_gbs(\d{1,7})")


@dataclasses.dataclass(kw_only=True)
class Record:
    """One run as its files tell it. Zero and '' stand for what they do not tell."""

    path: pathlib.Path
    name: str
    source: str  # maxbench | nemo | megatron | maxtext
    status: str = ""  # done | stopped | failed | died | running
    reason: str = ""
    model: str = ""
    size: str = ""
    dtype: str = ""
    gpu_type: str = ""  # a name of gpus.GPUS
    device: str = ""  # as the run called it
    gpus: int = 0
    gbs: int = 0
    seq: int = 0
    layers: int = 0
    planned: int = 0  # steps
    started: float = 0.0  # seconds since 1970
    mocked: bool = False
    profiled: str = ""
    step_s: dict[int, float] = dataclasses.field(default_factory=dict)
    tflops: dict[int, float] = dataclasses.field(default_factory=dict)  # as logged
    loss: dict[int, float] = dataclasses.field(default_factory=dict)
    peak_bytes: int = 0
    power_w: float = 0.0  # mean over GPUs while they are busy
    saves: list[tuple[float, float]] = dataclasses.field(default_factory=list)  # seconds, bytes
    loads: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    result: dict = dataclasses.field(default_factory=dict)

    @property
    def last(self) -> int:
        """The last step that was logged; -1 where there is none."""
        return max(self.step_s, default=-1)


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
    if "result.json" in files or ("metrics.jsonl" in files and "job.json" in files):
        if record := _ours(folder):
            yield record
            return
    elif "job.json" in files:
        yield _never_trained(folder)
        return
    logs = (f for f in files if f.endswith(FOREIGN) and not NOT_RUNS.search(f))
    yield from filter(None, (_text(folder / f) for f in logs))


def _json(path: pathlib.Path) -> dict:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _at(data, *keys):
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _word(data, *keys) -> str:
    found = _at(data, *keys)
    return found if isinstance(found, str) else ""


def _number(data, *keys) -> float:
    found = _at(data, *keys)
    good = isinstance(found, int | float) and not isinstance(found, bool)
    return found if good and abs(found) < 1e30 and math.isfinite(found) else 0


def _count(data, *keys) -> int:
    return int(max(0, _number(data, *keys)))


# --- our own folders ---

# Field of Record -> where result.json has it.
WORDS = {
    "status": "status", "reason": "reason", "model": "config.model.name",
    "size": "config.model.size", "dtype": "config.precision.dtype",
    "gpu_type": "device.gpu_type", "device": "device.kind", "profiled": "config.profile.tool",
}  # fmt: skip
COUNTS = {
    "gpus": "device.count", "gbs": "config.layout.gbs", "seq": "config.train.seq",
    "layers": "config.model.layers", "planned": "config.train.steps", "peak_bytes": "peak_bytes",
}  # fmt: skip


def _ours(folder: pathlib.Path) -> Record | None:
    """A run's folder; None where result.json is not one of ours."""
    result = _json(folder / "result.json")
    if "config" not in result and result:
        return None
    name = _word(result, "name") or folder.name.rpartition("_")[0] or folder.name
    record = Record(path=folder, name=name, source="maxbench", result=result)
    for field, path in WORDS.items():
        setattr(record, field, _word(result, *path.split(".")))
    for field, path in COUNTS.items():
        setattr(record, field, _count(result, *path.split(".")))
    record.started, record.mocked = _number(result, "started"), result.get("mocked") is True
    _jsonl(folder / "metrics.jsonl", record)
    for key, kept in (("checkpoint_saves", record.saves), ("checkpoint_load", record.loads)):
        found = result.get(key)
        for one in found if isinstance(found, list) else [found] if found else []:
            if _number(one, "seconds") > 0:
                kept.append((_number(one, "seconds"), _number(one, "bytes")))
    _power(folder, record)
    if record.status in ("", "running"):
        _died(folder, record)
    elif record.status == "stopped" and (why := _reason(_job_text(folder))):
        record.reason = f"{record.reason}: {why}"
    return record


def _jsonl(path: pathlib.Path, record: Record) -> None:
    """Steps of metrics.jsonl; a damaged line is left out."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            one = json.loads(line)
        except (ValueError, RecursionError):
            continue
        step, step_s = _at(one, "step"), _number(one, "step_s")
        if not isinstance(step, int) or step < 0 or step_s <= 0:
            continue
        record.step_s[step] = step_s
        if isinstance(_at(one, "loss"), int | float):
            record.loss[step] = float(one["loss"])
        record.peak_bytes = max(record.peak_bytes, _count(one, "peak_bytes"))


def _died(folder: pathlib.Path, record: Record) -> None:
    """Why a run that never closed its result ended, from what the job left behind."""
    ended = _json(folder / "exit.json")
    reason = _reason(_job_text(folder)) or _word(ended, "reason").strip(" ;")
    code = _count(ended, "code")
    if not reason and code:
        reason = f"exit code {code}" + (f" (signal {code - 128})" if code > 128 else "")
    if not (ended or reason) and _is_alive(folder, record):
        record.status = "running"
        return
    if reason and _word(ended, "phase") == "preflight":
        reason = f"preflight: {reason}"
    silent = "ended without a word" if record.result else "ended before step 0"
    record.status, record.reason = "died", reason or silent


def _is_alive(folder: pathlib.Path, record: Record) -> bool:
    """Whether something was written not long ago."""
    newest = max(_mtime(folder / f) for f in ("metrics.jsonl", "result.json", "job.json"))
    return time.time() - newest < max(900.0, 10 * max(record.step_s.values(), default=0.0))


def _job_text(folder: pathlib.Path) -> bytes:
    """The ends of what the job and its steps printed."""
    files = [*sorted(folder.glob("srun-*.log")), *sorted(folder.glob("sbatch_*.out"))]
    return b"".join(_tail(p, 1 << 16) for p in files)


def _never_trained(folder: pathlib.Path) -> Record:
    """A job without a result: in its preflight, refused by it, or cut off."""
    name = folder.name.rpartition("_")[0] or folder.name
    started = _number(_json(folder / "job.json"), "started")
    record = Record(path=folder, name=name, source="maxbench", started=started)
    _from_name(record, name)
    _died(folder, record)
    return record


def _mtime(path: pathlib.Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _tail(path: pathlib.Path, size: int) -> bytes:
    try:
        with open(path, "rb") as f:
            f.seek(max(0, path.stat().st_size - size))
            return f.read(size)
    except OSError:
        return b""


def _reason(text: bytes) -> str:
    """The first line near the end of a log that says why a run ended, or ''."""
    found = [m.group(0).strip() for m in REASON.finditer(text)]
    # A cancelled step follows from what ended one of its tasks; a cancelled job is the cause.
    slurm = [f for f in found if re.search(rb"DUE TO|JOB \d+ ON|NODE FAIL", f)]
    secondary = rb"srun: error|task \d+: |^error: task|STEP [\d.]+ ON|^CANCELLED AT"
    telling = [f for f in found if not re.search(secondary, f)]
    best = next(iter(slurm[-1:] or telling[:1] or found[:1]), b"")
    return re.sub(r"\s+", " ", best.decode("utf-8", "replace"))[:160].strip()


def _power(folder: pathlib.Path, record: Record) -> None:
    """Mean power of the GPUs from gpu-<host>.csv, which task.sh writes beside a run."""
    logs = folder.glob("gpu-*.csv")
    watts = [float(m[1]) for path in logs for m in WATTS.finditer(_tail(path, 4 << 20))]
    high = max(watts, default=0.0)
    if busy := [w for w in watts if w > high / 2]:  # idle before and after the steps
        record.power_w = statistics.fmean(busy)


# --- text logs ---


def _text(path: pathlib.Path) -> Record | None:
    """A run from a text log; None where no line tells of a step or of training."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as f:
            data = f.read(LARGEST if size <= LARGEST else LARGEST // 2)
            if size > LARGEST:
                f.seek(size - LARGEST // 2)
                data += b"\n" + f.read()
    except OSError:
        return None
    record = Record(path=path, name=_run_name(path), source="nemo")
    record.started = _mtime(path)
    _steps(data, record)
    looks = re.search(r"pretrain|nemo|maxtext|megatron|log-", path.name)
    if not record.step_s and not looks:
        return None
    _from_name(record, f"{path.parent}/{path.name}")
    tools = {"nccltrace": "nccltrace", "_nsys": "nsys"}
    record.profiled = next((tool for part, tool in tools.items() if part in str(path)), "")
    for pattern, kept in ((SAVED, record.saves), (LOADED, record.loads)):
        for match in pattern.finditer(data):
            if (seconds := _float(match[1])) > 0:
                kept.append((seconds, _float(match[2]) * 1e9))
    _ending(data, record)
    return record


def _run_name(path: pathlib.Path) -> str:
    name = path.name.removeprefix("log-").removeprefix("slurm-")
    name = name.rpartition(".")[0] if name.endswith(FOREIGN) else name
    name = name.removesuffix("_0")
    last = name.rpartition(".")[2]  # after the account that NeMo-Run puts before it
    return last if "pretrain_" in last else name


def _float(text: bytes | None) -> float:
    with contextlib.suppress(ValueError):
        return max(0.0, _number({"": float(text or 0)}, ""))
    return 0.0


def _steps(data: bytes, record: Record) -> None:
    """Fills in the steps of every format that is in the text."""
    for match in MAXTEXT.finditer(data):
        step, step_s = int(match[1]), _float(match[2])
        if step_s <= 0:
            continue
        # Every process prints the line; the step takes as long as its slowest process.
        record.step_s[step] = max(step_s, record.step_s.get(step, 0.0))
        record.tflops[step] = _float(match[3])
        _loss(record, step, match[6])
        record.result["tokens"] = int(match[5] or 0)
        record.source = "maxtext"
    for pattern in (NEMO, BAR, MEGATRON):
        for match in pattern.finditer(data):
            _nemo_step(pattern, match, record)


def _nemo_step(pattern: re.Pattern, match: re.Match, record: Record) -> None:
    step, total, rest = int(match[1]), int(match[2]), match[3]
    found = {k: m[1] for k, p in FIELDS.items() if (m := p.search(rest))}
    step_s = _float(found.get("step_s")) or _float(found.get("step_ms")) / 1000
    if pattern is not NEMO:  # counts from 1; the progress bar prints its global_step from 0
        step, total = int(_float(found["step"])) if "step" in found else step - 1, total - 1
    if pattern is MEGATRON:
        record.source = "megatron"
    if step_s <= 0 or step < 0:
        return
    record.source = "nemo" if record.source == "maxtext" else record.source
    record.planned = max(record.planned, total + 1)
    record.step_s[step] = step_s
    if tflops := found.get("tflops") or ((m := MODEL_TFLOPS.search(rest)) and m[1]):
        record.tflops[step] = _float(tflops)
    _loss(record, step, found.get("loss"))
    if "gbs" in found:
        record.gbs = int(found["gbs"])
    elif "samples" in found and step:  # the older progress bar has no batch, but counts samples
        record.gbs = record.gbs or round(_float(found["samples"]) / (step + 1))
    record.peak_bytes = max(record.peak_bytes, int(found.get("peak", 0)))


def _loss(record: Record, step: int, text: bytes | None) -> None:
    with contextlib.suppress(ValueError):
        if text is not None:
            record.loss[step] = float(text)


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
    parts = pathlib.PurePath(text).parts
    for i, part in enumerate(parts[:-2]):
        if part in ("bf16", "fp8") and re.fullmatch(r"\d{1,4}b", parts[i + 1]):
            record.dtype = record.dtype or part
            record.size = record.size or parts[i + 1]
            if parts[i + 2].isdecimal() and len(parts[i + 2]) < 7:
                record.gpus = record.gpus or int(parts[i + 2])
    record.gpu_type = record.gpu_type or gpus.named(text)
    if not record.gbs and (gbs := GBS_NAMED.search(text)):
        record.gbs = int(gbs[1])
    if not record.seq and record.gpus:
        near = [r for r in published.rows() if (r.model, r.size) == (record.model, record.size)]
        row = min(near, key=lambda r: abs(r.gpus / record.gpus - 1), default=None)
        if row:
            record.seq, record.layers = row.seq, row.layers
    tokens = _count(record.result, "tokens")
    if not record.gbs and tokens and record.seq:
        record.gbs = tokens // record.seq


def _ending(data: bytes, record: Record) -> None:
    """Whether the run reached its end."""
    last = record.last
    if record.planned and last >= record.planned - 1:
        record.status = "done"
        return
    reason = _reason(data[-(1 << 18) :])
    if not record.planned and last >= 0 and not reason:
        record.status = "done"  # MaxText does not say how many steps there are to be
        return
    record.status = "died"
    record.reason = reason or ("the log ends here" if last >= 0 else "no step in the log")
