"""Jobs on Kubernetes from submission to report: kubectl, and the API of kubernetes_cluster.py.

A stand-in for the trainer ends as a test wants; one test trains.
"""

import json
import os
import pathlib
import shutil
import sys
import threading

import pytest

from maxbench.cli import entry
from maxbench.cli import watch as cli_watch
from maxbench.config import recipes
from maxbench.launch import job_status, kubectl, kubernetes, submission
from tests.launch import kubernetes_cluster
from tests.launch.test_launch import plain_env, tool

pytestmark = pytest.mark.skipif(
    not shutil.which("kubectl") and not os.environ.get("MAXBENCH_REQUIRE_ALL"), reason="no kubectl"
)
# In place of the trainer: plan.json says what its processes do in each start.
TRAINER = r"""
import json, os, pathlib, signal, sys, time
folder, process = pathlib.Path(os.environ["MB_FOLDER"]), os.environ["MB_PROCESS"]
attempt = int(os.environ.get("MB_ATTEMPT") or 0)
def save():
    about = folder / "checkpoints" / "3" / "about"
    about.mkdir(parents=True, exist_ok=True)
    (about / "run.json").write_text("{}")
signal.signal(signal.SIGTERM, lambda *_: (save(), sys.exit(75)))
plan = json.loads((pathlib.Path(__file__).parent / "plan.json").read_text())
does = plan[min(attempt, len(plan) - 1)]
if process == "0":
    for i in range(3):
        print(f"completed step: {i}, seconds: 0.500, loss: 1.0", flush=True)
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": i, "step_s": 0.5, "loss": 1.0}) + "\n")
print("resume", *[w for w in sys.argv if "experiments/" in w], flush=True)
time.sleep(does.get("sleeps", {}).get(process, does.get("sleep", 0)))
if does.get("save"):
    save()
sys.exit(does.get("codes", {}).get(process, 0))
"""
WRAPPER = """
if [[ "$*" == *"-m maxbench.train"* && "$*" != *maxbench.launch.node* ]]; then
  exec {python} {trainer} "$@"
fi
exec {python} "$@"
"""


class Place:
    """A cluster, a STAGE_PATH, and the trainer's plan."""

    def __init__(self, root: pathlib.Path, cluster: kubernetes_cluster.Cluster):
        self.root, self.cluster = root, cluster
        self.experiments = root / "stage" / "experiments"

    def plan(self, *starts: dict) -> None:
        (self.root / "bin" / "plan.json").write_text(json.dumps(starts or [{}]))

    def job_sets(self) -> list[str]:
        return [x["metadata"]["name"] for x in self.cluster.listed("jobsets")]

    def condition(self) -> str:
        """Type of the end of the only JobSet, or ''."""
        (job_set,) = self.cluster.listed("jobsets")
        return (job_set.get("status", {}).get("conditions") or [{"type": ""}])[0]["type"]

    def ended(self) -> str:
        kubernetes_cluster.wait(self.condition, 120, "the JobSet did not end")
        return self.condition()

    def row(self) -> job_status.Row:
        folders = job_status.refresh(job_status.folders([self.experiments]))
        return job_status.table(folders)[0]


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "results").mkdir()
    trainer = tmp_path / "bin" / "trainer.py"
    trainer.write_text(TRAINER)
    tool(tmp_path / "bin", "python3", WRAPPER.format(python=sys.executable, trainer=trainer))
    with kubernetes_cluster.cluster(tmp_path / "cluster") as cluster:
        root = recipes.ROOT
        env = {
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "STAGE_PATH": str(tmp_path / "stage"),
            "CLUSTER_TYPE": "kubernetes", "RUN_CONF_IMAGE": "image", "K8S_CODE": str(root),
            "PVC_DIR": str(tmp_path / "results"), "CHECKPOINT_EVERY": "2", "CPU_DEVICES": "2",
            "RUN_CONF_MOUNTS": f"results:{tmp_path}/results:claim", "JOB_TOTAL_GPUS": "4",
            "PRESET": "tiny", "DISABLE_PREFLIGHT": "true", "MAX_STEPS": "3",
        }  # fmt: skip
        for name in os.environ:
            if name not in plain_env():
                monkeypatch.delenv(name)
        for name, value in (env | cluster.env).items():
            monkeypatch.setenv(name, value)
        made = Place(tmp_path, cluster)
        made.plan()
        yield made


def test_from_submission_to_report(place, capsys):
    assert entry.run("launch", []) == 0
    (name,) = place.job_sets()
    assert f"job {name}: {place.experiments}/" in capsys.readouterr().out
    assert place.ended() == "Completed"
    assert entry.run("jobs", []) == 0
    line = capsys.readouterr().out.splitlines()[2].split()
    assert line[:4] == [name, "COMPLETED", "2", "0.500"]
    (folder,) = place.experiments.glob("*/pretrain_*")
    assert submission.of(folder) == (name, "kubernetes", "team", "", False)
    assert json.loads((folder / "job.json").read_text())["nodes"] == "machine0"
    assert "0: completed step: 2, seconds: 0.500" in (folder / "node-0.log").read_text()
    assert not (folder / "checkpoints").exists()  # stays in the claim
    assert entry.run("watch", [name]) == 0
    assert entry.run("report", [str(place.experiments)]) in (0, 1)
    assert folder.name in capsys.readouterr().out


def test_watch_ends_with_the_last_step_and_the_files_of_the_run(place, monkeypatch, capsys):
    """The job ends after its last log was read, before its state is asked for."""
    place.plan({"sleep": 2})
    monkeypatch.setattr(cli_watch, "PAUSE_S", 0.1)
    entry.run("launch", [])
    (name,) = place.job_sets()
    kubernetes_cluster.wait(lambda: place.row().step == "2", 300, "no step")
    states = job_status.states
    monkeypatch.setattr(job_status, "states", lambda jobs: place.ended() and states(jobs))
    assert entry.run("watch", [name]) == 0
    (folder,) = place.experiments.glob("*/pretrain_*")
    assert (folder / "exit.json").exists()


@pytest.mark.exhaustive
def test_bad_input_ends_the_job_and_75_starts_it_again(place, capsys):
    place.plan({"codes": {"1": 75}, "save": True}, {"codes": {"1": 2}})
    entry.run("launch", [])
    assert place.ended() == "Failed"
    (job_set,) = place.cluster.listed("jobsets")
    assert job_set["status"]["restarts"] == 1
    row = place.row()
    assert (row.state, row.why) == ("FAILED", "node 1: exit code 2")
    first, second = sorted(place.experiments.glob("*/pretrain_*"))
    assert int(second.name.rpartition("_")[2]) == int(first.name.rpartition("_")[2]) + 1
    assert "resume" in (second / "node-1.log").read_text()
    results = place.root / "results" / "experiments"
    assert f"{results}/{first.parent.name}/{first.name}" in (second / "node-1.log").read_text()
    assert entry.run("watch", [row.job]) == 1


def test_a_failure_without_a_checkpoint_is_not_repeated(place):
    place.plan({"codes": {"0": 1}})
    entry.run("launch", [])
    assert place.ended() == "Failed"
    assert place.cluster.listed("jobsets")[0]["status"]["restarts"] == 0


@pytest.mark.exhaustive
def test_a_preempted_pod_resumes_from_its_checkpoint(place):
    place.plan({"sleep": 60}, {})
    entry.run("launch", [])
    running = lambda: (
        "step: 2" in "".join(p.read_text() for p in (place.root / "cluster" / "logs").iterdir())
    )
    kubernetes_cluster.wait(running, 300, "no step")
    place.cluster.preempt(1)
    assert place.ended() == "Completed"
    assert place.cluster.listed("jobsets")[0]["status"]["restarts"] == 1
    assert place.row().state == "COMPLETED"
    last = max(place.experiments.glob("*/pretrain_*"))
    assert "--resume" not in (last / "node-0.log").read_text()
    assert "RESUME=" + str(place.root / "results") in (last / "node-0.log").read_text()
    assert [row.state for row in job_status.table(job_status.folders([place.experiments]))] == [
        "COMPLETED", "REQUEUED"]  # fmt: skip


@pytest.mark.exhaustive
def test_a_pending_pod_and_a_cancelled_job(place, capsys, monkeypatch):
    place.plan({"sleep": 60})
    place.cluster.pending = {1}
    entry.run("launch", [])
    (name,) = place.job_sets()
    pending = "1 of 2 pods pending: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    scheduled = lambda: place.row().why == pending
    kubernetes_cluster.wait(scheduled, 300, "not pending")
    assert place.row().state == "PENDING"
    place.cluster.pending = set()
    kubernetes_cluster.wait(lambda: place.row().state == "RUNNING", 300, "not running")
    kubernetes_cluster.wait(lambda: place.row().step == "2", 300, "no step in the log")
    assert entry.run("cancel", [name]) == 0
    assert place.row()[1::4] == ("CANCELLED", "its JobSet is deleted")
    capsys.readouterr()
    assert entry.run("cancel", ["unknown"]) == 2
    assert "JOB='unknown' has no run folder" in capsys.readouterr().err


def test_kueue_says_why_a_job_waits(place, monkeypatch):
    monkeypatch.setenv("K8S_QUEUE", "queue")
    entry.run("launch", [])
    with place.cluster.lock:
        (job_set,) = place.cluster.listed("jobsets")
        job_set["spec"]["suspend"] = True  # Kueue's webhook does so
        uid = job_set["metadata"]["uid"]
    assert place.row().why == "waits in queue queue"
    condition = {"type": "QuotaReserved", "status": "False", "message": "insufficient quota"}
    labels = {"kueue.x-k8s.io/job-uid": uid}
    status = {"conditions": [condition]}
    place.cluster.add("workloads", "w", metadata={"labels": labels}, status=status)
    assert place.row()[1::4] == ("PENDING", "queue queue: insufficient quota")


@pytest.mark.exhaustive
def test_wait_and_suite(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kubernetes, "POLL_S", 0.3)
    suite = tmp_path / "small.toml"
    suite.write_text("[expect]\nstep_s = 5\n[[jobs]]\nREPEATS = 2\n")
    assert entry.run("launch", ["--suite", str(suite), "--wait"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("  COMPLETED") == 2
    assert "maxbench report --suite" in captured.out
    (file,) = place.experiments.glob("suite_small_*.json")
    runs = json.loads(file.read_text())["runs"]
    assert len({run["folder"] for run in runs}) == 2
    place.plan({"codes": {"0": 1}})
    assert entry.run("launch", ["--wait"]) == 1


def test_refusals_are_one_line(place, capsys, monkeypatch):
    def refused(*words: str) -> str:
        assert entry.run("launch", [*words]) == 2
        text = capsys.readouterr().err
        assert text.count("\n") == 1
        return text

    place.cluster.refused = "admission webhook denied the request: no quota"
    assert "jobset.yaml: admission webhook denied the request: no quota" in refused()
    place.cluster.groups = ("v1",)
    shutil.rmtree(place.cluster.env["KUBECACHEDIR"], ignore_errors=True)
    assert "this cluster has no JobSets (jobset.x-k8s.io)" in refused()
    place.cluster.stop()
    assert "kubectl cannot reach the cluster: " in refused()
    monkeypatch.setenv("PATH", str(place.root / "empty"))
    assert "kubectl is not on PATH: install it" in refused()


def test_without_an_answer_the_state_is_from_the_folders(place, capsys):
    place.plan({"sleep": 60})
    entry.run("launch", [])
    place.cluster.stop()
    row = place.row()
    assert row.state == "SUBMITTED"
    assert row.why.startswith("kubectl: ")
    assert "note: no logs of Kubernetes: " in capsys.readouterr().err


def test_reasons_of_pods():
    def pod(phase: str = "Pending", **state) -> str:
        status = {"phase": phase, "containerStatuses": [{"state": state}] if state else []}
        return kubectl.Pod.of({"metadata": {"name": "p"}, "status": status}).why

    assert pod() == ""
    assert pod(waiting={"reason": "ImagePullBackOff", "message": "no\n image"}) == (
        "ImagePullBackOff: no image"
    )
    assert pod(waiting={"reason": "ContainerCreating"}).startswith("its image is being pulled")
    assert pod("Failed", terminated={"exitCode": 137, "reason": "OOMKilled"}) == (
        "OOMKilled, exit code 137"
    )
    assert pod("Failed", terminated={"exitCode": 2, "reason": "Error"}) == "exit code 2"
    assert pod("Running", terminated={"exitCode": 2, "reason": "Error"}) == ""


@pytest.mark.exhaustive
def test_a_real_run_of_two_pods(place, monkeypatch, capsys):
    """Two processes, preempted once: the loss goes on from the checkpoint."""
    tool(place.root / "bin", "python3", f'exec {sys.executable} "$@"')
    monkeypatch.setenv("MAX_STEPS", "40")
    monkeypatch.setattr(cli_watch, "PAUSE_S", 0.5)
    entry.run("launch", [])
    (name,) = place.job_sets()
    codes = []
    watching = threading.Thread(target=lambda: codes.append(entry.run("watch", [name])))
    watching.start()
    kubernetes_cluster.wait(lambda: place.row().step not in ("-", "0", "1"), 300, "no step")
    place.cluster.preempt(1)
    watching.join(600)
    assert codes == [0]
    second = max(place.experiments.glob("*/pretrain_*"))
    assert json.loads((second / "result.json").read_text())["status"] == "done"
    steps = [json.loads(x)["step"] for x in (second / "metrics.jsonl").read_text().splitlines()]
    assert steps[0] > 0
    assert steps[-1] == 39
    assert entry.run("report", [str(place.experiments)]) == 0
