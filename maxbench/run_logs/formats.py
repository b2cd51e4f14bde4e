"""The table of log formats: how each program logs a step, and the names of its fields.

A format is a table of formats.toml, or of a file of the user (--format_table), from which the
readers, their tests and docs/reference/log_formats.md are made.
"""

import dataclasses
import functools
import math
import os
import pathlib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from maxbench.config.errors import UserError, check_choice
from maxbench.config.number_formats import DTYPES
from maxbench.config.validation import build, field, parse_fields, required

GIB = float(2**30)
ROUNDED = 0.01  # relative error of a step time, by its digits in the log, that is worth a note
# Field of a step -> how the table of the docs names it.
FIELDS = {
    "step": "step",
    "step_s": "step time",
    "loss": "loss",
    "grad_norm": "grad norm",
    "tokens_s": "tokens/s",
    "tflops": "TFLOP/s",
    "mfu": "MFU",
    "peak": "memory",
}
# Settings that log_settings.py reads from any log -> how the table of the docs names them.
SETTINGS = {
    "gpu_type": "GPU type",
    "model": "model",
    "layout": "layout",
    "gpus": "GPUs",
    "seq": "seq",
    "gbs": "gbs",
}
# Fields of a step that a format may read, in seconds, bytes, TFLOP/s and tokens.
STEP_FIELDS = {
    "step": "number of the step",
    "step_s": "step time",
    "loss": "loss",
    "grad_norm": "norm of the gradient",
    "tokens_s": "tokens/s of a GPU",
    "tflops": "TFLOP/s of a GPU",
    "mfu": "MFU as the program logs it, a share",
    "peak": "peak memory of a GPU",
    "total": "number of steps of the run",
    "index": "the step's number from 0, where the line counts otherwise",
    "steps_s": "steps per second",
    "all_tokens_s": "tokens/s of all GPUs",
    "samples_s": "sequences/s of all GPUs",
    "gbs": "sequences of the step",
    "seq": "tokens of a sequence",
    "tokens": "tokens of the step",
    "samples": "sequences since the start of the run",
    "nan_steps": "steps with a nan loss",
    "epoch": "epoch from 0, to which step and total belong",
    "elapsed": "time since the start of the epoch or run, as 1:02:03",
    "microbatch": "microbatches since the start of the run: the step time is that of the last one",
}
# Fields of a whole run, besides gpus, seq, gbs and peak: those of log_settings.KEYS, and texts.
RUN_FIELDS = {
    "gpus": "GPUs",
    "steps": "number of steps of the run",
    "dp": "data parallelism",
    "tp": "tensor parallelism",
    "pp": "pipeline parallelism",
    "cp": "context parallelism",
    "ep": "expert parallelism",
    "mbs": "sequences of a microbatch",
    "accumulation": "microbatches of a step of one GPU",
    "model_name": "name of the model, a text",
    "gemms": "number format of GEMMs, a text",
}
_TEXT_FIELDS = {"model_name", "gemms"}
# A field in another unit -> the field, and the factor to its unit.
UNITS = {
    "step_ms": ("step_s", 1e-3),
    "peak_mib": ("peak", 2.0**20),
    "peak_gib": ("peak", GIB),
    "peak_gb": ("peak", 1e9),
    "flop_s": ("tflops", 1e-12),
    "mfu_percent": ("mfu", 0.01),
}


def _is_pattern(text: str) -> bool:
    """Whether a text is a regular expression whose groups are fields."""
    try:
        return re.compile(text.encode()).groupindex.keys() <= _FIELDS
    except re.error:
        return False


_FIELDS = {**STEP_FIELDS, **RUN_FIELDS, **UNITS}.keys()
_PATTERN = (_is_pattern, f"a regular expression with groups named {', '.join(_FIELDS)}")
_LABELS = (
    lambda labels: {*labels.values()} <= _FIELDS,
    f"a table of labels and their fields: {', '.join(_FIELDS)}",
)
_TEXTS = (lambda texts: texts and all(texts), "texts of which each such line has one")
_COLUMNS = (
    lambda names: {*names} <= {*FIELDS, *SETTINGS},
    f"of {', '.join({**FIELDS, **SETTINGS})}",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepLine:
    """A line about a step: texts of which each such line has one, and its pattern.

    Named groups of the pattern are fields; the labels of its format are searched in all of its
    match. The lines of steps have a group `step` and, if they name it, `total`.
    """

    has: tuple[str, ...] = field(check=_TEXTS)
    pattern: str = field(check=_PATTERN)
    first: int = field(1, at_least=0, at_most=1)  # number of the first step
    total_is_last: bool = field(False)  # `total` is the number of the last step
    common: bool = field(False)  # other lines have its texts too: such a line is not damaged
    # Whose fields a line without a step has: the last or next step's, or the whole run's.
    adds_to: str = field("", options=("", "last", "next", "run"))

    @functools.cached_property
    def texts(self) -> tuple[bytes, ...]:
        return tuple(text.encode() for text in self.has)

    @property
    def is_setting(self) -> bool:
        """Whether its fields are settings, which programs log before their steps."""
        return (
            self.adds_to == "run" and not {"peak_mib", "peak_gb"} & self.compiled.groupindex.keys()
        )

    @functools.cached_property
    def compiled(self) -> re.Pattern[bytes]:
        return re.compile(self.pattern.encode())


def _is_end(text: str) -> bool:
    """Whether a text is a regular expression."""
    try:
        re.compile(text.encode())
    except re.error:
        return False
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndLine:
    """A line by which a program says that it ends by itself.

    The sentence, with the groups of the pattern, says when; it is '' after the last step. A program
    that was stopped has not done what it was asked for.
    """

    pattern: str = field(check=(_is_end, "a regular expression"))
    sentence: str = field("")
    stopped: bool = field(False)
    launcher: bool = field(False)  # of a launcher: it ends other programs too

    def find(self, text: bytes) -> "Ending | None":
        """The line in a text, None if it is not there."""
        match = re.search(self.pattern.encode(), text)
        if not match:
            return None
        words = [group.decode("utf-8", "replace") for group in match.groups(b"")]
        return Ending(self.sentence.format(*words), self.stopped, match.end())


class Ending(NamedTuple):
    """The line by which a program ended."""

    sentence: str
    stopped: bool
    place: int  # behind the line, in its text


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogFormat:
    """The lines in which one program logs its steps."""

    program: str = field(check=(bool, "the program's name"))
    source: str = field("")  # repository and file that write the lines
    lines: tuple[StepLine, ...] = ()
    ends: tuple[EndLine, ...] = ()  # the first one that is there counts
    # Label in a line -> its field.
    fields: Mapping[str, str] = field(check=_LABELS)
    like: str = field("")  # format whose fields and remarks it has too
    steps_of: str = field("")  # format of its steps: its own lines add to them
    means: bool = field(False)  # a step time is the mean of the steps since the line before
    bars: bool = field(False)  # progress bars without names: the one with losses is the run's
    gbs_in_tokens: bool = field(False)  # its settings name tokens as the global batch size
    slowest: bool = field(False)  # of several lines of a step the slowest counts
    tflops: str = field("")  # which FLOPs the program counts
    # The step time of the window that NVIDIA's benchmarks of it publish, by which a run with a
    # spike is judged. '': they are not known, and the mean counts.
    rule: str = field("", options=("", "mean", "last step"))
    default_dtype: str = field("", options=("", *DTYPES))  # of a log that names no other
    no_loss: str = field("")  # in place of the loss, of processes that have none
    # SETTINGS that its log has, in the words of log_settings.py.
    dumps: tuple[str, ...] = field((), check=_COLUMNS)
    infers: tuple[str, ...] = field((), check=_COLUMNS)  # FIELDS or SETTINGS that are calculated
    inferred: str = field("")  # from what they are

    @functools.cached_property
    def common(self) -> bool:
        """Whether other programs may log lines as its lines of steps."""
        return any(line.common for line in self.lines)

    @functools.cached_property
    def continues(self) -> bool:
        """Whether fields of a step are in lines after the one that names the step."""
        return any(line.adds_to == "last" for line in self.lines)

    def find(self, name: str, line: StepLine, text: bytes) -> Iterator["Found"]:
        """Fields of each match of a line's pattern."""
        for match in line.compiled.finditer(text):
            groups = {k: x for k, x in match.groupdict().items() if x is not None}
            texts = {k: groups.pop(k).decode() for k in _TEXT_FIELDS & groups.keys()}
            total = _count(groups.get("total", b"")) + (line.total_is_last and "total" in groups)
            step = _count(groups["step"]) - line.first if "step" in groups else -1
            if "epoch" in groups:
                step, total = step + _count(groups["epoch"]) * total, 0
            yield Found(name, line, step, total, self._fields(match[0], groups), texts)

    def _fields(self, text: bytes, groups: Mapping[str, bytes]) -> dict[str, float]:
        """Fields of a match. A loss that is text and no number is "unreadable"."""
        found: dict[str, float] = {}
        tokens = [(key, x) for key, x in groups.items() if key not in ("step", "total", "epoch")]
        if self.fields:
            labelled = _label_pattern(tuple(self.fields)).findall(text)
            tokens += [(self.fields[label.decode()], token) for label, token in labelled]
        for key, token in tokens:
            value = _seconds(token) if key == "elapsed" else number(token)
            key, factor = UNITS.get(key, (key, 1.0))
            if key == "loss" and value is not None and value == number(self.no_loss.encode()):
                continue
            if value is not None:
                if key in ("step_s", "steps_s") and (rounding := _rounding(token)) > ROUNDED:
                    found["rounding"] = rounding
                found.setdefault(key, value * factor)
            elif key == "loss":
                found["unreadable"] = 1.0
        if (rate := found.pop("steps_s", 0.0)) > 0:
            found.setdefault("step_s", 1 / rate)
        return found

    def reads(self) -> set[str]:
        """The fields of a step that its lines have."""
        lines = [line for line in self.lines if line.adds_to != "run"]
        names = {*self.fields.values()}.union(*(line.compiled.groupindex for line in lines))
        names = {UNITS.get(name, (name, 0.0))[0] for name in names} | {"step"}
        return names & {*FIELDS, *SETTINGS}


@dataclasses.dataclass
class Found:
    """Fields that one line of a log has."""

    name: str  # of the format
    line: StepLine
    step: int  # from 0; -1 if the line has none
    total: int  # number of steps of the run; 0 if the line does not name it
    fields: dict[str, float]
    texts: dict[str, str]


@functools.cache
def _label_pattern(labels: tuple[str, ...]) -> re.Pattern[bytes]:
    ordered = sorted(labels, key=len, reverse=True)
    longest_first = b"|".join(re.escape(label.encode()) for label in ordered)
    return re.compile(rb"(?<![\w.])(" + longest_first + rb")[\"']?\s*[:=]\s*[\"']?([^\s|\]}\"']+)")


_NUMBER = re.compile(rb"([-+]?\d{1,40}(?:\.\d*)?(?:[eE][-+]?\d{1,4})?)([a-zA-Z%/]*)(\([\d.]*%\))?")
_NOT_FINITE = re.compile(rb"[-+]?(nan|inf)(?:inity)?(?:\.0*)?(?:[a-zA-Z%/]*)", re.IGNORECASE)
_NEXT_FIGURE = re.compile(rb"/[-+]?\d.*")  # Primus: the step's figure, then a mean
_SCALES = {b"k": 1e3, b"K": 1e3, b"M": 1e6, b"B": 1e9, b"G": 1e9, b"T": 1e12, b"P": 1e15,
           b"E": 1e18}  # fmt: skip
_UNITS = (b"", b"s", b"ms", b"GiB", b"GB", b"%")


def number(token: bytes) -> float | None:
    """The number of a field as `7,012`, `47.55GiB(60.05%)`, `1.2PFLOPS`; None if it is none.

    `nan.0`, which progress bars print, is nan; `inf` has no sign. Of `9.4/9.5` it is the first.
    """
    token = _NEXT_FIGURE.sub(b"", token.rstrip(b",;").replace(b",", b""))
    if special := _NOT_FINITE.fullmatch(token):
        return math.nan if special[1].lower() == b"nan" else math.inf
    match = _NUMBER.fullmatch(token)
    if not match:
        return None
    value, unit = float(match[1]), match[2]
    if unit.endswith(b"FLOPS"):
        return value * _SCALES.get(unit[:1], 1.0) / 1e12
    if unit in _SCALES:
        return value * _SCALES[unit]
    return value if unit in _UNITS else None


def _rounding(token: bytes) -> float:
    """Largest relative error of a number by the digits that its text has."""
    digits = re.match(rb"[-+]?(\d*)\.?(\d*)", _NEXT_FIGURE.sub(b"", token.replace(b",", b"")))
    whole = int(digits[1] + digits[2] or b"0") if digits and len(digits[0]) < 40 else 0
    return 0.5 / whole if whole else 0.0


def _seconds(text: bytes) -> float | None:
    """Seconds of a time as `1:02:03` or `02:03`."""
    parts = text.split(b":")
    if not all(part.isdigit() for part in parts):
        return None
    return float(sum(int(part) * 60**i for i, part in enumerate(reversed(parts))))


def _count(text: bytes) -> int:
    """A whole number, as `12`, `1,200` or a progress bar's `1.20k`; 0 if it is none."""
    value = number(text)
    return round(value) if value is not None and 0 <= value < 1e15 else 0


def _shortest(texts: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """The texts without those that contain another one: each search takes time."""
    return tuple(text for text in texts if not any(x in text for x in texts if x != text))


class FormatTable(Mapping[str, LogFormat]):
    """Formats by name, in the order in which they are tried."""

    def __init__(self, formats: Mapping[str, LogFormat]):
        self._formats = dict(formats)
        lines = [(name, line) for name, format in self.items() for line in format.lines]
        # A line may have settings of the run besides a step: they do not decide whose it is.
        self._lines = sorted(lines, key=lambda pair: not pair[1].adds_to)
        texts = lambda lines: tuple(dict.fromkeys(text for line in lines for text in line.texts))
        self.head_texts = _shortest(texts(line for _, line in lines))  # of all lines that are read
        self.marks = texts(x for _, x in lines if not (x.adds_to or x.common))  # of lines of steps
        # In a list of names a text is not a step's: NeMo names the metrics that can be monitored.
        self._unlisted = [re.compile(re.escape(x) + rb"(?!['\"] *[,\])}])") for x in self.marks]
        self._launchers = [end for format in self.values() for end in format.ends if end.launcher]

    def texts_after(self, seen: Iterable[str]) -> tuple[bytes, ...]:
        """Texts of which each line that is read behind the settings at the start of a log has one.

        Args:
          seen: formats of which there are steps. If one of them cannot be mistaken for another,
            those that can are not looked for.
        """
        seen = {*seen}
        sure = any(not self[name].common for name in seen)
        lines = [
            line for name, format in self.items() for line in format.lines
            if not line.is_setting and (name in seen or not (sure and format.common))
        ]  # fmt: skip
        return _shortest(tuple(dict.fromkeys(text for line in lines for text in line.texts)))

    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> LogFormat:
        return self._formats[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._formats)

    def __len__(self) -> int:
        return len(self._formats)

    def count(self, text: bytes) -> int:
        """The number of steps that a line of a log is about."""
        return max(len(pattern.findall(text)) for pattern in self._unlisted)

    def find(self, text: bytes) -> Iterator[Found]:
        """Fields of steps in a line of a log, by the first format that reads steps from it."""
        for name, line in self._lines:
            if any(part in text for part in line.texts):
                found = [*self[name].find(name, line, text)]
                yield from found
                if found and line.adds_to in ("", "last"):
                    return

    def end_of(self, name: str, text: bytes) -> Ending | None:
        """The line by which a program of a format ends in a text; None if there is none."""
        ends = (*(self[name].ends if name in self else ()), *self._launchers)
        return next(filter(None, (end.find(text) for end in ends)), None)


def read(path: str | os.PathLike, known: "FormatTable") -> "FormatTable":
    """The formats of a file, and these after them.

    Raises:
      UserError: the file cannot be read, is not TOML, or an entry of it is invalid.
    """
    where = f"format_table={str(path)!r}"
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise UserError(f"{where} cannot be read: {e.strerror}") from None
    except ValueError as e:
        raise UserError(f"{where}: {e}") from None
    return FormatTable({**parse(text, where, known), **known})


def parse(text: str, where: str, known: Mapping[str, LogFormat]) -> dict[str, LogFormat]:
    """The formats of a table in TOML.

    Args:
      where: the file, in errors.
      known: formats that `like` and `steps_of` may name besides those of the text.

    Raises:
      UserError: it is not TOML, or an entry is invalid: file, entry, field, and what would work.
    """
    try:
        tables = tomllib.loads(text)
    except ValueError as e:
        raise UserError(f"{where}: {e}") from None
    formats: dict[str, LogFormat] = {}
    # A format may be like a later one; the order of the text stays that of the table.
    for name in sorted(
        tables, key=lambda name: isinstance(tables[name], dict) and "like" in tables[name]
    ):
        try:
            formats[name] = _format(tables[name], {**known, **formats})
        except UserError as e:
            raise UserError(f"{where}: [{name}] {e}") from None
    return {name: formats[name] for name in tables}


def _format(values: Any, known: Mapping[str, LogFormat]) -> LogFormat:
    """The format of a table."""
    if not isinstance(values, dict) or not isinstance(values.get("lines"), list):
        raise UserError("must be a table with program and [[NAME.lines]]")
    lines = []
    for i, line in enumerate(values["lines"]):
        if not isinstance(line, dict):
            raise UserError(f"lines[{i}]={line!r} must be a table with has and pattern")
        lines.append(build(StepLine, f"lines[{i}]", line))
        if not (lines[i].adds_to or {"step", "samples"} & lines[i].compiled.groupindex.keys()):
            raise UserError(f"lines[{i}].pattern={lines[i].pattern!r} has no group (?P<step>...)")
    ends = values.get("ends", [])
    if not (isinstance(ends, list) and all(isinstance(end, dict) for end in ends)):
        raise UserError(f"ends={ends!r} must be tables with a pattern")
    for key in ("like", "steps_of"):
        if key in values:
            check_choice(key, values[key], known)
    own = {key: x for key, x in values.items() if key not in ("lines", "ends")}
    own = parse_fields(LogFormat, own)
    if ends:
        own["ends"] = tuple(build(EndLine, f"ends[{i}]", end) for i, end in enumerate(ends))
    like = vars(known[own["like"]]) if "like" in own else {"fields": {}}
    own["fields"] = {**like["fields"], **own.get("fields", {})}
    required(LogFormat, own, "the table")
    inherited = {f.name: like[f.name] for f in dataclasses.fields(LogFormat) if f.name in like}
    return LogFormat(**{**inherited, **own, "lines": tuple(lines)})


_FILE = pathlib.Path(__file__).with_name("formats.toml")
FORMATS = FormatTable(parse(_FILE.read_text(encoding="utf-8"), _FILE.name, {}))
