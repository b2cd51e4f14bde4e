"""Text logs of training programs: steps, checkpoints, settings, and how the run ended.

Given.table has the formats of the programs. Any bytes are accepted: incomplete lines and malformed
numbers are left out, and counted.
"""

import collections
import pathlib
import re
from collections.abc import Iterable, Sequence

from maxbench.run_logs import deaths, formats, log_files, mlperf_system
from maxbench.run_logs.line_prefixes import rank_of, strip_prefixes, time_of
from maxbench.run_logs.log_settings import SEARCHED, LogSettings
from maxbench.run_logs.record import Given, Origin, ReachedTarget, RunRecord
from maxbench.run_logs.step_series import StepSeries, positive, several_runs
from maxbench.run_logs.workload_name import complete

SUFFIXES = (".out", ".log", ".txt", ".err")
COMPRESSED = (".gz", ".zst")
RUN_NAME = re.compile(  # in the names of logs of runs
    r"pretrain|nemo|maxtext|megatron|torchtitan|neox|deepspeed|levanter|log-"
)
JOB_MARK = b"] maxbench: JOB_ID="  # line of launch/slurm.sh
BETWEEN = (
    1 << 20
)  # bytes of the text after a step that are kept: a program prints its settings there
ENDING = 1 << 18  # bytes at the end of a text that are searched for the cause of a death
LAST = 3  # steps whose texts are kept: another process may print its error before them
DUMP = 4  # settings in a text by which it is the start of a program
# Text in every line of a checkpoint: searching for it first is faster.
CHECKPOINTS = (b"Save duration: ", b"Time spent in load_checkpoint: ")
# Of maxbench. MaxText prints the second one too.
EVALUATIONS = (b"evaluation after step ", b"Training stopped: Target loss ")
_FLOAT = rb"([-+]?(?:\d++\.?+\d*+(?:[eE][-+]?\d++)?+|nan|inf))"
SAVED = re.compile(rb"Checkpoint Save[^\r\n]{0,300}Save duration: " + _FLOAT)
LOADED = re.compile(rb"Time spent in load_checkpoint: " + _FLOAT)
EVALUATED = re.compile(
    EVALUATIONS[0] + rb"(\d{1,9}): loss " + _FLOAT
    + rb", ([\d,]{1,20}) tokens, " + _FLOAT + rb" s since step 0 of this run"
)  # fmt: skip
REACHED = re.compile(EVALUATIONS[1] + _FLOAT + rb" achieved")
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


def read_text_log(
    paths: Sequence[pathlib.Path], given: Given, named: bool = False
) -> RunRecord | None:
    """Reads a run from its text log, which may be in several files: of its processes.

    Args:
      named: whether the user named a file itself: then it is a run whatever it contains.

    Returns:
      None if the log has no step and its name is not that of a run; or if a job of maxbench wrote
      it: such a log repeats the last lines of a run that has a folder.

    Raises:
      OSError: a file cannot be read.
    """
    record = RunRecord(path=paths[0], name=_run_name(paths[0]), source="")
    record.started = max(path.stat().st_mtime for path in paths)
    parser = LogParser(record, given.table)
    for path in paths:
        parser.next_file()
        try:
            for block in log_files.log_blocks(path):
                if JOB_MARK in block:
                    return None
                parser.read(block)
        except OSError as e:
            if len(paths) == 1 and not isinstance(e, log_files.DamagedFile):
                raise
            record.unread.append(str(e.strerror))
    parser.finish(f"{paths[0].parent}/{paths[0].name}", given)
    if not (record.step_s or record.unread or named or RUN_NAME.search(paths[0].name)):
        return None
    tools = {"nccltrace": "nccltrace", "_nsys": "nsys"}
    record.profiled = next((tool for part, tool in tools.items() if part in str(paths[0])), "")
    if len(paths) > 1:
        record.inferred.append(f"its log is in {len(paths)} files")
    _set_status(record, parser, paths)
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


def _set_status(record: RunRecord, parser: "LogParser", paths: Sequence[pathlib.Path]) -> None:
    """Sets status and reason from what follows the last step.

    A line by which the program ends decides, then the number of steps, then an error text.
    """
    texts, last = parser.texts(), record.last
    end = next(filter(None, (parser.table.end_of(record.source, text) for text in texts)), None)
    cause = min(filter(None, (deaths.cause(text[-ENDING:]) for text in texts)), default=None)
    if not record.source and not (cause and len(OTHER_STEPS.findall(b"\n".join(texts))) < 2):
        record.status, record.reason = "skipped", NOT_READ
        return
    rest = 0 if cause else record.interval - 1  # steps that complete no interval
    if end and last >= 0:
        record.status, record.reason = "stopped" if end.stopped else "done", end.sentence
        if end.stopped and cause:
            record.reason, record.remedy = f"{record.reason}: {cause.line}", cause.remedy
    elif record.total_steps and last + rest >= record.total_steps - 1:
        record.status = "done"
    elif cause:
        record.die(cause)
    elif last >= 0 and record.total_steps and record.may_be_running(*paths):
        record.status = "running"
    elif last >= 0 and (cause := deaths.cause(parser.earlier()[-ENDING:], certain=True)):
        record.die(cause)
    elif record.total_steps or last < 0:  # some programs do not log the number of steps
        record.status = "died"
        record.reason = "the log ends here" if last >= 0 else "no step in the log"
    else:
        record.status = "done"


# Format and, of a progress bar without a name, its number of steps.
Series = tuple[str, int]


class LogParser:
    """Reads the blocks of a log into a record: of the last run, if there are several in it."""

    def __init__(self, record: RunRecord, table: formats.FormatTable):
        self.record = record
        self.table = table
        self.settings = LogSettings()
        self.series: dict[Series, StepSeries] = {}
        self.runs = 1  # one after another in a file: the most of all files
        self._runs = 1  # in this file
        self._size = 0  # bytes of this file that were read
        self._open: dict[str, formats.Found] = {}  # format -> its step whose lines are being read
        self._next: dict[str, dict[str, float]] = {}  # format -> fields of its next step
        # Step, tokens and seconds of the last evaluation.
        self._evaluation: tuple[int, int, float] | None = None
        self._has_microbatches = False  # a time in the log is that of one microbatch
        self._programs: dict[str, str] = {}  # format of the steps -> the one that adds to them
        # Of each file, the text from each of its last steps on, in parts.
        self._files: list[collections.deque[list[bytes]]] = []
        self._last: dict[tuple[Series, bytes], int] = {}  # and rank -> its last step
        # Progress bar -> the text before it, if it came after a bar with losses that ended.
        self._starts: dict[Series, bytes] = {}

    def next_file(self) -> None:
        """Begins a file of the log."""
        self._files.append(collections.deque([[b""]], maxlen=LAST))
        self._last, self._size, self._runs = {}, 0, 1

    def read(self, block: bytes) -> None:
        """Adds the steps, checkpoints and settings in a block, which ends at the end of a line."""
        texts = self.table.head_texts
        if self._size >= SEARCHED:
            texts = self.table.texts_after(name for name, _ in self.series)
        done = 0
        for start, end in log_files.lines_with(block, (*texts, *CHECKPOINTS, *EVALUATIONS)):
            self._files[-1][-1].append(block[done:start])
            done = start
            for line in block[start:end].splitlines():
                self._read_line(line)
        self._files[-1][-1].append(block[done:])
        for parts in self._files[-1]:
            parts[:] = [b"".join(parts)[-BETWEEN:]]
        if self._size < SEARCHED:
            self.settings.read_lines(block[: SEARCHED - self._size], self.table.marks)
        self._size += len(block)

    def texts(self) -> list[bytes]:
        """The text after the last step, of each file."""
        return [b"".join(texts[-1]) for texts in self._files]

    def earlier(self) -> bytes:
        """The text around the last steps."""
        return b"\n".join(b"".join(parts) for x in self._files if len(x) > 1 for parts in x)

    def _read_line(self, line: bytes) -> None:
        """Adds what a line about a step or a checkpoint has; counts it if it is damaged."""
        text = strip_prefixes(line)
        lines_about_steps = self.table.count(text)
        all_found = [*self.table.find(text)]
        self._read_report(text, all_found)
        for found in all_found:
            if found.line.adds_to == "last":
                if step := self._open.get(found.name):
                    step.fields = {**found.fields, **step.fields}
            elif not found.line.adds_to:
                lines_about_steps -= self._add_step(found, line)
                self._files[-1].append([])
        if lines_about_steps > 0 and not self._is_validation(text):
            self.record.damaged += lines_about_steps

    def _read_report(self, text: bytes, all_found: Iterable[formats.Found]) -> None:
        """Adds what a line has about the whole run, the next step or a checkpoint."""
        for found in all_found:
            if found.line.adds_to == "run":
                self._add_settings(found)
            elif found.line.adds_to == "next":
                steps_of = self.table[found.name].steps_of or found.name
                self._programs[steps_of] = found.name
                self._next.setdefault(steps_of, {}).update(found.fields)
        for step, loss, tokens, elapsed_s in EVALUATED.findall(text):
            self.record.eval_loss[int(step)] = float(loss)
            tokens = tokens.replace(b",", b"") or b"0"
            self._evaluation = int(step), int(tokens), float(elapsed_s)
        if self._evaluation and (reached := REACHED.search(text)):
            self.record.reached = ReachedTarget(float(reached[1]), *self._evaluation)
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
            self._close(self._open.pop(found.name), rank_of(line), texts=2)
        if self.table[found.name].continues:
            self._open[found.name] = found
            return True
        return self._close(found, rank_of(line))

    def _close(self, found: formats.Found, rank: bytes, texts: int = 1) -> bool:
        """Adds a step whose lines are complete; returns whether it has a time or a rate.

        Args:
          texts: the number of texts since the step before.
        """
        format, fields, step = self.table[found.name], found.fields, found.step
        if found.line.first == 1 and 0 <= fields.get("index", -1) < 1e12:
            step = int(fields["index"])
        elif step < 0 and (gbs := self.settings.numbers.get("gbs")):
            step = round(fields.get("samples", 0) / gbs) - 1
        if fields.pop("microbatch", step + 1) != step + 1:
            fields.pop("step_s", None)
            self._has_microbatches = True
        key = found.name, found.total if format.bars else 0
        if step < self._last_step(key, rank) - 1 and self._is_of_run(key):
            self._begin_run(key, step, self._since(texts))
        self._last[key, rank] = step
        if format.bars:
            self._note_bar(key, texts)
        if key not in self.series:
            self.series[key] = StepSeries(means=format.means, slowest=format.slowest)
        return self.series[key].add(step, found.total, fields)

    def _is_of_run(self, key: Series) -> bool:
        """Whether steps are those of the run: some progress bars are of data or evaluations."""
        if not self.table[key[0]].bars:
            return True
        return key[1] == self.settings.numbers.get("steps") or self.series[key].has("loss")

    def _note_bar(self, key: Series, texts: int) -> None:
        """Stores the text before a new progress bar as a possible start of another run. A bar with
        losses that continues after it discards the start.

        Args:
          texts: the number of texts since the last step.
        """
        with_losses = {name for name, series in self.series.items() if series.has("loss")}
        if key in with_losses:
            self._starts = {name: text for name, text in self._starts.items() if name == key}
        elif key not in self.series and with_losses:
            self._starts[key] = self._since(texts)

    def _since(self, texts: int) -> bytes:
        """The last texts of this file."""
        return b"".join(b"".join(parts) for parts in [*self._files[-1]][-texts:])

    def _last_step(self, series: Series, rank: bytes) -> int:
        """The last step of a rank; of one that is new, of lines without a rank; -1 without any.

        A launcher labels all lines of a run or none: after the change another run prints.
        """
        unlabelled = {
            r: step for (key, r), step in self._last.items() if key == series and not (r and rank)
        }
        return self._last.get((series, rank), max(unlabelled.values(), default=-1))

    def _begin_run(self, key: Series, step: int, start: bytes) -> None:
        """Leaves out the run before, or of a run that is resumed the steps that it repeats.

        Args:
          key: of the run's steps.
          start: the text since the last step of the run before.
        """
        self._last = {}
        before, self.settings = self.settings, LogSettings()
        self.settings.read_lines(start, self.table.marks)
        steps = self.series[key].steps
        if step > min(steps, default=step):
            if len(self.settings.numbers) >= DUMP:  # else only the order of lines is another
                for i in [i for i in steps if i >= step]:
                    del steps[i]
            self.settings = before
            return
        self._runs += 1
        self.runs = max(self.runs, self._runs)
        self.series = {}
        self.record.peak_bytes, self.record.saves, self.record.loads = 0, [], []
        self.record.eval_loss, self.record.reached, self._evaluation = {}, None, None
        for first, last in log_files.lines_with(start, (*self.table.head_texts, *CHECKPOINTS)):
            line = strip_prefixes(start[first:last])
            self._read_report(line, self.table.find(line))
        self.settings = self.settings.or_else(before)

    def _begin_dead_run(self, name: str) -> None:
        """Begins a run that died before its first step, if the log ends with such a start.

        Args:
          name: format of the steps.
        """
        texts, settings = self._files[-1], LogSettings()
        start = b"".join(texts[-1])
        if end := self.table.end_of(name, start):
            start = start[end.place :]
        settings.read_lines(start, self.table.marks)
        if len(texts) > 1 and len(settings.numbers) >= DUMP and deaths.cause(start[-ENDING:]):
            texts[-1] = [start]
            self._begin_run((name, 0), 0, start)

    def _begin_last_bar(self) -> None:
        """Begins the run of the last progress bar with losses, if others with losses ended."""
        bars = [key for key in self._starts if self.series[key].has("loss")]
        if bars:
            last = self.series[bars[-1]]
            self._begin_run(bars[-1], -1, self._starts[bars[-1]])
            self.series = {bars[-1]: last}

    @staticmethod
    def _is_validation(text: bytes) -> bool:
        """Whether a line has text of a step's line, but is of another kind: progress of data."""
        return b" mfu: " in text and b"step" not in text

    def finish(self, name: str, given: Given) -> None:
        """Completes the record after the last block, with what the name of the log has too."""
        record = self.record
        for found in self._open.values():
            self._close(found, b"", texts=2)
        self._begin_last_bar()
        used = self._used()
        series = StepSeries()
        if used:
            record.source = max(used, key=lambda name: len(used[name].steps))
            if (record.source, 0) in self.series:
                self._begin_dead_run(record.source)
            used = self._used()
            series = used.get(record.source, series)
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
        if record.source == "mlperf":
            mlperf_system.read(record, given.gpu_types)
        self.settings.apply(record, given.gpu_types)
        if tokens := self.settings.numbers.get("tokens"):
            record.tokens = record.tokens or dict.fromkeys(series.steps, tokens)
        complete(record, name, given)
        if format and format.default_dtype and self.settings.is_complete and series.has("mfu"):
            record.learn(Origin.PROGRAM, dtype=format.default_dtype)
        series.fill(record)
        record.source = self._programs.get(record.source, record.source)
        record.log_format = self.table.get(record.source)
        if self._has_microbatches and not record.step_s:
            record.unread.append("its times are those of one of the microbatches of a step")
        record.inferred += several_runs(self.runs)

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
