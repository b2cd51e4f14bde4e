"""Right values of logs that leave settings out, change them, or have unusual steps.

The logs of tests/run_logs/cases are re-typed in the form of public ones, with invented numbers.
"""

import os
import pathlib
import shutil

import pytest

from maxbench.reporting import build_report, compare, fast_steps
from maxbench.run_logs import readers
from maxbench.run_logs.record import Origin
from tests.reporting.test_report import nemo

CASES = pathlib.Path(__file__).parents[1] / "run_logs" / "cases"
H100 = {"gpu_type": "h100"}


def summary(path: pathlib.Path, **options) -> compare.RunSummary:
    """The one run of a log."""
    settings = compare.ReportOptions(**options)
    (record,) = readers.read([path], settings.given)
    return compare.summarize(record, settings)


def case(name: str, **options) -> compare.RunSummary:
    return summary(CASES / name, **options)


def test_sequence_length_is_not_taken_from_a_published_row(tmp_path):
    """7.0 s a step of Llama 3.1 8B would be 175 % of the published figure at 8,192 tokens."""
    log = nemo(tmp_path / "log-pretrain_llama31_8b_bf16_gpus8_gbs128_1.out", 50, 7.0, tflops=None)
    row = summary(log, **H100)
    assert (row.verdict, row.mfu, row.tokens_s) == ("-", None, None)
    assert row.why == "not comparable: its log does not name the sequence length"
    assert row.step["mean"] == pytest.approx(7.0, abs=0.01)
    shorter = summary(log, **H100, seq=4096)
    assert (shorter.verdict, shorter.why) == ("-", "not comparable: sequence 4096, published 8192")
    assert shorter.record.origin("seq") is Origin.USER
    assert shorter.mfu["full"] == pytest.approx(0.487, abs=1e-3)


def test_each_setting_has_its_origin(tmp_path):
    log = nemo(tmp_path / "log-pretrain_llama31_8b_bf16_gpus8_gbs64_1.out", 50, 12.3)
    row = summary(log, **H100, gbs=256, gpus=16, seq=8192)
    origins = {name: str(row.record.origin(name)) for name in ("model", "gpus", "gbs", "seq")}
    assert origins == {"model": "name", "gpus": "user", "gbs": "log", "seq": "user"}
    options = compare.ReportOptions(gbs=256, gpus=16)
    unused = "--gbs applies to no log: each names its own batch size"
    assert compare.unused([row], options) == [unused]
    ((text, rows),) = compare.origins([row]).items()
    assert rows == [row]
    assert text == (
        "sequence length 8192, number of GPUs 16 and GPU type h100 by the user; "
        "model llama31 8b and number format bf16 by the name of the log or its folder"
    )


def test_model_of_the_user_is_that_of_its_file(tmp_path):
    """A workload file that is not in configs/ gives its own FLOPs."""
    file = tmp_path / "half.py"
    text = pathlib.Path("configs/llama31_8b.py").read_text()
    file.write_text(text.replace("layers=32", "layers=16").replace('"8b"', '"4b"'))
    given = {"gpus": 8, "gbs": 128, "seq": 8192, "dtype": "bf16", **H100}
    log = CASES / "nemo_val.log"
    whole, half = (summary(log, config=x, **given) for x in ("llama31_8b", str(file)))
    assert 0.5 < half.tflops["mean"] / whole.tflops["mean"] < 0.6


def test_growing_batch_counts_with_the_batch_of_its_steps():
    row = case("ramp_megatron.log", **H100, window=(2, 6))
    assert row.tokens_s == pytest.approx(85_459, abs=1)
    assert row.mfu["full"] == pytest.approx(0.626, abs=5e-4)
    assert (row.verdict, row.record.gbs) == ("PASS", 128)
    assert "gbs changes from 128 to 256 at step 7" in row.notes


@pytest.mark.parametrize(
    ("window", "steps"), [((2, 8), (2, 6)), ((5, 9), (7, 9)), ((7, 9), (7, 9))]
)
def test_window_does_not_cross_a_change_of_the_batch(window, steps):
    row = case("ramp_megatron.log", **H100, window=window)
    assert row.window == steps
    assert row.tokens_s == pytest.approx(85_459, abs=1)
    noted = f"steps {steps[0]} to {steps[1]} count: the batch changes" in row.notes
    assert noted == (window != steps)


def test_growing_batch_of_an_export(tmp_path):
    log = tmp_path / "export.csv"
    rows = (f"{i},{6.0 if i < 40 else 12.0},{64 if i < 40 else 128}\n" for i in range(50))
    log.write_text("_step,iteration-time,batch-size\n" + "".join(rows))
    row = summary(log, seq=8192)
    assert (row.window, row.record.gbs, row.tokens_s) == ((40, 44), 128, 128 * 8192 / 12)
    row = summary(log, seq=8192, window=(5, 30))
    assert (row.record.gbs, row.tokens_s) == (64, 64 * 8192 / 6)


def test_mean_over_two_batches_does_not_count(tmp_path):
    """Steps 25 to 30 have 128 and 256 sequences; their line has the last one and the mean time."""
    line = (
        " iteration {:8d}/ 80 | consumed samples: {} | elapsed time per iteration (ms): {} | "
        "global batch size: {} |\n"
    )
    lines = [line.format(i, 128 * i, 12000.0, 128) for i in (10, 20)]
    lines += [line.format(30, 128 * 25 + 256 * 5, 18000.0, 256)]
    lines += [line.format(i, 4480 + 256 * (i - 30), 24000.0, 256) for i in range(40, 90, 10)]
    log = tmp_path / "train.log"
    log.write_text("".join(lines))
    row = summary(log, seq=8192, window=(15, 29))
    assert row.window == (10, 19)
    assert row.tokens_s == pytest.approx(128 * 8192 / 12)


def test_batch_that_only_consumed_samples_show(tmp_path):
    """NeMo's older progress bars, of a run that resumes at step 100 with half of the batch."""
    bar = "\r| {}/200 [global_step={}.0, consumed_samples={}.0, train_step_timing in s=4.0]"
    samples = [6400 + 32 * i if i < 25 else 7200 + 64 * (i - 24) for i in range(50)]
    text = "".join(bar.format(100 + i, 99 + i, n) for i, n in enumerate(samples))
    log = tmp_path / "train.log"
    log.write_text(text)
    row = summary(log, seq=4096, window=(105, 114))
    assert (row.record.gbs, row.tokens_s) == (32, 32 * 4096 / 4)
    row = summary(log, seq=4096, window=(140, 144))
    assert (row.record.gbs, row.tokens_s) == (64, 64 * 4096 / 4)


def test_resumed_run_has_the_figures_of_its_last_steps(tmp_path):
    log = tmp_path / "train.log"
    shutil.copyfile(CASES / "resumed_running.log", log)
    for age, status in ((0, "running"), (1e6, "died")):
        now = log.stat().st_ctime
        os.utime(log, (now - age, now - age))
        row = summary(log, **H100)
        assert (row.record.status, row.window) == (status, (149, 158))
        assert row.tokens_s == pytest.approx(85_459, abs=1)
        assert row.verdict == ("-" if status == "running" else "DIED")
        assert "steps 149 to 158 count: the run starts later" in row.notes


def test_running_run_before_the_window_has_the_figures_of_its_last_steps(tmp_path):
    log = nemo(tmp_path / "log-pretrain_llama31_8b_bf16_gpus8_1.out", 20, 12.3)
    os.utime(log)
    row = summary(log, **H100)
    assert (row.why, row.window) == ("still running", (10, 19))
    assert "steps 10 to 19 count: the run is at step 19" in row.notes
    nemo(log, 1, 12.3)
    os.utime(log)
    assert summary(log, **H100).step is None  # the first step has the start


def test_format_is_read_or_unknown(tmp_path):
    row = case("torchtitan_mxfp8.log", window=(2, 8))
    assert (row.record.dtype, row.record.format) == ("fp8", "mxfp8")
    assert row.mfu["full"] == pytest.approx(0.224, abs=5e-4)
    log = tmp_path / "train.log"
    lines = (CASES / "torchtitan_mxfp8.log").read_text().splitlines(True)
    log.write_text("".join(x for x in lines if "MXFP8" not in x))
    row = summary(log, window=(2, 8))
    assert (row.record.dtype, row.mfu, row.verdict) == ("", None, "-")
    assert row.tokens_s == pytest.approx(139_200, rel=1e-3)
    log.write_text(log.read_text().replace("N/A", "44.89%"))
    row = summary(log, window=(2, 8))
    assert (row.record.dtype, row.record.origin("dtype")) == ("bf16", Origin.PROGRAM)
    log.write_text("".join(x for x in log.read_text().splitlines(True) if "size:" not in x))
    assert summary(log, window=(2, 8)).record.dtype == ""  # its head may lack other lines too


def test_loss_of_ranks_that_compute_none_is_no_value():
    row = case("torchtitan_pp_loss.log", window=(2, 8))
    assert row.loss == (12.0, 9.53194)


def test_nan_of_an_export_is_no_loss_where_nothing_was_logged():
    row = case("wandb_history_nan.csv", window=(2, 15))
    assert (row.record.status, row.ok, row.loss) == ("done", True, (12.0, 8.9393))
    assert row.step["mean"] == 12.27


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        (lambda i: "2.5" if i < 30 else "NaN", "loss is nan at step 30"),
        (lambda i: "NaN" if i == 30 else "2.5", "loss is nan at step 30"),
        (lambda i: "" if i % 10 else "2.5" if i < 30 else "NaN", "loss is nan at step 30"),
        (lambda i: "NaN" if i % 10 else "2.5", ""),
        (lambda i: "NaN" if i % 10 or i > 30 else "2.5", "loss is nan at step 31"),
        (lambda i: "" if i % 10 else "2.5", ""),
    ],
)
def test_nan_that_a_program_logged_is_found_in_an_export(tmp_path, cell, why):
    log = tmp_path / "export.csv"
    lines = (f"{i},9.4,{cell(i)}\n" for i in range(50))
    log.write_text("_step,iteration-time,lm loss\n" + "".join(lines))
    row = summary(log)
    assert (row.why if row.verdict == "DIED" else "") == why


def test_steps_faster_than_the_peak_are_of_another_gpu_type():
    """A slow first step changes nothing: the window counts."""
    for window in ((2, 8), (0, 9)):
        row = case("wrong_gpu_type.log", **H100, window=window)
        assert (row.verdict, row.mfu, row.window) == ("-", None, window)
        assert row.why == "not comparable: its steps are faster than the peak of its GPUs"
        assert row.step["median"] == 5.2
        (note,) = (x for x in row.notes if "faster" in x)
        assert "5.2 s for FLOPs of at least 6.82 s; the GPU type of this run is another" in note


def test_steps_at_the_peak_are_not_dispatch():
    """The least step time lies between the fast and the slow steps: none is left out."""
    times = {i: 1.7 + 0.1 * (i % 2) for i in range(50)}
    least = dict.fromkeys(times, 1.75)
    assert fast_steps.find(times, least, "8 h100").steps == frozenset()
    assert fast_steps.find({**times, 9: 0.2}, least, "8 h100").steps == {9}


def test_spike_is_named_and_judged_by_the_rule_of_its_program():
    """NVIDIA's recipes of MaxText publish the last step, those of NeMo the mean of the window."""
    row = case("maxtext_checkpoint_spike.log")
    assert "step 40 takes 21.31 s, 10.4 x the median of 2.05 s" in row.notes
    assert (row.step["median"], row.mfu, row.verdict) == (2.05, None, "-")
    row = case(
        "maxtext_checkpoint_spike.log", config="llama31_8b", gpus=8, seq=8192, dtype="bf16", **H100
    )
    assert row.why == "not comparable: GBS 16, published 128"


@pytest.mark.parametrize(
    ("program", "verdict", "words"),
    [
        ("nemo", "FAIL", "the mean, as NVIDIA for NeMo publishes; 12.3 s by the median is 99.8%"),
        (
            "maxtext",
            "PASS",
            "the last step, as NVIDIA for MaxText publishes; 21.3 s by the mean is 57",
        ),
    ],
)
def test_spike_leaves_the_other_figure_beside_the_verdict(tmp_path, program, verdict, words):
    lines = {
        "nemo": "Training epoch 0, iteration {}/49 | train_step_timing in s: {}\n",
        "maxtext": "completed step: {}, seconds: {}, loss: 2.5\n",
    }
    log = tmp_path / "log-pretrain_llama31_8b_bf16_gpus8_gbs128_1.out"
    log.write_text("".join(lines[program].format(i, 102.3 if i == 40 else 12.3) for i in range(50)))
    row = summary(log, **H100, seq=8192)
    assert (row.verdict, words in row.why) == (verdict, True), row.why


def test_text_that_quotes_the_key_of_a_step_time_is_no_damaged_line():
    row = case("nemo_val.log")
    assert (row.record.damaged, row.record.last) == (0, 49)


def test_origins_and_requests_stand_in_one_place_of_each_format():
    asked = compare.ReportOptions(paths=(str(CASES / "wrong_gpu_type.log"),), **H100)
    report = build_report.read(asked, width=0)
    for form in ("table", "md", "html"):
        assert report.text(form).count("GPU type h100 by the user") == 1, form
    assert '"gpu_type": "user"' in report.text("json")
