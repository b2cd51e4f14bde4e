"""The training loop: files that it writes, step times, stops, failures."""

import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types

import jax
import pytest

from maxbench.distributed import runtime, stragglers
from maxbench.distributed.progress import Progress
from maxbench.reporting import compare
from maxbench.run import log_writer, loop, process_stats, step_timer
from maxbench.run.result import RunResult
from maxbench.run_logs import readers
from maxbench.sharding import mesh
from maxbench.step import data, token_files
from tests.conftest import persistent_cache, processes, resolve
from tests.run.conftest import folder_of, losses, result_of

NUMBER = r"(\d+\.\d{3})"


@pytest.fixture(scope="module")
def eight_steps(tmp_path_factory):
    """Folder and printed text of `maxbench train` for eight steps on a CPU."""
    out = tmp_path_factory.mktemp("eight_steps")
    command = [sys.executable, "-m", "maxbench.train", "--config", "configs/llama31_8b.py:tiny"]
    command += ["--steps", "8", "--output_dir", str(out)]
    done = subprocess.run(command, env=processes(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder_of(out), done.stdout


@pytest.mark.core
@pytest.mark.xdist_group("eight_steps")
def test_tools_for_maxtext_and_nemo_read_the_log(eight_steps):
    """With the commands of NVIDIA's recipes: grep and tail."""
    folder, _ = eight_steps
    name, _, _ = folder.name.rpartition("_")
    readable = "pretrain_llama31_8b-tiny_bf16_gpus1_tp1_pp1_cp1_vp1_mbs2_gbs2"
    assert re.fullmatch(rf"{readable}_[0-9a-f]{{6}}_\d+", folder.name)
    assert (folder.parent.name, folder.parent.parent.name) == (name, "experiments")
    last = f"grep 'completed step:' {folder}/log-{name}.out | tail -1"
    line = subprocess.run(last, shell=True, capture_output=True, text=True).stdout
    pattern = rf"completed step: 7, seconds: {NUMBER}, TFLOP/s/device: {NUMBER}, "
    pattern += rf"Tokens/s/device: {NUMBER}, total_weights: 128, loss: {NUMBER}\n"
    assert re.fullmatch(pattern, line), line
    grep = ["grep", "-rh", "--include", "*.out", "train_step_timing", "experiments"]
    out = folder.parent.parent.parent
    lines = subprocess.run(grep, cwd=out, capture_output=True, text=True).stdout.splitlines()
    pattern = r"iteration ([0-9]+)/7 \| lr: .*train_step_timing in s: ([0-9.e-]+) \| "
    pattern += r"TFLOPS_per_GPU: ([0-9.e-]+) \| consumed_samples: (\d+)$"
    parsed = [re.search(pattern, line).groups() for line in lines]
    assert [int(p[0]) for p in parsed] == list(range(8))
    assert [int(p[3]) for p in parsed] == [2 * (i + 1) for i in range(8)]
    records = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    for record, fields in zip(records, parsed, strict=True):
        assert float(fields[1]) == pytest.approx(record["step_s"], rel=1e-3)


@pytest.mark.core
@pytest.mark.xdist_group("eight_steps")
def test_result_has_the_figures_of_the_run(eight_steps):
    folder, printed = eight_steps
    result = json.loads((folder / "result.json").read_text())
    assert (result["schema"], result["status"], result["steps_done"]) == (2, "done", 8)
    assert result["window"] == [4, 7]
    assert result["versions"]["jax"]
    assert result["config"]["model"]["embed"] == 128
    assert result["tokens_per_s"] == pytest.approx(128 / result["step_s"]["mean"])
    assert [i for i, _ in result["loss"].values()] == [0, 7]
    assert len({*losses(folder).values()}) == 8  # each step trains on other tokens
    for text in ("step time (steps 4 to 7)", "tokens/s", "at step 7\n", "not comparable"):
        assert text in printed


class SimulatedGpu:
    """Steps of 10 s on a simulated clock, with the log that records them.

    As on a GPU, the call that dispatches a step returns 0.1 s before that step ends. So no caller
    of it can see when the step before ended.
    """

    def __init__(self, monkeypatch, steps: int):
        self.now, self.times, self.folder, self.mllog = 0.0, {}, None, None
        self.progress = Progress()
        self.result = types.SimpleNamespace(mocked=False, start_to_first_step_s=None)
        self.ended = [threading.Event() for _ in range(steps)]
        self.recorded = [threading.Event() for _ in range(steps)]
        monkeypatch.setattr(step_timer.time, "perf_counter", lambda: self.now)

    def __call__(self, state, batch):
        i = state["step"]
        if i:
            self.end(i - 1)
            self.recorded[i - 1].wait(5)
        self.now = 10 * (i + 1) - 0.1
        metrics = {name: SimulatedScalar(self, i) for name in ("loss", "grad_norm")}
        return {"step": i + 1}, metrics

    def end(self, i: int) -> None:
        self.now = max(self.now, 10.0 * (i + 1))
        self.ended[i].set()

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """As log_writer.Log's."""

    def step(self, i, step_s, metrics, memory) -> None:
        """As log_writer.Log's."""
        self.times[i] = step_s
        self.recorded[i].set()


class SimulatedScalar:
    """An array that is ready when its step ends."""

    def __init__(self, gpu: SimulatedGpu, i: int):
        self.gpu, self.i = gpu, i

    def block_until_ready(self):
        if self.i == len(self.gpu.ended) - 1:  # no later step ends it
            self.gpu.end(self.i)
        self.gpu.ended[self.i].wait()
        return self

    def __float__(self):
        return 1.0


def never(step: int) -> str:
    return ""


def test_first_and_last_step_take_as_long_as_the_others(monkeypatch):
    gpu = SimulatedGpu(monkeypatch, 6)
    run = resolve("llama31_8b", "tiny", steps=6)
    assert loop.run_steps(run, gpu, never, gpu, {"step": 0}, itertools.repeat(None)) == ""
    assert gpu.times == {i: pytest.approx(10) for i in range(6)}


def test_stop_without_checkpoints_saves_nothing(monkeypatch):
    gpu = SimulatedGpu(monkeypatch, 1)
    run = resolve("llama31_8b", "tiny", steps=6)
    sigterm, batches = lambda i: "SIGTERM", itertools.repeat(None)
    stopped = loop.run_steps(run, gpu, sigterm, gpu, {"step": 0}, batches)
    assert stopped == "SIGTERM after step 0: nothing saved, no checkpoint was requested"


def test_stop_at_the_last_step_is_no_stop(monkeypatch):
    gpu = SimulatedGpu(monkeypatch, 6)
    run = resolve("llama31_8b", "tiny", steps=6)
    at_last = lambda i: "SIGTERM" if i == 5 else ""
    assert loop.run_steps(run, gpu, at_last, gpu, {"step": 0}, itertools.repeat(None)) == ""


def test_sigterm_finishes_the_step_and_saves(train, tmp_path, signal_at_step):
    signal_at_step(signal.SIGTERM, 2)
    code, printed = train(steps=100_000, checkpoint=True)
    assert code == 75
    folder, result = folder_of(tmp_path), result_of(tmp_path)
    last = max(losses(folder))
    reason = f"SIGTERM after step {last}: saved as step {last + 1}"
    assert (result["status"], result["reason"]) == ("stopped", reason)
    assert [p.name for p in folder.glob("checkpoints/*")] == [str(last + 1)]
    assert "SIGTERM after step" in printed


def test_ctrl_c_writes_the_result(train, tmp_path, signal_at_step):
    signal_at_step(signal.SIGINT, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    code, printed = train(steps=100_000)
    result, last = result_of(tmp_path), max(losses(folder_of(tmp_path)))
    assert (code, result["status"]) == (130, "stopped")
    assert result["reason"] == f"stopped by you at step {last}"
    assert printed.endswith(f"maxbench train: {result['reason']}\n")


def test_full_disk_is_the_reason(train, tmp_path, monkeypatch):
    init = log_writer.Log.__init__

    def init_on_full_disk(log, *args):
        init(log, *args)
        assert os.fstat(log.reserved_disk.fileno()).st_size == log_writer.RESERVED_BYTES
        log.jsonl.close()
        log.jsonl = open("/dev/full", "a", buffering=1)  # noqa: SIM115

    monkeypatch.setattr(log_writer.Log, "__init__", init_on_full_disk)
    code, printed = train(steps=9)
    assert code == 1
    assert "Traceback" not in printed
    result = result_of(tmp_path)
    reason = f"No space left on device: output_dir={str(tmp_path)!r}"
    assert (result["status"], result["reason"]) == ("failed", reason)
    files = {p.name for p in folder_of(tmp_path).iterdir()}
    assert {"result.json", "metrics.jsonl", f"log-{result['name']}.out"} <= files
    assert not any("part" in name for name in files)


@pytest.mark.parametrize("checkpoint", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_deleted_folder_is_the_reason(train, monkeypatch, checkpoint):
    """A checkpoint at the end creates the folder anew."""
    record_step = log_writer.Log.step

    def delete(log, i, *rest):
        record_step(log, i, *rest)
        if i == 1:
            shutil.rmtree(log.folder)

    monkeypatch.setattr(log_writer.Log, "step", delete)
    code, printed = train(steps=4, checkpoint=checkpoint)
    assert code == 1
    error, remedy = printed.splitlines()[-2:]
    assert error.startswith("maxbench train: error: the run's folder was deleted during the run: ")
    assert "Traceback" not in printed
    assert remedy.startswith("maxbench train: to do: ")
    assert "--output_dir" in remedy
    assert "results: " not in printed


@pytest.mark.exhaustive
def test_closed_pipe_does_not_end_the_run(tmp_path):
    """`maxbench train | head -n 1`: the reader leaves after the first line, the run goes on."""
    command = [sys.executable, "-m", "maxbench.train", "--config", "configs/llama31_8b.py:tiny"]
    command += ["--steps", "8", "--output_dir", str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=processes(), text=True, **pipes) as run:
        assert run.stdout.readline()
        run.stdout.close()
        errors = run.stderr.read()
    assert (run.returncode, errors) == (0, "")
    result = result_of(tmp_path)
    assert (result["status"], result["steps_done"]) == ("done", 8)


def test_a_text_is_learnt_by_bytes(train, tmp_path):
    code, printed = train(steps=16, mbs=8)
    assert code == 0, printed
    assert "data: LICENSE: 11,358 tokens, UTF-8 bytes, 1 document; 177 sequences" in printed
    (first, before), (_, after) = result_of(tmp_path)["loss"].values()
    assert (first, before) == (0, pytest.approx(math.log(512), abs=0.2))
    assert after < 3.8
    assert "entropy" not in printed


def test_a_host_that_reads_too_slowly_is_named(train, tmp_path, monkeypatch):
    """Two threads read a batch in 2 s each: of two steps, one waits."""
    read = token_files.Windows.__getitem__
    slowly = lambda self, i: (time.sleep(1), read(self, i))[1]
    monkeypatch.setattr(token_files.Windows, "__getitem__", slowly)
    monkeypatch.setattr(data, "PREFETCHED", 2)
    code, printed = train(steps=4)
    assert code == 0
    result = result_of(tmp_path)
    waited, whole = result["data_wait_s"], result["step_s"]["mean"]
    assert 0.1 < waited < whole
    share = f"{waited:.3f} s of a step, {waited / whole:.0%} of it"
    assert re.search(rf"waits for data +{share}: the host reads them too slowly", printed)


def test_invalid_files_end_the_run_with_the_reason(train, tmp_path, monkeypatch):
    code, printed = train(overrides={"train.data": "bigramm"})
    assert (code, [*tmp_path.iterdir()]) == (2, [])
    assert "error: data='bigramm' does not exist; give uniform, bigram" in printed
    monkeypatch.setattr(token_files, "CHECKED", 16)
    code, printed = train(steps=6, overrides={"model.vocab": 64})
    assert code == 2
    assert "token 34 is 65, and model.vocab=64 has ids from 0 to 63" in printed


def test_failing_figures_do_not_hide_how_the_run_ended(train, tmp_path, monkeypatch):
    original = RunResult.record_figures

    def fail(*_):
        monkeypatch.setattr(RunResult, "record_figures", original)
        raise ValueError("no figures")

    monkeypatch.setattr(RunResult, "record_figures", fail)
    with pytest.raises(ValueError, match="no figures"):
        train(steps=1)
    result = result_of(tmp_path)
    assert (result["status"], result["reason"]) == ("failed", "ValueError: no figures")


def test_loss_that_is_not_finite_fails_the_run(train, tmp_path):
    code, printed = train(steps=20, overrides={"optim.lr": 1e38, "optim.warmup": 0.0})
    assert code == 1
    *_, error, remedy = printed.splitlines()
    assert re.search(r"error: (loss|grad_norm) is (nan|inf) at step [1-9]", error)
    assert remedy.startswith("maxbench train: to do: the loss diverged")
    result = result_of(tmp_path)
    assert result["status"] == "failed"
    assert "at step" in result["reason"]
    (record,) = readers.read([tmp_path])
    assert record.remedy == remedy.removeprefix("maxbench train: to do: ")
    assert record.remedy in compare.summarize(record, compare.ReportOptions()).notes


def test_remedy_of_a_defect_stands_below_its_traceback(train, monkeypatch):
    def fail(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")

    monkeypatch.setattr(loop, "compile_step", fail)
    with pytest.raises(RuntimeError) as e:
        train(steps=1)
    assert e.value.__notes__[0].startswith("maxbench train: to do: the memory of a GPU is full")


def test_more_devices_than_present_are_refused(train):
    code, printed = train(fsdp=64)
    assert code == 2
    for text in ("64 devices are needed and 32 are present", "--cpu_devices 64", ":tiny"):
        assert text in printed


@pytest.fixture
def mocked_log(tmp_path, monkeypatch):
    """The log of a run on one GPU that mocks a network of eight, for which jax counts eight
    processes."""
    run = resolve("llama31_8b", "tiny", mock_gpus=8, fsdp=8, output_dir=str(tmp_path))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "process_count", lambda: 8)
    try:
        runtime.init_distributed(run)
        assert jax.config.read("jax_mock_gpu_topology") == "1x8x1"
        devices = mesh.make_mesh(run.layout)
        loop.check_processes(run, devices)
        log = loop.start_log(run, devices)
        yield log
        log.close("failed")
    finally:
        jax.config.update("jax_mock_gpu_topology", "")


def test_mocked_network_has_one_process(mocked_log):
    assert stragglers.allgather_json({"host": "a"}) == [{"host": "a"}]
    assert (mocked_log.result.processes, mocked_log.result.mocked) == (1, True)


def test_mocked_network_may_return_any_loss(mocked_log):
    metrics = {"loss": math.nan, "grad_norm": math.inf, "lr": 0.0}
    timer = step_timer.StepTimer(mocked_log)
    timer.add(0, metrics)
    timer.drain()
    assert [*mocked_log.times] == [0]
    mocked_log.result.mocked, mocked_log.result.compile_s = False, 0.0
    timer.add(1, metrics)
    with pytest.raises(step_timer.RunFailed, match="loss is nan at step 1"):
        timer.drain()
    timer = step_timer.StepTimer(mocked_log)
    timer.add(2, {"loss": 1.0, "grad_norm": 1.0, "lr": 0.0, "lost_rows": 3.0})
    with pytest.raises(step_timer.RunFailed, match=r"3 rows too many at step 2 .*use a larger"):
        timer.drain()


def test_no_step_is_recorded_after_stop():
    """A step in flight at Ctrl-C would be later than the one that the reason names."""
    log = types.SimpleNamespace(times={}, result=types.SimpleNamespace(mocked=False))
    log.step = lambda i, *values: log.times.update({i: values})
    timer, metrics = step_timer.StepTimer(log), {"loss": 1.0, "grad_norm": 1.0}
    timer.add(0, metrics)
    timer.drain()
    timer.stop()
    timer.add(1, metrics)
    timer.drain()
    assert [*log.times] == [0]


def test_log_reports_hits_of_the_compilation_cache(tmp_path):
    lines, result = [], types.SimpleNamespace()
    log = types.SimpleNamespace(line=lines.append, result=result, phase=str)
    step = types.SimpleNamespace(run=resolve("llama2_70b", "tiny"), abstract={})
    step.compile = lambda: (jax.jit(lambda x: x * 3).lower(1.0).compile(), 0.0, 0.0)
    with persistent_cache(tmp_path):
        loop.compile_step(step, log)
        assert lines[1:] == [f"compilation cache miss: {tmp_path}"]
        loop.compile_step(step, log)
        assert lines[3:] == [f"compilation cache hit: {tmp_path}"]
        assert result.compilation_cache == "hit"
        for file in tmp_path.glob("jit*-cache"):
            file.write_bytes(b"cut short")
        with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
            loop.compile_step(step, log)
        assert result.compilation_cache == "miss"


def test_process_statistics_are_plausible():
    assert 1e6 < process_stats.process_peak_bytes() < 1e12
    assert 0 < process_stats.since_start_s() < 1e5
