"""Text logs of other programs: steps, ends, several runs in a log, a run in several logs."""

import os
import pathlib
import re

import pytest

from maxbench.reporting import compare, tables
from maxbench.run_logs import formats, readers
from tools import log_samples

STEPS = {
    "maxtext": (
        b"completed step: 7, seconds: 9.4, TFLOP/s/device: 400.5, total_weights: 128, loss: 2.5",
        ("maxtext", 7, 0, {"step_s": 9.4, "tflops": 400.5, "tokens": 128.0, "loss": 2.5}),
    ),
    "nemo": (
        b"Training epoch 0, iteration 7/49 | global_batch_size: 128 | global_step: 7 | "
        b"train_step_timing in s: 9.4",
        ("nemo", 7, 50, {"gbs": 128.0, "index": 7.0, "step_s": 9.4}),
    ),
    "nemo's progress bar": (
        b"| 8/50 [00:10, train_step_timing in s=9.4, consumed_samples=1024.0]",
        ("nemo", 7, 50, {"step_s": 9.4, "samples": 1024.0}),
    ),
    "megatron": (
        b" iteration        8/      50 | elapsed time per iteration (ms): 9400.0 | lm loss: 2.5 |",
        ("megatron", 7, 50, {"step_s": 9.4, "loss": 2.5}),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_line_of_a_step_is_parsed(name):
    """All programs' steps are counted from 0."""
    line, expected = STEPS[name]
    (found,) = formats.FORMATS.find(line)
    assert (found.name, found.step, found.total, found.fields) == expected


CASES = pathlib.Path(__file__).with_name("cases")
H100 = compare.ReportOptions(gpu_type="h100", window=(1, 6))
OOM = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
RETRY = (
    "wandb: Network error (ConnectionError), entering retry loop.\n"
    "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='api.wandb.ai', port=443)\n"
    "urllib3.exceptions.ReadTimeoutError: Read timed out, retrying in 3 s\n"
)


def read(folder: pathlib.Path, text: str, name: str = "log-x.out", old: bool = True):
    """The one run of a folder with one log more."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (0, 0) if old else None)
    (record,) = readers.read([folder])
    return record


# --- how a run ended ---

# Program -> lines by which it ends, and what the report says.
ENDS = {
    "nemo": [("[1:00, v_num=]`Trainer.fit` stopped: `max_steps=20` reached.", "done", ""),
             ("Time limit reached. Elapsed time is 0:10:00. Signaling Trainer to stop.", "done",
              "ended after 0:10:00 as asked")],
    "maxtext": [("Training stopped: Target loss self.config.target_eval_loss=2.0 is achieved.",
                 "done", "ended at its target loss")],
    "torchtitan": [("[titan] 2026-02-24 19:48:02,123 - root - INFO - Training completed", "done",
                    "")],
    "neox": [("rank: 0 | time: 2026-01-05 10:00:00 | exiting the program at iteration 20", "done",
              "ended at 20 as asked"),
             (" validation results at the end of training for test data | lm_loss value: 3", "done",
              "")],
    "megatron": [(" [exiting program at iteration 20] datetime: 2026-01-05", "done",
                  "ended at 20 as asked"),
                 (" [exiting program after 229.4999 minutes] datetime: 2026-01-05", "done",
                  "ended after 229.4 minutes as asked"),
                 (" [exiting program after receiving SIGTERM.] datetime: 2026-01-05", "stopped",
                  "stopped by SIGTERM"),
                 (" [Exiting program due to straggler detection.]", "stopped",
                  "stopped by its straggler detection"),
                 ("[after training is done] datetime: 2026-01-05 10:00:00", "done", "")],
    "deepspeed": [("[INFO] [launch.py:367:main] Process 4711 exits successfully.", "done", "")],
    "levanter": [("INFO:levanter.trainer:Reached end of training data loader", "done", "")],
}  # fmt: skip
ENDS |= {
    "lightning": ENDS["nemo"],
    "composer": [("2026-01-05 10:00:00: rank0[77][MainThread]: INFO: llmfoundry.train: Done.",
                  "done", "")],
    "olmo-core": [("2026-01-05 host:0 olmo_core.train.trainer:764 INFO Training complete", "done",
                   ""),
                  ("WARNING Run canceled from all ranks. Reason: max time reached", "stopped",
                   "stopped")],
    "hf-trainer": [("{'train_runtime': 188.2, 'train_steps_per_second': 0.1, 'epoch': 1.0}",
                    "done", "")],
    "litgpt": [("| - Training Time : 188.20 s", "done", "")],
    "axlearn": [("axlearn trainer process  0 step       20] Reached max_step=20. Stopping", "done",
                 "")],
    "mlperf": [(':::MLLOG {"key": "run_stop", "value": null, "metadata": {"status": "success"}}',
                "done", "ended at its target loss"),
               (':::MLLOG {"key": "run_stop", "value": null, "metadata": {"status": "aborted"}}',
                "stopped", "stopped before its target loss")],
    # They end after their last step, without a word.
    "nanotron": [], "automodel": [], "nanogpt": [],
}  # fmt: skip
LIKE_MEGATRON = ("megatron-bridge", "megatron-deepspeed", "primus")
ENDS |= {name: ENDS["megatron"] for name in LIKE_MEGATRON}


def test_every_format_has_its_ends():
    assert ENDS.keys() == formats.FORMATS.keys()
    for name, format in formats.FORMATS.items():
        lines = "\n".join(line for line, *_ in ENDS[name]).encode()
        assert all(end.find(lines) for end in format.ends), name


@pytest.mark.parametrize(("name", "end"), [(n, e) for n, ends in ENDS.items() for e in ends])
def test_line_by_which_a_program_ends_wins_over_errors(tmp_path, name, end):
    line, status, sentence = end
    log = log_samples.LOGS[name](range(20), 500)
    record = read(tmp_path, f"{log}{line}\nConnectionResetError: Connection reset by peer\n")
    assert (record.status, record.reason.partition(": ")[0]) == (status, sentence)


def test_error_after_which_the_program_goes_on_is_no_death(tmp_path):
    log = log_samples.megatron(range(20), 50) + RETRY + OOM
    log += "".join(log_samples.megatron(range(20, 25), 50).splitlines(True)[-10:])
    assert read(tmp_path, log, old=False).status == "running"
    record = read(tmp_path, log)
    assert (record.status, "out of memory" in record.reason) == ("died", False)
    assert read(tmp_path, log + OOM, old=False).reason == OOM[9:].strip()


def test_error_of_another_process_may_precede_the_last_step(tmp_path):
    """The output of processes is not ordered; a general error is not certain to be the cause."""
    log = log_samples.torchtitan(range(20), 50).splitlines(True)
    record = read(tmp_path, "".join([*log[:-3], OOM, *log[-3:]]))
    assert (record.status, record.reason) == ("died", OOM[9:].strip())
    record = read(tmp_path, "".join([*log[:-3], "ValueError: x\n", *log[-3:]]))
    assert (record.status, record.reason) == ("died", "the log ends here")


def test_launcher_ends_well_only_if_all_processes_do(tmp_path):
    end = "Process 4711 exits successfully.\n['python', 'a.py'] exits with return code = -9\n"
    record = read(tmp_path, log_samples.deepspeed(range(20), 50) + end)
    assert (record.status, "return code = -9" in record.reason) == ("died", True)


def test_cases():
    """Logs in which an error decided, or the number of steps that a run was started for."""
    names = ("wandb_hiccup_torchtitan", "exit_interval", "shorter_second_run")
    records = readers.read(CASES / f"{name}.log" for name in names)
    rows = {r.path.stem: compare.summarize(r, H100) for r in records}
    hiccup = rows["wandb_hiccup_torchtitan"]
    assert (tables.status(hiccup), hiccup.verdict) == ("Success", "-")
    exit_interval = rows["exit_interval"]
    assert (tables.status(exit_interval), exit_interval.record.last) == ("Success", 9)
    assert "ended at 10 as asked" in exit_interval.explanation
    second = rows["shorter_second_run"]
    assert (tables.status(second), second.step["mean"], second.record.last) == ("Success", 18, 7)
    assert "the log has 2 runs one after another: the last counts" in second.notes


def test_running_case(tmp_path):
    text = (CASES / "wandb_hiccup_running_megatron.log").read_text()
    row = compare.summarize(read(tmp_path, text, old=False), H100)
    assert (tables.status(row), row.why) == ("Running", "still running")


# --- several runs in a log ---


def slower(log: str) -> str:
    return log.replace("ms): 9400.0", "ms): 18000.0")


@pytest.mark.parametrize("steps", [30, 50, 70])
def test_last_run_of_a_log_counts(tmp_path, steps):
    second = slower(log_samples.megatron(range(steps), steps)).replace(" 128 ", " 64 ")
    second = second.replace("bf16 ......", "fp8 .......").replace("128\n", "64\n")
    record = read(tmp_path, log_samples.megatron(range(50), 50) + second)
    assert (record.status, record.last, {*record.step_s.values()}) == ("done", steps - 1, {18.0})
    assert record.total_steps == steps
    assert record.inferred[-1] == "the log has 2 runs one after another: the last counts"
    assert record.gbs == 64


@pytest.mark.parametrize("steps", [30, 50, 70])
def test_last_of_several_runs_with_a_progress_bar_counts(tmp_path, steps):
    """The bars have no names: those of evaluations begin again within a run."""
    run = log_samples.Work(step_s=18.0, gbs=64)
    second = log_samples.hf_trainer(range(steps), steps, loss="7.5", of=run)
    record = read(tmp_path, log_samples.hf_trainer(range(50), 50) + second)
    assert (record.last, {*record.step_s.values()}, {*record.loss.values()}) == (
        steps - 1, {18.0}, {7.5}
    )  # fmt: skip
    assert (record.status, record.total_steps, record.gbs) == ("done", steps, 64)
    assert "the log has 2 runs one after another: the last counts" in record.inferred


def test_run_with_a_progress_bar_that_is_resumed_is_one_run(tmp_path):
    first, second = (log_samples.hf_trainer(steps, 50) for steps in (range(38), range(30, 50)))
    record = read(tmp_path, first + second)
    assert (record.status, record.last, len(record.step_s)) == ("done", 49, 50)
    assert not [x for x in record.inferred if "runs" in x]


def test_last_run_counts_although_it_died_before_its_first_step(tmp_path):
    start = log_samples.megatron([], 50)
    record = read(tmp_path, log_samples.megatron(range(50), 50) + start + OOM)
    assert (record.status, record.step_s, record.source) == ("died", {}, "megatron")
    assert "the log has 2 runs" in record.inferred[-1]


def test_resumed_run_is_one_run(tmp_path):
    """It repeats the steps after its last checkpoint."""
    first, second = (log_samples.megatron(steps, 50) for steps in (range(38), range(30, 35)))
    record = read(tmp_path, first + slower(second), old=False)
    assert (record.status, record.last, record.step_s[29], record.step_s[30]) == (
        "running", 34, 9.4, 18.0
    )  # fmt: skip
    assert not [x for x in record.inferred if "runs" in x]


def test_lines_of_several_processes_in_one_log_are_one_run(tmp_path):
    log = log_samples.maxtext(range(10), 10).splitlines(True)
    head, steps = log[:-10], log[-10:]
    labelled = [f"{rank}: {line}" for rank in (0, 1) for line in steps]  # not in the order of time
    record = read(tmp_path, "".join([*head, *labelled]))
    assert (record.last, record.status) == (9, "done")
    assert not [x for x in record.inferred if "runs" in x]


# --- a run in several logs ---


def test_logs_of_processes_are_one_run(tmp_path):
    """Rank 0 has the settings, the last one the steps, another one the cause."""
    head, steps = log_samples.megatron([], 50), log_samples.megatron(range(20), 50)
    for rank in range(16):
        text = head if rank == 0 else OOM if rank == 3 else ""
        text += steps[len(head) :] if rank == 15 else ""
        (tmp_path / f"megatron_rank{rank}.log").write_text(text)
    (record,) = readers.read([tmp_path])
    assert (record.last, record.seq, record.model) == (19, log_samples.SEQ, "llama31")
    assert (record.status, record.reason) == ("died", OOM[9:].strip())
    assert "its log is in 16 files" in record.inferred


def test_logs_of_processes_with_two_runs_each_have_two_runs(tmp_path):
    text = log_samples.maxtext(range(10), 10) + log_samples.maxtext(range(8), 8)
    for rank in range(4):
        (tmp_path / f"maxtext_rank{rank}.log").write_text(text)
    (record,) = readers.read([tmp_path])
    assert (record.last, record.status) == (7, "done")
    assert "the log has 2 runs one after another: the last counts" in record.inferred


def test_folders_of_torchrun_are_one_run(tmp_path):
    for attempt, steps in ((0, 12), (1, 20)):
        for rank in range(4):
            folder = tmp_path / "none_x" / f"attempt_{attempt}" / str(rank)
            folder.mkdir(parents=True)
            (folder / "stdout.log").write_text(log_samples.torchtitan(range(steps), 20))
            (folder / "stderr.log").write_text("")
    (record,) = readers.read([tmp_path])
    assert (record.last, record.status) == (19, "done")


def test_output_and_errors_are_one_run(tmp_path):
    (tmp_path / "log-x_7.out").write_text(log_samples.nemo(range(20), 50))
    record = read(tmp_path, OOM, "log-x_7.err")
    assert (record.status, record.last, record.reason) == ("died", 19, OOM[9:].strip())


def test_log_of_the_launcher_and_of_the_job_are_one_run(tmp_path):
    lines = log_samples.megatron(range(20), 50).splitlines(True)
    times = (f"ms): {9400 + i % 7}.{i}" for i in range(len(lines)))
    lines = [re.sub(r"ms\): [\d.]+", next(times), line) for line in lines]
    (tmp_path / "megatron.log").write_text("".join(lines))
    record = read(tmp_path, "".join(lines[-30:]) + OOM, "slurm-77.out")
    assert (record.last, record.status, record.reason) == (19, "died", OOM[9:].strip())
    assert "the same steps are in slurm-77.out" in record.inferred


@pytest.mark.parametrize("names", [("a_1", "a_2"), ("node1", "node2"), ("rank0", "rank2")])
def test_repeats_are_several_runs(tmp_path, names):
    for name in names:
        (tmp_path / f"megatron_{name}.log").write_text(log_samples.megatron(range(50), 50))
    assert len(readers.read([tmp_path])) == 2
