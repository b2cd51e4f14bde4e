"""All runs below given paths: run folders of maxbench, text logs of other programs.

No content of a file raises an error: unreadable parts are left out, and noted in the RunRecord.
"""

import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from maxbench.config.errors import UserError, escape_control
from maxbench.hardware.gpus import GPU_TYPES, GpuTypes
from maxbench.run_logs import text_logs
from maxbench.run_logs.record import RunRecord
from maxbench.run_logs.run_folder import MARKERS, read_run_folder

NOT_RUNS = re.compile(r"^(sbatch_|srun-|node-|gpu-|nccl)|prepare_squad_dataset_exp|import_ckpt_exp")
SKIPPED_FOLDERS = ("checkpoints", "nsys_profile", "xplane")


def read(paths: Iterable[str | pathlib.Path], gpu_types: GpuTypes = GPU_TYPES) -> list[RunRecord]:
    """All runs at and below the paths, in the order of their names and start times.

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
        for folder, files in _folders(path, lambda e: add(_unreadable(e.filename, e))):
            for record in _read_folder(folder, files, gpu_types):
                add(record)
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
    folder: pathlib.Path, files: list[str], gpu_types: GpuTypes
) -> Iterator[RunRecord]:
    """The run of a folder, or the runs of the text logs in it."""
    if MARKERS & {*files} and (record := read_run_folder(folder, files, gpu_types)):
        yield record
        return
    for name in files:
        if not name.endswith(text_logs.SUFFIXES) or NOT_RUNS.search(name):
            continue
        try:
            if record := text_logs.read_text_log(folder / name, gpu_types):
                yield record
        except FileNotFoundError:  # removed since the folder was listed
            continue
        except OSError as e:
            yield _unreadable(folder / name, e)
