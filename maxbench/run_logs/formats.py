"""The table of log formats: how each program logs a step, and the names of its fields.

Each format is an entry of FORMATS, from which the readers, their tests and
docs/reference/log_formats.md are made. The formats of lines are those of the programs' sources in
2025 and 2026, and of their older releases where these differ.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

_INT = rb"(\d{1,9})"
GIB = float(2**30)
# Field of a step -> how the table names it.
FIELDS = {
    "step": "step",
    "step_s": "step time",
    "loss": "loss",
    "grad_norm": "grad norm",
    "tokens_s": "tokens/s",
    "tflops": "TFLOP/s",
    "peak": "memory",
}
# Settings that log_settings.py reads from any log -> how the table names them.
SETTINGS = {
    "gpu_type": "GPU type",
    "model": "model",
    "layout": "layout",
    "gpus": "GPUs",
    "seq": "seq",
    "gbs": "gbs",
}


@dataclasses.dataclass(frozen=True)
class StepLine:
    """A line about a step: text that is in every such line, and its pattern.

    The groups of the pattern are the step, the number of steps or nothing, and the fields.
    """

    marker: bytes
    pattern: re.Pattern[bytes]
    first: int = 1  # number of the first step
    last_step: bool = False  # the line has the last step in place of the number of steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogFormat:
    """The lines in which one program logs its steps."""

    program: str
    lines: tuple[StepLine, ...]
    # Label in the line -> the field, and the factor to its unit: seconds, bytes, TFLOP/s.
    labels: Mapping[bytes, tuple[str, float]]
    # Whether a step time is the mean of the steps since the line before, not that of one step.
    means: bool = False
    tflops: str = ""  # which FLOPs the program counts
    dumps: tuple[str, ...] = ()  # SETTINGS that its log has, in the words of log_settings.py
    infers: tuple[str, ...] = ()  # names of FIELDS or SETTINGS that are calculated
    inferred: str = ""  # from what they are

    def fields(self, text: bytes) -> dict[str, float]:
        """The fields of a line. A loss that is text and no number is "unreadable"."""
        found: dict[str, float] = {}
        for label, token in self._pattern.findall(text):
            name, factor = self.labels[label]
            value = number(token)
            if value is None:
                if name == "loss":
                    found["unreadable"] = 1.0
                continue
            found.setdefault(name, value * factor)
        return found

    @property
    def _pattern(self) -> re.Pattern[bytes]:
        return _field_pattern(tuple(self.labels))

    def reads(self) -> set[str]:
        """The fields of a step that its lines have."""
        names = {name for name, _ in self.labels.values()} | {"step"}
        names |= {"step_s"} if "step_ms" in names else set()
        return names & {*FIELDS, *SETTINGS}


@functools.cache
def _field_pattern(labels: tuple[bytes, ...]) -> re.Pattern[bytes]:
    longest_first = b"|".join(re.escape(x) for x in sorted(labels, key=len, reverse=True))
    return re.compile(rb"(?<![\w.])(" + longest_first + rb")\s*[:=]\s*([^\s|\]}\"']+)")


_NUMBER = re.compile(rb"([-+]?\d{1,40}(?:\.\d*)?(?:[eE][-+]?\d{1,4})?)([a-zA-Z%/]*)(\([\d.]*%\))?")
_NOT_FINITE = re.compile(rb"[-+]?(nan|inf)(?:inity)?(?:\.0*)?(?:[a-zA-Z%/]*)", re.IGNORECASE)
_SCALES = {b"K": 1e3, b"M": 1e6, b"G": 1e9, b"T": 1e12, b"P": 1e15, b"E": 1e18}
_UNITS = (b"", b"s", b"ms", b"GiB", b"GB", b"%")


def number(token: bytes) -> float | None:
    """The number of a field as `7,012`, `47.55GiB(60.05%)`, `1.2PFLOPS`; None if it is none.

    `nan.0`, which progress bars print, is nan; `inf` has no sign.
    """
    token = token.rstrip(b",;").replace(b",", b"")
    if special := _NOT_FINITE.fullmatch(token):
        return math.nan if special[1].lower() == b"nan" else math.inf
    match = _NUMBER.fullmatch(token)
    if not match:
        return None
    value, unit = float(match[1]), match[2]
    if unit.endswith(b"FLOPS"):
        return value * _SCALES.get(unit[:1], 1.0) / 1e12
    return value if unit in _UNITS else None


_MEGATRON_FIELDS = {
    b"elapsed time per iteration (ms)": ("step_ms", 1.0),
    b"throughput per GPU (TFLOP/s/GPU)": ("tflops", 1.0),
    b"lm loss": ("loss", 1.0),
    b"grad norm": ("grad_norm", 1.0),
    b"global batch size": ("gbs", 1.0),
    b"consumed samples": ("samples", 1.0),
    b"number of nan iterations": ("nan_steps", 1.0),
}
_TRAIN_BAR = re.compile(rb"train: [^\r\n]{0,300}?\| *" + _INT + rb"/" + _INT + rb" \[([^\r\n\]]*)")
_MEGATRON_LINE = re.compile(rb"iteration +" + _INT + rb"/ +" + _INT + rb" \|([^\r\n]*)")
_MEGATRON_DUMP = ("peak", "gpu_type", "model", "layout", "gpus", "seq", "gbs")
# Name of a format, as in RunRecord.source -> the format. Of a log that has lines of several
# programs, the format with the most steps counts, the first one of those with equally many.
FORMATS: dict[str, LogFormat] = {
    "nemo": LogFormat(
        program="NeMo",
        lines=(
            StepLine(
                b"train_step_timing in s",
                re.compile(rb"iteration " + _INT + rb"/" + _INT + rb"\b([^\r\n]*)"),
                first=0,
                last_step=True,
            ),
            StepLine(  # a progress bar
                b"train_step_timing in s",
                re.compile(rb"\| *" + _INT + rb"/" + _INT + rb" \[([^\r\n\]]*)"),
            ),
        ),
        labels={
            b"train_step_timing in s": ("step_s", 1.0),
            b"TFLOPS_per_GPU": ("tflops", 1.0),
            b"reduced_train_loss": ("loss", 1.0),
            b"grad_norm": ("grad_norm", 1.0),
            b"global_batch_size": ("gbs", 1.0),
            b"peak_memory_usage": ("peak", 1.0),
            b"global_step": ("step", 1.0),
            b"consumed_samples": ("samples", 1.0),
        },
        tflops="NeMo's formula of the model",
        dumps=("gpu_type", "model", "layout", "gpus", "seq"),
        infers=("gbs",),
        inferred="gbs from the consumed samples in older progress bars",
    ),
    "maxtext": LogFormat(
        program="MaxText",
        lines=(
            StepLine(
                b"completed step: ",
                re.compile(rb"completed step: " + _INT + rb"()((?:(?!completed)[^\r\n])*)"),
                first=0,
            ),
        ),
        labels={
            b"seconds": ("step_s", 1.0),
            b"TFLOP/s/device": ("tflops", 1.0),
            b"Tokens/s/device": ("tokens_s", 1.0),
            b"loss": ("loss", 1.0),
            b"total_weights": ("tokens", 1.0),
        },
        tflops="MaxText's formula: causal or full, by release",
        dumps=("gpu_type", "model", "layout", "gpus", "seq", "gbs"),
        inferred="the slowest process of a step counts; gbs is total_weights / seq",
    ),
    "torchtitan": LogFormat(
        program="torchtitan",
        lines=(
            StepLine(
                b" mfu: ",
                re.compile(rb"(?<!validate )\bstep: *" + _INT + rb"()( +loss:[^\r\n]*)"),
            ),
        ),
        labels={
            b"loss": ("loss", 1.0),
            b"grad_norm": ("grad_norm", 1.0),
            b"memory": ("peak", GIB),
            b"tps": ("tokens_s", 1.0),
            b"wps": ("tokens_s", 1.0),
            b"tflops": ("tflops", 1.0),
        },
        means=True,
        tflops="torchtitan's: 6 x parameters + 12 x layers x embed x seq a token (full)",
        dumps=("gpu_type", "model", "layout", "gpus", "seq", "gbs"),
        infers=("step_s",),
        inferred="step time from tps, seq, gbs and GPUs, or from the lines' times of day",
    ),
    "neox": LogFormat(
        program="GPT-NeoX",
        lines=(
            StepLine(
                b"elapsed time per iteration (ms): ",
                re.compile(
                    rb"samples/sec: [^|\r\n]{1,30}\| iteration +"
                    + _INT
                    + rb"/ *"
                    + _INT
                    + rb" \|([^\r\n]*)"
                ),
            ),
        ),
        labels={
            b"elapsed time per iteration (ms)": ("step_ms", 1.0),
            b"approx flops per GPU": ("tflops", 1.0),
            b"lm_loss": ("loss", 1.0),
            b"samples/sec": ("samples_s", 1.0),
            b"number of nan iterations": ("nan_steps", 1.0),
        },
        means=True,
        tflops="GPT-NeoX's: recomputed FLOPs count (hardware FLOPs)",
        dumps=("peak", "gpu_type", "model", "layout", "gpus", "seq", "gbs"),
        infers=("gbs",),
        inferred="gbs from samples/s and step time, where the log does not name it",
    ),
    "megatron-bridge": LogFormat(
        program="Megatron-Bridge",
        lines=(),  # those of Megatron-LM, after a line with MODEL_TFLOP: see BRIDGE_RATE
        labels=_MEGATRON_FIELDS,
        means=True,
        tflops="Megatron-Bridge's formula of the model: causal",
        dumps=_MEGATRON_DUMP,
        inferred="TFLOP/s is that of the line before the step's",
    ),
    "megatron": LogFormat(
        program="Megatron-LM",
        lines=(StepLine(b"elapsed time per iteration (ms): ", _MEGATRON_LINE),),
        labels=_MEGATRON_FIELDS
        | {  # of Megatron-DeepSpeed
            b"TFLOPs": ("tflops", 1.0),
            b"tokens per gpu per second (tgs)": ("tokens_s", 1.0),
        },
        means=True,
        tflops="Megatron-LM's formula of the model: causal, in older releases full",
        dumps=_MEGATRON_DUMP,
        inferred="a loss that a line with nan iterations leaves out is nan",
    ),
    "deepspeed": LogFormat(
        program="DeepSpeed",
        lines=(
            StepLine(  # PipelineEngine
                b"iter time (s): ",
                re.compile(rb"\bsteps?: *" + _INT + rb"(?: */ *" + _INT + rb")?( loss:[^\r\n]*)"),
            ),
            StepLine(  # ThroughputTimer
                b"RunningAvgSamplesPerSec=",
                re.compile(rb"(?:global_step=|\b\d{1,9}/)" + _INT + rb"()(, Running[^\r\n]*)"),
            ),
        ),
        labels={
            b"loss": ("loss", 1.0),
            b"iter time (s)": ("step_s", 1.0),
            b"samples/sec": ("samples_s", 1.0),
            b"CurrSamplesPerSec": ("samples_s", 1.0),
            b"MaxMemAllocated": ("peak", GIB),
        },
        means=True,
        dumps=("gpu_type", "layout", "gpus", "gbs"),
        infers=("gbs",),
        inferred="step time from samples/s and train_batch_size, or from the lines' times of day",
    ),
    "levanter": LogFormat(
        program="levanter",
        lines=(
            StepLine(
                b"Progress on:train ",
                re.compile(
                    rb"Progress on:train +([\d.]{1,9}[kM]?)it/([\d.]{1,9}[kM]?)it( rate:[^\r\n]*)"
                ),
            ),
            StepLine(b"it, loss=", _TRAIN_BAR),
            StepLine(b"it/s, loss=", _TRAIN_BAR),
        ),
        labels={b"loss": ("loss", 1.0), b"postfix:loss": ("loss", 1.0)},
        means=True,
        dumps=("gpu_type", "gpus", "seq", "gbs"),
        infers=("step_s",),
        inferred="step time from the progress bar's rate, a moving average of 3 digits",
    ),
}
# Megatron-Bridge prints the rate of a step on a line of its own before the step's, or in it.
BRIDGE_RATE = re.compile(rb"([\d.]{1,12}) ?MODEL_TFLOP/s/GPU")
BRIDGE_MARKER = b"MODEL_TFLOP"
# Megatron's report of memory after the first steps, in MiB.
MEMORY = re.compile(rb"memory \(MB\) \|[^\r\n]{0,99}?max allocated: ([\d.]{1,12})")
MEMORY_MARKER = b"memory (MB) |"
# Rate of a progress bar: iterations per second, or seconds per iteration.
BAR_RATE = re.compile(rb"(?:rate:|, *)([\d.]{1,12})(it/s|s/it)")
LINES = tuple((source, format, line) for source, format in FORMATS.items() for line in format.lines)
MARKERS = tuple(dict.fromkeys(line.marker for _, _, line in LINES))


def step_lines(text: bytes) -> Iterator[tuple[str, int, int, dict[str, float]]]:
    """Program, step (from 0), number of steps (0: unknown) and fields of each step in a line.

    Of several formats that fit, the first counts.
    """
    for source, format, line in LINES:
        if line.marker not in text:
            continue
        found = False
        for match in line.pattern.finditer(text):
            found = True
            step, total = _count(match[1]), _count(match[2] or b"0")
            fields = format.fields(match[0])
            if source == "levanter" and (rate := BAR_RATE.search(match[3])):
                value = number(rate[1])
                if value:
                    fields["step_s"] = value if rate[2] == b"s/it" else 1 / value
            if line.first == 0:
                total += line.last_step and match[2] != b""
            else:
                step = int(fields["step"]) if 0 <= fields.get("step", -1) < 1e12 else step - 1
            yield source, step, total, fields
        if found:
            return


def _count(text: bytes) -> int:
    """A whole number, as `12` or as a progress bar's `1.20k`."""
    scale = _SCALES.get(text[-1:].upper(), 1.0)
    value = number(text[:-1] if scale > 1 else text)
    return round(value * scale) if value is not None and value < 1e15 else 0
