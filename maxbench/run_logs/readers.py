"""All runs below given paths: run folders of maxbench, logs and exports of other programs.

No content of a file raises an error: unreadable parts are left out, and noted in the RunRecord.
"""

import functools
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from maxbench.config.errors import UserError, escape_control
from maxbench.run_logs import csv_exports, event_files, text_logs
from maxbench.run_logs.record import Given, RunRecord
from maxbench.run_logs.run_folder import MARKERS, read_run_folder

NOT_RUNS = re.compile(r"^(sbatch_|srun-|node-|gpu-|nccl)|prepare_squad_dataset_exp|import_ckpt_exp")
SAME = 2e-3  # relative difference of step times that are printed with four digits
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

    def add(record: RunRecord) -> None:
        record.name, record.reason = escape_control(record.name), escape_control(record.reason)
        records.setdefault(os.path.realpath(record.path), record)

    for path in map(pathlib.Path, paths):
        if not os.path.lexists(path):
            raise UserError(f"no such file or folder: {path}")
        named = not path.is_dir()
        for folder, files in _folders(path, lambda e: add(_unreadable(e.filename, e))):
            for record in _read_folder(folder, files, given, named):
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


def _read_folder(
    folder: pathlib.Path, files: list[str], given: Given, named: bool
) -> Iterator[RunRecord]:
    """The run of a folder, or the runs of the logs in it.

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
            read = functools.partial(text_logs.read_text_log, path, given, named)
            yield from _readable(lambda: [read()], path)  # noqa: B023 - read at once


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
    """Leaves event files and exports out that have the steps of a log: the run counts once."""
    logs = [r for r in records.values() if r.source not in ("", "tensorboard", "wandb")]
    for key, copy in [*records.items()]:
        if copy.source not in ("tensorboard", "wandb"):
            continue
        for log in logs:
            if _same_steps(copy.step_s, log.step_s):
                log.inferred.append(f"the same steps are in {copy.path.name}")
                del records[key]
                break


def _same_steps(a: dict[int, float], b: dict[int, float]) -> bool:
    """Whether two runs have nearly the same time at three or more steps, and at all common ones."""
    for shift in (0, 1):  # programs count the steps of their tags from 0 or from 1
        common = [(a[i], b[i - shift]) for i in a if i - shift in b]
        if len(common) >= 3 and len(common) >= 0.9 * min(len(a), len(b)):
            close = sum(abs(x / y - 1) < SAME for x, y in common)
            if close == len(common) and len({x for x, _ in common}) > 1:
                return True
    return False
