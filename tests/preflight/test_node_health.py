"""What the preflight finds of nodes, with a stand-in for nvidia-smi and a made-up /sys."""

import os
import pathlib

from maxbench.hardware.gpus import GPU_TYPES
from maxbench.preflight import node_health
from tests.launch.test_launch import tool

GOOD = "580.65.06, Enabled, Disabled, Enabled, 700.00, 700.00, 1980, NVIDIA H100 80GB HBM3"
SMI = f"""[[ $1 == nvlink ]] || {{ for i in 1 2; do echo '{GOOD}'; done; exit; }}
echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'
echo '	 Link 0: 26.562 GB/s'
echo '	 Link 1: <inactive>'"""


def test_what_a_node_has_is_read(tmp_path, monkeypatch):
    tool(tmp_path, "nvidia-smi", SMI)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    files = {
        "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
        "dev/nvidia-caps-imex-channels/channel0": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = node_health.facts(str(tmp_path / "not" / "there"), tmp_path)
    assert [gpu["clocks.max.sm"] for gpu in found["gpus"]] == ["1980", "1980"]
    assert found["links"] == ["26.562 GB/s", "<inactive>"]
    assert found["ports"] == {"mlx5_0/1": ["ACTIVE", 400.0]}
    assert (found["governors"], found["imex"]) == (["powersave"], True)
    assert found["free_gib"] > 0
    monkeypatch.setenv("PATH", "")
    assert node_health.facts(".", pathlib.Path("/nowhere"))["gpus"] == []


def node(**changes) -> dict:
    gpu = dict(zip(node_health.SMI, GOOD.split(", "), strict=True))
    ports = {f"mlx5_{i}/1": ["ACTIVE", 400.0] for i in range(8)}
    facts = {"gpus": [gpu] * 8, "links": ["26.562 GB/s"] * 144, "ports": ports, "imex": False}
    return facts | {"governors": ["performance"], "free_gib": 5000.0} | changes


def judged(*nodes: dict, gpu: str = "h100") -> dict[str, list[str]]:
    """Of nodes n0, n1, ...: what is no pass, by check."""
    rows = node_health.judge({f"n{i}": one for i, one in enumerate(nodes)}, gpu, GPU_TYPES)
    assert {check for _, check, _ in rows} <= {*node_health.WHY}
    return {check: [verdict, what] for verdict, check, what in rows if verdict != "pass"}


def test_good_nodes_pass_and_others_are_named():
    assert judged(node(), node()) == {}
    ill = dict(node()["gpus"][0]) | {"ecc.mode.current": "Disabled", "power.limit": "500.00"}
    sick = node(gpus=[ill], links=["<inactive>", "26 GB/s"], governors=["powersave"])
    assert judged(node(), sick) == {
        "ecc": ["warn", "Disabled on n1"],
        "power limit": ["warn", "500.00 W of 700.00 W on n1"],
        "nvlink": ["warn", "1 of 2 links down on n1"],
        "governor": ["warn", "powersave on n1"],
    }
    other = [dict(gpu) | {"driver_version": "570.1"} for gpu in node()["gpus"]]
    assert judged(node(), node(gpus=other))["driver"][0] == "warn"
    down = {"a/1": ["DOWN", 400.0], "b/1": ["ACTIVE", 200.0]}
    said = judged(node(), node(ports=down))["network"]
    assert said == ["warn", "1 of 2 ports up, 25 of 400 GB/s on n1"]
    assert judged(node(ports=down)) == {}  # one node needs none
    assert judged(node(free_gib=0.5))["disk"] == ["fail", "0.5 GiB free on n0"]
    assert judged(node(free_gib=5.0))["disk"][0] == "warn"
    grace = judged(node(), node(), gpu="gb200")
    assert grace["imex"] == ["warn", "no channel on n0, n1"]
    assert grace["gpu type"] == ["warn", "8 x NVIDIA H100 80GB HBM3, not gb200 on n0, n1"]
    half = [dict(gpu) | {"name": "NVIDIA H200"} for gpu in node()["gpus"]]
    assert judged(node(), node(gpus=half))["gpu type"] == [
        "warn",
        "8 x NVIDIA H200, not h100 on n1",
    ]
    part = [dict(gpu) | {"mig.mode.current": "Enabled"} for gpu in node()["gpus"]]
    assert judged(node(gpus=part))["mig"] == ["fail", "Enabled on n0"]


def test_a_line_says_why_it_matters():
    rows = node_health.judge({"n0": node(governors=["powersave"], gpus=[])}, "h100", GPU_TYPES)
    assert node_health.lines(rows) == [
        "warn  governor     powersave on n0: a CPU that sleeps starts kernels late",
        "pass  disk         10 GiB or more free on n0",
    ]
