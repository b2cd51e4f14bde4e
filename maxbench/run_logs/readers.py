"""All runs below given paths: run folders of maxbench, logs and exports of other programs.

No content of a file raises an error: unreadable parts are left out, and noted in the RunRecord.
"""

import functools
import os
import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from maxbench.config.errors import UserError, escape_control
from maxbench.run_logs import csv_exports, deaths, event_files, text_logs
from maxbench.run_logs.record import SETTINGS, Given, RunRecord
from maxbench.run_logs.run_folder import MARKERS, read_run_folder

NOT_RUNS = re.compile(r"^(sbatch_|srun-|node-|gpu-|nccl)|prepare_squad_dataset_exp|import_ckpt_exp")
SAME = 2e-3  # relative difference of step times that are printed with four digits
_RANK = re.compile(  # in the name of a log: the number of its process
    r"(?i)(?:^|[^a-z])(?:rank|proc|process|worker|task|replica|host|node)[-_.]?(\d{1,6})(?!\d)"
)
_TORCHRUN = re.compile(r"^(.*)/attempt_(\d{1,4})/(\d{1,6})/(stdout|stderr)\.log$")
SKIPPED_FOLDERS = ("checkpoints", "nsys_profile", "xplane")


_NOTHING = Given()


def read(paths: Iterable[str | pathlib.Path], given: Given = _NOTHING) -> list[RunRecord]:
    """All runs at and below the paths, in the order of their names and start times.

    Args:
      given: what the user says about all logs.

    Raises:
      UserError: a path does not exist.
    """
    records: dict[str, RunRecord] = {}
    logs: dict[pathlib.Path, bool] = {}  # of other programs -> whether it is named itself

    def add(record: RunRecord) -> None:
        record.name, record.reason = escape_control(record.name), escape_control(record.reason)
        records.setdefault(os.path.realpath(record.path), record)

    for path in map(pathlib.Path, paths):
        if not os.path.lexists(path):
            raise UserError(f"no such file or folder: {path}")
        named = not path.is_dir()
        for folder, files in _folders(path, lambda e: add(_unreadable(e.filename, e))):
            for found in _read_folder(folder, files, given, named):
                if isinstance(found, RunRecord):
                    add(found)
                else:
                    logs[found] = named
    for run in _runs_of(logs):
        named = any(logs[path] for path in run)
        read_log = functools.partial(text_logs.read_text_log, run, given, named)
        for record in _readable(lambda: [read_log()], run[0]):  # noqa: B023 - read at once
            add(record)
    _drop_copies(records)
    key = lambda record: (_natural_order(record.name), record.started, str(record.path))
    return sorted(records.values(), key=key)


def _unreadable(path: str | pathlib.Path, error: OSError) -> RunRecord:
    """The record of a file or folder that cannot be read."""
    path, reason = pathlib.Path(path), f"cannot be read: {error.strerror}"
    return RunRecord(path=path, name=path.name, source="", status="skipped", reason=reason)


def _natural_order(name: str) -> list:
    """A sort key with gpus8 before gpus16."""
    parts = re.split(r"([0-9]{1,18})", name)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def _folders(
    path: pathlib.Path, on_error: Callable[[OSError], Any]
) -> Iterator[tuple[pathlib.Path, list[str]]]:
    """Each folder at and below a path, with the names of its files."""
    if not path.is_dir():
        yield path.parent, [path.name]
        return
    for folder, subfolders, files in os.walk(path, onerror=on_error):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS)
        yield pathlib.Path(folder), sorted(files)


def _runs_of(logs: Collection[pathlib.Path]) -> list[list[pathlib.Path]]:
    """The files of each run.

    Those of its processes differ in the number behind a word as "rank", from 0 on; a process may
    have one for its output and one for its errors; torchrun writes a folder for each start.
    """
    starts: dict[tuple[str, ...], dict[tuple[int, int, str], pathlib.Path]] = {}
    for path in logs:
        output = _output_of(path, logs)
        if match := _TORCHRUN.search(str(output)):
            key: tuple[str, ...] = (match[1], match[4])
            number = int(match[2]), int(match[3])
        elif match := _RANK.search(output.name):
            key = (str(output.parent), output.name[: match.start(1)], output.name[match.end(1) :])
            number = 0, int(match[1])
        else:
            key, number = (str(output),), (0, 0)
        starts.setdefault(key, {})[(*number, "" if path == output else path.name)] = path
    runs = []
    for files in starts.values():
        last = max(start for start, _, _ in files)
        chosen = {place: path for place, path in sorted(files.items()) if place[0] == last}
        ranks = {rank for _, rank, _ in chosen}
        groups = [ranks] if ranks == {*range(len(ranks))} else [{rank} for rank in ranks]
        runs += [[path for place, path in chosen.items() if place[1] in g] for g in groups]
    return runs


def _output_of(path: pathlib.Path, logs: Collection[pathlib.Path]) -> pathlib.Path:
    """The log of the output of a process, from that of its errors."""
    if path.suffix != ".err" and "stderr" not in path.name:
        return path
    output = path.with_name(path.name.replace("stderr", "stdout"))
    names = (output.with_suffix(suffix) for suffix in (path.suffix, ".out", ".log"))
    return next((name for name in names if name != path and name in logs), path)


def _read_folder(
    folder: pathlib.Path, files: list[str], given: Given, named: bool
) -> Iterator[RunRecord | pathlib.Path]:
    """The run of a folder, or the runs of the exports and the paths of the text logs in it.

    Args:
      named: whether the user named the one file itself.
    """
    if MARKERS & {*files} and (record := read_run_folder(folder, files, given)):
        yield record
        return
    if events := [folder / name for name in files if event_files.NAME in name]:
        yield from _readable(lambda: [event_files.read_event_files(events, given)], events[0])
    for name in files:
        path = folder / name
        if event_files.NAME in name or (NOT_RUNS.search(name) and not named):
            continue
        if name.endswith(".csv"):
            yield from _readable(functools.partial(csv_exports.read_csv, path, given, named), path)
        elif named or text_logs.is_log_name(name):
            yield path


def _readable(
    read: Callable[[], Iterable[RunRecord | None]], path: pathlib.Path
) -> Iterator[RunRecord]:
    """The runs that a reader finds, or the record of a file that cannot be read."""
    try:
        yield from filter(None, read())
    except FileNotFoundError:  # removed since the folder was listed
        return
    except OSError as e:
        yield _unreadable(path, e)


def _drop_copies(records: dict[str, RunRecord]) -> None:
    """Leaves out what has the steps of another log: event files, exports, the launcher's log."""
    logs: list[RunRecord] = []
    for key, record in sorted(records.items(), key=lambda x: (_is_export(x[1]), -len(x[1].step_s))):
        same = _same_steps if _is_export(record) else _is_copy
        log = next((log for log in logs if same(record, log)), None)
        if log:
            log.inferred.append(f"the same steps are in {record.path.name}")
            if not _is_export(record):
                _complete(log, record)
            del records[key]
        elif record.source and not _is_export(record):
            logs.append(record)


def _is_export(record: RunRecord) -> bool:
    return record.source in ("tensorboard", "wandb")


def _is_copy(a: RunRecord, b: RunRecord) -> bool:
    """Whether two logs of a program have the same three or more times, and the same losses."""
    if (
        a.source != b.source
        or a.source == "maxbench"
        or a.step_s.get(a.last) != b.step_s.get(a.last)
    ):
        return False
    if not a.step_s.keys() <= b.step_s.keys():
        return False
    times = {(step_s, b.step_s[i]) for i, step_s in a.step_s.items()}
    same_loss = all(str(a.loss[i]) == str(b.loss[i]) for i in a.loss.keys() & b.loss.keys())
    return len(times) >= 3 and all(x == y for x, y in times) and same_loss


def _complete(log: RunRecord, copy: RunRecord) -> None:
    """Adds to a log what another log of the same run knows: settings, and how it ended."""
    for name in (*SETTINGS, "size", "layers"):
        log.learn(copy.origin(name), **{name: getattr(copy, name)})
    for name in ("layout", "total_steps", "peak_bytes", "saves", "loads"):
        setattr(log, name, getattr(log, name) or getattr(copy, name))
    cause = lambda r: deaths.of_reason(r.reason)
    if copy.status == "done" or (log.status != "done" and cause(copy) < cause(log)):
        log.status, log.reason, log.remedy = copy.status, copy.reason, copy.remedy


def _same_steps(export: RunRecord, log: RunRecord) -> bool:
    """Whether two runs have nearly the same time at three or more steps, and at all common ones."""
    a, b = export.step_s, log.step_s
    for shift in (0, 1):  # programs count the steps of their tags from 0 or from 1
        common = [(a[i], b[i - shift]) for i in a if i - shift in b]
        if len(common) >= 3 and len(common) >= 0.9 * min(len(a), len(b)):
            close = sum(abs(x / y - 1) < SAME for x, y in common)
            if close == len(common) and len({x for x, _ in common}) > 1:
                return True
    return False
