"""Whole runs: what they write, and how they end, resume and fail."""

import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest
from absl import logging

from benchmarks import kills
from maxbench.distributed import runtime, stragglers
from maxbench.run import checkpoint, log_writer, loop
from maxbench.sharding import mesh
from tests.conftest import keeping, processes, resolve

TINY = "configs/llama31_8b.py:tiny"
EXACT = {"precision.grads": "fp32"}


@pytest.fixture(autouse=True, scope="module")
def compiled_once():
    """What these runs compile is kept, as what processes do: most come to the same program."""
    with keeping():
        yield


def start(output: pathlib.Path, *words: str, **more):
    """A run in a process of its own, which prints into a file."""
    output.parent.mkdir(parents=True, exist_ok=True)
    return kills.fork(words, str(output), **more)


def run_here(folder, capsys, workload="llama31_8b", overrides=None, **flags) -> tuple[int, str]:
    """A run in this process; returns its exit code and what it printed."""
    run = resolve(
        workload, "tiny", EXACT | (overrides or {}), dtype="fp32", output_dir=str(folder), **flags
    )
    try:
        code = loop.train(run)
    except SystemExit as e:
        code = e.code
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def folder_of(root) -> pathlib.Path:
    return max(pathlib.Path(root).rglob("result.json"), key=lambda p: p.stat().st_mtime_ns).parent


def losses(folder) -> dict[int, float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {r["step"]: r["loss"] for r in map(json.loads, lines)}


def signals_itself(monkeypatch, number: signal.Signals, step: int) -> None:
    """This process gets a signal as soon as a step is recorded."""
    record = log_writer.Log.step

    def recorded(log, i, *rest):
        record(log, i, *rest)
        if i == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(log_writer.Log, "step", recorded)


@pytest.mark.core
def test_a_run_writes_what_the_seeds_read(tmp_path):
    command = [sys.executable, "-m", "maxbench.train", "--config", TINY, "--steps", "8"]
    command += ["--output_dir", str(tmp_path)]
    done = subprocess.run(command, env=processes(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder = folder_of(tmp_path)
    name = "pretrain_llama31_8b-tiny_bf16_gpus1_tp1_pp1_cp1_vp1_mbs2_gbs2"
    assert re.fullmatch(rf"experiments/{name}/{name}_\d+", str(folder.relative_to(tmp_path)))
    log = folder / f"log-{name}.out"

    last = subprocess.run(
        f"grep 'completed step:' {log} | tail -1", shell=True, capture_output=True, text=True
    ).stdout
    number = r"(\d+\.\d{3})"
    pattern = rf"completed step: 7, seconds: {number}, TFLOP/s/device: {number}, Tokens/s/device: "
    pattern += rf"{number}, total_weights: 128, loss: {number}\n"
    assert re.fullmatch(pattern, last), last
    found = subprocess.run(
        ["grep", "-rh", "--include", "*.out", "train_step_timing", "experiments"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert len(found) == 8
    pattern = r"iteration ([0-9]+)/7 \| lr: .*train_step_timing in s: ([0-9.e-]+) \| "
    pattern += r"TFLOPS_per_GPU: ([0-9.e-]+) \| consumed_samples: (\d+)$"
    parsed = [re.search(pattern, line).groups() for line in found]
    assert [int(p[0]) for p in parsed] == list(range(8))
    assert [int(p[3]) for p in parsed] == [2 * (i + 1) for i in range(8)]

    result = json.loads((folder / "result.json").read_text())
    assert (result["schema"], result["status"], result["steps_done"]) == (1, "done", 8)
    assert result["window"] == [4, 7]
    assert result["versions"]["jax"]
    assert result["config"]["model"]["embed"] == 128
    assert result["tokens_per_s"] == pytest.approx(128 / result["step_s"]["mean"])
    records = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    for record, line in zip(records, parsed, strict=True):
        assert float(line[1]) == pytest.approx(record["step_s"], rel=1e-3)
    assert len({r["loss"] for r in records}) == 8  # different tokens every step
    assert [i for i, _ in result["loss"].values()] == [0, 7]
    for text in ("step time (steps 4 to 7)", "tokens/s", "at step 7\n", "not comparable"):
        assert text in done.stdout


MESH = dict(dp=2, fsdp=2, tp=2, gbs=8)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> pathlib.Path:
    """The folder of a run of six steps on eight devices, with checkpoints of steps 4 and 6."""
    out, every = tmp_path_factory.mktemp("straight"), EXACT | {"output.checkpoint_every": 4}
    run = resolve("llama31_8b", "tiny", every, dtype="fp32", output_dir=str(out), steps=6, **MESH)
    assert loop.train(run) == 0
    return folder_of(out)


@pytest.mark.core
@pytest.mark.xdist_group("straight")
def test_resume_is_exact_and_moves_to_another_mesh(straight, tmp_path, capsys):
    saved = (
        r"Global Checkpoint Save : Rank: 0 : Iteration: 4 : Start time: \d+\.\d{3}s : "
        r"Save duration: \d+\.\d{3}s : \d+\.\d{3} GB : \d+\.\d{3} GB/s : "
        r"and \d+\.\d{3}s in the background"
    )
    assert re.search(saved, next(straight.glob("log-*.out")).read_text())
    expected, fourth = losses(straight), str(straight / "checkpoints/4")
    code, out = run_here(tmp_path, capsys, steps=6, checkpoint=True, resume=fourth, **MESH)
    assert code == 0
    assert re.search(r"Time spent in load_checkpoint: \d+\.\d{3}s", out)
    assert losses(folder_of(tmp_path)) == {4: expected[4], 5: expected[5]}
    sixth = [kills.last(f / "checkpoints", 6) for f in (straight, folder_of(tmp_path))]
    assert sixth[0] == sixth[1]
    for other in (dict(cp=4, fsdp=2, mbs=2), dict(pp=2, vp=2, tp=2, mbs=1)):
        code, out = run_here(tmp_path, capsys, steps=6, resume=fourth, gbs=8, **other)
        assert code == 0, out
        assert losses(folder_of(tmp_path)) == pytest.approx(
            {4: expected[4], 5: expected[5]}, rel=1e-5
        )


def test_a_bad_checkpoint_is_refused_with_its_reason(tmp_path, capsys):
    assert run_here(tmp_path, capsys, steps=2, checkpoint=True)[0] == 0
    path = folder_of(tmp_path) / "checkpoints/2"
    again = tmp_path / "again"

    def refused(*texts, **flags):
        code, out = run_here(again, capsys, **{"resume": str(path), "steps": 4, **flags})
        assert code == 2
        assert "error: resume=" in out
        for text in (str(path), *texts):
            assert text in out

    refused("nothing is left to train", "--steps 3", steps=2)
    refused("of another model: name=llama31 (this run: grok1)", workload="grok1_314b")
    refused("its weights are fp32", overrides={"precision.weights": "bf16"})
    whole = (path / "about/run.json").read_text()
    about = json.loads(whole)
    # The user's flags are not to blame for what was changed here.
    about["run"]["model"]["heads"] += 1
    for damaged in (whole[: len(whole) // 2], json.dumps(about), "{}", "[]", ""):
        (path / "about/run.json").write_text(damaged)
        refused("run.json is missing, damaged or foreign")
    (path / "about/run.json").unlink()
    refused("run.json is missing, damaged or foreign")
    about = {k: v for k, v in json.loads(whole).items() if k != "crc32"} | {"fingerprints": {}}
    about["crc32"] = checkpoint._crc32(about)
    (path / "about/run.json").write_text(json.dumps(about))
    refused("no fingerprints")
    (path / "about/run.json").write_text(whole)
    largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    kept = largest.read_bytes()
    middle = len(kept) // 2
    largest.write_bytes(kept[:middle] + bytes(64) + kept[middle + 64 :])
    # In a process of its own: what orbax leaves unfinished would complain in a later test.
    words = ("--config", TINY, "--dtype", "fp32", "--config.precision.grads=fp32", "--steps", "4")
    output = tmp_path / "said"
    process = start(output, *words, "--resume", str(path), "--output_dir", str(again))
    process.join()
    said = output.read_text()
    assert process.exitcode == 2, said
    assert f"error: resume: no checkpoint is whole: {path}: damaged, " in said
    assert "Traceback" not in said
    result = json.loads((folder_of(again) / "result.json").read_text())
    assert result["status"] == "failed"
    assert result["reason"].startswith("resume: no checkpoint is whole: ")
    largest.write_bytes(kept)
    assert run_here(again, capsys, resume=str(path), steps=3)[0] == 0
    path = tmp_path / "nowhere"
    refused("does not exist")


def test_resume_passes_over_what_is_damaged_and_names_what_is_changed(tmp_path, capsys):
    every = {"output.checkpoint_every": 1}
    assert run_here(tmp_path / "a", capsys, steps=4, overrides=every)[0] == 0
    folder = folder_of(tmp_path / "a")
    assert sorted(p.name for p in folder.glob("checkpoints/*")) == ["3", "4"]
    (folder / "checkpoints/4/about/run.json").write_text("{}")
    other = {"optim.b1": 0.8, "train.seed": 7}
    code, out = run_here(
        tmp_path / "b", capsys, steps=5, resume=f"{tmp_path},{folder}", overrides=other, gbs=4
    )
    assert code == 0, out
    assert f"resume: passed over {folder}/checkpoints/4: run.json is" in out
    for text in ("layout.gbs=4 (saved: 2)", "optim.b1=0.8 (saved: 0.9)", "train.seed=7 (saved: 0)"):
        assert f"resume: changed since it was saved: {text}" in out
    assert [*losses(folder_of(tmp_path / "b"))] == [3, 4]
    loaded = json.loads((folder_of(tmp_path / "b") / "result.json").read_text())["checkpoint_load"]
    assert loaded["path"] == str(folder / "checkpoints/3")
    assert (len(loaded["skipped"]), len(loaded["changed"])) == (1, 4)  # steps, too


def test_damaged_checkpoints_never_load_and_never_stop_a_run(tmp_path):
    assert kills.damaged(tmp_path, 8, random.Random(0))["passed over"] > 1


def test_a_damaged_checkpoint_silences_orbax_alone(caplog):
    """What it raises is passed over with a reason; every other warning is heard as before."""
    read = eval(compile("lambda log: log.warning('of orbax')", "/lib/orbax/reader.py", "eval"))
    saved, why = checkpoint._attempt(lambda _: 1 / 0, None)
    assert (saved, why) == (None, "ZeroDivisionError: division by zero")
    read(logging)
    logging.warning("ours")
    assert [r.getMessage() for r in caplog.records] == ["ours"]


def test_killed_runs_go_on_as_if_nothing_had_been(tmp_path):
    """benchmarks/kills.py does it many times."""
    found, prints, _ = kills.kill_and_resume(tmp_path / "killed", 2, random.Random(0))
    assert (found, prints) == kills.straight(tmp_path / "straight", max(found) + 1)


def test_checkpoints_are_saved_once_in_the_background_and_the_last_are_kept(tmp_path):
    every = {"output.checkpoint_every": 1, "output.max_to_keep": 1, "output.keep_period": 3}
    run, told = resolve("llama31_8b", "tiny", every), []
    with checkpoint.Saver(tmp_path, run, told.append) as saver:
        for step in (1, 2, 3, 4, 5, 5):
            saver.save({"step": jnp.int32(step), "params": jnp.ones(8)})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "5"]
    assert [x["step"] for x in told] == [1, 2, 3, 4, 5]
    assert all(x["seconds"] > 0 and x["background_s"] > 0 and x["bytes"] > 99 for x in told)


def test_sigterm_finishes_the_step_saves_and_exits(tmp_path, capsys, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    signals_itself(monkeypatch, signal.SIGTERM, 2)
    try:
        code, out = run_here(tmp_path, capsys, steps=100_000, checkpoint=True)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert code == loop.EX_TEMPFAIL == 75
    folder = folder_of(tmp_path)
    result = json.loads((folder / "result.json").read_text())
    last = max(losses(folder))
    reason = f"SIGTERM after step {last}: saved as step {last + 1}"
    assert (result["status"], result["reason"]) == ("stopped", reason)
    assert [p.name for p in folder.glob("checkpoints/*")] == [str(last + 1)]
    assert "SIGTERM after step" in out


class SlowDevice:
    """Steps of 10 s each by a clock of its own. As on a GPU, the call that starts a step returns
    0.1 s before that step's end; so nobody who waits for the call sees the end of the step before.
    """

    def __init__(self, monkeypatch, steps: int):
        self.now, self.times, self.result, self.folder = 0.0, {}, {}, None
        self.ends = [threading.Event() for _ in range(steps)]
        self.seen = [threading.Event() for _ in range(steps)]
        monkeypatch.setattr(loop.time, "perf_counter", lambda: self.now)

    def __call__(self, state):
        i = state["step"]
        if i:
            self._end(i - 1)
            self.seen[i - 1].wait(5)
        self.now = 10 * (i + 1) - 0.1
        return {"step": i + 1}, {k: Scalar(self, i) for k in ("loss", "grad_norm")}

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        pass

    def _end(self, i: int) -> None:
        self.now = max(self.now, 10.0 * (i + 1))
        self.ends[i].set()

    def step(self, i, step_s, out, memory):
        """As metrics.Log's."""
        self.times[i] = step_s
        self.seen[i].set()


class Scalar:
    """An array that is ready when its step ends."""

    def __init__(self, device: SlowDevice, i: int):
        self.device, self.i = device, i

    def block_until_ready(self):
        if self.i == len(self.device.ends) - 1:  # no later step stands before its end
            self.device._end(self.i)
        self.device.ends[self.i].wait()
        return self

    def __float__(self):
        return 1.0


def test_sigterm_saves_nothing_that_was_not_asked_for(monkeypatch):
    device = SlowDevice(monkeypatch, 1)
    run = resolve("llama31_8b", "tiny", steps=6)
    said = loop.steps(run, device, lambda i: "SIGTERM", device, {"step": 0})
    assert said == "SIGTERM after step 0: nothing saved, no checkpoint was asked for"
    device = SlowDevice(monkeypatch, 6)
    said = loop.steps(run, device, lambda i: "SIGTERM" * (i == 5), device, {"step": 0})
    assert said == ""  # in time with the last step: it is done


def test_ctrl_c_keeps_the_results(tmp_path, capsys, monkeypatch):
    signals_itself(monkeypatch, signal.SIGINT, 2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it
    try:
        code, out = run_here(tmp_path, capsys, steps=100_000)
    finally:
        signal.signal(signal.SIGINT, before)
    result = json.loads((folder_of(tmp_path) / "result.json").read_text())
    last = max(losses(folder_of(tmp_path)))
    assert (code, result["status"]) == (130, "stopped")
    assert result["reason"] == f"stopped by you at step {last}"
    assert out.endswith(f"maxbench train: {result['reason']}\n")


def test_a_full_disk_is_the_reason(tmp_path, capsys, monkeypatch):
    made = log_writer.Log.__init__

    def full(log, *args):
        made(log, *args)
        assert os.fstat(log.reserved_disk.fileno()).st_size == log_writer.RESERVED_BYTES
        log.jsonl.close()
        log.jsonl = open("/dev/full", "a", buffering=1)  # noqa: SIM115

    monkeypatch.setattr(log_writer.Log, "__init__", full)
    code, out = run_here(tmp_path, capsys, steps=9)
    assert code == 1
    assert "Traceback" not in out
    result = json.loads((folder_of(tmp_path) / "result.json").read_text())
    reason = f"No space left on device: output_dir={str(tmp_path)!r}"
    assert (result["status"], result["reason"]) == ("failed", reason)
    kept = {p.name for p in folder_of(tmp_path).iterdir()}
    assert {"result.json", "metrics.jsonl", f"log-{result['name']}.out"} <= kept
    assert not any("room" in name or "part" in name for name in kept)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_deleted_folder_ends_the_run_with_one_line(checkpoint, tmp_path, capsys, monkeypatch):
    """The folder is deleted after step 1 of 4, with and without a checkpoint at the end."""
    record = log_writer.Log.step

    def recorded(log, i, *rest):
        record(log, i, *rest)
        if i == 1:
            shutil.rmtree(log.folder)

    monkeypatch.setattr(log_writer.Log, "step", recorded)
    code, printed = run_here(tmp_path, capsys, steps=4, checkpoint=checkpoint)
    assert code == 1
    error = printed.splitlines()[-1]
    assert error.startswith("maxbench train: error: the run's folder was deleted during the run: ")
    assert "Traceback" not in printed
    assert "results: " not in printed


def test_figures_that_fail_do_not_hide_how_the_run_ended(tmp_path, capsys, monkeypatch):
    whole = log_writer.Log.summary

    def fail(log):
        monkeypatch.setattr(log_writer.Log, "summary", whole)
        raise ValueError("no figures")

    monkeypatch.setattr(log_writer.Log, "summary", fail)
    with pytest.raises(ValueError, match="no figures"):
        run_here(tmp_path, capsys, steps=1)
    result = json.loads((folder_of(tmp_path) / "result.json").read_text())
    assert (result["status"], result["reason"]) == ("failed", "ValueError: no figures")


def test_first_and_last_step_are_as_long_as_the_others(monkeypatch):
    device = SlowDevice(monkeypatch, 6)
    run = resolve("llama31_8b", "tiny", steps=6)
    assert loop.steps(run, device, lambda i: "", device, {"step": 0}) == ""
    assert device.times == {i: pytest.approx(10) for i in range(6)}


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, capsys):
    code, out = run_here(
        tmp_path, capsys, steps=20, overrides={"optim.lr": 1e38, "optim.warmup": 0.0}
    )
    assert code == 1
    assert re.search(r"error: (loss|grad_norm) is (nan|inf) at step [1-9]", out)
    result = json.loads((folder_of(tmp_path) / "result.json").read_text())
    assert result["status"] == "failed"
    assert "at step" in result["reason"]


def test_a_mocked_network_has_no_other_processes(tmp_path, monkeypatch):
    """What jax says with one GPU and a mocked network: a process for each GPU, and numbers that
    mean nothing."""
    run = resolve("llama31_8b", "tiny", mock_gpus=8, fsdp=8, output_dir=str(tmp_path))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "process_count", lambda: 8)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        runtime.init_distributed(run)
        assert jax.config.read("jax_mock_gpu_topology") == "1x8x1"  # a host has what is here
        devices = mesh.make_mesh(run.layout)
        loop.check_processes(run, devices)
        log = loop.start_log(run, devices)
        assert stragglers.allgather_json({"host": "a"}) == [{"host": "a"}]
        assert loop.stop_requests(None)(0) == ""
    finally:
        jax.config.update("jax_mock_gpu_topology", "")
        signal.signal(signal.SIGTERM, handler)
    assert (log.result["processes"], log.result["mocked"]) == (1, True)
    numbers = {"loss": math.nan, "grad_norm": math.inf, "lr": 0.0}
    queue = loop.StepTimer(log)
    queue.add(0, numbers)
    queue.drain()
    assert [*log.times] == [0]
    log.result |= {"mocked": False, "compile_s": 0.0}
    queue.add(1, numbers)
    with pytest.raises(loop.RunFailed, match="loss is nan at step 1"):
        queue.drain()
    log.close("failed")


def test_devices_that_are_not_there(tmp_path, capsys):
    code, out = run_here(tmp_path, capsys, fsdp=64)
    assert code == 2
    for text in (
        "64 devices are needed and 32 are present",
        "--cpu_devices 64",
        ":tiny",
        ":rehearse",
    ):
        assert text in out


@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_that_dies_is_named_and_ends_the_run(tmp_path, lost):
    run = kills.Start(tmp_path, kills.FOREVER, processes=2)
    run.until(lambda: run.folder() and losses(run.folder()))
    run.processes[lost].kill()
    codes = run.codes()
    assert codes[lost] == -signal.SIGKILL
    assert codes[1 - lost] not in (0, -signal.SIGKILL)
    result = json.loads((run.folder() / "result.json").read_text())
    reason = f"process {lost} of 2 on n{lost} died, see {run.output}"
    assert (result["status"], result["reason"]) == ("failed", reason)
    assert result["steps_done"] > 0
    assert f"error: {reason}" in run.said()
    assert "Traceback" not in run.said()


@pytest.mark.xdist_group("straight")  # one worker makes the run that both compare with
def test_two_processes_train_as_one(straight, tmp_path, capsys):
    """Told of each other by flags; then, to go on, by the environment."""
    flags = ["--config", TINY, "--dtype", "fp32", "--config.precision.grads=fp32", "--steps", "6"]
    flags += [f"--{k}={v}" for k, v in MESH.items()]

    def pair(by, *more):
        address, started, output = kills.free_address(), [], tmp_path / by
        for i in range(2):
            extra, env = ["--coordinator", address, "--processes", "2", "--process", str(i)], {}
            if by == "environment":
                env = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
                extra, env = [], env | {"JAX_PROCESS_ID": str(i)}
            started.append(start(output, *flags, *more, *extra, devices=4, **env))
        for process in started:
            process.join()
            assert process.exitcode == 0, output.read_text()

    every = "--config.output.checkpoint_every=5"
    pair("flags", every, "--output_dir", str(tmp_path / "two"))
    two = folder_of(tmp_path / "two")
    fifth = str(two / "checkpoints/5")
    pair("environment", "--resume", fifth, "--output_dir", str(tmp_path / "more"))
    one = losses(straight)
    assert losses(two) == pytest.approx(one, rel=1e-5)
    assert losses(folder_of(tmp_path / "more")) == {5: losses(two)[5]}
    assert len(list((tmp_path / "two").rglob("result.json"))) == 1
    code, out = run_here(tmp_path / "on", capsys, steps=6, resume=fifth, **MESH)
    assert code == 0, out
    assert losses(folder_of(tmp_path / "on")) == pytest.approx({5: one[5]}, rel=1e-5)
