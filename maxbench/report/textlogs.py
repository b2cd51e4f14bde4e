"""What the lines of text logs tell: steps of NeMo, Megatron-Bridge and MaxText, and how they ended.

Any bytes will do: half a line, or a number that is none, is left out.
"""

import contextlib
import re
from collections.abc import Iterator

from maxbench.report.record import Record

_INT, _FLOAT = rb"(\d{1,9})", rb"([-+]?(?:\d[\d.]{0,30}(?:[eE][-+]?\d{1,3})?|nan|inf))"
# Program -> patterns of a line: its step, how many there will be, and the rest with its FIELDS.
LINES = {
    "maxtext": [re.compile(rb"completed step: " + _INT + rb"()((?:(?!completed)[^\r\n])*)")],
    "nemo": [
        re.compile(rb"iteration " + _INT + rb"/" + _INT + rb"\b([^\r\n]*)"),
        re.compile(rb"\| *" + _INT + rb"/" + _INT + rb" \[([^\r\n\]]*)"),  # the progress bar
    ],
    "megatron": [re.compile(rb"iteration +" + _INT + rb"/ +" + _INT + rb" \|([^\r\n]*)")],
}
FROM_0 = (LINES["maxtext"][0], LINES["nemo"][0])  # the others count from 1
FIELDS = {
    "step_s": re.compile(rb"(?:, seconds|train_step_timing in s)[:=] ?" + _FLOAT),
    "step_ms": re.compile(rb"elapsed time per iteration \(ms\): ?" + _FLOAT),
    "tflops": re.compile(
        rb"(?:TFLOPS_per_GPU|throughput per GPU \(TFLOP/s/GPU\)|TFLOP/s/device): ?" + _FLOAT
    ),
    "model_tflops": re.compile(_FLOAT + rb" ?MODEL_TFLOP/s/GPU"),
    "loss": re.compile(rb"(?:(?:reduced_train_loss|lm loss)[:=] ?|, loss: )" + _FLOAT),
    "gbs": re.compile(rb"(?:global_batch_size|global batch size)[:=] *" + _INT),
    "tokens": re.compile(rb"total_weights: " + _INT),
    "peak": re.compile(rb"peak_memory_usage: (\d{1,15})"),
    "step": re.compile(rb"global_step=" + _FLOAT),
    "samples": re.compile(rb"consumed_samples[:=] ?" + _FLOAT),
}
SAVED = re.compile(rb"Checkpoint Save[^\r\n]*Save duration: " + _FLOAT)
LOADED = re.compile(rb"Time spent in load_checkpoint: " + _FLOAT)
REASON = re.compile(
    rb"F\d{4} \d\d:\d\d:[^\]\r\n]{0,80}\] [^\r\n]*|"  # absl: the process ends itself
    rb"DUE TO TIME LIMIT|DUE TO NODE FAILURE|NODE FAILURE|CANCELLED AT [^*\r\n]*|"
    rb"[oO]ut of memory[^\r\n]*|RESOURCE_EXHAUSTED[^\r\n]*|oom-kill[^\r\n]*|"
    rb"Watchdog caught[^\r\n]*|Segmentation fault|Bus error|"
    rb"(?:^|(?<=[\r\n :]))[A-Za-z_.]*(?:Error|Exception): [^\r\n]*|error: [^\r\n]*",
    re.MULTILINE,
)


def fill(record: Record, data: bytes) -> None:
    """Fills in the steps and the checkpoints that a log's text tells of."""
    for source, step, total, fields in lines(data):
        record.source = source
        step_s = number(fields.get("step_s")) or number(fields.get("step_ms")) / 1000
        if step_s <= 0 or step < 0:
            continue
        # Every process of MaxText prints the line; a step takes as long as its slowest process.
        slowest = record.step_s.get(step, 0.0) if source == "maxtext" else 0.0
        record.step_s[step] = max(step_s, slowest)
        record.planned = max(record.planned, total)
        if tflops := fields.get("tflops") or fields.get("model_tflops"):
            record.tflops[step] = number(tflops)
        with contextlib.suppress(KeyError, ValueError):
            record.loss[step] = float(fields["loss"])
        if "gbs" in fields:
            record.gbs = int(fields["gbs"])
        elif "samples" in fields and step:  # the older progress bar has no batch, counts samples
            record.gbs = record.gbs or round(number(fields["samples"]) / (step + 1))
        if "tokens" in fields:
            record.result["tokens"] = int(fields["tokens"])
        record.peak_bytes = max(record.peak_bytes, int(fields.get("peak", 0)))
    for pattern, kept in ((SAVED, record.saves), (LOADED, record.loads)):
        kept += filter(None, map(number, pattern.findall(data)))


def lines(data: bytes) -> Iterator[tuple[str, int, int, dict[str, bytes]]]:
    """Program, step (from 0), steps to be (0: not said) and fields of each line about a step."""
    for source, patterns in LINES.items():
        for match in (m for pattern in patterns for m in pattern.finditer(data)):
            step, total = int(match[1]), int(match[2] or 0)
            fields = {k: m[1] for k, p in FIELDS.items() if (m := p.search(match[3]))}
            if match.re in FROM_0:
                total += match[2] != b""  # it names the last step
            else:
                step = int(number(fields["step"])) if "step" in fields else step - 1
            yield source, step, total, fields


def number(text: bytes | None) -> float:
    """A positive number of a log; 0 where it is none, or none that can be."""
    with contextlib.suppress(ValueError):
        found = float(text or 0)
        return found if 0 < found < 1e30 else 0.0
    return 0.0


def reason(text: bytes) -> str:
    """The first line near the end of a log that says why a run ended, or ''."""
    found = [m[0].strip() for m in REASON.finditer(text)]
    # A cancelled step follows from what ended one of its tasks; a cancelled job is the cause.
    slurm = [f for f in found if re.search(rb"DUE TO|JOB \d+ ON|NODE FAIL", f)]
    secondary = rb"srun: error|task \d+: |^error: task|STEP [\d.]+ ON|^CANCELLED AT"
    telling = [f for f in found if not re.search(secondary, f)]
    best = next(iter(slurm[-1:] or telling[:1] or found[:1]), b"")
    return re.sub(r"\s+", " ", best.decode("utf-8", "replace"))[:160].strip()
