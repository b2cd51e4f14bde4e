"""A workload is one file: every command knows a copy with new numbers and a new name."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from maxbench.config import recipes
from maxbench.config.errors import UserError
from maxbench.cost_model import compile_cache
from tests.launch.test_launch import LAUNCH, plain_env
from tests.reporting.test_report import nemo_line

ROOT = pathlib.Path(__file__).parents[2]
NEW = {'name="llama31"': 'name="madeup"', 'size="8b"': 'size="3b-a1b"', '"llama3.1"': '"made-up"'}
NEW |= {'"llama3"': '"made"', " 32 8192 ": " 28 8192 ", "layers=32": "layers=28", "rank=1, ": ""}
FOREIGN = "log-team.pretrain_made-up_3b-a1b_bf16_gpus16_tp1_pp1_cp2_vp1_mbs1_gbs256_7_0.out"


def copied() -> str:
    """Text of a copy of llama31_8b.py with another name and number of layers."""
    text = (ROOT / "configs" / "llama31_8b.py").read_text()
    for old, new in NEW.items():
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A checkout in which configs/copy.py is added, and nothing else changed."""
    folder = tmp_path_factory.mktemp("clone")
    for part in ("maxbench", "configs", "launch"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "configs" / "copy.py").write_text(copied())
    return folder


def output(clone: pathlib.Path, *words: str, **env: str) -> str:
    """Output of a command in the clone."""
    env = plain_env(**env) | {"PYTHONPATH": str(clone)}
    done = subprocess.run(words, cwd=clone, env=env, capture_output=True, text=True)
    assert done.returncode in (0, 3), done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_copied_file_trains_and_is_reported(clone):
    train = (sys.executable, "-m", "maxbench.train", "--config", "configs/copy.py:tiny")
    output(clone, *train, "--cpu_devices", "1", "--steps", "2", "--seq", "16", "--layers", "1")
    (clone / "experiments" / FOREIGN).write_text("".join(nemo_line(i, 9, 4.0) for i in range(9)))
    report = (
        sys.executable,
        "-m",
        "maxbench.report",
        "--gpu_type",
        "h100",
        "--seq",
        "8192",
        "--format=csv",
    )
    csv = output(clone, *report, "experiments")
    assert "/pretrain_madeup_3b-a1b-tiny_bf16_gpus1_" in csv
    assert "nothing published for madeup 3b-a1b bf16 on h100" in csv  # all fields of the name


@pytest.mark.gpu_compile
@pytest.mark.skipif(not compile_cache.versions()["jax-cuda13-plugin"], reason="no GPU compiler")
@pytest.mark.exhaustive
def test_copied_file_is_planned(clone, tmp_path):
    plan = (sys.executable, "-m", "maxbench.plan", "--config", "configs/copy.py:tiny", "--json")
    found = json.loads(output(clone, *plan, "--layers", "1", MAXBENCH_CACHE=str(tmp_path)))
    assert found["name"].startswith("pretrain_madeup_3b-a1b-tiny_bf16_gpus1")


@pytest.mark.parametrize(
    "env", [{"MODEL": "madeup"}, {"MODEL_SIZE": "3b-a1b"}, {"MODEL": "MADE-UP"}]
)
def test_copied_file_is_launched_by_name_or_size(clone, env):
    script = output(clone, "launch/launch.sh", "--dry_run", **env)
    assert "maxbench.train --config copy --gpus 8" in script
    assert "#SBATCH --time=00:30:00" in script
    assert "pretrain_madeup_3b-a1b_bf16_gpus8_" in script


def test_default_workload_does_not_depend_on_user_files(clone):
    assert "--config llama31_8b --gpus 8" in output(clone, "launch/launch.sh", "--dry_run")
    assert re.search(r"MODEL +llama31 .*madeup", output(clone, "launch/launch.sh", "--help"))


def test_file_outside_the_checkout_is_launched_by_its_path(tmp_path):
    path = tmp_path / "elsewhere.py"
    path.write_text(copied())
    env = {"MODEL": os.path.relpath(path, ROOT), "RUN_CONF_IMAGE": "image", "JOB_TOTAL_GPUS": "16"}
    script = output(ROOT, "launch/launch.sh", "--dry_run", **env)
    assert f"maxbench.train --config {path} --gpus 16" in script
    assert f",{tmp_path}:{tmp_path}" in script  # mounts of the container


def test_files_with_equal_names_are_chosen_by_path(clone):
    twin = clone / "configs" / "twin.py"
    shutil.copy(clone / "configs" / "copy.py", twin)
    env = plain_env(MODEL="madeup", PYTHONPATH=str(clone))
    command = ["launch/launch.sh", "--dry_run"]
    done = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    both = "configs/copy.py and configs/twin.py"
    assert f"matches {both}: set MODEL to the path of one" in done.stderr
    assert "--config twin " in output(clone, *command, MODEL="configs/twin.py")


def test_sections_of_a_file_are_checked():
    with pytest.raises(UserError, match=r"launch: a field='dtpye' is not .* mean 'dtype'"):
        recipes.workload("", model={}, train={}, optim={}, layouts="", launch={"dtpye": "fp8"})
    with pytest.raises(UserError, match="section='lauch' is not one of model, layout"):
        recipes.workload("", model={}, train={}, optim={}, layouts="", lauch={})


def test_file_of_further_gpu_types_reaches_the_job(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[h300]\nlike = "gb200"\nnvlink_gpus = 36\nenvironment = { A_B = "1" }\n')
    env = {"HARDWARE": "mine.toml", "GPU_TYPE": "h300", "MODEL": "nemotron"}
    script = output(tmp_path, str(LAUNCH), "--dry_run", **env, JOB_TOTAL_GPUS="128")
    assert f"--hardware {path} --gpu_type h300" in script
    assert "#SBATCH --segment=8" in script
    assert "export A_B=1" in script


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The folder of an installed package: maxbench/ with configs/ in it, and no job scripts."""
    folder, ignore = tmp_path_factory.mktemp("package"), shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "maxbench", folder / "maxbench", ignore=ignore)
    shutil.copytree(ROOT / "configs", folder / "maxbench/configs", ignore=ignore)
    return folder


def test_an_installed_package_launches_on_kubernetes_and_hosts(package, tmp_path):
    def launched(**env: str) -> subprocess.CompletedProcess:
        env = plain_env(JOB_TOTAL_GPUS="16", STAGE_PATH=str(tmp_path), **env)
        command = (sys.executable, "-m", "maxbench.launch", "--dry_run")
        return subprocess.run(
            command, cwd=ROOT / "docs", env=env | {"PYTHONPATH": str(package)},
            capture_output=True, text=True,
        )  # fmt: skip

    jobset = launched(CLUSTER_TYPE="kubernetes", RUN_CONF_IMAGE="a/b:1")
    assert "- llama31_8b\n" in jobset.stdout, jobset.stderr
    hosts = launched(CLUSTER_TYPE="hosts", SSH_HOSTS="node[1-2]")
    assert "maxbench.train --config llama31_8b --gpus 16" in hosts.stdout, hosts.stderr
    assert str(ROOT) not in jobset.stdout + hosts.stdout.replace(sys.executable, "")
    slurm = launched(SBATCH_ACCOUNT="a", SBATCH_PARTITION="b")
    assert slurm.returncode == 2
    assert "needs the job scripts of a checkout" in slurm.stderr
