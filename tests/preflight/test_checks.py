"""Errors that the preflight finds in the facts of all processes."""

import dataclasses
import os

import pytest

from maxbench.preflight import checks, node_health
from tests.conftest import resolve
from tests.launch.test_launch import tool

GPU = {"name": "H100", "driver": "580", "ecc": "0", "celsius": "40", "slowdown": "Not Active"}
FACTS = checks.ProcessFacts(
    host="a",
    platform="gpu",
    devices=4,
    kind="H100",
    versions={"jax": "0.10.2"},
    gpus=[GPU] * 4,
    node=None,
    gemm_tflops=[750.0] * 4,
    all_reduce_gbytes_per_s=360.0,
    transports={"P2P": 1},
)


def process(host: str, **changes) -> checks.ProcessFacts:
    return dataclasses.replace(FACTS, host=host, **changes)


@pytest.fixture
def run():
    return resolve("llama31_8b", gpus=8)


def test_equal_hosts_pass(run):
    processes = [process("a"), process("b")]
    assert checks.errors(run, processes) == []
    assert "P2P x 2" in checks.table(run, processes)


def test_versions_must_be_equal(run):
    old = process("b", versions={"jax": "0.9"})
    assert checks.errors(run, [process("a"), old]) == ["jax differ: 0.10.2 on a; 0.9 on b"]


def test_faulty_gpus_are_named(run):
    gpus = [GPU, GPU, GPU | {"ecc": "3"}, GPU | {"slowdown": "Active"}]
    memory, slowdown = checks.errors(run, [process("a"), process("b", gpus=gpus)])
    assert memory == "b: GPU 2 has 3 uncorrected memory errors"
    assert slowdown == "b: GPU 3 is slowed by its hardware (40 C)"


def test_missing_devices_are_an_error(run):
    assert "needs 8 devices, 4 exist" in checks.errors(run, [process("a")])[0]


def test_failed_check_of_a_node_is_an_error(run):
    node = node_health.NodeFacts([], [], {}, [], imex=False, free_gib=0.5)
    (error,) = checks.errors(run, [process("a", node=node), process("b")])
    assert error.startswith("0.5 GiB free on a: ")


def test_tcp_between_nodes_must_be_allowed(run):
    processes = [process(host, transports={"NET/Socket": 8}) for host in "ab"]
    assert "TCP" in checks.errors(run, processes)[0]
    assert checks.errors(run, processes, allow_tcp=True) == []


def test_slow_host_is_named():
    hosts = [process(f"n{i}") for i in range(3)]
    assert checks.slow_hosts([*hosts, process("n3", gemm_tflops=[750.0, 500.0])]) == ["n3"]
    cpus = [process("a", platform="cpu"), process("b", platform="cpu", gemm_tflops=[1.0])]
    assert checks.slow_hosts(cpus) == []


def test_jax_must_use_the_gpus_that_nvidia_smi_counts(run, tmp_path, monkeypatch):
    line = "NVIDIA H100 80GB HBM3, 580.65.06, 0, 31, Not Active"
    tool(tmp_path, "nvidia-smi", f"for i in 0 1 2 3; do echo '{line}'; done")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gpus = checks.gpus_of_node()
    assert [gpu["driver"] for gpu in gpus] == ["580.65.06"] * 4
    a, b = (process(host, gpus=gpus) for host in "ab")
    assert checks.errors(run, [a, b]) == []
    fewer = checks.errors(run, [a, process("b", gpus=gpus, devices=3)])
    assert "b: nvidia-smi counts 4 GPUs and jax 3: unset CUDA_VISIBLE_DEVICES" in fewer[0]
    per_gpu = [process("b", gpus=gpus, devices=1) for _ in range(4)]
    assert checks.errors(run, [a, *per_gpu]) == ["devices differ: 1 x H100 on b; 4 x H100 on a"]
    smaller = resolve("llama31_8b", "tiny", fsdp=2)
    assert checks.errors(smaller, [process("a", gpus=gpus, devices=2)]) == []


def test_cpu_must_be_asked_for(run):
    cpus = [process(host, platform="cpu", gpus=[]) for host in "ab"]
    for unasked in (run, resolve("llama31_8b", "tiny", gpus=8)):
        (error,) = checks.errors(unasked, cpus)
        assert "jax runs on cpu: " in error
        assert "--cpu_devices N runs it on a CPU" in error
    assert checks.errors(resolve("llama31_8b", "tiny", gpus=8, cpu_devices=4), cpus) == []
