"""maxbench cluster: variables from a fake Slurm, questions on a terminal, and errors."""

import builtins
import os
import pathlib
import platform
import tomllib

import pytest

from maxbench.cli import cluster as cli_cluster
from maxbench.cli import entry
from maxbench.launch import job_file, slurm
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
    for name in [n for n in os.environ if n.startswith(("SLURM", "SBATCH", "GPU", "RUN_CONF"))]:
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
    monkeypatch.setenv("GPU_TYPE", "a100")
    assert "GPU_TYPE='a100' is not one of h100, h200" in refused(capsys)
