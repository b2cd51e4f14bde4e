"""maxbench jobs and archive: runs while they are there, and what is kept of them."""

import json
import os
import pathlib
import subprocess
import tarfile

import pytest

from maxbench.launch import archive, follow
from tests.launch.test_launch import tool


def folder(place: pathlib.Path, stamp: int, **files: object) -> pathlib.Path:
    """A run's folder with JSON files in it."""
    made = place / "experiments" / "run" / f"run_{stamp}"
    made.mkdir(parents=True)
    for name, what in files.items():
        (made / f"{name}.json").write_text(json.dumps(what))
    return made


@pytest.fixture
def runs(tmp_path):
    """Four jobs: one waits, one runs after a requeue, one has failed, one is done."""
    (folder(tmp_path, 4) / "job_id").write_text("14")
    folder(tmp_path, 1, job={"job": "11"})
    running = folder(tmp_path, 3, job={"job": "11", "restart": 1})
    steps = [json.dumps({"step": i, "step_s": float(i)}) for i in range(2000)]
    (running / "metrics.jsonl").write_text("\n".join([*steps, '{"step": 2000, "st']))
    left = {"code": 1, "reason": "DUE TO TIME LIMIT"}
    folder(tmp_path, 2, job={"job": "12"}, exit=left, result={"reason": "loss is\x1b NaN"})
    folder(tmp_path, 0, job={"job": "10"}, exit={"code": 0})
    return tmp_path / "experiments"


def test_jobs_are_listed_with_what_slurm_and_their_folders_say(runs, tmp_path, monkeypatch, capsys):
    tool(tmp_path, "squeue", "echo '14|PENDING|Resources'; echo '11|RUNNING|None'")
    tool(tmp_path, "sacct", "echo '12|FAILED|None'; echo '11|PENDING|None'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert follow.table([runs])[1:] == [
        ("14", "PENDING", "-", "-", "run_4", "Resources"),
        ("11", "RUNNING", "1999", follow.progress(runs / "run" / "run_3")[1], "run_3", ""),
        ("12", "FAILED", "-", "-", "run_2", "loss is  NaN"),
        ("11", "REQUEUED", "-", "-", "run_1", ""),
        ("10", "COMPLETED", "-", "-", "run_0", ""),
    ]
    assert 1600 < float(follow.progress(runs / "run" / "run_3")[1]) < 1999  # of the last steps
    assert follow.main(["jobs", str(runs)]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("run_4  Resources")


def test_without_slurm_the_folders_say_it(runs, monkeypatch):
    monkeypatch.setenv("PATH", "")
    said = [row[1] for row in follow.table([runs])[1:]]
    assert said == ["SUBMITTED", "STARTED", "FAILED", "REQUEUED", "COMPLETED"]
    with pytest.raises(SystemExit, match="2"):
        follow.main(["jobs", "/nowhere"])


def test_an_archive_has_all_but_profiles_and_checkpoints(runs, tmp_path):
    for name in ("checkpoints/5", "nsys_profile", "xplane"):
        (runs / "run" / "run_3" / name).mkdir(parents=True)
        (runs / "run" / "run_3" / name / "large").write_text("x")
    (runs / "link").symlink_to("/etc/passwd")
    os.mkfifo(runs / "pipe")
    target = runs / "kept.tar.gz"  # which is not in itself
    assert archive.main(["archive", str(runs), "--to", str(target)]) == 0
    with tarfile.open(target) as tar:
        names = {*tar.getnames()}
        tar.extractall(tmp_path / "out", filter="data")
    assert len(names) == 10  # with the sums
    assert "experiments/run/run_3/metrics.jsonl" in names
    assert not [n for n in names if "large" in n or "link" in n or "pipe" in n]
    subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "out", check=True)
    for words in ([str(runs), "--to", str(target)], [], ["/nowhere"], [str(runs), "--to"]):
        with pytest.raises(SystemExit, match="2"):
            archive.main(["archive", *words])
