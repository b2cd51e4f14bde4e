"""Text logs of NeMo, Megatron-Bridge and MaxText: steps, checkpoints, and how the run ended.

Any bytes are accepted: incomplete lines and malformed numbers are left out.
"""

import pathlib
import re
from collections.abc import Iterator

from maxbench.hardware.gpus import GpuTypes
from maxbench.run_logs import log_files
from maxbench.run_logs.record import RunRecord
from maxbench.run_logs.workload_name import fill_from_name

SUFFIXES = (".out", ".log", ".txt", ".err")
RUN_NAME = re.compile(r"pretrain|nemo|maxtext|megatron|log-")  # in the names of logs of runs
JOB_MARK = b"] maxbench: JOB_ID="  # line of launch/slurm.sh
ENDING = 1 << 18  # bytes at the end of a log that are searched for the reason of a death

_INT = rb"(\d{1,9})"
_FLOAT = rb"([-+]?(?:\d++\.?+\d*+(?:[eE][-+]?\d++)?+|nan|inf))"
# Program -> patterns of the line of a step: the step, the number of steps, and the fields.
LINES = {
    "maxtext": [re.compile(rb"completed step: " + _INT + rb"()((?:(?!completed)[^\r\n])*)")],
    "nemo": [
        re.compile(rb"iteration " + _INT + rb"/" + _INT + rb"\b([^\r\n]*)"),
        re.compile(rb"\| *" + _INT + rb"/" + _INT + rb" \[([^\r\n\]]*)"),  # progress bar
    ],
    "megatron": [re.compile(rb"iteration +" + _INT + rb"/ +" + _INT + rb" \|([^\r\n]*)")],
}
FROM_0 = (LINES["maxtext"][0], LINES["nemo"][0])  # the others count steps from 1
FIELD_NAMES = {  # program -> label in its log -> field
    "maxtext": {
        b", seconds": "step_s",
        b"TFLOP/s/device": "tflops",
        b", loss": "loss",
        b"total_weights": "tokens",
    },
    "nemo": {
        b"train_step_timing in s": "step_s",
        b"TFLOPS_per_GPU": "tflops",
        b"reduced_train_loss": "loss",
        b"global_batch_size": "gbs",
        b"peak_memory_usage": "peak",
        b"global_step": "step",
        b"consumed_samples": "samples",
    },
    "megatron": {
        b"elapsed time per iteration (ms)": "step_ms",
        b"throughput per GPU (TFLOP/s/GPU)": "tflops",
        b"lm loss": "loss",
        b"global batch size": "gbs",
    },
}
FIELDS = {
    source: re.compile(rb"(%b)[:=] *%b(?![\w.])" % (b"|".join(map(re.escape, words)), _FLOAT))
    for source, words in FIELD_NAMES.items()
}
MODEL_TFLOPS = re.compile(_FLOAT + rb" ?MODEL_TFLOP/s/GPU")
# Text in every line of a step, and in the lines of checkpoints: searching for it first is faster.
TIMES = (b"completed step: ", b"train_step_timing in s", b"elapsed time per iteration (ms): ")
CHECKPOINTS = (b"Save duration: ", b"Time spent in load_checkpoint: ")
SAVED = re.compile(rb"Checkpoint Save[^\r\n]*Save duration: " + _FLOAT)
LOADED = re.compile(rb"Time spent in load_checkpoint: " + _FLOAT)
REASON = re.compile(
    rb"F\d{4} \d\d:\d\d:[^\]\r\n]{0,80}\] [^\r\n]*|"  # absl's fatal error
    rb"DUE TO TIME LIMIT|DUE TO NODE FAILURE|NODE FAILURE|CANCELLED AT [^*\r\n]*|"
    rb"[oO]ut of memory[^\r\n]*|RESOURCE_EXHAUSTED[^\r\n]*|oom-kill[^\r\n]*|"
    rb"Watchdog caught[^\r\n]*|Segmentation fault|Bus error|"
    rb"(?:^|(?<=[\r\n :]))[A-Za-z_.]*(?:Error|Exception): [^\r\n]*|error: [^\r\n]*",
    re.MULTILINE,
)


def read_text_log(path: pathlib.Path, gpu_types: GpuTypes) -> RunRecord | None:
    """Reads a run from a text log.

    Returns:
      None if the log has no step and its name is not that of a run; or if a job of maxbench wrote
      it: such a log repeats the last lines of a run that has a folder.

    Raises:
      OSError: the log cannot be read.
    """
    record = RunRecord(path=path, name=_run_name(path), source="nemo")
    record.started = path.stat().st_mtime
    end = b""
    for block in log_files.blocks(path):
        if JOB_MARK in block:
            return None
        parse_block(record, block)
        end = (end + block)[-ENDING:]
    if not record.step_s and not RUN_NAME.search(path.name):
        return None
    fill_from_name(record, f"{path.parent}/{path.name}", gpu_types)
    tools = {"nccltrace": "nccltrace", "_nsys": "nsys"}
    record.profiled = next((tool for part, tool in tools.items() if part in str(path)), "")
    _set_status(record, end)
    return record


def _run_name(path: pathlib.Path) -> str:
    """The run's name in the name of its log."""
    name = path.name.removeprefix("log-").removeprefix("slurm-")
    name = name.rpartition(".")[0] if name.endswith(SUFFIXES) else name
    name = name.removesuffix("_0")
    last = name.rpartition(".")[2]  # NeMo-Run puts the account first
    return last if "pretrain_" in last else name


def _set_status(record: RunRecord, end: bytes) -> None:
    """Sets status and reason from the end of the log."""
    record.status, last = "done", record.last
    if record.total_steps and last >= record.total_steps - 1:
        return
    reason = death_reason(end)
    if last >= 0 and record.total_steps and not reason and record.may_be_running(record.path):
        record.status = "running"
    elif record.total_steps or last < 0 or reason:  # MaxText does not log the number of steps
        record.status = "died"
        record.reason = reason or ("the log ends here" if last >= 0 else "no step in the log")


def parse_block(record: RunRecord, block: bytes) -> None:
    """Adds the steps and checkpoints in a block of a log to the record."""
    data = relevant_lines(block)
    record.damaged += sum(map(data.count, TIMES))
    for source, step, total, fields in lines(data):
        record.source = source
        step_s = positive(fields.get("step_s", fields.get("step_ms", 0) / 1000))
        if not step_s or step < 0:
            continue
        record.damaged -= 1
        # Every process of MaxText prints the line; the slowest one determines the step time.
        slowest = record.step_s.get(step, 0.0) if source == "maxtext" else 0.0
        record.step_s[step] = max(step_s, slowest)
        record.total_steps = max(record.total_steps, total)
        if "tflops" in fields:
            record.tflops[step] = positive(fields["tflops"])
        if "loss" in fields:
            record.loss[step] = fields["loss"]
        if "gbs" in fields:
            record.gbs = int(positive(fields["gbs"]))
        elif "samples" in fields and step:  # older progress bars
            record.gbs = record.gbs or round(positive(fields["samples"]) / (step + 1))
        if "tokens" in fields:
            record.tokens = int(positive(fields["tokens"]))
        record.peak_bytes = max(record.peak_bytes, int(positive(fields.get("peak", 0))))
    for pattern, seconds in ((SAVED, record.saves), (LOADED, record.loads)):
        seconds += filter(None, (positive(float(x)) for x in pattern.findall(data)))


def relevant_lines(block: bytes) -> bytes:
    """The lines of a block that contain one of TIMES or CHECKPOINTS."""
    spans = set()
    for text in (*TIMES, *CHECKPOINTS):
        at = block.find(text)
        while at >= 0:
            end = block.find(b"\n", at)
            end = len(block) if end < 0 else end
            spans.add((block.rfind(b"\n", 0, at) + 1, end))
            at = block.find(text, end)
    return b"\n".join(block[start:end] for start, end in sorted(spans))


def lines(data: bytes) -> Iterator[tuple[str, int, int, dict[str, float]]]:
    """Program, step (from 0), number of steps (0: unknown) and fields of each line of a step."""
    for source, patterns in LINES.items():
        for match in (m for pattern in patterns for m in pattern.finditer(data)):
            step, total, text = int(match[1]), int(match[2] or 0), match[3]
            names = FIELD_NAMES[source]
            fields = {names[label]: float(x) for label, x in FIELDS[source].findall(text)}
            if b"MODEL_TFLOP" in text and (rate := MODEL_TFLOPS.search(text)):
                fields.setdefault("tflops", float(rate[1]))
            if match.re in FROM_0:
                total += match[2] != b""  # the line has the last step
            else:
                step = int(positive(fields["step"])) if "step" in fields else step - 1
            yield source, step, total, fields


def positive(number: float) -> float:
    """The number, or 0 if it is not positive and finite."""
    return number if 0 < number < 1e30 else 0.0


def death_reason(text: bytes) -> str:
    """The most informative line at the end of a log about why the run ended, or ''."""
    reasons = [m[0].strip() for m in REASON.finditer(text)]
    # Slurm cancels a step after one of its tasks failed; but a cancelled job is the cause.
    slurm = [r for r in reasons if re.search(rb"DUE TO|JOB \d+ ON|NODE FAIL", r)]
    secondary = rb"srun: error|task \d+: |^error: task|STEP [\d.]+ ON|^CANCELLED AT"
    primary = [r for r in reasons if not re.search(secondary, r)]
    best = next(iter(slurm[-1:] or primary[:1] or reasons[:1]), b"")
    return re.sub(r"\s+", " ", best.decode("utf-8", "replace"))[:160].strip()
