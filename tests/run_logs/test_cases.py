"""Logs of cases/, in the form of public ones, with their right values. Numbers are invented."""

import pathlib

import pytest

from maxbench.reporting import compare
from maxbench.run_logs import readers

CASES = pathlib.Path(__file__).with_name("cases")
WINDOW = compare.ReportOptions(window=(2, 8))


def read(name: str):
    (record,) = readers.read([CASES / name])
    return record


def test_primus_logs_the_step_and_a_mean():
    r = read("primus_inst_avg.log")
    assert (r.source, r.damaged, sorted(r.step_s)) == ("primus", 0, [*range(9)])
    assert r.step_s[1] == 13.3728
    assert (r.tflops[1], r.tokens_s[1]) == (567.6, 9801.4)
    assert r.peak_bytes == pytest.approx(153.81 * 2**30)


def test_megatron_bridge_logs_memory_in_gigabytes():
    row = compare.summarize(read("bridge_memory_gb.log"), WINDOW)
    assert row.record.source == "megatron-bridge"
    assert row.peak_gib == pytest.approx(70.123e9 / 2**30)
    assert row.tflops["mean"] == 467.0


def test_maxtext_of_2023_logs_tflops_of_a_device(tmp_path):
    lines = (f"completed step: {i}, seconds: 9.400, TFLOP/s: 687.1, loss: 2.5\n" for i in range(9))
    (tmp_path / "train.log").write_text("".join(lines))
    (r,) = readers.read([tmp_path])
    assert (r.source, r.step_s[8], r.tflops[8], r.loss[8]) == ("maxtext", 9.4, 687.1, 2.5)
