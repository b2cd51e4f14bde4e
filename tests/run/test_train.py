"""Whole runs: what they write, and how they end, resume and fail."""

import json
import math
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import pytest

from maxbench.mesh import axes
from maxbench.run import hosts, loop, runtime
from tests.conftest import processes, resolve

TINY = "configs/llama31_8b.py:tiny"
EXACT = {"precision.grads": "fp32"}


def start(*args: str, **more: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "maxbench.train", *args]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=processes() | more, stdout=pipe, stderr=pipe, text=True)


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


@pytest.mark.core
def test_a_run_writes_what_the_seeds_read(tmp_path):
    done = start("--config", TINY, "--steps", "8", "--output_dir", str(tmp_path))
    out, err = done.communicate()
    assert done.returncode == 0, err
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
    for text in ("step time (steps 4 to 7)", "tokens/s", "days to 1T tokens", "not comparable"):
        assert text in out


@pytest.mark.core
def test_resume_is_exact_and_moves_to_another_mesh(tmp_path, capsys):
    straight, half = tmp_path / "straight", tmp_path / "half"
    axes = dict(dp=2, fsdp=2, tp=2, gbs=8)
    assert run_here(straight, capsys, steps=6, checkpoint=True, **axes)[0] == 0
    code, out = run_here(half, capsys, steps=4, checkpoint=True, **axes)
    assert code == 0
    saved = re.search(
        r"Global Checkpoint Save : Rank: 0 : Iteration: 4 : Start time: \d+\.\d{3}s : "
        r"Save duration: \d+\.\d{3}s : \d+\.\d{3} GB : \d+\.\d{3} GB/s",
        out,
    )
    assert saved, out
    expected, first = losses(folder_of(straight)), str(folder_of(half))
    code, out = run_here(half, capsys, steps=6, checkpoint=True, resume=first, **axes)
    assert code == 0
    assert re.search(r"Time spent in load_checkpoint: \d+\.\d{3}s", out)
    assert losses(folder_of(half)) == {4: expected[4], 5: expected[5]}
    prints = [
        json.loads((folder_of(f) / "checkpoints/6/run.json").read_text())["fingerprints"]
        for f in (straight, half)
    ]
    assert prints[0] == prints[1]
    for other in (dict(cp=4, mbs=4), dict(fsdp=8, mbs=1), dict(pp=2, vp=2, tp=2, mbs=1)):
        code, out = run_here(half, capsys, steps=6, resume=first, gbs=8, **other)
        assert code == 0, out
        assert losses(folder_of(half)) == pytest.approx({4: expected[4], 5: expected[5]}, rel=1e-5)


def test_a_bad_checkpoint_is_refused_with_its_reason(tmp_path, capsys):
    assert run_here(tmp_path, capsys, steps=2, checkpoint=True)[0] == 0
    path = folder_of(tmp_path) / "checkpoints/2"

    def refused(*texts, **flags):
        code, out = run_here(
            tmp_path / "again", capsys, **{"resume": str(path), "steps": 4, **flags}
        )
        assert code == 2
        assert "error: resume=" in out
        for text in (str(path), *texts):
            assert text in out

    refused("nothing is left to train", "--steps 3", steps=2)
    refused("of another model: name=llama31 (this run: grok1)", workload="grok1_314b")
    refused("its weights are fp32", overrides={"precision.weights": "bf16"})
    about = (path / "run.json").read_text()
    (path / "run.json").write_text(about.replace('"loss', '"')[: len(about) // 2])
    refused("run.json is damaged or foreign")
    (path / "run.json").unlink()
    refused("only unfinished ones")
    (path / "run.json").write_text(about)
    largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    whole = largest.read_bytes()
    largest.write_bytes(whole[:-7])
    refused("damaged", largest.name, f"saved were {len(whole)}")
    middle = len(whole) // 2
    largest.write_bytes(whole[:middle] + bytes(64) + whole[middle + 64 :])
    # In a process of its own: what orbax leaves unfinished would complain in a later test.
    words = ("--config", TINY, "--dtype", "fp32", "--config.precision.grads=fp32", "--steps", "4")
    process = start(*words, "--resume", str(path), "--output_dir", str(tmp_path / "again"))
    _, said = process.communicate(timeout=300)
    assert process.returncode == 2, said
    assert f"error: resume={path}: damaged, " in said
    assert "Traceback" not in said
    largest.unlink()
    refused("is missing")
    largest.write_bytes(whole)
    assert run_here(tmp_path / "again", capsys, resume=str(path), steps=3)[0] == 0
    path = tmp_path / "nowhere"
    refused("does not exist")


def test_a_killed_run_leaves_its_last_checkpoint_and_its_log(tmp_path, capsys):
    args = ("--steps", "100000", "--config.output.checkpoint_every=1", "--dtype", "fp32")
    args += ("--config.precision.grads=fp32",)
    process = start("--config", TINY, "--output_dir", str(tmp_path), *args)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.rglob("run.json"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.communicate()
    folder = folder_of(tmp_path)
    assert json.loads((folder / "result.json").read_text())["status"] == "running"
    before = losses(folder)
    assert len(before) >= 3
    assert "completed step: 2" in next(folder.glob("log-*.out")).read_text()
    last = max(int(p.parent.name) for p in folder.rglob("run.json"))
    code, out = run_here(tmp_path / "again", capsys, steps=last + 1, resume=str(folder))
    assert code == 0, out
    assert [*losses(folder_of(tmp_path / "again"))] == [last]


def test_sigterm_finishes_the_step_saves_and_exits(tmp_path):
    args = ("--steps", "100000", "--checkpoint", "--output_dir", str(tmp_path))
    process = start("--config", TINY, *args)
    deadline = time.monotonic() + 120
    while not list(tmp_path.rglob("metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    while not losses(folder_of(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    folder = folder_of(tmp_path)
    result = json.loads((folder / "result.json").read_text())
    last = max(losses(folder))
    assert (result["status"], result["reason"]) == ("stopped", f"SIGTERM after step {last}")
    assert (folder / "checkpoints" / str(last + 1) / "run.json").exists()
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
        runtime.connect(run)
        assert jax.config.read("jax_mock_gpu_topology") == "1x8x1"  # a host has what is here
        mesh = axes.make_mesh(run.layout)
        loop.check_processes(run, mesh)
        log = loop.start_log(run, mesh)
        assert hosts.gather({"host": "a"}) == [{"host": "a"}]
        assert loop.stop_requests()(0) == ""
    finally:
        jax.config.update("jax_mock_gpu_topology", "")
        signal.signal(signal.SIGTERM, handler)
    assert (log.result["processes"], log.result["mocked"]) == (1, True)
    numbers = {"loss": math.nan, "grad_norm": math.inf, "lr": 0.0}
    queue = loop.Queue(log)
    queue.add(0, numbers)
    queue.drain()
    assert [*log.times] == [0]
    log.result |= {"mocked": False, "compile_s": 0.0}
    queue.add(1, numbers)
    with pytest.raises(loop.Failed, match="loss is nan at step 1"):
        queue.drain()
    log.close("failed")


def test_devices_that_are_not_there(tmp_path, capsys):
    code, out = run_here(tmp_path, capsys, fsdp=64)
    assert code == 2
    for text in ("64 are needed and 32 present", "--cpu_devices 64", ":tiny", ":rehearse"):
        assert text in out


def test_two_processes_train_as_one(tmp_path, capsys):
    """Told of each other by flags; then, to go on, by the environment."""
    axes = dict(dp=2, fsdp=2, tp=2, gbs=8)
    assert run_here(tmp_path / "one", capsys, steps=5, **axes)[0] == 0
    flags = ["--config", TINY, "--dtype", "fp32", "--config.precision.grads=fp32"]
    flags += [f"--{k}={v}" for k, v in axes.items()] + ["--cpu_devices", "4"]

    def pair(by, *more):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{s.getsockname()[1]}"
        started = []
        for i in range(2):
            extra, env = ["--coordinator", address, "--processes", "2", "--process", str(i)], {}
            if by == "environment":
                env = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
                extra, env = [], env | {"JAX_PROCESS_ID": str(i)}
            started.append(start(*flags, *more, *extra, **env))
        for process in started:
            _, err = process.communicate(timeout=300)
            assert process.returncode == 0, err

    pair("flags", "--steps", "4", "--checkpoint", "--output_dir", str(tmp_path / "two"))
    resume = str(folder_of(tmp_path / "two"))
    pair("environment", "--steps", "5", "--resume", resume, "--output_dir", str(tmp_path / "more"))
    one, two = losses(folder_of(tmp_path / "one")), losses(folder_of(tmp_path / "two"))
    assert two | losses(folder_of(tmp_path / "more")) == pytest.approx(one, rel=1e-5)
    assert len(two) == 4
    assert len(list((tmp_path / "two").rglob("result.json"))) == 1
    code, out = run_here(tmp_path / "on", capsys, steps=5, resume=resume, cp=2, gbs=8)
    assert code == 0, out
