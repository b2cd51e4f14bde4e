"""Logs of every program in the table of formats, in every wrapping that they are found in."""

import gzip
import json
import math
import pathlib
import random
import sys
import time
from unittest import mock

import pytest

from maxbench.reporting import compare, difference
from maxbench.run_logs import formats, readers, text_logs
from maxbench.run_logs.line_prefixes import strip_prefixes, time_of
from maxbench.run_logs.record import Given, RunRecord
from tools import log_formats_table, log_samples
from tools.log_samples import GBS, GPUS, LOGS, SEQ, STEP_S

H100 = compare.ReportOptions(gpu_type="h100")
NOTHING = Given()
CASES = pathlib.Path(__file__).parent / "cases"
WITHOUT_TOTAL = ("deepspeed", "lightning", "axlearn")  # they do not log the number of steps
INTERVAL = range(9, 50, 10)  # of logs that report every tenth step


def read(
    folder: pathlib.Path, text: str | bytes, name: str = "train.log", given: Given = NOTHING
) -> RunRecord:
    """The one run in a folder with one log."""
    data = text if isinstance(text, bytes) else text.encode()
    (folder / name).write_bytes(data)
    (record,) = readers.read([folder], given)
    return record


def summary(folder: pathlib.Path, text: str | bytes, name: str = "train.log"):
    return compare.summarize(read(folder, text, name, H100.given), H100)


def figures(r: RunRecord) -> tuple:
    """The figures that must not depend on how a log is wrapped."""
    return r.source, r.status, r.step_s, r.loss, r.grad_norm, r.tflops, r.gpu_type, r.layout, r.gbs


def test_table_and_samples_have_the_same_programs():
    assert LOGS.keys() == formats.FORMATS.keys()


@pytest.mark.parametrize("name", LOGS)
def test_log_has_what_the_table_says(tmp_path, name):
    format, r = formats.FORMATS[name], read(tmp_path, LOGS[name](range(50), 50))
    assert (r.source, r.status, r.damaged, r.unread) == (name, "done", 0, [])
    assert sorted(r.step_s) == list(range(name == "lightning", 50))
    digits = {"lightning": 0.7, "composer": 0.005, "olmo-core": 0.005}  # as the log rounds them
    assert r.step_s[40] == pytest.approx(STEP_S, abs=digits.get(name, 1e-3))
    known = format.reads() | {*format.dumps, *format.infers}
    found = {
        "loss": r.loss, "grad_norm": r.grad_norm, "tokens_s": r.tokens_s, "tflops": r.tflops,
        "mfu": r.mfu,
        "peak": r.peak_bytes, "gpu_type": r.gpu_type == "h100", "model": r.model == "llama31",
        "layout": r.layout, "gpus": r.gpus == GPUS, "seq": r.seq == SEQ, "gbs": r.gbs == GBS,
    }  # fmt: skip
    assert {field for field, value in found.items() if value} == known - {"step", "step_s"}


def test_docs_have_the_table_of_this_revision():
    """If not: python -m tools.log_formats_table."""
    assert log_formats_table.PAGE.read_text() == log_formats_table.page()


WRAPPINGS = {
    "ANSI colours": lambda text: text.replace(": ", ":\x1b[32m \x1b[0m").replace("|", "\x1b[1m|"),
    "colours by cat -v": lambda text: text.replace("|", "^[[1m|^[[0m"),
    "srun --label": lambda text: "".join(f" 3: {x}" for x in text.splitlines(True)),
    "kubectl --prefix --timestamps": lambda text: "".join(
        f"[pod/train-0/main] 2026-01-01T00:00:00.123456789Z {x}" for x in text.splitlines(True)
    ),
    "CRI": lambda text: "".join(
        f"2026-01-01T00:00:00.1Z stdout F {x}" for x in text.splitlines(True)
    ),
    "Google Cloud's JSON": lambda text: "".join(
        json.dumps({"textPayload": x, "severity": "INFO"}) + "\n" for x in text.splitlines(True)
    ),
    "Windows line ends": lambda text: text.replace("\n", "\r\n"),
}
ENCODINGS = {
    "UTF-16": lambda text: text.encode("utf-16"),
    "UTF-16 without a mark": lambda text: text.encode("utf-16-le"),
    "UTF-32": lambda text: text.encode("utf-32"),
    "UTF-8 with a mark": lambda text: text.encode("utf-8-sig"),
    "gzip": lambda text: gzip.compress(text.encode()),
    "two gzip members": lambda text: (
        gzip.compress(text[:999].encode()) + gzip.compress(text[999:].encode())
    ),
    "gzip of UTF-16": lambda text: gzip.compress(text.encode("utf-16")),
}


@pytest.mark.parametrize("name", LOGS)
def test_wrapping_and_encoding_change_no_figure(tmp_path, name):
    text = LOGS[name](range(50), 50)
    plain = figures(read(tmp_path, text))
    for how, wrap in (WRAPPINGS | ENCODINGS).items():
        assert figures(read(tmp_path, wrap(text))) == plain, how


def test_zstandard_is_read_or_the_package_is_named(tmp_path):
    if sys.version_info >= (3, 14):
        from compression import zstd as zstandard
    else:
        zstandard = pytest.importorskip("zstandard")
    text = log_samples.nemo(range(50), 50)
    data = zstandard.compress(text.encode())
    r = read(tmp_path, data, "train.log.zst")
    assert (r.name, r.last, r.status) == ("train", 49, "done")
    r = read(tmp_path, data[:-30], "train.log.zst")
    assert "its Zstandard data ends early" in r.unread[0]
    with mock.patch.dict(sys.modules, {"zstandard": None, "compression": None}):
        r = read(tmp_path, data, "train.log.zst")
    assert (r.status, "pip install zstandard" in r.reason) == ("skipped", True)


def test_readable_part_of_a_damaged_file_counts(tmp_path):
    noise = random.Random(0)
    text = "".join(
        x + f"{noise.randrange(10**30)}\n" for x in log_samples.nemo(range(50), 50).splitlines(True)
    )
    data = gzip.compress(text.encode())
    r = read(tmp_path, data[: len(data) // 2], "log-a.out.gz")
    assert 0 < r.last < 49
    assert r.unread[0].startswith("its gzip data ends early")
    r = read(tmp_path, data[:-200] + b"\xff" * 100 + data[-100:], "log-a.out.gz")
    assert r.unread[0].startswith("its gzip data is damaged")


def test_prefixes_are_stripped_together():
    line = b"0: [rank0]:2026-01-01T00:00:02.5Z [2026-01-01 00:00:03,250] step: 3"
    assert strip_prefixes(line) == b"step: 3"
    assert time_of(line) - time_of(b"2026-01-01 00:00:02 x") == 1.25
    plain = [b" samples/sec: 1.2 | iteration 3/ 4 |", b"| 8/50 [00:10", b"{'a': 1}", b"3: ", b""]
    assert [strip_prefixes(x) for x in plain] == [*plain[:3], b"", b""]


@pytest.mark.parametrize("how", WRAPPINGS)
def test_reason_of_a_death_is_read_in_every_wrapping(tmp_path, how):
    text = log_samples.torchtitan(range(20), 50) + "torch.OutOfMemoryError: CUDA out of memory\n"
    row = summary(tmp_path, WRAPPINGS[how](text))
    assert (row.verdict, row.record.last) == ("DIED", 19)
    assert row.why == "torch.OutOfMemoryError: CUDA out of memory"


# --- means over an interval ---


@pytest.mark.parametrize("name", [n for n, f in formats.FORMATS.items() if f.means])
def test_means_over_an_interval(tmp_path, name):
    """While the run goes on, and when it is done; the mean with the start does not count."""
    slow_start = LOGS[name](INTERVAL, 50).replace("9400.0", "99999.0", 1)
    row = summary(tmp_path, slow_start)
    assert (row.record.status, row.record.interval, row.window) == ("done", 10, (30, 49))
    assert row.step["mean"] == pytest.approx(STEP_S, rel=1e-3)
    assert "steps 30 to 49 count: each time in the log is the mean of 10 steps" in row.notes
    row = summary(tmp_path, LOGS[name](range(9, 40, 10), 200))
    running = name not in WITHOUT_TOTAL
    assert (row.record.status == "running") == running
    assert row.step["mean"] == pytest.approx(STEP_S, rel=1e-3)


def test_last_steps_that_fill_no_interval_do_not_make_a_run_dead(tmp_path):
    row = summary(tmp_path, log_samples.megatron(INTERVAL, 55))
    assert (row.ok, row.record.last) == (True, 49)
    dead = log_samples.megatron(INTERVAL, 55) + "torch.OutOfMemoryError: CUDA out of memory\n"
    assert "out of memory" in summary(tmp_path, dead).why


# --- values that are calculated ---


def test_step_time_follows_from_the_times_of_day_without_a_batch(tmp_path):
    lines = log_samples.torchtitan(range(50), 50).splitlines(True)
    r = read(tmp_path, "".join(x for x in lines if " step: " in x or "CUDA" in x))
    assert sorted(r.step_s) == list(range(1, 50))
    assert r.step_s[40] == pytest.approx(STEP_S, abs=2e-3)
    assert "step time inferred: from the times of day of its lines" in r.inferred


def test_torchtitan_line_of_the_issue(tmp_path):
    text = "".join(
        f"[rank0]:[titan] 2026-01-01 00:00:{i:02},000 - root - INFO - step: {i} loss: 8.1 "
        "grad_norm: 1.2 memory: 47.55GiB(60.05%) tps: 7,012 tflops: 406.36 mfu: 41.09%\n"
        for i in range(1, 51)
    )  # fmt: skip
    row = summary(tmp_path, text)
    assert row.step["mean"] == pytest.approx(1.0)
    assert row.peak_gib == pytest.approx(47.55)
    assert (row.tflops["mean"], row.record.tokens_s[9], row.record.last) == (406.36, 7012, 49)


def test_batch_of_a_deepspeed_log_is_rate_times_step_time(tmp_path):
    text = "".join(x for x in log_samples.deepspeed(range(50), 50).splitlines(True) if "iter" in x)
    r = read(tmp_path, text)
    assert (r.gbs, r.inferred) == (GBS, [f"gbs {GBS} is samples/s x step time"])


# --- whose TFLOP/s ---


def test_tflops_of_megatron_bridge_are_named_with_their_convention(tmp_path):
    row = summary(tmp_path, log_samples.bridge(range(50), 50))
    (note,) = [x for x in row.notes if "TFLOPS" in x]
    assert row.tflops["mean"] == 717.2
    assert note == (
        "TFLOPS/GPU 717.2 is Megatron-Bridge's, causal attention; by our formula it is 807.5 full, "
        "717.7 causal"
    )
    other = log_samples.bridge(range(50), 50).replace("717.2MODEL", "650.0 MODEL")
    assert "a convention of its own" in " ".join(summary(tmp_path, other).notes)
    full = log_samples.bridge(range(50), 50).replace("717.2", "807.0")
    assert not [x for x in summary(tmp_path, full).notes if "TFLOPS" in x]


# --- losses and gradient norms that are no finite numbers ---


@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize("loss", ["nan.0", "nan", "NaN", "inf", "-inf", "Infinity"])
def test_loss_that_is_not_finite_is_a_finding(tmp_path, name, loss):
    row = summary(tmp_path, LOGS[name](range(50), 50, loss=loss))
    assert row.verdict == "DIED"
    assert row.why in ("loss is nan at step 0", "loss is inf at step 0")


def test_loss_that_is_no_number_is_a_finding(tmp_path):
    for name in LOGS:
        row = summary(tmp_path, LOGS[name](range(50), 50, loss="1.2.3"))
        assert "the loss of step 0 and in 49 more is not a number" in row.notes, name


def test_progress_bar_with_nan_0_is_a_finding(tmp_path):
    bar = "".join(
        f"\rEpoch 0: : {i}%|███| {i}/50 [07:57<00:00, reduced_train_loss="
        f"{'nan.0' if i > 20 else '7.310'}, global_step={i - 1}.0, train_step_timing in s=4.770]"
        for i in range(1, 51)
    )
    row = summary(tmp_path, bar)
    assert (row.why, row.record.last) == ("loss is nan at step 20", 49)


def test_loss_that_megatron_leaves_out_is_nan(tmp_path):
    good = log_samples.megatron(range(50), 50)
    (line,) = (line for line in good.splitlines() if "iteration       46/" in line)
    bad = line.replace(" lm loss: 1.196000E+01 |", "")
    bad = bad.replace("nan iterations:   0", "nan iterations:   1")
    row = summary(tmp_path, good.replace(line, bad))
    assert row.why == "loss is nan at step 45"
    assert "its log counts 1 iterations with a nan loss" in row.notes


def test_gradient_norm_that_is_not_finite_is_noted(tmp_path):
    log = log_samples.megatron(range(50), 50).replace("grad norm: 1.234", "grad norm: inf", 2)
    assert "grad norm is inf at step 0 and in 1 more steps" in summary(tmp_path, log).notes


# --- steps faster than the hardware ---


def maxtext_with(times: dict[int, float], steps: int, head: bool) -> str:
    text = log_samples.maxtext(range(steps), steps)
    text = text if head else "".join(x for x in text.splitlines(True) if "completed" in x)
    for i, seconds in times.items():
        text = text.replace(f"step: {i}, seconds: 9.400", f"step: {i}, seconds: {seconds:.3f}")
    return text


@pytest.mark.parametrize("head", [True, False], ids=["known peak", "unknown peak"])
def test_dispatched_steps_and_the_wait_for_them_are_left_out(tmp_path, head):
    text = maxtext_with({0: 60.0, 1: 0.3, 2: 106.0}, 6, head)
    row = summary(tmp_path, text)
    (note,) = [x for x in row.notes if "dispatch" in x]
    why = "its FLOPs take 6.82 s at the peak of 8 h100" if head else "the later steps take 9.4 s"
    assert note == (
        f"left out as dispatch, not work: step 1 (0.3 s); {why}; and step 2 (106 s), which waited "
        "for it"
    )
    assert row.step["mean"] == pytest.approx(9.4)
    row = summary(tmp_path, maxtext_with({0: 60.0, 1: 0.3, 2: 106.0}, 3, head))
    assert (row.window, row.step["mean"]) == ((2, 2), 106.0) or row.step["mean"] == 60.0


def test_run_faster_than_its_gpus_has_a_wrong_setting(tmp_path):
    times = dict.fromkeys(range(50), 1.0)
    row = summary(tmp_path, maxtext_with(times, 50, True))
    (note,) = [x for x in row.notes if "peak" in x]
    assert note.startswith(
        "steps 35 to 44 are faster than the peak of 8 h100: 1 s for FLOPs of at least 6.82 s"
    )
    assert (row.verdict, row.mfu) == ("-", None)


def test_growing_batch_is_not_dispatch(tmp_path):
    text = log_samples.megatron(range(50), 50)
    for _ in range(5):  # a batch that grows: the first steps have less work
        text = text.replace("9400.0 |", "900.0 |", 1)
        text = text.replace("batch size:   128", "batch size: 12", 1)
    assert not [x for x in summary(tmp_path, text).notes if "dispatch" in x]


# --- settings ---


def test_gpu_that_is_in_no_table_is_named(tmp_path):
    row = summary(tmp_path, log_samples.nemo(range(50), 50).replace("H100 80GB HBM3", "L40S"))
    assert any("its log names 'NVIDIA L40S" in note for note in row.notes)


@pytest.mark.parametrize("name", ["L40S", "H100", "H100 80GB HBM3 MIG 3g.40gb"])
def test_gpu_of_no_known_type_is_not_taken_for_that_of_the_path(tmp_path, name):
    text = log_samples.nemo(range(50), 50).replace("NVIDIA H100 80GB HBM3", f"NVIDIA {name}")
    row = compare.summarize(read(tmp_path, text, "log-h100.out"), compare.ReportOptions())
    assert (row.record.device, row.record.gpu_type) == (f"NVIDIA {name}", "")
    assert (row.mfu, row.verdict) == (None, "-")
    assert row.tokens_s


def test_card_is_compared_with_its_own_peak():
    (r,) = readers.read([CASES / "torchtitan_h100_pcie.log"])
    row = compare.summarize(r, compare.ReportOptions(window=(2, 8)))
    assert (r.device, r.gpu_type) == ("NVIDIA H100 PCIe", "h100pcie")
    assert row.mfu["full"] == pytest.approx(0.441, abs=1e-3)
    assert (row.verdict, row.why) == ("-", "nothing published for llama31 8b bf16 on h100pcie")


def test_several_gpu_types_are_named_and_none_is_taken(tmp_path):
    text = "GPU 1: NVIDIA B200\n" + log_samples.nemo(range(50), 50)
    r = read(tmp_path, text)
    assert (r.gpu_type, r.inferred[0]) == ("", "its log names several GPU types: b200, h100")


def test_layout_is_in_the_settings_of_a_run(tmp_path):
    row = summary(tmp_path, log_samples.torchtitan(range(50), 50))
    settings = difference.settings_of(row)
    assert (settings["program"], settings["layout.fsdp"]) == ("torchtitan", "4")


def test_file_that_is_named_itself_is_always_a_run(tmp_path):
    path = tmp_path / "output.1"
    path.write_text(log_samples.neox(range(50), 50))
    assert readers.read([tmp_path]) == []
    (r,) = readers.read([path])
    assert (r.source, r.last) == ("neox", 49)
    path.write_text("remember the milk\n")
    (r,) = readers.read([path])
    assert (r.status, r.reason) == ("skipped", text_logs.NOT_READ)


# --- event files and CSV exports ---

SCALARS = [
    *((tag, i, value) for i in range(50) for tag, value in
      [("perf/step_time_seconds", STEP_S + i % 3 / 10), ("learning/loss", 2.5)]),
]  # fmt: skip


def test_event_file_of_a_program_with_a_step_time(tmp_path):
    name = "events.out.tfevents.1700000000.node1"
    row = summary(tmp_path, log_samples.event_file(SCALARS), name)
    r = row.record
    assert (r.source, r.status, r.last, r.loss[0], r.unread) == ("tensorboard", "done", 49, 2.5, [])
    assert row.step["mean"] == pytest.approx(9.5, abs=0.02)


@pytest.mark.parametrize("at", [0, 5, 100, 2000])
def test_damaged_event_file_loses_one_record(tmp_path, at):
    data = bytearray(log_samples.event_file(SCALARS))
    data[at] ^= 4
    r = read(tmp_path, bytes(data), "events.out.tfevents.1.n")
    assert len(r.step_s) >= 49
    assert r.unread == ["1 damaged places in its event file"]


def event_files_of(folder, *starts: float, first: int = 0) -> RunRecord:
    """Two files in a folder: 40 steps of 2 s, and 20 steps of 3 s from `first` on."""
    for i, (start_s, steps, step_s) in enumerate(
        zip(starts, (range(40), range(first, first + 20)), (2.0, 3.0), strict=True)
    ):
        scalars = [(tag, s, x) for s in steps for tag, x in (("step_s", step_s), ("loss", 4 - i))]
        data = log_samples.event_file(scalars, start_s)
        (folder / f"events.out.tfevents.{i}.n").write_bytes(data)
    (record,) = readers.read([folder])
    return record


def test_event_files_whose_steps_begin_again_are_of_two_runs(tmp_path):
    r = event_files_of(tmp_path, 1e9, 2e9)
    assert (r.last, {*r.step_s.values()}, r.loss[19]) == (19, {3.0}, 3.0)
    assert "the log has 2 runs one after another: the last counts" in r.inferred


def test_event_file_of_a_resumed_run_goes_on(tmp_path):
    r = event_files_of(tmp_path, 1e9, 2e9, first=30)
    assert (r.last, r.step_s[29], r.step_s[30]) == (49, 2.0, 3.0)
    assert not [x for x in r.inferred if "runs" in x]


def test_event_files_of_several_processes_are_of_one_run(tmp_path):
    r = event_files_of(tmp_path, 1e9, 1e9 + 1)
    assert r.last == 39
    assert not [x for x in r.inferred if "runs" in x]


def test_event_file_without_a_step_time_names_its_tags(tmp_path):
    data = log_samples.event_file([("accuracy", i, 0.5) for i in range(5)])
    r = read(tmp_path, data, "events.out.tfevents.1.n")
    assert (r.status, r.reason) == ("skipped", "no tag of a step time; its tags are accuracy")


def test_history_and_chart_of_weights_and_biases(tmp_path):
    history = "_step,_timestamp,train/loss,throughput/duration,throughput/tokens_per_second\n"
    history += "".join(f"{i},{1e9 + i},2.5,9.4,111550.6\n" for i in range(50))
    r = read(tmp_path, history, "export.csv")
    assert (r.source, r.name, r.step_s[40], r.loss[40]) == ("wandb", "export", 9.4, 2.5)
    chart = (
        '"Step","a - train/step_time_ms","a - train/step_time_ms__MIN","b - train/step_time_ms"\n'
    )
    chart += "".join(f'"{i}","9400","1","{9500 if i else ""}"\n' for i in range(50))
    (tmp_path / "export.csv").write_text(chart)
    a, b = readers.read([tmp_path])
    assert (a.name, a.step_s[40], a.last) == ("a", 9.4, 49)
    assert (b.name, b.step_s[40], min(b.step_s)) == ("b", 9.5, 1)


def test_csv_without_steps_is_ignored_or_named(tmp_path):
    path = tmp_path / "prices.csv"
    path.write_text("item,price\nmilk,1\n")
    assert readers.read([tmp_path]) == []
    (r,) = readers.read([path])
    assert (r.status, r.reason) == ("skipped", "no column of steps: _step or step or global_step")
    path.write_text("step,price\n1,2\n")
    (r,) = readers.read([path])
    assert r.reason == "no tag of a step time; its tags are price"


def test_run_with_a_log_and_an_event_file_counts_once(tmp_path):
    times = [STEP_S + i % 3 / 10 for i in range(50)]
    lines = (f"completed step: {i}, seconds: {s:.3f}, loss: 2.5\n" for i, s in enumerate(times))
    (tmp_path / "train.log").write_text("".join(lines))
    r = read(tmp_path, log_samples.event_file(SCALARS), "events.out.tfevents.1.n")
    assert (r.source, r.inferred) == ("maxtext", ["the same steps are in events.out.tfevents.1.n"])


@pytest.mark.parametrize("text", ["train: it, loss=", "memory (MB) | ", "Checkpoint Save ", "0: "])
def test_line_of_a_megabyte_is_read_quickly(tmp_path, text):
    before = time.process_time()
    read(tmp_path, text * (2_000_000 // len(text)), "log-x.out")
    assert time.process_time() - before < 3


def test_number_of_a_field():
    numbers = {b"7,012": 7012, b"47.55GiB(60.05%)": 47.55, b"1.2PFLOPS": 1200, b"9.4,": 9.4}
    assert {token: formats.number(token) for token in numbers} == numbers
    assert [formats.number(x) for x in (b"1.2.3", b"x", b"", b"9.4.1", b"--1")] == [None] * 5
    assert math.isnan(formats.number(b"nan.0"))
