"""maxbench cluster: variables from a fake Slurm, questions on a terminal, and errors."""

import builtins
import os
import pathlib
import platform
import shutil
import tomllib

import pytest

from maxbench.cli import cluster as cli_cluster
from maxbench.cli import entry
from maxbench.launch import job_file, slurm
from tests.launch import kubernetes_cluster
from tests.launch.test_launch import tool

HERE = platform.machine()


def node(name: str, gres: str, partitions: str, more: str = "", machine: str = "x86_64") -> str:
    """A line of scontrol show nodes --oneliner."""
    return (
        f"NodeName={name} Arch={machine} CoresPerSocket=56 CPUTot=224 {more} Gres={gres} "
        f"NodeAddr={name} OS=Linux 6.8.0 #1 SMP State=IDLE Partitions={partitions} "
        "CfgTRES=cpu=224,gres/gpu=8 Comment=Arch=none"
    )


H100 = [node(f"n{i}", "gpu:nvidia_h100_80gb_hbm3:8(S:0-1)", "batch,all") for i in range(3)]
CPU = [node("c1", "(null)", "all,cpu")]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A STAGE_PATH, and no tools but those that a test adds."""
    (tmp_path / "bin").mkdir()
    for name in [
        n for n in os.environ if n.startswith(("SLURM", "SBATCH", "GPU", "RUN_CONF", "K8S", "KUBE"))
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("STAGE_PATH", str(tmp_path / "a b"))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    for name in ("sacctmgr", "sbatch", "nvidia-smi"):
        tool(tmp_path / "bin", name, "exit 1")
    slurm.sbatch_supports.cache_clear()
    yield tmp_path
    slurm.sbatch_supports.cache_clear()


def slurm_says(place: pathlib.Path, nodes: list[str], accounts: str = "", default: str = ""):
    (place / "nodes").write_text("\n".join(nodes))
    tool(place / "bin", "scontrol", f"cat {place}/nodes")
    if accounts:
        user = f"printf '%s\\n' {default}"
        tool(place / "bin", "sacctmgr", f"[[ $3 == user ]] && {user} || printf '%s\\n' {accounts}")
    tool(place / "bin", "sbatch", "echo '  --segment=nodes'")


def variables_in_file(place: pathlib.Path) -> dict[str, str]:
    return tomllib.loads((place / "a b" / "cluster.toml").read_text())


def refused(capsys) -> str:
    assert entry.run("cluster", []) == 2
    return capsys.readouterr().err


def test_detected_variables_are_written_and_used_by_jobs(place, capsys, monkeypatch):
    """GPUs are in two partitions: one is named in the environment."""
    slurm_says(place, [*H100, *CPU], accounts="acct acct", default="acct")
    output = refused(capsys)
    about = "batch (3 nodes of 8 h100, x86_64), all (3 nodes of 8 h100, x86_64)"
    assert f"set SBATCH_PARTITION: one of {about}" in output
    assert not (place / "a b").exists()
    monkeypatch.setenv("SBATCH_PARTITION", "batch")
    assert entry.run("cluster", []) == 0
    assert variables_in_file(place) == {
        "SBATCH_PARTITION": "batch", "GPU_TYPE": "h100", "GPUS_PER_NODE": "8",
        "SBATCH_GPUS_PER_NODE": "8", "ARCHITECTURE": "x86_64", "SBATCH_ACCOUNT": "acct",
        "SEGMENT": "true",
    }  # fmt: skip
    assert f"{place}/a b/cluster.toml:" in capsys.readouterr().out
    (s,) = job_file.resolve_jobs({"STAGE_PATH": str(place / "a b")})
    options = slurm.sbatch_options(s, "", pathlib.Path("x"))
    assert {"--partition=batch", "--account=acct", "--gres=gpu:8"} <= {*options}


def test_existing_variables_are_kept_and_missing_ones_added(place, capsys, monkeypatch):
    slurm_says(place, H100[:1])
    file = place / "a b" / "cluster.toml"
    file.parent.mkdir()
    user_text = '# mine\nSLURM_PARTITION = "all"\nTIME_LIMIT = "02:00:00"\nGPU_TYPE = "h200"'
    file.write_text(user_text)
    monkeypatch.setenv("GPU_TYPE", "H100")
    monkeypatch.setenv("RUN_CONF_IMAGE", "/x/y.sqsh")
    entry.run("cluster", [])
    assert "note: GPU_TYPE=H100 is set in the environment and wins\n" in capsys.readouterr().out
    assert file.read_text().startswith(user_text + "\n")
    assert {*variables_in_file(place)} == {
        "SLURM_PARTITION", "TIME_LIMIT", "GPU_TYPE", "GPUS_PER_NODE", "SBATCH_GPUS_PER_NODE",
        "ARCHITECTURE", "SEGMENT", "RUN_CONF_IMAGE",
    }  # fmt: skip
    before = file.read_text()
    entry.run("cluster", [])
    assert file.read_text() == before


def test_ambiguous_variables_are_asked_on_a_terminal(place, capsys, monkeypatch):
    """Two partitions with GPUs, three accounts; a wrong answer is asked again."""
    untyped = node("d1", "gpu:4", "dev", more="AvailableFeatures=ib,gb200", machine="aarch64")
    slurm_says(place, [*H100, untyped], accounts="b a c", default="b")
    answers, asked = ["dve", "dev", "a"], []
    monkeypatch.setattr(cli_cluster.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(builtins, "input", lambda _: asked.append(1) or answers.pop(0))
    entry.run("cluster", [])
    output = capsys.readouterr().out
    assert "SBATCH_PARTITION, which one?\n  batch  3 nodes of 8 h100, x86_64\n" in output
    assert "  dev    1 node of 4 gb200, aarch64\n" in output
    assert "'dve' is not one of batch, all, dev" in output
    assert "SBATCH_ACCOUNT, which one?\n  a\n  b  your default\n  c\n" in output
    kept = variables_in_file(place)
    assert (kept["SBATCH_PARTITION"], kept["SBATCH_ACCOUNT"]) == ("dev", "a")
    assert (kept["GPU_TYPE"], kept["GPUS_PER_NODE"], kept["ARCHITECTURE"]) == (
        "gb200", "4", "aarch64")  # fmt: skip
    entry.run("cluster", [])  # asked once
    assert len(asked) == 3


def test_without_an_answer_choices_are_listed_and_nothing_is_written(place, capsys, monkeypatch):
    slurm_says(place, CPU)

    def ended(_):
        raise EOFError

    monkeypatch.setattr(cli_cluster.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(builtins, "input", ended)
    output = refused(capsys)
    assert "set SBATCH_PARTITION: one of all (1 node of no gres, x86_64), cpu" in output
    assert "; set GPU_TYPE: one of h100, h200, b200, b300, gb200, gb300" in output


def test_in_a_job_its_own_facts_are_used(place, monkeypatch):
    """sbatch setup.sh: partition and account of the job, GPUs by the driver; no gres anywhere."""
    slurm_says(place, [node("n1", "(null)", "batch,other")], accounts="a b")
    tool(place / "bin", "nvidia-smi", "for i in 1 2 3 4; do echo NVIDIA GB200; done")
    for name, value in {"ID": "7", "PARTITION": "other", "ACCOUNT": "b"}.items():
        monkeypatch.setenv(f"SLURM_JOB_{name}", value)
    entry.run("cluster", [])
    assert variables_in_file(place) == {
        "SBATCH_PARTITION": "other", "GPU_TYPE": "gb200", "GPUS_PER_NODE": "4",
        "SBATCH_GPUS_PER_NODE": "none", "ARCHITECTURE": HERE, "SBATCH_ACCOUNT": "b",
        "SEGMENT": "true",
    }  # fmt: skip


def test_missing_or_silent_slurm_is_an_error(place, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(place / "bin"))
    assert "scontrol is not on PATH: run this on a login node" in refused(capsys)
    tool(place / "bin", "scontrol", "echo 'slurm_load_node: Unable to contact' >&2; exit 1")
    assert "no node of a partition: slurm_load_node: Unable to contact" in refused(capsys)
    slurm_says(place, H100[:1])
    (place / "a b").write_text("a file")
    monkeypatch.setenv("PATH", f"{place}/bin:/usr/bin:/bin")
    monkeypatch.setenv("SBATCH_PARTITION", "all")
    assert f"'{place}/a b/cluster.toml' cannot be written: " in refused(capsys)
    monkeypatch.setenv("GPU_TYPE", "v100")
    assert "GPU_TYPE='v100' is not one of h100, h200" in refused(capsys)


# --- without Slurm ---


@pytest.fixture
def elsewhere(place, monkeypatch):
    """No Slurm; programs of a test alone."""
    monkeypatch.setenv("PATH", str(place / "bin"))
    for name in ("bash", "cat", "uname", "test"):
        (place / "bin" / name).symlink_to(shutil.which(name, path="/usr/bin:/bin"))
    return place


def gpu_node(name: str, product: str, machine: str = "", **resources: str) -> dict:
    labels = {"nvidia.com/gpu.product": product, "node.kubernetes.io/instance-type": machine}
    taints = [{"key": "nvidia.com/gpu"}, {"key": "team"}, {"key": "node.kubernetes.io/x"}]
    allocatable = {"nvidia.com/gpu": "8", **resources}
    return {"metadata": {"name": name, "labels": labels}, "status": {"allocatable": allocatable},
            "spec": {"taints": taints}}  # fmt: skip


@pytest.fixture
def kubernetes(elsewhere, tmp_path, monkeypatch):
    """The API of kubernetes_cluster.py, and kubectl."""
    if not (kubectl := shutil.which("kubectl", path="/usr/local/bin:/usr/bin:/bin")):
        pytest.skip("no kubectl")
    tool(elsewhere / "bin", "kubectl", f'exec {kubectl} "$@"')
    with kubernetes_cluster.cluster(tmp_path / "cluster") as cluster:
        for name, value in cluster.env.items():
            monkeypatch.setenv(name, value)

        def add(plural: str, *items: dict) -> None:
            for item in items:
                cluster.add(plural, item["metadata"]["name"], **item)

        cluster.extend = add
        yield cluster


def test_scheduler_is_asked_where_there_is_no_slurm(elsewhere, capsys):
    for name in ("kubectl", "ssh"):
        tool(elsewhere / "bin", name, "exit 1")
    text = refused(capsys)
    about = "kubernetes (JobSets, through kubectl), hosts (plain hosts, by ssh)"
    assert f"set CLUSTER_TYPE: one of {about}" in text
    assert "scontrol is not on PATH" in text


def test_variables_of_a_kubernetes_cluster(kubernetes, elsewhere, capsys, monkeypatch):
    monkeypatch.setenv("CLUSTER_TYPE", "kubernetes")
    monkeypatch.setenv("RUN_CONF_IMAGE", "registry/image:1")
    assert "no node of this cluster offers nvidia.com/gpu" in refused(capsys)
    nodes = [gpu_node(f"n{i}", "NVIDIA-H100-80GB-HBM3", **{"rdma/ib": "1k"}) for i in range(2)]
    kubernetes.extend("nodes", *nodes, gpu_node("old", "Tesla-V100"))
    kubernetes.extend("localqueues", {"metadata": {"name": "queue"}})
    assert entry.run("cluster", []) == 0
    assert variables_in_file(elsewhere) == {
        "CLUSTER_TYPE": "kubernetes", "K8S_CONTEXT": "here", "K8S_NAMESPACE": "team",
        "GPU_TYPE": "h100", "GPUS_PER_NODE": "8", "K8S_RESOURCES": "rdma/ib=1",
        "K8S_TOLERATIONS": "nvidia.com/gpu;team", "K8S_QUEUE": "queue",
        "RUN_CONF_IMAGE": "registry/image:1",
    }  # fmt: skip
    stage = {"STAGE_PATH": str(elsewhere / "a b")}
    (s,) = job_file.resolve_jobs(stage | {"JOB_TOTAL_GPUS": "16"})
    assert s.values["CLUSTER_TYPE"] == "kubernetes"


def test_networks_follow_the_type_of_the_machines(kubernetes, elsewhere, capsys, monkeypatch):
    """The claim for results and the image are asked on a terminal."""
    node = gpu_node("n", "", "a3-ultragpu-8g", **{"rdma/x": "1"})
    node["metadata"]["labels"]["cloud.google.com/gke-accelerator"] = "nvidia-h200-141gb"
    kubernetes.extend("nodes", node)
    size = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Ti"}}}
    kubernetes.extend("persistentvolumeclaims", {"metadata": {"name": "mine"}, "spec": size})
    answers = ["kubernetes", "results:/results:mine", "registry/image:2"]
    monkeypatch.setattr(cli_cluster.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(builtins, "input", lambda _: answers.pop(0))
    assert entry.run("cluster", []) == 0
    output = capsys.readouterr().out
    assert "  results:/results:mine  1Ti, ReadWriteMany\n" in output
    assert "RUN_CONF_IMAGE, container image" in output
    kept = variables_in_file(elsewhere)
    assert (kept["GPU_TYPE"], kept["K8S_NETWORK"]) == ("h200", "gke-a3-ultra")
    assert (kept["RUN_CONF_MOUNTS"], kept["PVC_DIR"]) == ("results:/results:mine", "/results")
    assert kept["RUN_CONF_IMAGE"] == "registry/image:2"
    assert "K8S_RESOURCES" not in kept


def test_a_cluster_without_jobsets_or_an_image_is_refused(kubernetes, capsys, monkeypatch):
    monkeypatch.setenv("CLUSTER_TYPE", "kubernetes")
    kubernetes.extend("nodes", gpu_node("n", "NVIDIA-B200"))
    assert "set RUN_CONF_IMAGE: container image" in refused(capsys)
    kubernetes.groups = ("v1",)
    shutil.rmtree(kubernetes.env["KUBECACHEDIR"])
    assert "this cluster has no JobSets" in refused(capsys)
    monkeypatch.setenv("CLUSTER_TYPE", "nomad")
    assert "CLUSTER_TYPE='nomad' is not one of kubernetes, runai, hosts" in refused(capsys)


def test_hosts_describe_themselves(elsewhere, capsys, monkeypatch):
    monkeypatch.setenv("CLUSTER_TYPE", "hosts")
    assert "set SSH_HOSTS: " in refused(capsys)
    body = """
host="${@: -2:1}"
case "$host" in
  down) echo "ssh: connect to host down port 22: No route to host" >&2; exit 255 ;;
  small) echo x86_64; echo NVIDIA L4 ;;
  *) echo x86_64; for i in 1 2 3 4 5 6 7 8; do echo NVIDIA H100 80GB HBM3; done ;;
esac
"""
    tool(elsewhere / "bin", "ssh", body)
    monkeypatch.setenv("SSH_HOSTS", "n1 down")
    assert "down: ssh: connect to host down port 22: No route to host" in refused(capsys)
    monkeypatch.setenv("SSH_HOSTS", "n1 small")
    assert "differ: n1 has 8 h100, x86_64; small has 1 GPUs, x86_64" in refused(capsys)
    monkeypatch.setenv("SSH_HOSTS", "n[1-3]")
    assert entry.run("cluster", []) == 0
    assert variables_in_file(elsewhere) == {
        "CLUSTER_TYPE": "hosts", "SSH_HOSTS": "n[1-3]", "GPU_TYPE": "h100",
        "GPUS_PER_NODE": "8", "ARCHITECTURE": "x86_64",
    }  # fmt: skip


def test_run_ai_asks_for_what_it_needs(elsewhere, capsys, monkeypatch):
    monkeypatch.setenv("CLUSTER_TYPE", "runai")
    text = refused(capsys)
    for name in ("GPU_TYPE", "RUN_CONF_IMAGE", "RUN_CONF_MOUNTS", "PROJECT_NAME", "PVC_DIR"):
        assert f"set {name}: " in text
