"""The report: run folders and logs of other programs, figures, verdicts, damaged files, speed."""

import base64
import contextlib
import csv
import dataclasses
import io
import json
import math
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import time
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxbench.cli import entry
from maxbench.config import recipes
from maxbench.config.precedence import build_config
from maxbench.config.resolve import resolve
from maxbench.cost_model import compile_cache
from maxbench.evidence import mlperf, published
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.metrics.checkpoint_interval import best_interval_s
from maxbench.reporting import build_report, compare, export, page, predictions, tables
from maxbench.run_logs import log_files, readers
from maxbench.run_logs.record import SETTINGS, Origin
from tests.conftest import needs

ROOT = pathlib.Path(__file__).parents[2]
H100 = compare.ReportOptions(gpu_type="h100", seq=8192)
NAME = "pretrain_llama31_8b_{dtype}_gpus{gpus}_tp1_pp1_cp2_vp1_mbs1_gbs{gbs}"


def nemo_line(i: int, total: int, step_s: float, gbs: int = 128, tflops: float | None = 611.2):
    rate = "" if tflops is None else f" | TFLOPS_per_GPU: {tflops:.4}"
    return (
        f"Training epoch 0, iteration {i}/{total - 1} | lr: 7.496e-06 | global_batch_size: {gbs} | "
        f"global_step: {i} | peak_memory_usage: 70833405952 | memory_allocated: 44271689728 | "
        f"reduced_train_loss: 11.96 | train_step_timing in s: {step_s:.4}{rate} | "
        f"consumed_samples: {(i + 1) * gbs}\n"
    )


def nemo(path: pathlib.Path, steps: int, step_s: float, total: int = 50, end: str = "", **kwargs):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [nemo_line(i, total, step_s + 0.01 * (i % 3 - 1), **kwargs) for i in range(steps)]
    path.write_text("".join(lines) + end)
    os.utime(path, (1e9, 1e9))  # no program writes to it any more
    return path


def ours(
    folder: pathlib.Path, gpus: int = 8, gbs: int = 128, step_s=9.4, steps: int = 50, dtype="fp8",
    stamp: int = 1, **result,
):  # fmt: skip
    """A run folder with the files that a finished run has."""
    name = NAME.format(dtype=dtype, gpus=gpus, gbs=gbs)
    path = folder / "experiments" / name / f"{name}_{stamp}"
    path.mkdir(parents=True)
    times = [step_s(i) if callable(step_s) else step_s for i in range(steps)]
    model = compare.model_of("llama31", "8b")
    config = {
        "model": {f: getattr(model, f) for f in model.__dataclass_fields__},
        "layout": {"gbs": gbs},
        "train": {"seq": 8192, "steps": 50},
        "precision": {"dtype": dtype},
        "profile": {"tool": ""},
    }
    whole = {"schema": 1, "name": name, "status": "done", "reason": ""}
    whole |= {"config": config, "run": config}
    whole |= {"device": {"gpu_type": "h100", "kind": "NVIDIA H100", "count": gpus}}
    whole |= {"started": 1000.0 + stamp, "peak_bytes": 60 << 30}
    (path / "result.json").write_text(json.dumps(whole | result))
    with (path / "metrics.jsonl").open("w") as f:
        for i, t in enumerate(times):
            f.write(json.dumps({"step": i, "step_s": t, "loss": 2.0, "time": 1.0 * i}) + "\n")
    return path


def rows(path: pathlib.Path, s: compare.ReportOptions = H100) -> list[compare.RunSummary]:
    return [compare.summarize(r, s) for r in readers.read([path], s.given)]


# --- logs of other programs ---


def test_nemo_log(tmp_path):
    nemo(tmp_path / f"log-team.{NAME.format(dtype='fp8', gpus=8, gbs=128)}_1234_0.out", 50, 9.39)
    (row,) = rows(tmp_path)
    assert (row.record.source, row.record.status) == ("nemo", "done")
    window = [9.39 + 0.01 * (i % 3 - 1) for i in range(35, 45)]
    assert row.step["mean"] == pytest.approx(sum(float(f"{x:.4}") for x in window) / 10)
    assert row.tflops["mean"] == 611.2
    assert row.tokens_s == pytest.approx(8192 * 128 / row.step["mean"])
    assert (row.verdict, row.baseline.step_s) == ("PASS", 9.33)
    assert row.peak_gib == pytest.approx(70833405952 / 2**30)


def test_maxtext_log_counts_the_slowest_process(tmp_path):
    folder = tmp_path / "results" / "v1" / "bf16" / "70b" / "64"
    folder.mkdir(parents=True)
    lines = [
        f"completed step: {i}, seconds: {7.1 + p / 10:.3f}, TFLOP/s/device: 460.480, "
        "Tokens/s/device: 1035.970, total_weights: 524288, loss: 0.000\n"
        for i in range(50)
        for p in (0, 1)
    ]
    (folder / "log-maxtext_llama2_70b_64_1407993.out").write_text("".join(lines))
    (row,) = rows(tmp_path, dataclasses.replace(H100, seq=4096))
    r = row.record
    assert (r.source, r.model, r.size, r.dtype, r.gpus) == ("maxtext", "llama2", "70b", "bf16", 64)
    assert (r.gbs, r.seq) == (128, 4096)
    assert row.step["mean"] == pytest.approx(7.2)
    assert row.verdict == "PASS"  # 6.999 / 7.2


def test_progress_bar_of_the_older_recipes(tmp_path):
    text = "".join(
        f"\rEpoch 0: : {i}%|███| {i}/100 [07:57<00:00, reduced_train_loss=7.310, "
        f"global_step={i - 1}.00, consumed_samples={32 * i}.0, train_step_timing in s=4.770]"
        for i in range(1, 101)
    )
    folder = tmp_path / "bf16" / "340b" / "128"
    folder.mkdir(parents=True)
    (folder / "log-nemo_nemotron4_340b_128_77.out").write_text(text)
    (row,) = rows(tmp_path, dataclasses.replace(H100, seq=4096))
    assert sorted(row.record.step_s) == list(range(100))
    assert row.record.gbs == 32
    assert row.share == pytest.approx(4.61 / 4.77)


def test_megatron_bridge_log(tmp_path):
    text = "".join(
        f" [2026-01-01] iteration {i:8d}/      50 | consumed samples: 1 | elapsed time per "
        f"iteration (ms): 9400.0 | global batch size: 128 | lm loss: 1.1E+01 |\n"
        for i in range(1, 51)
    )
    (tmp_path / f"log-{NAME.format(dtype='fp8', gpus=8, gbs=128)}_7_0.out").write_text(text)
    (row,) = rows(tmp_path)
    assert (row.record.source, row.record.status) == ("megatron", "done")
    assert row.step["mean"] == pytest.approx(9.4)


def test_checkpoint_lines_of_nvidia_recipes(tmp_path):
    end = (
        "[NeMo I 2025-04-11 14:48:45 nemo_logging:393] Global Checkpoint Save : Rank: 0 : "
        "Iteration: 50 : Start time: 1744408121.151s : Save duration: 4.389s\n"
        "[NeMo I 2025-04-11 14:46:18 nemo_logging:393] Global Checkpoint Load : Rank : 0 : "
        "Start time : 1744407969.270s : Time spent in load_checkpoint: 9.712s\n"
    )
    nemo(tmp_path / f"log-{NAME.format(dtype='fp8', gpus=8, gbs=128)}_1.out", 50, 9.4, end=end)
    (row,) = rows(tmp_path)
    assert (row.record.saves, row.record.loads) == ([4.389], [9.712])
    o = compare.overhead(row.record, compare.ReportOptions(mtbf=24))
    assert o.best_s == best_interval_s(4.389, 86400)  # as plan's
    # To first order both losses are equal at the best interval: sqrt(2 x save / mtbf) + load/mtbf.
    assert o.share == pytest.approx(math.sqrt(2 * 4.389 / 86400) + 9.712 / 86400, rel=0.01)
    at_hour = compare.overhead(row.record, compare.ReportOptions(mtbf=24, interval=60))
    assert at_hour.share == pytest.approx(4.389 / 3600 + (1800 + 9.712) / 86400, rel=0.02)
    row.record.saves = [0.0]  # of a log that rounds
    assert compare.overhead(row.record, compare.ReportOptions(mtbf=24)) is None


# --- runs that died ---


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME "
         "LIMIT ***\nsrun: error: n1: task 0: Terminated\n", "DUE TO TIME LIMIT"),
        ("Traceback (most recent call last):\n  File x\ntorch.OutOfMemoryError: CUDA out of "
         "memory. Tried to allocate 2 GiB\n", "out of memory"),
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO NODE "
         "FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***\n", "NODE FAILURE"),
        ("", "the log ends here"),
    ],
)  # fmt: skip
def test_dead_runs_are_listed_with_last_step_and_reason(tmp_path, end, reason):
    nemo(tmp_path / "log-pretrain_llama31_8b_fp8_8_1.out", 20, 9.4, end=end)
    (row,) = rows(tmp_path)
    assert (row.verdict, row.record.last) == ("DIED", 19)
    assert reason in row.why
    assert row.step is None
    text = tables.text([row], H100)
    assert "(20 iterations)" in text
    assert "Failed experiments: 1" in text
    assert reason in page.html([row], H100)


def test_run_killed_without_a_message_is_dead(tmp_path):
    path = ours(tmp_path, steps=12, status="running")
    old = time.time() - 86400
    for file in path.iterdir():
        os.utime(file, (old, old))
    (row,) = rows(tmp_path)
    assert (row.verdict, row.record.last, row.why) == ("DIED", 11, "ended without an error message")


def test_time_limit_is_named_if_a_process_saw_another_one_die_of_it(tmp_path):
    path = ours(tmp_path, steps=12, status="failed")
    result = json.loads((path / "result.json").read_text())
    result["reason"] = "process 0 of 2 on n1 died, see lines 0: of srun-train-1.0.log"
    (path / "result.json").write_text(json.dumps(result))
    end = "slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT"
    (path / "srun-train-1.0.log").write_text(f"{end} ***\n")
    (row,) = rows(tmp_path)
    assert row.verdict == "DIED"
    assert row.why.startswith(f"{result['reason']}: ")
    assert "DUE TO TIME LIMIT" in row.why


def test_running_run_is_not_dead(tmp_path):
    ours(tmp_path, steps=12, status="running")
    (row,) = rows(tmp_path)
    assert (row.verdict, row.why, row.ok) == ("-", "still running", False)


def test_run_with_nan_loss_is_dead(tmp_path):
    path = ours(tmp_path)
    lines = (path / "metrics.jsonl").read_text().replace('"loss": 2.0', '"loss": NaN')
    (path / "metrics.jsonl").write_text(lines)
    (row,) = rows(tmp_path)
    assert row.verdict == "DIED"
    assert "loss is nan" in row.why


def test_job_that_never_trained_names_the_preflight_error(tmp_path):
    folder = tmp_path / "experiments" / "pretrain_x" / "pretrain_x_1"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text('{"job": "7", "started": 5}')
    (folder / "exit.json").write_text('{"code": 1, "phase": "preflight", "reason": ""}')
    (folder / "srun-preflight-7.0.log").write_text("0: preflight: error: driver differ: a, b\n")
    (row,) = rows(tmp_path)
    assert row.verdict == "DIED"
    assert row.why == "preflight: error: driver differ: a, b"


# --- nothing is lost ---


def every_format(path: pathlib.Path, **kwargs) -> dict[str, str]:
    """Report on a path in each format, from this process."""
    texts = {}
    for name in build_report.FORMATS:
        out = path.parent / f"{name}.out"
        entry.run("report", [f"--format={name}", f"--output={out}", "--gpu_type=h100", str(path)])
        texts[name] = out.read_text()
    return texts


def test_log_of_any_size_is_read_completely_in_constant_memory(tmp_path):
    """100 MB, a NaN in the middle; read in the time and the memory of a small one."""
    noise = f"[NeMo I 2026-01-01 12:00:00] {'a | 1/2, b: 3 ' * 10}\n" * 14_000
    lines = [nemo_line(i, 50, 9.4).replace("11.96", "nan" if i == 25 else "11.96") + noise
             for i in range(50)]  # fmt: skip
    (tmp_path / "log-pretrain_llama31_8b_fp8_8_1.out").write_text("".join(lines))
    code = (
        "import time\nfrom maxbench.run_logs import readers\n"
        "from maxbench.reporting import compare\nfrom maxbench.run import process_stats\n"
        f"(r,) = readers.read(['{tmp_path}'])\n"
        "row = compare.summarize(r, compare.ReportOptions())\n"
        "print(len(r.step_s), process_stats.process_peak_bytes(), time.process_time(), row.why)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    steps, peak, seconds, *why = done.stdout.split()
    assert (steps, " ".join(why)) == ("50", "loss is nan at step 25")
    assert int(peak) < 80e6
    assert float(seconds) < 3


@given(block=st.integers(1 << 9, 1 << 13), seed=st.integers(0, 9))
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_figures_do_not_depend_on_the_block_size_of_reading(tmp_path, block, seed):
    rng = random.Random(seed)
    bar = "".join(f"\r| {i}/60 [00:1, train_step_timing in s={i}.5]" for i in range(51, 60))
    lines = [nemo_line(i, 60, 9 + i / 100) + rng.randrange(9) * "a, seconds\n" for i in range(51)]
    path = nemo(tmp_path / "log-pretrain_a.out", 0, 1.0, end="".join(lines) + bar + "\nerror: x\n")
    whole = readers.read([path])
    kept, log_files.BLOCK = log_files.BLOCK, block
    try:
        assert readers.read([path]) == whole
    finally:
        log_files.BLOCK = kept
    assert len(whole[0].step_s) == 59  # the bar counts from 1


def test_damaged_lines_are_counted_in_every_format(tmp_path):
    path = ours(tmp_path) / "metrics.jsonl"
    path.write_text(path.read_text().replace('{"step": 7,', '{"st').replace('"step": 8,', ""))
    output = every_format(tmp_path)
    assert {name for name, text in output.items() if "damaged lines about steps: 2" in text} == {
        *build_report.FORMATS
    }
    log = nemo(tmp_path / "b" / "log-pretrain_llama31_8b_fp8_8_1.out", 50, 9.4)
    log.write_text(log.read_text().replace("in s: 9.4 ", "in s: 9.4.1 "))
    (row,) = rows(log)
    assert row.record.damaged == 50 - len(row.record.step_s) == 17


def test_missing_steps_are_noted(tmp_path):
    def without(stamp: int, *gone: int) -> compare.RunSummary:
        path = ours(tmp_path, stamp=stamp) / "metrics.jsonl"
        lines = path.read_text().splitlines(True)
        path.write_text("".join(x for i, x in enumerate(lines) if i not in gone))
        return rows(path.parent)[0]

    one = without(1, *range(30, 40))
    assert one.notes == ["no steps in the log from 30 to 39", "steps 40 to 44 count: a gap"]
    assert "the run was shorter" not in tables.text([one], H100)
    assert without(2, 3, 9).notes == ["no steps in the log from 3 to 3 and in 1 more places"]
    assert without(3, *range(35, 45)).step is None
    ends = "the log ends at step 39, the run at 49"
    assert without(4, *range(40, 50)).notes == [ends, "steps 20 to 39 count: the run was shorter"]
    assert without(5, *range(40)).notes == ["steps 45 to 49 count: the run starts later"]
    assert compare.gaps(range(9, 100, 10)) == []  # a program that logs every tenth step


def test_run_is_found_by_any_of_its_files(tmp_path):
    path = ours(tmp_path)
    result = (path / "result.json").read_text()
    (path / "result.json").write_text(result.replace('"config"', '"confiG"'))
    (row,) = rows(tmp_path)
    assert (len(row.record.step_s), row.record.gpus) == (50, 8)
    assert "result.json is damaged" in row.explanation
    (path / "result.json").unlink()
    (row,) = rows(tmp_path)
    assert (len(row.record.step_s), row.verdict) == (50, "-")
    (path / "metrics.jsonl").write_text('{"accuracy": 1}\n')  # of another program
    assert rows(tmp_path) == []


def test_file_that_is_not_regular_is_skipped_with_a_note(tmp_path):
    path = ours(tmp_path)
    os.mkfifo(tmp_path / "log-pipe.out")
    os.mkfifo(path / "gpu-n1.csv")
    os.mkfifo(path / "srun-train-1.log")
    (path / "exit.json").write_text('{"code": 9}')
    for name, text in every_format(tmp_path).items():
        assert "cannot be read: not a regular file" in text, name
        assert "gpu-n1.csv cannot be read" in text, name
    (path / "metrics.jsonl").unlink()
    os.mkfifo(path / "metrics.jsonl")
    (path / "result.json").write_text("{")
    found = {row.record.status: row.explanation for row in rows(tmp_path)}
    assert found["skipped"] == "cannot be read: not a regular file"
    assert "result.json is damaged; metrics.jsonl cannot be read" in found["died"]


def test_control_characters_are_escaped(tmp_path):
    evil = "\x1b]0;pwned\x07\x9b2J\u202e\udc80"
    name = f"log-pretrain_{evil}\n.out"
    nemo(tmp_path / name.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape"), 3,
         9.4, end=f"ValueError: {evil[:-1]}\n")  # fmt: skip
    ours(tmp_path, status="failed", reason=evil, versions={evil: evil}, slow_hosts=[evil])
    output = every_format(tmp_path) | {"names": run("--full-names", str(tmp_path), code=1)}
    for format, text in output.items():
        assert {c for c in text if not c.isprintable()} <= {"\n"}, format


def test_running_job_has_not_failed(tmp_path):
    ours(tmp_path, steps=12, status="running")
    log = nemo(tmp_path / "log-pretrain_llama31_8b_fp8_8_1.out", 20, 9.4)
    os.utime(log)
    output = every_format(tmp_path)
    assert json.loads(output["json"])["summary"] == {
        "success_experiments": 0, "failed_experiments": 0, "running_experiments": 2,
        "success_rate": 0,
    }  # fmt: skip
    assert output["csv"].endswith("# Summary: 0 success, 0 failed, 2 running, 2 total\n")
    assert "Running experiments: 2" in output["table"]
    assert entry.run("report", ["--output=/dev/null", str(tmp_path)]) == 0


def test_alarms_of_many_steps_are_fast():
    before = time.process_time()
    assert "drifts by +40.0%" in compare.alarms([1 + i / 20_000 for i in range(10_001)])[0]
    assert time.process_time() - before < 1


# --- verdicts ---


def test_every_published_row_passes_compared_with_itself():
    """Each published figure, as a log, gets its own tokens/s, days and MFU back; a figure of an
    older release is held against the newest with its layout."""
    for p in published.rows():
        r = readers.RunRecord(
            path=pathlib.Path("x"), name="x", source="nemo", status="done", size=p.size,
            layers=p.layers, step_s=dict.fromkeys(range(50), p.step_s), format=p.format,
            layout=p.layout,
        )  # fmt: skip
        r.learn(Origin.LOG, **{name: getattr(p, name) for name in SETTINGS})
        row = compare.summarize(r, compare.ReportOptions())
        newest = row.baseline.release
        assert f"of published {row.baseline.step_s:g} s ({newest})" in row.why
        assert row.baseline.layout == p.layout
        if newest != p.release:
            assert row.baseline.age < p.age
            continue
        assert (row.verdict, row.baseline) == ("PASS", p)
        assert row.tokens_s == pytest.approx(p.tokens_per_s, rel=2e-3)
        if p.days_to_1t and p.days_to_1t not in (27, 19):
            assert row.days == pytest.approx(p.days_to_1t, rel=6e-3)


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.0, "PASS"), (1.03, "PASS"), (1.05, "WARN"), (1.08, "FAIL")]
)
def test_verdict_by_share_of_published(tmp_path, factor, verdict):
    ours(tmp_path, step_s=9.33 * factor)
    assert rows(tmp_path)[0].verdict == verdict


def test_exemplar_criterion_is_95_percent_of_each_workload(tmp_path):
    ours(tmp_path, step_s=9.33 * 1.05)
    options = compare.ReportOptions(criterion="exemplar")
    assert rows(tmp_path, options)[0].verdict == "PASS"
    text = tables.text(rows(tmp_path, options), options)
    assert "Exemplar\n  reached by all of 1 runs; 0 are not compared" in text
    assert "PASS from 95.0%: NVIDIA's Exemplar Clouds" in " ".join(text.split())
    ours(tmp_path, name="slow", stamp=2, step_s=9.33 * 1.06)
    found = rows(tmp_path, options)
    assert sorted(row.verdict for row in found) == ["FAIL", "PASS"]
    assert "not reached: 1 of 2 runs are below: slow (94.3%)" in tables.text(found, options)


def test_thresholds_stand_in_the_report_with_their_computation(tmp_path):
    ours(tmp_path)
    text = tables.text(rows(tmp_path), H100)
    n = mlperf.noise()
    share = 1 / (1 + n.systems) / (1 + n.runs_p90)
    assert f"PASS from {share:.1%}, WARN from" in " ".join(text.split())
    assert f"up to {n.systems:.1%} between systems" in text


def test_work_without_a_published_row_is_compared_with_systems_of_mlperf(tmp_path):
    device = {"gpu_type": "b200", "kind": "NVIDIA B200", "count": 8}
    work = dict(gbs=16, dtype="nvfp4", device=device)
    ours(tmp_path, step_s=0.4505, **work)
    (row,) = rows(tmp_path)
    assert row.why.startswith("as fast as 6 of 7 MLPerf systems that ran this work")
    assert (row.verdict, row.baseline) == ("PASS", None)
    ours(tmp_path, stamp=2, step_s=0.4505 * 1.06, **work)
    assert rows(tmp_path)[1].verdict == "WARN"


def test_differences_from_the_published_row_prevent_a_verdict(tmp_path):
    ours(tmp_path, gbs=64)
    (row,) = rows(tmp_path)
    assert (row.verdict, row.why) == ("-", "not comparable: GBS 64, published 128")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"mocked": True}, "the network was mocked"),
        ({"device": {"gpu_type": None, "kind": "cpu", "count": 8}}, "ran on cpu"),
        ({"device": {"gpu_type": "gb200", "kind": "GB200", "count": 8}}, "nothing published"),
    ],
)
def test_run_that_is_not_comparable_has_no_verdict(tmp_path, change, why):
    ours(tmp_path, **change)
    (row,) = rows(tmp_path)
    assert row.verdict == "-"
    assert why in row.why


def test_log_without_gpu_type_is_not_assumed_to_be_h100(tmp_path):
    nemo(tmp_path / f"log-{NAME.format(dtype='fp8', gpus=8, gbs=128)}_1.out", 50, 9.4)
    (row,) = rows(tmp_path, compare.ReportOptions(seq=8192))
    assert row.why == "not comparable: its log does not name the GPU type"
    assert row.mfu is None


def test_gpu_type_is_asked_for_once_for_all_logs(tmp_path):
    for name, step_s in {"a": 9.4, "b": 9.41, "c": 9.42}.items():
        nemo(tmp_path / f"log-{NAME.format(dtype='fp8', gpus=8, gbs=128)}_{name}.out", 50, step_s)
    ours(tmp_path)
    for form in ("table", "json", "html", "md"):
        text = run(f"--format={form}", "--seq=8192", str(tmp_path))
        assert text.count("--gpu_type=") == 1, form
        assert "3 of 4 logs do not name the GPU type" in text, form
        flags = (f"--format={form}", "--gpu_type=h100")
        assert "--gpu_type=" not in run(*flags, str(tmp_path))
        assert "3 of 4 logs do not name the sequence length: --seq=SEQ" in run(
            *flags, str(tmp_path)
        )


# --- scaling, repeats, money ---


def test_weak_and_strong_scaling(tmp_path):
    for gpus, step_s in ((8, 9.33), (16, 9.36), (32, 9.8)):
        ours(tmp_path, gpus=gpus, gbs=16 * gpus, step_s=step_s)
    ours(tmp_path, gpus=16, gbs=128, step_s=5.0)
    weak, strong = compare.curves(rows(tmp_path))
    assert (weak.kind, strong.kind) == ("weak", "strong")
    assert [p.gpus for p in weak.points] == [8, 16, 32]
    assert weak.points[2].efficiency == pytest.approx(9.33 / 9.8)
    assert weak.points[1].published == pytest.approx(224055 / 16 / (112388 / 8))
    assert strong.points[1].efficiency == pytest.approx(9.33 / 5 / 2)


def test_repeats_drift_and_two_modes(tmp_path):
    rng = random.Random(0)
    ours(tmp_path, stamp=1, step_s=lambda i: 9.4 + rng.gauss(0, 0.01))
    ours(tmp_path, stamp=2, step_s=lambda i: 9.0 if i % 2 else 10.0)
    ours(tmp_path, stamp=3, step_s=lambda i: 9.0 + 0.05 * i)
    calm, split, drift = rows(tmp_path)
    assert calm.notes == []
    assert "two modes, 9 and 10 s" in split.notes[0]
    assert any("drifts by" in n for n in drift.notes)
    (group,) = compare.repeats([calm, split, drift])
    assert group.runs == 3
    assert group.spread > 0.05
    assert group.notes[0] == "runs differ by more than 5%"


@settings(deadline=None)
@given(st.lists(st.floats(0.99, 1.01), min_size=10, max_size=40))
def test_noise_of_a_percent_does_not_raise_two_modes(times):
    assert (
        not any("two modes" in n for n in compare.alarms(times)) or max(times) - min(times) > 0.02
    )


def test_cost_and_energy(tmp_path):
    path = ours(tmp_path)
    (path / "gpu-n1.csv").write_text("t, 0, 690.5, 60\nt, 1, 709.5, 61\nt, 0, 80.0, 40\nbad\n")
    (row,) = rows(tmp_path, compare.ReportOptions(cost=2.5))
    assert row.cost == pytest.approx(row.days * 24 * 8 * 2.5)
    assert row.record.power_w == pytest.approx(700)
    assert row.joules == pytest.approx(700 * 8 / row.tokens_s)


# --- predictions and NCCL calls ---

FLAGS = ["--config", "configs/llama31_8b.py", "--gpus", "8", "--dtype", "fp8"]
# A report is another process, which resolves auto to Transformer Engine where it is installed.
XLA = {"precision.backend": "xla"}


def planned_run(
    folder: pathlib.Path, tool: str = "", gpu: str = "h100", overrides: dict = XLA, **result
) -> pathlib.Path:
    """A run with its complete configuration and, under nccltrace, one all-gather per step."""
    config = recipes.load(ROOT / FLAGS[1])
    steps = 5 if tool else 50
    flags = {"dtype": "fp8", "profile": tool, "steps": steps, "output_dir": str(folder)}
    run = resolve(build_config(config, gpus=8, flags=flags, overrides=overrides), GPU_TYPES)
    more = [f"--profile={tool}", "--steps", str(steps), "--output_dir", "/x"]
    device = {"gpu_type": gpu, "kind": gpu, "count": 8}
    config = {"config": run.config.asdict(), "run": run.asdict()}
    config |= {"name": run.name, "device": device}
    result = config | {"command": ["train.py", *FLAGS, *more]} | result
    path = ours(folder, stamp=len(list(folder.rglob("result.json"))), steps=steps, **result)
    line = ("0: n1:1:2 [0] NCCL INFO AllGather: opCount 3 sendbuff 0x1 recvbuff 0x2 count 67108864 "
            "datatype 9 op 0 root 0 comm 0xabc [nranks=8] stream 0x4\n")  # fmt: skip
    if tool:
        (path / "srun-train-1.0.log").write_text(line * 5 + line[:90])
    return path


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A compile cache with the program of the run: one all-gather of 1 GiB over 8 GPUs."""
    monkeypatch.setenv("MAXBENCH_CACHE", str(tmp_path / "cache"))
    config = recipes.load(ROOT / FLAGS[1])
    asked = build_config(config, gpus=8, flags={"dtype": "fp8"}, overrides=XLA)
    run = resolve(asked, GPU_TYPES)
    text = (
        "HloModule m, is_scheduled=true\n\nENTRY %main (x: f32[]) -> f32[] {\n"
        "  %x = bf16[67108864]{0} parameter(0)\n  %s = (bf16[67108864]{0}, bf16[536870912]{0}) "
        "all-gather-start(%x), replica_groups=[1,8]<=[8], dimensions={0}\n"
        "  %d = bf16[536870912]{0} all-gather-done(%s)\n}\n"
    )
    sizes = dict.fromkeys(("weights", "optimizer", "arguments", "temporaries"), 1 << 30)
    compile_cache.store(
        run,
        compile_cache.CompiledStep(
            text=text, **sizes, copy=1, gradients=1, host=0, attention="cudnn",
            lower_s=1.0, compile_s=1.0, peak_rss_gib=1.0,
        ),
    )  # fmt: skip


def test_trace_is_compared_with_the_plan(tmp_path, program):
    planned_run(tmp_path, "nccltrace")
    text = run(str(tmp_path / "experiments"))
    line = next(x for x in text.splitlines() if "0xabc" in x)
    assert line.split() == ["all-gather", "8", "0xabc", "1.0", "1,024.00", "100.0%"]
    line = next(x for x in text.splitlines() if "dp+cp" in x)
    assert line.split() == [
        "all-gather",
        "8",
        "dp+cp",
        "1.0",
        "1",
        "1,024.00",
        "1,024.00",
        "100.0%",
    ]
    assert "damaged lines left out: 1" in text
    (one,) = json.loads(run("--format=json", str(tmp_path / "experiments")))["results"]
    assert one["nccl"]["step_compared_with_plan"][0]["planned_bytes"] == 2**30
    assert f"    {line.strip()}" in run("--format=md", str(tmp_path))


def test_trace_fits_the_terminal():
    trace = tables.Trace("", [(["collective", "GPUs"], [["all-gather", "8"]])], ["a note"])
    assert trace.lines(16) == [
        "collective  GPUs",
        "---------- -----",
        "all-gather     8",
        "",
        "a note",
    ]
    assert trace.lines(15) == ["all-gather", "  GPUs 8", "", "a note"]


def test_trace_without_a_plan_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("MAXBENCH_CACHE", str(tmp_path / "empty"))
    path = planned_run(tmp_path, "nccltrace")
    command = f"not planned yet: maxbench plan {' '.join(FLAGS)}\n"
    assert command in run(str(tmp_path))
    (path / "srun-train-1.0.log").write_text("0: nothing\n")
    assert "no NCCL call in the log" in run(str(tmp_path))
    os.mkfifo(path / "srun-train-2.0.log")  # has no writer: reading it would not end
    output = run(str(tmp_path))
    assert output.count("srun-train-2.0.log cannot be read: not a regular file") == 1


def test_page_marks_predicted_parts_as_predicted(tmp_path, program):
    planned_run(tmp_path)
    text = run("--format=html", str(tmp_path / "experiments"))
    assert "are <b>predicted</b> by maxbench plan, not measured" in text
    sentence = r"Predicted ([0-9.]+) s; measured 9.400 s, \+([0-9,.]+)%"
    ((predicted, excess),) = re.findall(sentence, text)
    measured = float(predicted) * (1 + float(excess.replace(",", "")) / 100)
    assert measured == pytest.approx(9.4, 0.2)
    assert "exposed communication" in text
    assert "GEMMs" not in text  # the program has none
    assert "all-gather" in text.split("Where the predicted seconds go")[1]


def test_page_explains_each_prediction_once(tmp_path, program):
    for _ in range(2):
        planned_run(tmp_path)
    text = run("--format=html", str(tmp_path / "experiments"))
    assert text.count("Where the predicted seconds go: operations") == 1
    assert text.count("has the same prediction") == 1
    (drawing,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', text)
    ElementTree.fromstring(base64.b64decode(drawing))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"gpu": "b200"}, "the run was on b200, a plan would be for h100"),
        ({"mocked": True}, "with its network mocked"),
        ({"config": {"model": {"layers": 4}}}, "is of another version of maxbench"),
    ],
)
def test_no_prediction_of_another_program(tmp_path, program, change, why):
    planned_run(tmp_path, **change)
    text = run("--format=html", str(tmp_path / "experiments"))
    assert why in text
    assert "measured 9.400 s" not in text


def test_an_hour_of_power_readings_is_read_quickly(tmp_path):
    path = ours(tmp_path)
    (path / "gpu-n1.csv").write_text("2026/01/01 00:00:00.000, 0, 700.00, 60, 1900\n" * 80_000)
    before = time.process_time()
    (row,) = rows(tmp_path)
    assert time.process_time() - before < 2
    assert row.record.power_w == pytest.approx(700)


# --- formats ---


def run(*args: str, code: int = 0) -> str:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert entry.run("report", args) == code, err.getvalue()
    return out.getvalue() if code < 2 else err.getvalue()


@pytest.fixture
def mixed(tmp_path):
    """Run folders, logs of other programs, dead runs, and files that are not logs."""
    ours(tmp_path)
    ours(tmp_path, gpus=16, gbs=256, step_s=9.5)
    nemo(tmp_path / "old" / f"log-a.{NAME.format(dtype='bf16', gpus=8, gbs=128)}_9_0.out", 50, 12.3)
    nemo(tmp_path / "old" / "log-a.pretrain_llama31_8b_fp8_short_10_0.out", 30, 9.4, tflops=None)
    (tmp_path / "notes.txt").write_text("remember the milk")
    (tmp_path / "sbatch_x.out").write_text(nemo_line(49, 50, 1.0))
    # The output of a job that was submitted by sbatch directly names the folder of its run.
    output = f"[2026-11-23 13:46:40] maxbench: JOB_ID=7 RESTART=0 FOLDER={tmp_path}\n0: "
    (tmp_path / "slurm-7.out").write_text(output + nemo_line(49, 50, 1.0))
    return tmp_path


def test_csv_rows_have_as_many_fields_as_heads(mixed):
    text = run("--format=csv", "--gpu_type=h100", str(mixed))
    *lines, trailer = text.splitlines()
    table = list(csv.reader(io.StringIO("\n".join(lines))))
    assert ",".join(table[0]).startswith(
        "filename,status,time_mean_seconds,time_std_dev_seconds,tflops_per_gpu_mean,"
        "tflops_per_gpu_std_dev,max_iteration"
    )
    assert {len(line) for line in table} == {25}
    assert trailer == "# Summary: 3 success, 1 failed, 4 total"


def test_json_is_valid_without_figures(mixed):
    data = json.loads(run("--format=json", str(mixed)), parse_constant=lambda x: pytest.fail(x))
    assert data["analysis"]["min_iteration"] == 35
    assert data["summary"] == {
        "success_experiments": 3, "failed_experiments": 1, "success_rate": 75
    }  # fmt: skip
    failed = [r for r in data["results"] if r["status"] == "Failed"]
    assert failed[0]["max_iteration"] == 29
    assert failed[0]["time_mean"] is None


def test_markdown_and_names(mixed):
    text = run("--format=md", str(mixed))
    bars = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(bars) == 1
    assert str(mixed) in run("--full-names", str(mixed))
    assert str(mixed) not in run(str(mixed))


def test_diff_names_changed_figures_and_settings(tmp_path):
    a = ours(tmp_path, versions={"jax": "0.10.2"})
    b = ours(tmp_path, stamp=2, step_s=9.9, versions={"jax": "0.11.0"})
    text = run("--diff", str(a), str(b))
    assert "+5.32%" in text
    assert "versions.jax: 0.10.2 -> 0.11.0" in text
    assert "more than twice the steps' std" in text
    (losses,) = re.findall(r"^ +2 \|([AB ]+)$", text, re.M)
    assert (losses.count("A"), losses.count("B")) == (0, 50)  # B's are the same, and above A's
    assert "--diff compares two runs, and 1 are" in run("--diff", str(a), code=2)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--format=tabel"], "format='tabel' is not one of table, csv, json, md, html; did you"),
        (["--window=44"], "window=44 must be first and last step, as 35,44"),
        (["--cost=-1"], "cost=-1 must be a finite number, at least 0"),
        (["--gpu_type=h10"], "did you mean 'h100'?"),
        (["--mtbf=nan"], "mtbf=nan must be a finite number, above 0"),
        (["--output=/none/x", "maxbench/../tests/reporting"], "no run and no log"),
        (["nowhere"], "no such file"),
        (["--fromat=csv"], "unknown flag 'fromat'"),
    ],
)
def test_bad_input_is_refused(args, message):
    assert message in run(*args, code=2)


def test_closed_pipe_is_not_an_error(mixed):
    command = f"{sys.executable} -m maxbench.report --format=json {mixed} | head -c 1"
    command = ["bash", "-c", command + "; exit ${PIPESTATUS[0]}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{", "")


def test_empty_folder_is_refused(tmp_path):
    assert "no run and no log at or below" in run(str(tmp_path), code=2)


def test_exit_code_is_1_if_no_run_succeeded(tmp_path):
    nemo(tmp_path / "log-pretrain_llama31_8b_fp8_8_1.out", 20, 9.4)
    assert "Success rate: 0%" in run(str(tmp_path), code=1)


# --- damage ---

PIECES = st.one_of(
    st.binary(max_size=80),
    st.builds(
        lambda i, n, t: nemo_line(i, n, t).encode(),
        st.integers(0, 10**12), st.integers(1, 10**12), st.floats(allow_nan=True),
    ),
    st.sampled_from(
        [
            b"completed step: 3, seconds: 1e999, TFLOP/s/device: nan",
            b"iteration 49/49 | train_step_timing in s: 1.2.3.4",
            b"| 99999999999/1 [global_step=-inf, train_step_timing in s=0.0]",
            b'{"step": 1, "step_s": 0.5}\n{"step": true}\n[1]\nnull\n{"step": 2, "step_s": "x"}\n',
            b"slurmstepd: error: *** CANCELLED AT DUE TO TIME LIMIT ***\n",
            b"Save duration: 1e400s : nan GB", b"\r\n\x00\xff\xfe", b"[" * 2000,
        ]
    ),
)  # fmt: skip


def fuzz(check, examples: int, *args: st.SearchStrategy, **kwargs: st.SearchStrategy) -> None:
    """Calls check with so many generated examples."""
    settings(max_examples=examples, deadline=None)(given(*args, **kwargs)(check))()


EXAMPLES = pytest.mark.parametrize(
    "examples", [20, pytest.param(150, marks=pytest.mark.exhaustive)]
)
FILES = ("log-x.out", "metrics.jsonl", "result.json", "exit.json", "job.json", "gpu-n.csv")


@EXAMPLES
def test_damaged_files_break_no_format(tmp_path, examples):
    """Truncated, binary, mixed and empty files in place of each file that the report reads."""

    def check(pieces, name, cut):
        shutil.rmtree(tmp_path / "experiments", ignore_errors=True)
        path = ours(tmp_path)
        (path / "job.json").write_text("{}")
        intact = (path / name).read_bytes() if (path / name).exists() else b""
        (path / name).write_bytes(intact[:cut] + b"".join(pieces))
        found = rows(tmp_path, compare.ReportOptions(cost=1.0, gpu_type="h100"))
        assert all(make(found, H100) for make in build_report.FORMATS.values())
        assert json.loads(export.to_json(found, H100))
        assert "</html>" in page.html(found, H100)

    pieces, names = st.lists(PIECES, max_size=8), st.sampled_from(FILES)
    fuzz(check, examples, pieces, names, st.integers(0, 4000))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


@EXAMPLES
def test_results_of_another_shape_break_no_format(tmp_path, examples):
    def check(data):
        shutil.rmtree(tmp_path / "experiments", ignore_errors=True)
        path = planned_run(tmp_path / "experiments", data.draw(st.sampled_from(["", "nccltrace"])))
        result = json.loads((path / "result.json").read_text())
        place = result
        for _ in range(data.draw(st.integers(1, 3))):
            key = data.draw(st.sampled_from(sorted(place)))
            if not isinstance(place[key], dict) or not place[key]:
                break
            place = place[key]
        place[data.draw(st.sampled_from(sorted(place)))] = data.draw(JSON)
        result[data.draw(st.sampled_from(
            ["checkpoint_saves", "command", "slow_hosts", "compile_s", "versions", "x"]
        ))] = data.draw(JSON)  # fmt: skip
        (path / "result.json").write_text(json.dumps(result))
        found = rows(tmp_path, compare.ReportOptions(cost=1.0))
        predictions.add_predictions(found, GPU_TYPES, every=True)
        assert tables.text(found, H100)
        assert json.loads(export.to_json(found, H100))
        assert "</html>" in page.html(found, H100)

    fuzz(check, examples, st.data())


@pytest.mark.parametrize("seconds", [1e12, 6.78e16, 1e300, -1, 0])
def test_impossible_dates_are_left_out(tmp_path, seconds):
    path = planned_run(tmp_path / "experiments", "")
    result = json.loads((path / "result.json").read_text())
    (path / "result.json").write_text(json.dumps(result | {"started": seconds, "ended": seconds}))
    assert not re.search("(started|ended) [0-9]{4}-", page.html(rows(tmp_path), H100))


# --- NVIDIA's parser ---

AWK = r"""
# An independent reader with the regular expressions that NVIDIA's parser uses (needs gawk).
match($0, /iteration ([0-9]+)\/49/, it) && match($0, /train_step_timing in s: ([0-9.]+)/, t) &&
match($0, /TFLOPS_per_GPU: ([0-9.]+(e[-+]?[0-9]+)?)/, f) {
  if (it[1] > last) last = it[1]
  if (it[1] >= 35 && it[1] <= 44) { n++; sum += t[1]; squares += t[1]^2; rate += f[1] }
}
END {
  if (last < 44) { print "Failed", last; exit }
  mean = sum / n
  printf "Success %.3f %.3f %.2f\n", mean, sqrt(squares / n - mean^2), rate / n
}
"""


@pytest.mark.exhaustive
def test_nvidia_parser_reads_our_log(tmp_path):
    """A real run of 50 steps, read with gawk, gives the same mean as result.json."""
    gawk = needs("gawk")
    command = [sys.executable, "-m", "maxbench.train", "--config", "configs/llama31_8b.py:tiny"]
    command += ["--cpu_devices", "1", "--steps", "50", "--layers", "1", "--seq", "16"]
    command += ["--output_dir", str(tmp_path)]
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "SLURM_CONF")}
    subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True)
    (log,) = tmp_path.rglob("log-*.out")
    output = subprocess.run(
        [gawk, AWK, str(log)], capture_output=True, text=True, check=True
    ).stdout
    status, mean, *_ = output.split()
    (row,) = rows(tmp_path)
    assert status == "Success"
    assert float(mean) == pytest.approx(row.step["mean"], abs=1e-3)
    # The text log alone gives the same figures.
    alone = tmp_path / "alone" / log.name
    alone.parent.mkdir()
    shutil.copy(log, alone)
    (text,) = rows(alone)
    assert text.step["mean"] == pytest.approx(row.step["mean"], abs=1e-3)
    assert text.record.loss.keys() == row.record.loss.keys()


# --- the command ---


def test_help_lists_the_flags_of_report(capsys):
    assert entry.run("report", ["--help"]) == 0
    output = capsys.readouterr().out
    assert "--cost" in output
    assert "--dry_run" not in output


@pytest.mark.parametrize("width", [80, 120, 400])
def test_table_fits_the_terminal(tmp_path, width):
    """Names have lines of their own, optional columns are left out, and no cell is cut."""
    ours(tmp_path, stamp=1)
    ours(tmp_path, stamp=2, status="died", reason="a reason that is long " * 9)
    wide = dataclasses.replace(H100, width=width)
    text = tables.text(rows(tmp_path, wide), wide)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.startswith("pretrain_llama31_8b_") for line in lines) == 2
    assert ("Experiment" in text) == (width == 400)
    for head in ("Mean s", "TFLOPS/GPU", "Tokens/s", "Verdict"):
        assert head in text
    assert "2.000 to 2.000" in text or width == 80


def test_rates_of_virtual_devices_are_left_out(tmp_path):
    ours(tmp_path, device={"kind": "cpu", "count": 8})
    (row,) = rows(tmp_path)
    cells_of_row = tables.cells(row)
    assert {cells_of_row[head] for head in tables.NOT_ON_CPU} == {"-"}
    assert cells_of_row["Tokens/s"] != "-"
    assert tables.record(row)["tflops_per_gpu_mean"] > 0  # data stays
    assert (tables.record(row)["loss_first"], tables.record(row)["loss_last"]) == (2.0, 2.0)


def test_legend_is_folded_where_the_output_is_no_terminal(tmp_path):
    ours(tmp_path)
    *_, legend = run("--full_names", str(tmp_path)).split("\n\n")
    assert legend.startswith("Std is the population's.")
    assert "PASS from" in " ".join(legend.split())
    assert max(map(len, legend.splitlines())) <= 93
