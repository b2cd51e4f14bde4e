"""CLUSTER_TYPE=hosts: jobs through a stand-in for ssh that runs the command here."""

import json
import os
import pathlib
import re
import sys

import pytest

from maxbench.cli import entry
from maxbench.cli import watch as cli_watch
from maxbench.config.errors import UserError
from maxbench.launch import hosts, hosts_driver, job_status, node, submission
from tests.launch.kubernetes_cluster import wait
from tests.launch.test_kubernetes_jobs import TRAINER, WRAPPER
from tests.launch.test_launch import dry_run, plain_env, tool

# Arguments: options, host, command. The host's name decides.
SSH = """
host="${@: -2:1}" command="${@: -1}"
echo "$host" >>{root}/connections
case "$host" in
  down*) echo "ssh: connect to host $host port 22: Connection refused" >&2; exit 255 ;;
esac
exec bash -c "$command"
"""


class Place:
    def __init__(self, root: pathlib.Path):
        self.root, self.experiments = root, root / "stage" / "experiments"

    def plan(self, *starts: dict) -> None:
        (self.root / "bin" / "plan.json").write_text(json.dumps(starts or [{}]))

    def rows(self) -> list[job_status.Row]:
        return job_status.table(job_status.folders([self.experiments]))


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    trainer = tmp_path / "bin" / "trainer.py"
    trainer.write_text(TRAINER)
    tool(tmp_path / "bin", "python3", WRAPPER.format(python=sys.executable, trainer=trainer))
    tool(tmp_path / "bin", "ssh", SSH.replace("{root}", str(tmp_path)))
    env = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "STAGE_PATH": str(tmp_path / "stage"),
        "MAXBENCH_PYTHON": f"{tmp_path}/bin/python3", "CLUSTER_TYPE": "hosts",
        "SSH_HOSTS": "me@n[1-2] n3", "CPU_DEVICES": "2", "JOB_TOTAL_GPUS": "4", "PRESET": "tiny",
        "DISABLE_PREFLIGHT": "true", "MAX_STEPS": "3",
    }  # fmt: skip
    for name in os.environ:
        if name not in plain_env():
            monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cli_watch, "PAUSE_S", 0.3)
    made = Place(tmp_path)
    made.plan()
    return made


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b,c", ["a", "b", "c"]),
        ("n[1-3,07]", ["n1", "n2", "n3", "n07"]),
        ("me@n[08-10].x", ["me@n08.x", "me@n09.x", "me@n10.x"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("[fd00::1] me@[fd00::2],fd00::3", ["fd00::1", "me@fd00::2", "fd00::3"]),
        ("fe80::1%eth0", ["fe80::1%eth0"]),
        ("", []),
    ],
)
def test_lists_of_hosts(text, expected):
    assert hosts.expand(text) == expected


@pytest.mark.parametrize("text", ["n[1-", "n[a]", "n[3-1]", "n1 n1", "n[1-2] n2"])
def test_malformed_lists_are_refused(text):
    with pytest.raises(UserError, match="SSH_HOSTS="):
        hosts.expand(text)


@pytest.mark.parametrize("text", ["node1:2222", "n[1-2]:22", "me@10.0.0.1:22", "[fd00::1]:22"])
def test_port_of_a_host_is_refused_with_where_it_goes(text):
    with pytest.raises(UserError, match=r"takes no ports: give them in ~/.ssh/config|no range"):
        hosts.expand(text)


def test_coordinator_of_ipv6_hosts_has_brackets():
    output = dry_run(CLUSTER_TYPE="hosts", JOB_TOTAL_GPUS="16", SSH_HOSTS="[fd00::1] [fd00::2]")
    assert " fd00::1 " in output
    assert re.search(r"MB_COORDINATOR=\[fd00::1\]:\d{5}\b", output)


def test_from_submission_to_report(place, capsys):
    assert entry.run("launch", ["--wait"]) == 0
    (row,) = place.rows()
    assert (row.state, row.step, row.seconds) == ("COMPLETED", "2", "0.500")
    assert sorted((place.root / "connections").read_text().split()) == ["me@n1", "me@n2"]
    (folder,) = place.experiments.glob("*/pretrain_*")
    assert submission.of(folder) == (row.job, "hosts", "", str(folder), False)
    assert json.loads((folder / "job.json").read_text())["nodes"] == "n1"
    for i in (0, 1):
        assert f"NODE={i} of 2 (n{i + 1})" in (folder / f"node-{i}.log").read_text()
    assert f"job {row.job}: " in capsys.readouterr().out
    assert entry.run("watch", [row.job]) == 0
    assert capsys.readouterr().out.rstrip().endswith("COMPLETED  step 2, 0.500 s/step")


def test_a_job_that_saved_is_started_again(place):
    place.plan({"codes": {"1": 1}, "save": True}, {})
    assert entry.run("launch", ["--wait"]) == 0
    assert [row.state for row in place.rows()] == ["COMPLETED", "REQUEUED"]
    first, second = sorted(place.experiments.glob("*/pretrain_*"))
    assert f"RESUME={first}\n" in (second / "node-0.log").read_text()


def test_an_unreachable_host_is_named(place, monkeypatch):
    place.plan({"sleep": 60})
    monkeypatch.setenv("SSH_HOSTS", "n1 down7")
    assert entry.run("launch", ["--wait"]) == 1
    (row,) = place.rows()
    assert row.state == "FAILED"
    assert row.why.startswith("down7: ssh: connect to host down7 port 22: Connection refused")


def test_jobs_run_one_after_the_other_and_can_be_cancelled(place, monkeypatch, capsys):
    place.plan({"sleep": 60})
    monkeypatch.setenv("REPEATS", "2")
    assert entry.run("launch", []) == 0
    state = lambda: [row.state for row in place.rows()]
    wait(lambda: state() == ["PENDING", "RUNNING"], 300, "not running")
    second, first = place.rows()
    wait(lambda: place.rows()[1].step == "2", 300, "no step")
    assert entry.run("cancel", [second.job]) == 0
    assert entry.run("cancel", [first.job]) == 0
    wait(lambda: state() == ["CANCELLED", "CANCELLED"], 300, "not cancelled")
    assert place.rows()[1].why == "cancelled"
    assert entry.run("watch", [first.job]) == 1
    assert sorted((place.root / "connections").read_text().split()) == ["me@n1", "me@n2"]


def test_a_driver_that_died_is_noticed(place):
    place.plan({"sleep": 60})
    entry.run("launch", [])
    wait(lambda: place.rows()[0].state == "RUNNING", 300, "not running")
    (folder,) = place.experiments.glob("*/pretrain_*")
    pid = json.loads((folder / hosts.DRIVER).read_text())["pid"]
    os.kill(pid, 9)
    wait(lambda: place.rows()[0].state == "FAILED", 300, "not noticed")
    ended = lambda: submission.read_json(folder / "exit.json")  # its connections are closed
    wait(ended, 300, "the processes go on")
    assert ended()["reason"] == node.CLOSED
    assert f"the process that ran it, {pid} on " in place.rows()[0].why


def test_the_reason_is_the_host_that_failed(place, monkeypatch):
    """The driver closes the connection of the first host after the second has failed."""
    place.plan({"sleeps": {"0": 60}, "codes": {"1": 1}})
    monkeypatch.setattr(hosts, "_start_detached", lambda *_: os.getpid())
    monkeypatch.setattr(node, "GRACE_S", 1)
    monkeypatch.setenv("MAX_RESTARTS", "0")
    assert entry.run("launch", []) == 0
    (folder,) = place.experiments.glob("*/pretrain_*")
    state, why = hosts_driver.run(folder, lambda: False)
    assert (state, why) == ("FAILED", "stopped after 0 restarts: me@n2: exit code 1")
    hosts.write_state(folder, state, why, os.getpid())
    assert place.rows()[0].why == "me@n2: exit code 1"


def test_results_of_hosts_with_their_own_disk_are_copied(place, monkeypatch):
    """The first host does not see the launcher's folder."""
    there = place.root / "disk of the host"
    other = f'sed "s|MB_OUT={place.root}/stage|\'MB_OUT={there}\'|" <<<"$command"'
    body = SSH.replace("{root}", str(place.root)).replace('"$command"\n', f'"$({other})"\n')
    tool(place.root / "bin", "ssh", body)
    assert entry.run("launch", ["--wait"]) == 0
    (folder,) = place.experiments.glob("*/pretrain_*")
    assert (there / "experiments" / folder.parent.name / folder.name).is_dir()
    assert {"metrics.jsonl", "job.json", "exit.json"} <= {p.name for p in folder.iterdir()}
    assert "maxbench-files" not in (folder / "node-0.log").read_text()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({}, "needs 2 hosts, and SSH_HOSTS is not set"),
        ({"SSH_HOSTS": "n1"}, "needs 2 hosts, and SSH_HOSTS has 1"),
        ({"SSH_HOSTS": "n1 n2", "EXCLUDE_NODES": "n2"}, "has 1 without those of EXCLUDE_NODES"),
        ({"SSH_HOSTS": "n1;reboot"}, "SSH_HOSTS='n1;reboot' must be hosts, as 'node1 node2'"),
        ({"SSH_HOSTS": "n[1-2]", "RUN_CONF_IMAGE": "x"}, "RUN_CONF_IMAGE is set, and CLUSTER_"),
        ({"SSH_HOSTS": "n[1-2]", "MAX_RESTARTS": "100"}, "MAX_RESTARTS=100 must be below 100"),
    ],
)
def test_what_hosts_cannot_run_is_refused(env, message):
    output = dry_run(code=2, CLUSTER_TYPE="hosts", JOB_TOTAL_GPUS="16", **env)
    assert message in output
    assert output.count("\n") == 1


def test_dry_run_prints_a_command_per_host():
    output = dry_run(CLUSTER_TYPE="hosts", JOB_TOTAL_GPUS="16", SSH_HOSTS="me@n[1-4]")
    lines = output.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("ssh -T -o BatchMode=yes")
    assert "MB_NODE_INDEX=1 " in lines[2]
    assert "MB_COORDINATOR=n1:" in lines[2]
