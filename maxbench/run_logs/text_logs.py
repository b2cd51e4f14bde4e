"""Text logs of training programs: steps, checkpoints, settings, and how the run ended.

formats.FORMATS is the table of the programs. Any bytes are accepted: incomplete lines and malformed
numbers are left out, and counted.
"""

import pathlib
import re
from collections.abc import Iterable

from maxbench.run_logs import formats, log_files
from maxbench.run_logs.line_prefixes import strip_prefixes, time_of
from maxbench.run_logs.log_settings import HINTS, SEARCHED, LogSettings
from maxbench.run_logs.record import Given, Origin, RunRecord
from maxbench.run_logs.step_series import StepSeries, positive
from maxbench.run_logs.workload_name import complete

SUFFIXES = (".out", ".log", ".txt", ".err")
COMPRESSED = (".gz", ".zst")
RUN_NAME = re.compile(  # in the names of logs of runs
    r"pretrain|nemo|maxtext|megatron|torchtitan|neox|deepspeed|levanter|log-"
)
JOB_MARK = b"] maxbench: JOB_ID="  # line of launch/slurm.sh
ENDING = 1 << 18  # bytes at the end of a log that are searched for the reason of a death
# Text in every line of a checkpoint: searching for it first is faster.
CHECKPOINTS = (b"Save duration: ", b"Time spent in load_checkpoint: ")
_FLOAT = rb"([-+]?(?:\d++\.?+\d*+(?:[eE][-+]?\d++)?+|nan|inf))"
SAVED = re.compile(rb"Checkpoint Save[^\r\n]{0,300}Save duration: " + _FLOAT)
LOADED = re.compile(rb"Time spent in load_checkpoint: " + _FLOAT)
REASON = re.compile(
    rb"F\d{4} \d\d:\d\d:[^\]\r\n]{0,80}\] [^\r\n]*|"  # absl's fatal error
    rb"DUE TO TIME LIMIT|DUE TO NODE FAILURE|NODE FAILURE|CANCELLED AT [^*\r\n]*|"
    rb"[oO]ut of memory[^\r\n]*|RESOURCE_EXHAUSTED[^\r\n]*|oom-kill[^\r\n]*|"
    rb"Watchdog caught[^\r\n]*|Segmentation fault|Bus error|"
    rb"(?:^|(?<=[\r\n :]))[A-Za-z_.]*(?:Error|Exception): [^\r\n]*|error: [^\r\n]*",
    re.MULTILINE,
)

# A line about a step in a format that is none of the table's.
OTHER_STEPS = re.compile(
    rb"^(?=[^\r\n]{0,999}\bloss)[^\r\n]{0,200}?\b(?:step|iter|iteration|batch)\w{0,9}\W{0,4}\d",
    re.MULTILINE | re.IGNORECASE,
)
NOT_READ = (
    "it has no step of a known format: --format_table FILE adds one, a table of its lines "
    "(docs/reference/log_formats.md)"
)


def is_log_name(name: str) -> bool:
    """Whether a file's name is that of a text log, compressed or not."""
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return name.endswith(SUFFIXES)


def read_text_log(path: pathlib.Path, given: Given, named: bool = False) -> RunRecord | None:
    """Reads a run from a text log.

    Args:
      named: whether the user named the file itself: then it is a run whatever it contains.

    Returns:
      None if the log has no step and its name is not that of a run; or if a job of maxbench wrote
      it: such a log repeats the last lines of a run that has a folder.

    Raises:
      OSError: the log cannot be read.
    """
    record = RunRecord(path=path, name=_run_name(path), source="")
    record.started = path.stat().st_mtime
    parser, end = LogParser(record), b""
    try:
        for block in log_files.log_blocks(path):
            if JOB_MARK in block:
                return None
            parser.read(block)
            end = (end + block)[-ENDING:]
    except log_files.DamagedFile as e:
        record.unread.append(str(e.strerror))
    parser.finish(f"{path.parent}/{path.name}", given)
    if not (record.step_s or record.unread or named or RUN_NAME.search(path.name)):
        return None
    tools = {"nccltrace": "nccltrace", "_nsys": "nsys"}
    record.profiled = next((tool for part, tool in tools.items() if part in str(path)), "")
    _set_status(record, end)
    return record


def _run_name(path: pathlib.Path) -> str:
    """The run's name in the name of its log."""
    name = path.name.removeprefix("log-").removeprefix("slurm-")
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    name = name.rpartition(".")[0] if name.endswith(SUFFIXES) else name
    name = name.removesuffix("_0")
    last = name.rpartition(".")[2]  # NeMo-Run puts the account first
    return last if "pretrain_" in last else name


def _set_status(record: RunRecord, end: bytes) -> None:
    """Sets status and reason from the end of the log."""
    record.status, last = "done", record.last
    text = b"\n".join(map(strip_prefixes, end.splitlines()))
    reason = death_reason(text)
    if not record.source and (not reason or len(OTHER_STEPS.findall(text)) > 1):
        record.status, record.reason = "skipped", NOT_READ
        return
    # After the last report there may be steps that complete no interval.
    rest = 0 if reason else record.interval - 1
    if record.total_steps and last + rest >= record.total_steps - 1:
        return
    if last >= 0 and record.total_steps and not reason and record.may_be_running(record.path):
        record.status = "running"
    elif record.total_steps or last < 0 or reason:  # some programs do not log the number of steps
        record.status = "died"
        record.reason = reason or ("the log ends here" if last >= 0 else "no step in the log")


class LogParser:
    """Reads the blocks of a log into a record."""

    def __init__(self, record: RunRecord, table: formats.FormatTable = formats.FORMATS):
        self.record = record
        self.table = table
        self.settings = LogSettings()
        # Format and, of a progress bar without a name, its number of steps -> its steps.
        self.series: dict[tuple[str, int], StepSeries] = {}
        self._size = 0  # bytes that were read
        self._open: dict[str, formats.Found] = {}  # format -> its step whose lines are being read
        self._next: dict[str, dict[str, float]] = {}  # format -> fields of its next step
        self._has_microbatches = False  # a time in the log is that of one microbatch
        self._programs: dict[str, str] = {}  # format of the steps -> the one that adds to them

    def read(self, block: bytes) -> None:
        """Adds the steps, checkpoints and settings in a block, which ends at the end of a line."""
        texts = self.table.head_texts
        if self._size >= SEARCHED:
            texts = self.table.texts_after(name for name, _ in self.series)
        for line in lines_with(block, (*texts, *CHECKPOINTS)).splitlines():
            self._read_step(line)
        if self._size < SEARCHED:
            for line in lines_with(block[: SEARCHED - self._size], HINTS).splitlines():
                if not any(mark in line for mark in self.table.marks):
                    self.settings.read(strip_prefixes(line))
        self._size += len(block)

    def _read_step(self, line: bytes) -> None:
        """Adds what a line about a step or a checkpoint has; counts it if it is damaged."""
        text = strip_prefixes(line)
        lines_about_steps = self.table.count(text)
        for found in self.table.find(text):
            adds_to = found.line.adds_to
            if adds_to == "run":
                self._add_settings(found)
            elif adds_to == "next":
                steps_of = self.table[found.name].steps_of or found.name
                self._programs[steps_of] = found.name
                self._next.setdefault(steps_of, {}).update(found.fields)
            elif adds_to == "last":
                if step := self._open.get(found.name):
                    step.fields = {**found.fields, **step.fields}
            else:
                lines_about_steps -= self._add_step(found, line)
        if lines_about_steps > 0 and not self._is_validation(text):
            self.record.damaged += lines_about_steps
        for pattern, seconds in ((SAVED, self.record.saves), (LOADED, self.record.loads)):
            seconds += filter(None, (positive(float(x)) for x in pattern.findall(text)))

    def _add_settings(self, found: formats.Found) -> None:
        """Adds what a line has about the whole run."""
        peak = int(found.fields.pop("peak", 0))
        self.record.peak_bytes = max(self.record.peak_bytes, peak)
        for name, value in found.fields.items():
            if value > 0:
                self.settings.numbers.setdefault(name, int(value))
        for name, text in found.texts.items():
            self.settings.words.setdefault(name, text)

    def _add_step(self, found: formats.Found, line: bytes) -> bool:
        """Adds a step; returns whether it has a time or a rate."""
        found.fields = {**self._next.pop(found.name, {}), **found.fields}
        if "step_s" not in found.fields:
            found.fields.setdefault("time", time_of(line))
        if found.name in self._open:
            self._close(self._open.pop(found.name))
        if self.table[found.name].continues:
            self._open[found.name] = found
            return True
        return self._close(found)

    def _close(self, found: formats.Found) -> bool:
        """Adds a step whose lines are complete; returns whether it has a time or a rate."""
        format, fields, step = self.table[found.name], found.fields, found.step
        if found.line.first == 1 and 0 <= fields.get("index", -1) < 1e12:
            step = int(fields["index"])
        elif step < 0 and (gbs := self.settings.numbers.get("gbs")):
            step = round(fields.get("samples", 0) / gbs) - 1
        if fields.pop("microbatch", step + 1) != step + 1:
            fields.pop("step_s", None)
            self._has_microbatches = True
        key = found.name, found.total if format.bars else 0
        if key not in self.series:
            self.series[key] = StepSeries(means=format.means, slowest=format.slowest)
        return self.series[key].add(step, found.total, fields)

    @staticmethod
    def _is_validation(text: bytes) -> bool:
        """Whether a line has text of a step's line, but is of another kind: progress of data."""
        return b" mfu: " in text and b"step" not in text

    def finish(self, name: str, given: Given) -> None:
        """Completes the record after the last block, with what the name of the log has too."""
        record = self.record
        for found in self._open.values():
            self._close(found)
        used = self._used()
        series = StepSeries()
        if used:
            record.source = max(used, key=lambda name: len(used[name].steps))
            series = used[record.source]
        elif self.series:  # lines of steps without a time
            record.source = next(iter(self.series))[0]
        format = self.table.get(record.source)
        if format:
            self._apply_conventions(format)
        for other in used.values():  # our log has the lines of two programs
            if not (series.means or other.means):
                for step, fields in other.steps.items():
                    series.steps.setdefault(step, fields)
        series.set_work(record)
        self.settings.apply(record, given.gpu_types)
        if tokens := self.settings.numbers.get("tokens"):
            record.tokens = record.tokens or dict.fromkeys(series.steps, tokens)
        complete(record, name, given)
        if format and format.default_dtype and self.settings.is_complete and series.has("mfu"):
            record.learn(Origin.PROGRAM, dtype=format.default_dtype)
        series.fill(record)
        record.source = self._programs.get(record.source, record.source)
        if self._has_microbatches and not record.step_s:
            record.unread.append("its times are those of one of the microbatches of a step")

    def _used(self) -> dict[str, StepSeries]:
        """The steps of each format; those of the run's progress bar, of several without names."""
        total = self.settings.numbers.get("steps", 0)
        rank = lambda key: (
            key[1] == total,
            self.series[key].has("loss"),
            len(self.series[key].steps),
        )
        keys = sorted((key for key in self.series if self.series[key].steps), key=rank)
        return {key[0]: self.series[key] for key in keys}

    def _apply_conventions(self, format: formats.LogFormat) -> None:
        """Changes settings whose names mean something else in a program, and adds what follows."""
        numbers = self.settings.numbers
        if format.gbs_in_tokens and "gbs" in numbers:
            numbers["tokens"] = numbers.pop("gbs")
        if {"dp", "mbs", "accumulation"} <= numbers.keys():
            gbs = numbers["dp"] * numbers["mbs"] * numbers["accumulation"]
            numbers.setdefault("gbs", gbs)
            gpus = (
                numbers["dp"] * numbers.get("tp", 1) * numbers.get("pp", 1) * numbers.get("cp", 1)
            )
            numbers.setdefault("gpus", gpus)


def lines_with(block: bytes, texts: Iterable[bytes]) -> bytes:
    """The lines of a block that contain one of several texts."""
    spans = set()
    for text in texts:
        at = block.find(text)
        while at >= 0:
            end = block.find(b"\n", at)
            end = len(block) if end < 0 else end
            spans.add((block.rfind(b"\n", 0, at) + 1, end))
            at = block.find(text, end)
    return b"\n".join(block[start:end] for start, end in sorted(spans))


def death_reason(text: bytes) -> str:
    """The most informative line at the end of a log about why the run ended, or ''."""
    reasons = [m[0].strip() for m in REASON.finditer(text)]
    # Slurm cancels a step after one of its tasks failed; but a cancelled job is the cause.
    slurm = [r for r in reasons if re.search(rb"DUE TO|JOB \d+ ON|NODE FAIL", r)]
    secondary = rb"srun: error|task \d+: |^error: task|STEP [\d.]+ ON|^CANCELLED AT"
    primary = [r for r in reasons if not re.search(secondary, r)]
    best = next(iter(slurm[-1:] or primary[:1] or reasons[:1]), b"")
    return re.sub(r"\s+", " ", best.decode("utf-8", "replace"))[:160].strip()
