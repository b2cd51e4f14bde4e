"""maxbench.launch.node: processes of one node, exit codes, restarts, files in the output."""

import base64
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tarfile
import time

import pytest

from maxbench.launch import node
from maxbench.launch.node import NodeJob, Stop
from tests.launch.test_launch import plain_env

ROOT = pathlib.Path(__file__).parents[2]
# In place of the trainer: its process's number decides what it does.
TRAINER = """
import json, os, pathlib, signal, sys, time
number, folder = os.environ["MB_PROCESS"], pathlib.Path(os.environ["MB_FOLDER"] or ".")
def save():
    about = folder / "checkpoints" / "3" / "about"
    about.mkdir(parents=True, exist_ok=True)
    (about / "run.json").write_text("{}")
def stop(*_):
    save() if "save-on-term" in sys.argv else None
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
print("args", *sys.argv[1:], flush=True)
of_jax = sorted(name for name in os.environ if name.startswith("JAX_"))
print("env", *(f"{name}={os.environ[name]}" for name in of_jax), flush=True)
for word in sys.argv[1:]:
    name, _, value = word.partition("=")
    if name == "save":
        save()
    if name == f"code{number}":
        sys.exit(int(value))
    if name == "sleep":
        time.sleep(float(value))
"""


@pytest.fixture
def run(tmp_path):
    """Runs a node until its end: run(*words of the trainer, field=value...) -> (code, output)."""
    trainer = tmp_path / "trainer.py"
    trainer.write_text(TRAINER)

    def start(*words: str, **fields) -> subprocess.Popen:
        job = NodeJob(job="j-1", name="run", out=str(tmp_path), stamp=100, **fields)
        env = plain_env(**job.env(), PYTHONPATH=str(ROOT))
        command = [sys.executable, "-m", "maxbench.launch.node", "--", sys.executable, str(trainer)]
        return subprocess.Popen(
            [*command, *words], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def whole(*words: str, **fields) -> tuple[int, str]:
        process = start(*words, **fields)
        output = process.communicate(timeout=60)[0]
        return process.returncode, output

    whole.start = start
    return whole


def test_variables_of_a_job_are_read_back():
    job = NodeJob(job="a", nodes=4, coordinator="h:1", time_limit_s=60, ship="true")
    assert NodeJob.from_env(job.env()) == job
    assert NodeJob.from_env({"MB_ATTEMPT": ""}) == NodeJob()


def test_each_process_gets_its_number_its_peers_and_its_gpu(run, tmp_path):
    fields = {"nodes": 2, "node_index": 1, "tasks_per_node": 2, "gpus": 2, "coordinator": "h:70"}
    code, output = run(**fields)
    assert code == 0
    for number in (2, 3):
        peers = f"JAX_COORDINATOR_ADDRESS=h:71 JAX_CUDA_VISIBLE_DEVICES={number - 2} "
        assert f"{number}: env {peers}JAX_NUM_PROCESSES=4 JAX_PROCESS_ID={number}\n" in output
    folder = tmp_path / "experiments" / "run" / "run_100"
    assert (folder / "node-1.log").read_text() == output
    assert not (folder / "job.json").exists()  # of the first node alone
    assert "0: env\n" in run()[1]  # one process needs no coordinator


@pytest.mark.parametrize(
    ("words", "fields", "code"),
    [
        ([], {}, 0),
        (["code0=1"], {}, 1),
        (["code0=2", "save"], {}, 2),
        (["save", "code0=1"], {}, 75),  # it can go on from the checkpoint
        (["save", "code0=2"], {}, 2),
        (["code0=75"], {}, 75),
        (["sleep=30"], {"time_limit_s": 1}, 124),
        (["sleep=30", "save-on-term"], {"time_limit_s": 1}, 75),
        (["code1=3", "sleep=0.5"], {"tasks_per_node": 2, "coordinator": "h:70"}, 3),
    ],
)
def test_exit_code_says_whether_the_job_is_to_be_started_again(run, tmp_path, words, fields, code):
    assert run(*words, **fields)[0] == code
    about = json.loads((tmp_path / "experiments" / "run" / "run_100" / "exit.json").read_text())
    assert (about["code"], about["phase"]) == (code, "train")
    assert ("TIME LIMIT" in about.get("reason", "")) == ("time_limit_s" in fields)


def test_a_restart_resumes_from_all_earlier_checkpoints(run, tmp_path):
    run("save", "code0=1")
    run("save", "code0=1", attempt=1)
    run("code0=1", attempt=2)
    folders = tmp_path / "experiments" / "run"
    output = run(attempt=3, start_timeout_s=9)[1]
    expected = f"--config.output.stamp=103 --resume {folders}/run_100,{folders}/run_101 "
    assert f"0: args {expected}--config.runtime.rendezvous_timeout_s=9\n" in output
    assert (folders / ".job_j-1").read_text().split() == ["100", "101", "102", "103"]
    assert json.loads((folders / "run_103" / "job.json").read_text())["restart"] == 3


@pytest.mark.parametrize(("how", "code"), [("signal", 75), ("eof", 143)])
def test_a_stop_reaches_the_processes(run, how, code):
    with run.start("sleep=60", until_eof="true") as process:
        while "args" not in (line := process.stdout.readline()):
            assert line
        process.send_signal(signal.SIGTERM) if how == "signal" else process.stdin.close()
        assert process.wait(60) == code


def test_preflight_gets_the_flags_of_the_run():
    job = NodeJob(name="run", out="/o", allow_tcp="true")
    words = node.preflight_of(["python3", "-m", "maxbench.train", "--gpus", "8"], job)
    assert words[2:] == ["maxbench.preflight", "--gpus", "8", "--allow_tcp",
                         "--json=/o/experiments/run/run_0/preflight.json"]  # fmt: skip


def test_a_failed_preflight_ends_the_job(run, tmp_path):
    code, output = run("code0=1", preflight="true")
    assert code == 1
    assert output.count("0: args") == 1
    about = json.loads((tmp_path / "experiments" / "run" / "run_100" / "exit.json").read_text())
    assert about["phase"] == "preflight"


def test_a_script_sets_variables_before_the_processes_start(run, tmp_path):
    (tmp_path / "set env.sh").write_text("export JAX_OF_SCRIPT=1\n")
    assert "0: env JAX_OF_SCRIPT=1\n" in run(source=str(tmp_path / "set env.sh"))[1]
    assert run(source="/nowhere.sh")[0] == 1


def test_results_that_cannot_be_written_are_one_line(run, tmp_path):
    (tmp_path / "experiments").write_text("a file")
    code, output = run()
    assert code == 2
    assert output.startswith("maxbench: error: ")
    assert output.count("\n") == 1


def test_files_of_a_run_arrive_through_its_output(run, tmp_path):
    folder = tmp_path / "experiments" / "run" / "run_100"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "big").write_text("x")
    (folder / "result.json").write_bytes(os.urandom(300))
    (folder / "huge").write_bytes(bytes(node.MAX_SHIPPED_BYTES + 1))
    output, kept = run(ship="true")[1], []
    archive = node.received(output.splitlines(keepends=True), kept.append)
    node.unpack(archive, tmp_path / "there")
    there = tmp_path / "there" / "run_100"
    assert sorted(p.name for p in there.iterdir()) == ["exit.json", "job.json", "result.json"]
    assert (there / "result.json").read_bytes() == (folder / "result.json").read_bytes()
    assert "".join(kept) == (folder / "node-0.log").read_text()
    (folder / "submission.json").write_text("{}")  # the launcher sees this folder
    assert node.BEGIN not in run(ship="if-not-shared")[1]


def test_damaged_or_hostile_archives_write_nothing_outside(tmp_path):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for name in ("../out", "/out", "a/../../out", "run_1", "a/b/c", "run_1/ok"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
        link = tarfile.TarInfo("run_1/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    text = base64.b64encode(data.getvalue()).decode()
    for lines in ([node.BEGIN, text], [node.BEGIN, "!!", node.END], [node.BEGIN, node.END], []):
        assert node.received(lines, lambda _: None) == b""
    node.unpack(node.received([node.BEGIN, text, node.END], print), tmp_path / "x")
    node.unpack(data.getvalue()[:50], tmp_path / "x")
    node.unpack(b"no archive", tmp_path / "x")
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["ok"]


def test_a_process_that_ignores_the_end_of_another_is_killed(monkeypatch):
    monkeypatch.setattr(node, "GRACE_S", 0.2)
    ignoring = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    start = lambda code: subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    running = {0: start("raise SystemExit(3)"), 1: start(ignoring)}
    started = time.monotonic()
    output = node.Output(io.StringIO())
    assert node._wait(running, output, Stop(), 0) == 3
    assert time.monotonic() - started < 55
