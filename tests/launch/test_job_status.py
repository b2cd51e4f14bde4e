"""maxbench jobs, watch and archive."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import time
import types

import pytest

from maxbench.cli import entry
from maxbench.cli import watch as cli_watch
from maxbench.launch import job_status
from maxbench.reporting import compare, tables
from maxbench.run_logs import readers, run_folder
from maxbench.run_logs.record import RunRecord
from tests.launch.test_launch import tool

OPTIONS = compare.ReportOptions()


def folder(place: pathlib.Path, stamp: int, **files: object) -> pathlib.Path:
    """A run's folder with JSON files in it."""
    folder = place / "experiments" / "run" / f"run_{stamp}"
    folder.mkdir(parents=True)
    for name, what in files.items():
        (folder / f"{name}.json").write_text(json.dumps(what))
    return folder


@pytest.fixture
def runs(tmp_path):
    """Four jobs: one waits, one runs after a requeue, one has failed, one is done."""
    (folder(tmp_path, 4) / "job_id").write_text("14")
    folder(tmp_path, 1, job={"job": "11"})
    running = folder(tmp_path, 3, job={"job": "11", "restart": 1})
    steps = [json.dumps({"step": i, "step_s": float(i)}) for i in range(2000)]
    (running / "metrics.jsonl").write_text("\n".join([*steps, '{"step": 2000, "st']))
    left = {"code": 1, "reason": "DUE TO TIME LIMIT"}
    failed = {"config": {}, "status": "failed", "reason": "loss is\x1b NaN"}
    folder(tmp_path, 2, job={"job": "12"}, exit=left, result=failed)
    folder(tmp_path, 0, job={"job": "10"}, exit={"code": 0})
    return tmp_path / "experiments"


def test_jobs_are_listed_from_slurm_and_their_folders(runs, tmp_path, monkeypatch, capsys):
    tool(tmp_path, "squeue", "echo '14|PENDING|Resources'; echo '11|RUNNING|None'")
    tool(tmp_path, "sacct", "echo '12|FAILED|None'; echo '11|PENDING|None'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    seconds = job_status.progress(run_folder.read_state(runs / "run" / "run_3"))[1]
    assert job_status.table(job_status.folders([runs])) == [
        ("14", "PENDING", "-", "-", "run_4", "Resources"),
        ("11", "RUNNING", "1999", seconds, "run_3", ""),
        ("12", "FAILED", "-", "-", "run_2", "loss is\\x1b NaN"),
        ("11", "REQUEUED", "-", "-", "run_1", ""),
        ("10", "COMPLETED", "-", "-", "run_0", ""),
    ]
    assert 1600 < float(seconds) < 1999  # of the last steps
    assert entry.run("jobs", [str(runs)]) == 0
    assert capsys.readouterr().out.splitlines()[2].endswith("run_4  Resources")


def test_without_slurm_the_state_is_from_the_folders(runs, monkeypatch):
    monkeypatch.setenv("PATH", "")
    output = [row[1] for row in job_status.table(job_status.folders([runs]))]
    assert output == ["SUBMITTED", "STARTED", "FAILED", "REQUEUED", "COMPLETED"]
    assert entry.run("jobs", ["/nowhere"]) == 2


STEP = "0: completed step: 7, seconds: 1.500, loss: 2.5\n"
SLURM = "slurmstepd: error: *** JOB 15 ON n1 CANCELLED AT 2026-01-05T10:00:00{} ***\n"
# Output of a job without an end in its files -> state and reason in all commands.
FORGOTTEN = {
    STEP + SLURM.format(""): ("CANCELLED", "died", "CANCELLED AT"),
    STEP + SLURM.format(" DUE TO TIME LIMIT"): ("TIMEOUT", "died", "DUE TO TIME LIMIT"),
    STEP + "srun: error: Node failure on n1\n": ("NODE_FAIL", "died", "Node failure on n1"),
    STEP + "0: ValueError: x\n": ("FAILED", "died", "ValueError: x"),
    STEP: ("FAILED", "died", "ended before step 0"),
    f"0: ConnectionError: x\n{STEP}": ("FAILED", "died", "ended before step 0"),
}


@pytest.mark.parametrize("output", FORGOTTEN, ids=range(len(FORGOTTEN)))
def test_report_jobs_and_watch_read_one_state(tmp_path, monkeypatch, capsys, output):
    monkeypatch.setenv("PATH", "")
    place = folder(tmp_path, 15, job={"job": "15"})
    (place / "srun-train-15.0.log").write_text(output)
    for path in place.iterdir():
        os.utime(path, (0, 0))
    state, status, why = FORGOTTEN[output]
    (row,) = job_status.table([place])
    (record,) = readers.read([place])
    assert (row.state, record.status) == (state, status)
    assert why in row.why
    assert row.why == record.reason
    assert entry.run("watch", ["15", str(tmp_path)]) == 1
    assert f"  {state}  " in capsys.readouterr().out


def test_running_job_survives_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    place = folder(tmp_path, 15, job={"job": "15"})
    (place / "srun-train-15.0.log").write_text(f"0: ConnectionError: x\n{STEP}")
    (record,) = readers.read([place])
    assert (job_status.table([place])[0].state, record.status) == ("STARTED", "running")


@pytest.fixture
def child():
    """Starts a process; returns its identity, and kills it if asked to, else after the test."""
    code = "import json; from maxbench.host import identity as i; print(json.dumps("
    code += "i.of_this_process()), flush=True); input()"
    with contextlib.ExitStack() as running:

        def start(killed: bool) -> dict:
            command = [sys.executable, "-c", code]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            running.enter_context(process)
            running.callback(process.kill)
            about = json.loads(process.stdout.readline())
            if killed:
                process.kill()
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
            return about

        yield start


def state_with(tmp_path, monkeypatch, process, steps=0, of="result") -> tuple[str, str, str]:
    """State of a run in `jobs`, and its status and reason in the report.

    Args:
      of: the file that names its process.
    """
    monkeypatch.setenv("PATH", "")
    files = {"job": {"job": "15"}, "result": {"config": {}, "status": "running"}}
    files = files if of == "result" else {"job": files["job"]}
    files[of]["process"] = process
    place = folder(tmp_path, 15, **files)
    lines = [json.dumps({"step": i, "step_s": 1.0}) + "\n" for i in range(steps)]
    (place / "metrics.jsonl").write_text("".join(lines))
    (row,) = job_status.table([place])
    (record,) = readers.read([place])
    return row.state, record.status, record.reason


RUNNING = ("STARTED", "running", "")


@pytest.mark.parametrize("steps", [0, 3])
def test_killed_run_of_this_machine_has_died_at_once(tmp_path, monkeypatch, capsys, child, steps):
    killed = child(killed=True)
    reason = "ended without an error message" if steps else "ended before step 0"
    assert state_with(tmp_path, monkeypatch, killed, steps) == ("FAILED", "died", reason)
    assert entry.run("watch", ["15", str(tmp_path)]) == 1
    assert "  FAILED  " in capsys.readouterr().out


def test_run_killed_before_it_has_a_result_has_died(tmp_path, monkeypatch, child):
    killed = child(killed=True)
    assert state_with(tmp_path, monkeypatch, killed, of="job")[:2] == ("FAILED", "died")


@pytest.mark.parametrize("other", [{}, {"machine": "another boot/1"}, {"pid": 0}, {"pid": "x"}])
def test_process_that_is_alive_or_elsewhere_may_be_running(tmp_path, monkeypatch, child, other):
    process = child(killed="machine" in other)
    assert state_with(tmp_path, monkeypatch, process | other) == RUNNING


def test_number_of_a_process_that_is_used_again_is_of_another_one(tmp_path, monkeypatch, child):
    process = child(killed=False) | {"start": 1}
    assert state_with(tmp_path, monkeypatch, process)[:2] == ("FAILED", "died")


def test_unreadable_run_is_not_running(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    place = folder(tmp_path, 15, job={"job": "15"})
    (place / "result.json").mkdir()
    (place / "metrics.jsonl").write_text('{"step": 0, "step_s": 1.5}\n')
    (record,) = readers.read([place])
    assert (record.status, record.reason) == (
        "skipped", "result.json cannot be read: not a regular file"
    )  # fmt: skip
    assert job_status.table([place])[0].why == record.reason
    good = compare.summarize(RunRecord(path=place, name="x", source="", step_s={0: 1.0}), OPTIONS)
    good.ok = True
    assert tables.counts([good, compare.summarize(record, OPTIONS)])["success_rate"] == 50


def test_disappearing_folders_are_ignored(runs, monkeypatch):
    """Checkpoints are written and removed below a run while others look."""
    looked, scan = [], os.scandir

    def scandir(path):
        looked.append(pathlib.Path(path).name)
        if "gone" in looked[-1]:
            raise FileNotFoundError(path)
        return scan(path)

    for name in ("gone", "run/run_3/checkpoints"):
        (runs / name).mkdir()
    monkeypatch.setattr(os, "scandir", scandir)
    assert len(job_status.folders([runs])) == 5
    assert "gone" in looked
    assert "checkpoints" not in looked


def clock(sleep) -> types.SimpleNamespace:
    """In place of the module time."""
    return types.SimpleNamespace(sleep=sleep, strftime=time.strftime)


def test_job_is_followed_until_it_ends(tmp_path, monkeypatch, capsys):
    """It waits, steps, is requeued into another folder, and is done; once Slurm does not answer."""
    first = folder(tmp_path, 1)
    (first / "job_id").write_text("11")
    tool(tmp_path, "squeue", f"cat {tmp_path}/word")
    tool(tmp_path, "sacct", "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def slurm(word: str):
        (tmp_path / "word").write_text(word and f"11|{word}\n12|RUNNING|None\n")

    def step(place: pathlib.Path, number: int):
        (place / "metrics.jsonl").write_text(f'{{"step": {number}, "step_s": 1.5}}\n')

    def requeued():
        slurm("PENDING|BeginTime")
        (first / "exit.json").write_text('{"code": 1, "reason": "NODE FAILURE"}')

    def second():
        slurm("RUNNING|None")
        step(folder(tmp_path, 2, job={"job": "11", "restart": 1}), 8)

    moves = [
        lambda: slurm("RUNNING|None"),
        lambda: step(first, 7),
        lambda: slurm(""),  # no answer: nothing has changed
        requeued,
        second,
        lambda: slurm("COMPLETED|None"),
    ]
    slurm("PENDING|Resources")
    monkeypatch.setattr(cli_watch, "time", clock(lambda _: moves.pop(0)()))
    assert entry.run("watch", ["11", str(tmp_path)]) == 0
    assert [line.split("  ", 1)[1] for line in capsys.readouterr().out.splitlines()] == [
        str(first),
        "PENDING  Resources",
        "RUNNING",
        "RUNNING  step 7, 1.500 s/step",
        "PENDING  step 7, 1.500 s/step  NODE FAILURE",
        str(first.parent / "run_2"),
        "RUNNING  step 8, 1.500 s/step",
        "COMPLETED  step 8, 1.500 s/step",
    ]
    assert moves == []


def test_watch_ends_with_an_exit_code_or_an_error(runs, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert entry.run("watch", ["10", str(runs)]) == 0
    assert entry.run("watch", ["12", str(runs)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("  FAILED  loss is\\x1b NaN")
    for words in (["12x", str(runs)], [], ["99", str(runs)], ["10", "/nowhere"]):
        assert entry.run("watch", words) == 2
    assert "job 99 is not known to Slurm, and has no run folder" in capsys.readouterr().err

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_watch, "time", clock(interrupt))
    assert entry.run("watch", ["14", str(runs)]) == 130


def test_archive_leaves_out_profiles_and_checkpoints(runs, tmp_path):
    for name in ("checkpoints/5", "nsys_profile", "xplane"):
        (runs / "run" / "run_3" / name).mkdir(parents=True)
        (runs / "run" / "run_3" / name / "large").write_text("x")
    (runs / "link").symlink_to("/etc/passwd")
    os.mkfifo(runs / "pipe")
    target = runs / "kept.tar.gz"  # which is not in itself
    assert entry.run("archive", [str(runs), "--to", str(target)]) == 0
    with tarfile.open(target) as tar:
        names = {*tar.getnames()}
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-xf", target, "-C", tmp_path / "out"], check=True)
    assert len(names) == 10  # with the sums
    assert "experiments/run/run_3/metrics.jsonl" in names
    assert not [n for n in names if "large" in n or "link" in n or "pipe" in n]
    subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "out", check=True)
    for words in ([str(runs), "--to", str(target)], [], ["/nowhere"], [str(runs), "--to"]):
        assert entry.run("archive", words) == 2


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["jobs", "."], "jobs: error: no job below .; `maxbench report` lists runs"),
        (["archive", "experiments", "--to", "runs.zip"], "to='runs.zip' must end with .tar.gz"),
        (["cancel"], "cancel: error: no job is given; `maxbench jobs` lists the jobs"),
    ],
)
def test_command_without_a_job_says_so(words, error, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").mkdir()
    assert entry.run(words[0], words[1:]) == 2
    assert error in capsys.readouterr().err
