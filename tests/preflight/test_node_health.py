"""Facts of nodes, from a stand-in for nvidia-smi and a /sys of the test, and their findings."""

import dataclasses
import os
import pathlib

import pytest

from maxbench.hardware.gpus import GPU_TYPES
from maxbench.preflight import node_health
from tests.launch.test_launch import tool

SMI_LINE = "580.65.06, Enabled, Disabled, Enabled, 700.00, 700.00, 1980, NVIDIA H100 80GB HBM3"
SMI = f"""[[ $1 == nvlink ]] || {{ for i in 1 2; do echo '{SMI_LINE}'; done; exit; }}
echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'
echo '	 Link 0: 26.562 GB/s'
echo '	 Link 1: <inactive>'"""


def test_facts_are_read_from_nvidia_smi_and_sys(tmp_path, monkeypatch):
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
    facts = node_health.read_facts(str(tmp_path / "not" / "created"), tmp_path)
    assert [gpu["clocks.max.sm"] for gpu in facts.gpus] == ["1980", "1980"]
    assert facts.links == ["26.562 GB/s", "<inactive>"]
    assert facts.ports == {"mlx5_0/1": ("ACTIVE", 400.0)}
    assert (facts.governors, facts.imex) == (["powersave"], True)
    assert facts.free_gib > 0


def test_facts_are_empty_where_nothing_can_be_read(monkeypatch):
    monkeypatch.setenv("PATH", "")
    facts = node_health.read_facts(".", pathlib.Path("/nowhere"))
    assert (facts.gpus, facts.links, facts.ports, facts.governors) == ([], [], {}, [])


GPU = dict(zip(node_health.SMI_PROPERTIES, SMI_LINE.split(", "), strict=True))
GOOD = node_health.NodeFacts(
    gpus=[GPU] * 8,
    links=["26.562 GB/s"] * 144,
    ports={f"mlx5_{i}/1": ("ACTIVE", 400.0) for i in range(8)},
    governors=["performance"],
    imex=False,
    free_gib=5000.0,
)


def node(**changes) -> node_health.NodeFacts:
    return dataclasses.replace(GOOD, **changes)


def gpus(**changes) -> list[dict[str, str]]:
    """Eight GPUs with some properties changed; '_' stands for '.' in their names."""
    return [GPU | {name.replace("_", "."): value for name, value in changes.items()}] * 8


def findings(*nodes: node_health.NodeFacts, gpu_type: str = "h100") -> dict[str, tuple[str, str]]:
    """Verdict and text of each check of nodes n0, n1, ... that does not pass."""
    facts = {f"n{i}": one for i, one in enumerate(nodes)}
    judged = node_health.judge(facts, gpu_type, GPU_TYPES)
    assert {finding.check for finding in judged} <= {*node_health.CHECKS}
    return {f.check: (f.verdict, f.text) for f in judged if f.verdict != "pass"}


def test_good_nodes_pass():
    assert findings(GOOD, GOOD) == {}


def test_faulty_node_is_named_by_every_check():
    faulty = node(
        gpus=[GPU | {"ecc.mode.current": "Disabled", "power.limit": "500.00"}],
        links=["<inactive>", "26 GB/s"],
        governors=["powersave"],
    )
    assert findings(GOOD, faulty) == {
        "ecc": ("warn", "Disabled on n1"),
        "power limit": ("warn", "500.00 W of 700.00 W on n1"),
        "nvlink": ("warn", "1 of 2 links down on n1"),
        "governor": ("warn", "powersave on n1"),
    }


def test_different_drivers_warn():
    other = [GPU | {"driver_version": "570.1"}] * 8
    assert findings(GOOD, node(gpus=other))["driver"][0] == "warn"


def test_network_matters_to_several_nodes_alone():
    half_down = node(ports={"a/1": ("DOWN", 400.0), "b/1": ("ACTIVE", 200.0)})
    expected = ("warn", "1 of 2 ports up, 25 of 400 GB/s on n1")
    assert findings(GOOD, half_down)["network"] == expected
    assert findings(half_down) == {}


@pytest.mark.parametrize(("free_gib", "verdict"), [(0.5, "fail"), (5.0, "warn")])
def test_little_disk_space_warns_or_fails(free_gib, verdict):
    expected = (verdict, f"{free_gib:g} GiB free on n0")
    assert findings(node(free_gib=free_gib)) == {"disk": expected}


def test_nodes_that_share_nvlink_need_an_imex_channel():
    assert findings(GOOD, GOOD, gpu_type="gb200")["imex"] == ("warn", "no channel on n0, n1")


def test_another_gpu_type_warns():
    text = "8 x NVIDIA H100 80GB HBM3 (h100), not gb200 on n0"
    assert findings(GOOD, gpu_type="gb200")["gpu type"] == ("warn", text)
    mixed = findings(GOOD, node(gpus=gpus(name="NVIDIA H200")))
    assert mixed["gpu type"] == ("warn", "8 x NVIDIA H200 (h200), not h100 on n1")
    card = findings(node(gpus=gpus(name="NVIDIA H100 PCIe")))
    assert card["gpu type"] == ("warn", "8 x NVIDIA H100 PCIe (h100pcie), not h100 on n0")
    other = findings(node(gpus=gpus(name="NVIDIA H100")))
    assert other["gpu type"] == ("warn", "8 x NVIDIA H100 (no known type), not h100 on n0")


def test_mig_fails():
    assert findings(node(gpus=gpus(mig_mode_current="Enabled")))["mig"] == ("fail", "Enabled on n0")


def test_line_of_a_finding_says_why_it_matters():
    facts = {"n0": node(governors=["powersave"], gpus=[])}
    assert node_health.lines(node_health.judge(facts, "h100", GPU_TYPES)) == [
        "warn  governor  powersave on n0: a CPU in a power-saving state launches kernels late",
        "pass  disk      10 GiB or more free on n0",
    ]
