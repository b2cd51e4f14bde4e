"""Runs read from folders and files, whatever is left of them."""

import json
import os
import time

import pytest

from maxbench.config.errors import UserError
from maxbench.run_logs import log_files, readers
from maxbench.run_logs.record import Given, RunRecord, dig
from maxbench.run_logs.workload_name import complete

NAME = "pretrain_llama31_8b_bf16_gpus16_tp1_pp1_cp2_vp1_mbs1_gbs256"


@pytest.fixture
def folder(tmp_path):
    """A run folder with the metrics of three steps, the last line of which is incomplete."""
    folder = tmp_path / f"{NAME}_1700000000"
    folder.mkdir()
    lines = [json.dumps({"step": i, "step_s": 9.4, "loss": 3.0 - i}) for i in range(3)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 3, ')
    return folder


def age(folder, seconds: float) -> None:
    """Sets the times of all files back."""
    past = time.time() - seconds
    for path in folder.iterdir():
        os.utime(path, (past, past))


def test_run_without_a_result_is_running_while_it_writes(folder):
    (record,) = readers.read([folder])
    assert (record.status, record.last, record.loss[2]) == ("running", 2, 1.0)


def test_run_without_a_result_has_died_later(folder):
    age(folder, 3600)
    (record,) = readers.read([folder])
    assert (record.status, record.reason) == ("died", "ended without an error message")


def test_reason_of_a_death_is_read_from_the_job(folder):
    (folder / "exit.json").write_text(json.dumps({"code": 137}))
    (record,) = readers.read([folder])
    assert (record.status, record.reason) == ("died", "exit code 137 (signal 9)")
    (folder / "srun-train-1.0.log").write_text("0: ValueError: no such thing\n")
    (record,) = readers.read([folder])
    assert record.reason == "ValueError: no such thing"


def test_damaged_files_are_noted(folder):
    (folder / "result.json").write_text('{"config": ')
    (record,) = readers.read([folder])
    assert "result.json is damaged" in record.unread


def test_unknown_fields_are_taken_from_the_name(folder):
    (record,) = readers.read([folder])
    fields = (record.model, record.size, record.dtype, record.gpus, record.gbs)
    assert fields == ("llama31", "8b", "bf16", 16, 256)


def test_missing_path_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        readers.read([tmp_path / "absent"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama31_70b_fp8_64n", ("llama31", "70b", "fp8", 512)),
        ("results/25.02/bf16/8b/32/log.out", ("", "8b", "bf16", 32)),
        ("unknown", ("", "", "", 0)),
    ],
)
def test_workload_of_a_name(tmp_path, name, expected):
    record = RunRecord(path=tmp_path, name=name, source="nemo")
    complete(record, name, Given())
    assert (record.model, record.size, record.dtype, record.gpus) == expected


@pytest.mark.parametrize(
    ("value", "default", "expected"),
    [("x", "", "x"), (3, "", ""), (3, 0, 3), (-1, 0, 0), (float("inf"), 0.0, 0.0), (True, 0, 0)],
)
def test_dig_checks_the_type_of_a_value(value, default, expected):
    assert dig({"a": {"b": value}}, "a.b", default) == expected
    assert dig({"a": 1}, "a.b", default) == default


def test_blocks_end_at_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(log_files, "BLOCK", 8)
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthree\nfour and five")
    blocks = [*log_files.blocks(path)]
    assert b"".join(blocks) == path.read_bytes()
    assert blocks[0] == b"one\ntwo\n"
    assert log_files.tail(path, 4) == b"five"


def test_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        [*log_files.blocks(tmp_path / "pipe")]
