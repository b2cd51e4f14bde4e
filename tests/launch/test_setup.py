"""setup.sh with stand-ins for uv and enroot: what is there decides, not an earlier mark."""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest

from tests.launch.test_launch import ROOT, plain_env, tool

MACHINE = os.uname().machine
# In place of an environment that has all that maxbench needs.
PYTHON = f'[[ "$*" == *needs.py* ]] && exit 0; exec {sys.executable} "$@"'
MAXBENCH = f'[[ $1 == train ]] || PYTHONPATH={ROOT} exec {sys.executable} -m maxbench "$@"'
UV = f"""echo "uv $*" >> calls
if [[ $1 == venv ]]; then
  mkdir -p "${{@: -1}}/bin"
  printf '#!/bin/bash\\n%s\\n' {shlex.quote(PYTHON)} > "${{@: -1}}/bin/python"
  echo {shlex.quote(MAXBENCH)} > "${{@: -1}}/bin/maxbench"
  chmod +x "${{@: -1}}"/bin/*
fi"""
# The image's Python lacks what INSIDE says until pip is called; pip install in it is recorded.
ENROOT = """echo "enroot $*" >> calls
case $1 in
  import | export) touch "$3" ;;
  digest) cat digest ;;
  start)
    while [[ $1 != python3 && $1 != bash ]]; do shift; done
    PATH=$PWD/image:$PATH exec "$@" ;;
esac"""
IMAGE_PYTHON = f"""echo "image python3 $*" >> calls
[[ "$*" == *needs.py* && ! -f installed ]] && echo "ml-collections is not there" >&2 && exit 1
[[ "$*" == *"pip install"* ]] && {{ touch "${{INSTALLS:-/dev/null}}"; exit 0; }}
{PYTHON}"""


@pytest.fixture
def place(tmp_path):
    """A folder with a PATH of stand-ins in it."""
    for name in ("bin", "image"):
        (tmp_path / name).mkdir()
    for name in (
        "bash",
        "dirname",
        "uname",
        "mkdir",
        "rm",
        "mv",
        "cat",
        "sed",
        "chmod",
        "touch",
        "timeout",
    ):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    tool(tmp_path / "bin", "uv", UV)
    tool(tmp_path / "image", "python3", IMAGE_PYTHON)
    return tmp_path


def setup(place: pathlib.Path, *options: str, code: int = 0, **env: str) -> tuple[str, list[str]]:
    """What setup.sh says, and what it has called."""
    (place / "calls").write_text("")
    env = {"PATH": str(place / "bin"), "STAGE_PATH": str(place / "a b"), "PYTHONPATH": ""} | env
    env["MAXBENCH_ROOT"] = str(ROOT)
    command = [str(ROOT / "setup.sh"), *options]
    done = subprocess.run(
        command, env=plain_env(**env), cwd=place, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr, (place / "calls").read_text().splitlines()


def test_what_is_there_is_not_made_again_and_what_is_gone_is(place):
    """The environment, its doors, the image: each is looked at."""
    tool(place / "bin", "enroot", ENROOT)
    stage, installed = place / "a b", {"INSTALLS": "installed"}
    said, calls = setup(place, IMAGE="docker://x#y@sha256:1", **installed)
    assert f"RUN_CONF_IMAGE={stage}/maxbench.sqsh" in said
    assert f"uv venv --quiet --seed --python 3.12 {stage}/venv-{MACHINE}" in calls
    (pip,) = [c for c in calls if c.startswith("image python3 -m pip install")]
    assert "-c /tmp/kept.txt" in pip  # the image's own jax stays
    assert [c for c in calls if c.startswith("enroot")][-1].startswith("enroot remove")
    door = stage / "venv" / "bin" / "maxbench"
    done = subprocess.run([door, "--help"], capture_output=True, text=True, check=True)
    assert "usage: maxbench COMMAND" in done.stdout
    # All is there; and now a cluster, which is asked what it is.
    fields = "NodeName=n1 Arch=riscv Gres=gpu:h200:8 Partitions=batch"
    tool(place / "bin", "scontrol", f"echo {fields}")
    tool(place / "bin", "sbatch", "exit 1")
    tool(place / "bin", "sacctmgr", "exit 1")
    skip = "while [[ $1 == -* ]]; do shift 2; done"
    tool(place / "bin", "srun", f'echo "srun $*" >> calls; {skip}; "$@"')
    said, calls = setup(place, IMAGE="docker://x#y@sha256:1", **installed, SBATCH_ACCOUNT="me")
    assert [c.split()[1] for c in calls if c.startswith("enroot")] == ["start"]
    assert not [c for c in calls if c.startswith("uv")]
    assert [c for c in calls if c.startswith("srun -N 1 -t 01:00:00 -A me -p batch ")]
    kept = tomllib.loads((stage / "cluster.toml").read_text())
    assert (kept["GPU_TYPE"], kept["ARCHITECTURE"]) == ("h200", "riscv")
    assert kept["RUN_CONF_IMAGE"] == f"{stage}/maxbench.sqsh"
    assert said.endswith(f"For launch.sh: export STAGE_PATH={stage}\n")  # the file has the image
    # Another image; an environment whose Python is gone.
    (stage / f"venv-{MACHINE}" / "bin" / "python").unlink()
    said, calls = setup(place, IMAGE="docker://x#y@sha256:2", **installed)
    assert [c for c in calls if "enroot import" in c and "sha256:2" in c]
    assert [c for c in calls if c.startswith("uv venv")]


def test_a_tag_that_has_moved_is_noticed(place):
    """What the tag was is kept beside the image, where this enroot and its registry tell it."""
    tool(place / "bin", "enroot", ENROOT)
    command = [str(ROOT / "launch" / "image.sh"), "docker://x#y:26.06", str(place / "i.sqsh")]

    def made(digest: str) -> list[str]:
        (place / "calls").write_text("")
        (place / "digest").write_text(digest)
        env = plain_env(PATH=str(place / "bin"), INSTALLS="installed")
        done = subprocess.run(
            command, env=env, cwd=place, capture_output=True, text=True, check=True
        )
        assert done.stderr == ""
        return done.stdout.splitlines()

    file, was = f"setup: {place}/i.sqsh is made of docker://x#y:26.06", "sha256:1f"
    assert made(was) == [f"{file} ({was})"]
    assert made(was) == made("") == [f"{file} ({was}) and has all"]
    moved = (
        "setup: note: docker://x#y:26.06 is another image by now, sha256:2e; to take it, remove "
    )
    assert made("sha256:2e") == [f"{file} ({was}) and has all", f"{moved}{place}/i.sqsh"]
    assert "import" not in (place / "calls").read_text()
    (place / "i.sqsh").unlink()
    assert made("") == [f"{file} (digest not known: enroot 4.0 tells it)"]


def test_an_image_in_which_maxbench_does_not_run_is_none(place):
    tool(place / "bin", "enroot", ENROOT)
    said, _ = setup(place, code=2, IMAGE="docker://old")
    assert "ml-collections is not there" in said
    assert "maxbench does not run in IMAGE='docker://old'" in said
    assert not list(place.rglob("maxbench.sqsh*"))


def test_another_architecture_is_told_what_to_do(place):
    setup(place, "--cpu")
    tool(place, "uname", "echo riscv")
    env = plain_env(PATH=f"{place}:{os.environ['PATH']}")
    door = place / "a b" / "venv" / "bin" / "python"
    done = subprocess.run([door], env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert (
        f"there is no {place}/a b/venv-riscv: run setup.sh on a machine of this kind" in done.stderr
    )


def test_what_a_python_lacks_is_said(tmp_path):
    def said(*more: str) -> str:
        command = [sys.executable, "-I", str(ROOT / "launch" / "needs.py"), *more]
        return subprocess.run(command, capture_output=True, text=True).stderr

    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["absl-py>=99"]\n')
    assert ", needed is >=99" in said(str(tmp_path))
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["absl-py"]\n')
    assert "no-such-package is not there" in said(str(tmp_path), "no-such-package")
    assert "maxbench is that of " in said(str(tmp_path))
