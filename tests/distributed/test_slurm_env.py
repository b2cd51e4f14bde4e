"""Hosts of processes, and the coordinator, from Slurm's variables."""

import pathlib
import shutil

import pytest

from maxbench.distributed import slurm_env
from maxbench.distributed.coordinator import split_address
from tests.conftest import needs

ENV = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "gpu-[07-09,12],b1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1(x3)",
}
HOSTS = ["gpu-07", "gpu-08", "gpu-09", "gpu-12", "b1"]


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("gpu-[07-09,12],b1", HOSTS),
        ("r[1-2]n[01,3]x", ["r1n01x", "r1n3x", "r2n01x", "r2n3x"]),
        ("", []),
    ],
)
@pytest.mark.parametrize("client", ["none", "without slurm.conf", "working"])
def test_nodelist_is_expanded(nodelist, hosts, client, tmp_path, monkeypatch):
    """By scontrol and by our parser alike, which a container without Slurm needs."""
    if client == "none":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        needs("scontrol")
        conf = "ClusterName=c\nSlurmctldHost=localhost\n" if client == "working" else ""
        (tmp_path / "slurm.conf").write_text(conf)
        monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    assert slurm_env.expand_nodelist(nodelist) == hosts


def test_scontrol_expands_the_nodelist_where_it_is_installed(tmp_path, monkeypatch):
    script = tmp_path / "scontrol"
    script.write_text('#!/bin/sh\n[ "$1 $2" = "show hostnames" ] && echo "from scontrol: $3"\n')
    script.chmod(0o755)
    shell = pathlib.Path(shutil.which("sh")).parent
    monkeypatch.setenv("PATH", f"{tmp_path}:{shell}")
    assert slurm_env.expand_nodelist("a[1-2]") == ["from", "scontrol:", "a[1-2]"]


@pytest.mark.parametrize(
    ("address", "expected"), [("10.0.0.7", "10.0.0.7:"), ("fd00::7", "[fd00::7]:"), ("", "gpu-07:")]
)
def test_coordinator_is_the_address_of_the_first_node(address, expected, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = slurm_env.coordinator_address(ENV | {"MB_COORDINATOR_HOST": address})
    assert found == f"{expected}{61440 + 4 * 7 + 1}"
    assert split_address(found)


def test_host_of_each_process():
    assert slurm_env.process_hosts(ENV) == [HOSTS[0], HOSTS[0], HOSTS[1], *HOSTS[1:]]
    one_per_node = {"SLURM_STEP_TASKS_PER_NODE": "1(x5)", "SLURM_DISTRIBUTION": "cyclic:block"}
    assert slurm_env.process_hosts(ENV | one_per_node) == HOSTS


@pytest.mark.parametrize("env", [{}, ENV | {"SLURM_DISTRIBUTION": "cyclic"}])
def test_undetermined_hosts_are_left_empty(env):
    assert slurm_env.process_hosts(env) == []


def test_coordinator_is_the_first_host_with_a_port_of_the_step():
    assert slurm_env.coordinator_address(ENV) == f"gpu-07:{61440 + 29}"
    named = ENV | {"MB_COORDINATOR_HOST": "10.0.0.7"}  # by the job script
    assert slurm_env.coordinator_address(named) == f"10.0.0.7:{61440 + 29}"
    last = ENV | {"SLURM_JOB_ID": "4095"}
    assert int(slurm_env.coordinator_address(last).rpartition(":")[2]) < 1 << 16
