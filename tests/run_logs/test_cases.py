"""Logs of cases/, in the form of public ones, with their right values. Numbers are invented."""

import json
import pathlib

import pytest

from maxbench.reporting import compare, tables
from maxbench.run_logs import readers
from maxbench.run_logs.record import Origin

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


# Case -> format, step time of step 5, loss of step 5, gbs, number of steps of the run.
OTHERS = {
    "other_nanotron.log": ("nanotron", 11.5, 10.0, 64, 50),
    "other_hf_trainer.log": ("hf-trainer", 12.27, 10.0315, 128, 50),
    "other_olmo.log": ("olmo-core", 12.5, 10.032, 0, 50),
    "other_litgpt.log": ("litgpt", 0.25041, 10.032, 0, 0),
    "other_automodel.log": ("automodel", 12.27, 10.0315, 0, 0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_programs_are_read(name):
    r, (source, step_s, loss, gbs, steps) = read(name), OTHERS[name]
    assert (r.source, r.damaged, r.gbs, r.total_steps) == (source, 0, gbs, steps)
    assert r.step_s[5] == pytest.approx(step_s, rel=1e-5)
    assert r.loss[5] == loss
    assert compare.summarize(r, WINDOW).share is None  # none of them names its GPU type


def test_rate_of_two_digits_is_named():
    assert "step times are within 6%: the log rounds them" in read("other_olmo.log").inferred


def test_time_of_one_of_several_microbatches_is_no_step_time(tmp_path):
    (tmp_path / "train.log").write_text(
        "".join(
            f"Epoch 1 | iter {4 * i} step {i} | loss train: 2.500, val: n/a | iter time: 250.41 ms "
            "(step) remaining time: 0:10:12\n"
            for i in range(1, 9)
        )
    )
    (r,) = readers.read([tmp_path / "train.log"])
    assert (r.source, r.step_s) == ("litgpt", {})
    assert r.unread == ["its times are those of one of the microbatches of a step"]


def test_evaluation_bars_of_a_trainer_without_a_head_are_no_steps(tmp_path):
    """Their number of steps may be that of more bars than the run's: the run's have losses."""
    train = "\r {0}%|█   | {0}/50 [01:10<05:00,  9.40s/it]\n{{'loss': 2.5, 'epoch': 0.1}}\n"
    evaluation = "".join(f"\r {i}%|█   | {i}/99 [00:01<00:01, 90.00it/s]" for i in range(1, 99))
    text = "".join(train.format(i) for i in range(1, 9)) + evaluation + "\n{'eval_loss': 2.5}\n"
    (tmp_path / "train.log").write_text(text)
    (r,) = readers.read([tmp_path])
    assert (sorted(r.step_s), r.step_s[5], r.total_steps) == ([*range(8)], 9.4, 50)


def test_steps_of_a_second_epoch_follow_those_of_the_first(tmp_path):
    bar = "\rEpoch {}: 9%|█  | {}/20 [{:02}:{:02}<00:00,  2.00it/s, train_loss=2.5]"
    clock = [(epoch, i, i // 120, i // 2 % 60) for epoch in (0, 1) for i in range(1, 21)]
    (tmp_path / "train.log").write_text("".join(bar.format(*x) for x in clock) + "\n")
    (r,) = readers.read([tmp_path])
    assert (r.source, r.last, sorted(r.loss)) == ("lightning", 39, [*range(40)])
    assert {*r.step_s.values()} == {0.5}


@pytest.mark.parametrize("end", ["", "ValueError: no such thing\n"])
def test_log_of_no_known_program_is_not_read(tmp_path, end):
    """It may have an error and be finished: what its lines mean is unknown."""
    text = "".join(f"[trainer] step={i} | loss=2.5 | 9.4 sec\n" for i in range(9))
    (tmp_path / "train.log").write_text(text + end)
    row = compare.summarize(readers.read([tmp_path / "train.log"])[0], WINDOW)
    assert (tables.status(row), row.verdict) == ("Not read", "-")
    assert "--format_table FILE" in row.why
    assert tables.counts([row]) == {
        "success_experiments": 0, "failed_experiments": 0, "not_read_experiments": 1,
        "success_rate": 0,
    }  # fmt: skip


def test_log_that_ends_with_an_error_before_its_first_step_died(tmp_path):
    (tmp_path / "train.log").write_text("num_layers: 32\nValueError: no such thing\n")
    row = compare.summarize(readers.read([tmp_path / "train.log"])[0], WINDOW)
    assert (tables.status(row), row.why) == ("Failed", "ValueError: no such thing")


# --- exports without a column of step times ---


def test_download_of_tensorboard_has_its_run_and_tag_in_its_name():
    r = read("run-llama31_8b-tag-iteration-time.csv")
    assert (r.name, r.status, r.model, r.size) == ("llama31_8b", "done", "llama31", "8b")
    assert {*r.step_s.values()} == {12.27}


@pytest.mark.parametrize("tag", ["perf_step_time_seconds", "iteration-time", "step_s (1)"])
def test_tag_in_the_name_of_a_file(tmp_path, tag):
    (tmp_path / f"run-a-tag-{tag}.csv").write_text("Wall time,Step,Value\n1e9,1,9.4\n2e9,2,9.5\n")
    (r,) = readers.read([tmp_path])
    assert (r.name, r.step_s) == ("a", {1: 9.4, 2: 9.5})


def test_step_time_is_the_difference_of_times_over_that_of_steps(tmp_path):
    """Step times of TensorBoard's download of a loss, and of a history of Weights & Biases."""
    steps = range(10, 101, 10)
    download = "".join(f"{1e9 + 9.4 * i},{i},2.5\n" for i in steps)
    (tmp_path / "run-a-tag-lm loss.csv").write_text("Wall time,Step,Value\n" + download)
    history = "".join(f"{i},{1e9 + 4.7 * i},2.5\n" for i in steps)
    (tmp_path / "b.csv").write_text("_step,_timestamp,train/loss\n" + history)
    for r, step_s in zip(readers.read([tmp_path]), (9.4, 4.7), strict=True):
        assert (r.interval, sorted(r.step_s)) == (10, [*steps[1:]])
        assert [*r.step_s.values()] == pytest.approx([step_s] * 9)
        assert "step time inferred: from the elapsed time of its lines" in r.inferred


def test_evaluations_and_pauses_are_no_steps(tmp_path):
    """Steps of 1 s; an evaluation of 1.5 s at every tenth step, and an hour between two steps."""
    rows, time = [], 1e9
    for i in range(1, 51):
        time += 3600 if i == 25 else 1
        rows.append(f"{i},{time},2.5,")
        if i % 10 == 0:
            time += 1.5
            rows.append(f"{i},{time},,2.4")
    text = "_step,_timestamp,train/loss,validation/loss\n" + "\n".join(rows)
    (tmp_path / "a.csv").write_text(text)
    (r,) = readers.read([tmp_path])
    assert {*r.step_s.values()} == {1}
    near = {x for i in range(10, 51, 10) for x in (i, i + 1)}
    assert {*range(2, 51)} - r.step_s.keys() == {*near, 25} - {51}
    assert "left out: 10 intervals with an evaluation or a pause" in r.inferred


# --- MLPerf ---


def mlperf_log(folder: pathlib.Path, lines: str) -> pathlib.Path:
    """A log of a submission, with the description of its system."""
    system = {"number_of_nodes": "2", "accelerators_per_node": "4",
              "accelerator_model_name": "NVIDIA Blackwell Ultra GPU (GB300)"}  # fmt: skip
    path = folder / "Org" / "results" / "sys1" / "llama31_8b" / "result_0.txt"
    path.parent.mkdir(parents=True)
    path.write_text(lines)
    (folder / "Org" / "systems").mkdir()
    (folder / "Org" / "systems" / "sys1.json").write_text(json.dumps(system))
    return path


def mllog(key: str, value: object, **metadata: object) -> str:
    event = {"namespace": "", "time_ms": 1, "event_type": "POINT_IN_TIME", "key": key}
    metadata = {"file": "a.py", "lineno": 1, **metadata}
    return f":::MLLOG {json.dumps(event | {'value': value, 'metadata': metadata})}\n"


HEAD = "".join(
    mllog(key, value)
    for key, value in {
        "submission_benchmark": "llama31_8b", "submission_platform": "2xNVIDIA GB200",
        "global_batch_size": 16, "max_sequence_length": 8192, "max_steps": 1200000,
        "target_accuracy": 3.3,
    }.items()
)  # fmt: skip


def test_mlperf_log_of_nvidia(tmp_path):
    """One step of 32 has its time; evaluations and the mean of a block are no steps."""
    steps = "".join(
        mllog("tracked_stats", {"train_step_time": 0.35, "reduced_train_loss": 4.5},
              step=float(i), samples_count=16.0 * i)
        + mllog("tracked_stats", {"validation_step_time": 0.1}, step=1, samples_count=16)
        for i in range(31, 3200, 32)
    ) + mllog("tracked_stats", {"train_step_time": 0.9}, samples_count=51200)  # fmt: skip
    end = mllog("run_stop", None, step=3200, samples_count=51200, status="success")
    r = readers.read([mlperf_log(tmp_path, HEAD + steps + end)])[0]
    assert (r.source, r.status, r.reason) == ("mlperf", "done", "ended at its target loss")
    assert (r.model, r.size, r.gbs, r.seq, r.gpus) == ("llama31", "8b", 16, 8192, 8)
    assert r.gpu_type == "gb300"  # the log names another one
    assert (len(r.step_s), {*r.step_s.values()}, r.loss[31]) == (100, {0.35}, 4.5)
    row = compare.summarize(r, compare.ReportOptions())
    assert row.step["mean"] == 0.35
    assert "the log has one of 32 steps" in " ".join(row.notes)


LAYOUT = {  # keys and values of AMD's logs of 6.0
    "tensor_parallelism": 2, "pipeline_parallelism": 4, "context_parallelism": 1,
    "expert_parallelism": 1, "micro_batch_size": 2, "gradient_accumulation_steps": 1.0,
    "config_filename": "config_MI355X_1x8x1.sh",
}  # fmt: skip
PRECISIONS = [
    ("lowest_numerical_precision_linear", "nvfp4", "nvfp4"),
    ("lowest_numerical_precision_in_linear", "bfloat16", "bf16"),
    ("lowest_numerical_precision_linear", "mxfp4", "mxfp4"),
    ("lowest_numerical_precision_linear", "", ""),
    ("lowest_numerical_precision_in_attn", "fp8", ""),
]


@pytest.mark.parametrize(("key", "precision", "dtype"), PRECISIONS)
def test_mlperf_log_of_6_names_layout_and_precision(tmp_path, key, precision, dtype):
    settings = "".join(mllog(*pair) for pair in {**LAYOUT, key: precision}.items())
    steps = "".join(
        mllog("tracked_stats", {"train_step_time": 0.35, "reduced_train_loss": 4.5}, step=float(i))
        for i in range(31, 320, 32)
    )
    r = readers.read([mlperf_log(tmp_path, HEAD + settings + steps)])[0]
    assert r.layout == {"tp": 2, "pp": 4, "cp": 1, "ep": 1, "mbs": 2}
    assert (r.dtype, r.origin("dtype")) == (dtype, Origin.LOG if dtype else Origin.UNKNOWN)
    row = compare.summarize(r, compare.ReportOptions())
    assert row.step["mean"] == 0.35
    assert row.share is None or dtype in ("nvfp4", "bf16")


def test_mlperf_log_of_amd_has_samples_per_second_of_blocks(tmp_path):
    blocks = "".join(
        mllog("tracked_stats", {"throughput": 32.0}, step=12288 * i) for i in range(1, 5)
    )
    end = mllog("run_stop", None, samples_count=9, status="aborted")
    r = readers.read([mlperf_log(tmp_path, HEAD + blocks + end)])[0]
    assert (r.status, r.reason) == ("stopped", "stopped before its target loss")
    assert r.step_s == {768 * i - 1: 0.5 for i in range(1, 5)}
