"""What the lines of text logs tell: steps of NeMo, Megatron-Bridge and MaxText, and how they ended.

Any bytes will do: half a line, or a number that is none, is left out.
"""

import re
from collections.abc import Iterator

from maxbench.run_logs.record import RunRecord

_INT = rb"(\d{1,9})"
_FLOAT = rb"([-+]?(?:\d++\.?+\d*+(?:[eE][-+]?\d++)?+|nan|inf))"
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
WORDS = {
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
    for source, words in WORDS.items()
}
MODEL_TFLOPS = re.compile(_FLOAT + rb" ?MODEL_TFLOP/s/GPU")
# What every line about a step holds, and the lines about checkpoints: found much faster.
TIMES = (b"completed step: ", b"train_step_timing in s", b"elapsed time per iteration (ms): ")
OTHERS = (b"Save duration: ", b"Time spent in load_checkpoint: ")
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


def parse_block(record: RunRecord, block: bytes) -> None:
    """Fills in the steps and the checkpoints that a part of a log's text tells of."""
    data = relevant_lines(block)
    record.damaged += sum(map(data.count, TIMES))
    for source, step, total, fields in lines(data):
        record.source = source
        step_s = positive(fields.get("step_s", fields.get("step_ms", 0) / 1000))
        if not step_s or step < 0:
            continue
        record.damaged -= 1
        # Every process of MaxText prints the line; a step takes as long as its slowest process.
        slowest = record.step_s.get(step, 0.0) if source == "maxtext" else 0.0
        record.step_s[step] = max(step_s, slowest)
        record.planned = max(record.planned, total)
        if "tflops" in fields:
            record.tflops[step] = positive(fields["tflops"])
        if "loss" in fields:
            record.loss[step] = fields["loss"]
        if "gbs" in fields:
            record.gbs = int(positive(fields["gbs"]))
        elif "samples" in fields and step:  # the older progress bar has no batch, counts samples
            record.gbs = record.gbs or round(positive(fields["samples"]) / (step + 1))
        if "tokens" in fields:
            record.result["tokens"] = int(positive(fields["tokens"]))
        record.peak_bytes = max(record.peak_bytes, int(positive(fields.get("peak", 0))))
    for pattern, kept in ((SAVED, record.saves), (LOADED, record.loads)):
        kept += filter(None, (positive(float(x)) for x in pattern.findall(data)))


def relevant_lines(block: bytes) -> bytes:
    """The lines of a part of a log that hold one of TIMES or OTHERS."""
    spans = set()
    for word in (*TIMES, *OTHERS):
        at = block.find(word)
        while at >= 0:
            end = block.find(b"\n", at)
            end = len(block) if end < 0 else end
            spans.add((block.rfind(b"\n", 0, at) + 1, end))
            at = block.find(word, end)
    return b"\n".join(block[start:end] for start, end in sorted(spans))


def lines(data: bytes) -> Iterator[tuple[str, int, int, dict[str, float]]]:
    """Program, step (from 0), steps to be (0: not said) and fields of each line about a step."""
    for source, patterns in LINES.items():
        for match in (m for pattern in patterns for m in pattern.finditer(data)):
            step, total, text = int(match[1]), int(match[2] or 0), match[3]
            words = WORDS[source]
            fields = {words[word]: float(x) for word, x in FIELDS[source].findall(text)}
            if b"MODEL_TFLOP" in text and (rate := MODEL_TFLOPS.search(text)):
                fields.setdefault("tflops", float(rate[1]))
            if match.re in FROM_0:
                total += match[2] != b""  # it names the last step
            else:
                step = int(positive(fields["step"])) if "step" in fields else step - 1
            yield source, step, total, fields


def positive(number: float) -> float:
    """A number of a log; 0 where it is none that can be."""
    return number if 0 < number < 1e30 else 0.0


def death_reason(text: bytes) -> str:
    """The first line near the end of a log that says why a run ended, or ''."""
    found = [m[0].strip() for m in REASON.finditer(text)]
    # A cancelled step follows from what ended one of its tasks; a cancelled job is the cause.
    slurm = [f for f in found if re.search(rb"DUE TO|JOB \d+ ON|NODE FAIL", f)]
    secondary = rb"srun: error|task \d+: |^error: task|STEP [\d.]+ ON|^CANCELLED AT"
    telling = [f for f in found if not re.search(secondary, f)]
    best = next(iter(slurm[-1:] or telling[:1] or found[:1]), b"")
    return re.sub(r"\s+", " ", best.decode("utf-8", "replace"))[:160].strip()
