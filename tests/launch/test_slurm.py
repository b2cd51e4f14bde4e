"""launch.sh on a real Slurm: two nodes on this machine, submitted, killed, resumed, reported."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import tomllib

import pytest

from maxbench.reporting import compare
from maxbench.run_logs import readers, text_logs
from tests.conftest import needs, processes
from tests.launch import slurm_cluster

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = str(ROOT / "launch" / "launch.sh")
TINY = {"CPU_DEVICES": "4", "JOB_TOTAL_GPUS": "8", "PRESET": "tiny", "DTYPE": "fp32"}
SMALL = ["--layers", "1", "--seq", "16", "--config.model.embed=32", "--config.model.mlp=64"]
LONG = {"MAX_STEPS": "100000"}  # never ends by itself

pytestmark = [
    pytest.mark.xdist_group("slurm"),  # one cluster, one after the other
    pytest.mark.slurm,
]


@pytest.fixture(scope="module")
def slurm():
    for program in slurm_cluster.NEEDED:  # of the Debian packages slurm-wlm and munge
        needs(program)
    with slurm_cluster.cluster() as up:
        yield up


class Jobs:
    """Submits with launch.sh into a folder of its own."""

    def __init__(self, slurm, out: pathlib.Path):
        self.slurm, self.out = slurm, out
        self.env = (
            processes()
            | slurm.env
            | {
                "MAXBENCH_PYTHON": sys.executable,
                "STAGE_PATH": str(out),
                "HF_TOKEN": "hf_never_to_be_seen",
            }
        )

    def submit(self, env: dict[str, str], *options: str) -> str:
        """Runs launch.sh; returns the job's number."""
        command = [LAUNCH, *options, "--", *SMALL]
        done = subprocess.run(
            command, env=self.env | TINY | env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout.partition("job ")[2].partition(":")[0]

    def maxbench(self, *words: str, code: int = 0, **env: str) -> str:
        """Output of a command."""
        command = [sys.executable, "-m", "maxbench", *words]
        done = subprocess.run(
            command, env=self.env | env, capture_output=True, text=True, timeout=300, cwd=ROOT
        )
        assert done.returncode == code, f"{done.stderr}\n{self.log()}"
        return done.stdout

    def sbatch(self, env: dict[str, str], *options: str) -> str:
        """Submits launch.sh itself, as NVIDIA's recipes do."""
        command = ["sbatch", "--parsable", *options, LAUNCH, "--", *SMALL]
        done = subprocess.run(
            command, env=self.env | TINY | env, capture_output=True, text=True, cwd=self.out
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def log(self) -> str:
        """Output of the jobs of this folder, and the log of Slurm."""
        files = [*self.out.rglob("*.out"), *self.out.rglob("srun-*.log")]
        files.append(self.slurm.root / "slurmctld.log")
        return "\n".join(f"{f}:\n{f.read_text(errors='replace')}" for f in files)

    def metrics(self) -> list[pathlib.Path]:
        """Files of all runs. rglob would fail on checkpoints, which are created and removed."""
        return list(self.out.glob("experiments/*/*/metrics.jsonl"))

    def wait_for_step(self, step: int, seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while not any(f'"step": {step},' in f.read_text() for f in self.metrics()):
            assert time.monotonic() < end, f"no step {step} in {seconds} s\n{self.log()}"
            time.sleep(0.3)

    def run(self) -> readers.RunRecord:
        """The only run: no job started twice."""
        runs = readers.read([self.out])
        assert len(runs) == 1, f"{[r.path.name for r in runs]}\n{self.log()}"
        return runs[0]


@pytest.fixture
def jobs(slurm, tmp_path):
    (tmp_path / "a b").mkdir()  # what a script must quote
    made = Jobs(slurm, tmp_path / "a b")
    yield made
    with open(os.devnull, "w") as null:
        for job in slurm.run("squeue", "-h", "-o", "%A").split():
            subprocess.run(["scancel", "--signal=KILL", job], env=slurm.env, stderr=null)
    for name in ("node1", "node2"):
        if name not in slurm.daemons:
            slurm.start_node(name)
    slurm_cluster._wait(
        lambda: set(slurm.states().values()) == {"idle"}, 60, f"nodes idle: {slurm.states()}"
    )


def losses(out: pathlib.Path) -> dict[int, float]:
    files = sorted(out.rglob("metrics.jsonl"))
    lines = [json.loads(x) for f in files for x in f.read_text().splitlines()]
    return {x["step"]: x["loss"] for x in lines}


def test_two_nodes_train_as_one_process(jobs, tmp_path):
    """cluster.toml, submission of a suite, preflight, training on two nodes, watch, report."""
    kept = tomllib.loads(jobs.maxbench("cluster", GPU_TYPE="h100").partition(":\n")[2])
    assert kept["SBATCH_PARTITION"] == "batch"
    assert kept["ARCHITECTURE"] == os.uname().machine
    (tmp_path / "try.toml").write_text("[expect]\nloss = 7\n[[jobs]]\nMAX_STEPS = 8\n")
    about = {"MAX_STEPS": "", "OPTIMIZATION_NAME": "first-try"}
    nothing = {"SLURM_GPUS_PER_NODE": "null", "SBATCH_GPUS_PER_NODE": ""}  # as the recipes say
    number = jobs.submit(about | nothing, "--suite", str(tmp_path / "try.toml"))
    watched = jobs.maxbench("watch", number)
    assert "  RUNNING" in watched
    assert "  COMPLETED  step 7, " in watched.splitlines()[-1]
    assert jobs.slurm.job(number)["JobState"] == "COMPLETED"
    run = jobs.run()
    assert "#SBATCH --partition=batch\n" in next(run.path.glob("sbatch_*.sh")).read_text()
    (listed,) = jobs.out.rglob("suite_try_*.json")
    assert "Suite try: PASS, 1 of 1 runs" in jobs.maxbench("report", "--suite", str(listed))
    assert (run.status, run.gpus, run.last) == ("done", 8, 7)
    assert run.result["processes"] == 2
    assert run.result["job"]["id"] == number
    assert set(run.result["hosts"]) == {"node1", "node2"}
    preflight = json.loads((run.path / "preflight.json").read_text())
    assert not preflight["errors"]
    assert len(preflight["processes"]) == 2
    single = tmp_path / "single"
    command = [sys.executable, "-m", "maxbench.train", "--config", "configs/llama31_8b.py:tiny"]
    command += ["--fsdp", "8", "--cpu_devices", "8", "--dtype", "fp32", "--steps", "8"]
    command += [*SMALL, "--output_dir", str(single)]
    subprocess.run(command, env=jobs.env, cwd=ROOT, check=True, capture_output=True)
    two_nodes, one_process = losses(run.path), losses(single)
    assert two_nodes.keys() == one_process.keys() == {*range(8)}
    assert two_nodes == pytest.approx(one_process, rel=1e-5)
    assert "hf_never_to_be_seen" not in jobs.log()
    report = subprocess.run(
        [sys.executable, "-m", "maxbench.report", str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert report.returncode == 0
    assert "Success experiments: 2" in report.stdout


def test_cancelled_job_stops_after_its_step(jobs):
    number = jobs.submit(LONG | {"DISABLE_PREFLIGHT": "true"})
    second = jobs.submit(LONG | {"DISABLE_PREFLIGHT": "true"})
    jobs.wait_for_step(2)
    # One job per name runs at a time: the second, cancelled before the first ends, has no run.
    # Until the next scheduling cycle it may wait for "Resources", which the first one uses.
    why = lambda: jobs.slurm.run("squeue", "-h", "-j", second, "-o", "%T %r").split()
    slurm_cluster._wait(lambda: why() == ["PENDING", "Dependency"], 60, f"waits: {why()}")
    jobs.slurm.run("scancel", second)
    jobs.slurm.run("scancel", number)
    assert jobs.slurm.wait(number, 60)["JobState"] == "CANCELLED"
    run = jobs.run()
    row = compare.summarize(run, compare.ReportOptions())
    assert run.last >= 2
    assert row.verdict == "DIED"
    assert "SIGTERM" in row.why or "CANCELLED" in row.why, f"{row.why}\n{jobs.log()}"


def test_killed_process_ends_the_job(jobs):
    """With launch.sh submitted by sbatch: the number of GPUs follows from the nodes."""
    env = LONG | {"JOB_TOTAL_GPUS": "", "DISABLE_PREFLIGHT": "true"}
    env |= {"SLURM_GPUS_PER_NODE": "null"}  # srun would refuse it
    number = jobs.sbatch(env, "-N", "2", "-p", "batch")
    jobs.wait_for_step(2)
    victim = _trainers(jobs.out)[-1]
    os.kill(victim, signal.SIGKILL)
    assert jobs.slurm.wait(number, 60)["JobState"] == "FAILED", jobs.log()
    (slurm_log,) = jobs.out.glob("slurm-*.out")  # it may repeat steps, but is not a second run
    assert text_logs.JOB_MARK in slurm_log.read_bytes()
    run = jobs.run()
    row = compare.summarize(run, compare.ReportOptions())
    assert row.verdict == "DIED"
    assert run.last >= 2
    assert run.gpus == 8
    assert re.search(r"process \d of 2 on node\d died, see lines \d: of .*srun-train", row.why), (
        f"{row.why}\n{jobs.log()}"
    )


def _trainers(out: pathlib.Path) -> list[int]:
    """Processes that train into a folder."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"maxbench.train" in words and str(out).encode() in words and b"srun" not in words[0]:
            found.append(int(path.parent.name))
    return sorted(found)


def test_killed_node_is_named_and_the_job_requeued(jobs):
    number = jobs.submit(LONG | {"DISABLE_PREFLIGHT": "true"})
    jobs.wait_for_step(2)
    jobs.slurm.kill_node("node2")
    is_requeued = lambda: jobs.slurm.job(number)["Restarts"] == "1"  # it waits for a second node
    slurm_cluster._wait(is_requeued, 90, "the job is not requeued")
    run = jobs.run()
    assert compare.summarize(run, compare.ReportOptions()).verdict == "DIED"
    assert run.reason, jobs.log()


def test_job_that_gets_sigterm_saves_and_continues_after_requeue(jobs):
    """As before its time limit: Slurm sends the signal to the run, not to the script."""
    env = LONG | {"CHECKPOINT_EVERY": "5", "DISABLE_PREFLIGHT": "true"}
    number = jobs.submit(env)
    jobs.wait_for_step(7)
    jobs.slurm.run("scancel", "--signal=TERM", number)
    end = time.monotonic() + 120
    while len(jobs.metrics()) < 2:
        assert time.monotonic() < end, jobs.log()
        time.sleep(0.5)
    first, second = sorted(jobs.metrics(), key=lambda p: p.stat().st_ctime)
    while not second.read_text():
        assert time.monotonic() < end, jobs.log()
        time.sleep(0.5)
    begun = json.loads(second.read_text().splitlines()[0])["step"]
    assert begun == json.loads(first.read_text().splitlines()[-1])["step"] + 1, jobs.log()
    ended = json.loads((first.parent / "result.json").read_text())
    saved = f"SIGTERM after step {begun - 1}: saved as step {begun}"
    assert (ended["status"], ended["reason"]) == ("stopped", saved)
    result = json.loads((second.parent / "result.json").read_text())
    assert result["job"]["restart"] == "1"
    assert result["config"]["output"]["resume"]


def test_job_that_gets_sigterm_before_its_first_checkpoint_starts_again(jobs):
    """As on hosts and Kubernetes, here before the signal is handled; up to MAX_RESTARTS times."""
    number = jobs.submit(LONG | {"MAX_RESTARTS": "1", "DISABLE_PREFLIGHT": "true"})
    for restart in ("0", "1"):
        is_new = lambda count=restart: (
            len(_trainers(jobs.out)) == 2 and jobs.slurm.job(number)["Restarts"] == count
        )
        slurm_cluster._wait(is_new, 60, f"no restart {restart}")
        jobs.slurm.run("scancel", "--signal=TERM", number)
        slurm_cluster._wait(lambda: not _trainers(jobs.out), 60, "the run does not end")
    assert jobs.slurm.wait(number, 60)["JobState"] == "FAILED", jobs.log()
    assert "requeue: the job continues" in jobs.log()
    assert "no requeue: MAX_RESTARTS=1" in jobs.log()


def test_time_limit_is_named(jobs):
    number = jobs.submit(LONG | {"TIME_LIMIT": "00:05:00", "DISABLE_PREFLIGHT": "true"})
    jobs.wait_for_step(2)
    jobs.slurm.run("scontrol", "update", f"JobId={number}", "EndTime=now+2")
    for trainer in _trainers(jobs.out):  # till Slurm looks, every 30 s, and wakes them to end
        os.kill(trainer, signal.SIGSTOP)
    assert jobs.slurm.wait(number, 90)["JobState"] == "TIMEOUT", jobs.log()
    run = jobs.run()
    row = compare.summarize(run, compare.ReportOptions())
    assert row.verdict == "DIED"
    assert "TIME LIMIT" in row.why, f"{row.why}\n{jobs.log()}"


def test_preflight_refuses_an_unknown_xla_flag(jobs):
    """Even if launch.sh could not check the flags, because sbatch started it."""
    number = jobs.sbatch({"XLA_FLAGS": "--xla_gpu_graph_level=0"}, "-N", "2")
    assert jobs.slurm.wait(number)["JobState"] == "FAILED"
    assert "use --xla_gpu_enable_command_buffer=" in jobs.log()
    run = jobs.run()
    assert "preflight: error: XLA_FLAGS" in compare.summarize(run, compare.ReportOptions()).why


def test_too_few_nodes_are_refused(jobs):
    number = jobs.sbatch({}, "-N", "1")
    assert jobs.slurm.wait(number)["JobState"] == "FAILED"
    assert "needs 2 nodes, and this job has 1: sbatch -N 2 launch.sh" in jobs.log()
