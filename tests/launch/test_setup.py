"""setup.sh with fake uv and enroot: it checks what is installed, not an earlier mark."""

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
# Fake Python of an environment that has all requirements.
PYTHON = f'[[ "$*" == *needs.py* ]] && exit 0; exec {sys.executable} "$@"'
MAXBENCH = f'[[ $1 == train ]] || PYTHONPATH={ROOT} exec {sys.executable} -m maxbench "$@"'
UV = f"""echo "uv $*" >> calls
if [[ $1 == venv ]]; then
  mkdir -p "${{@: -1}}/bin"
  printf '#!/bin/bash\\n%s\\n' {shlex.quote(PYTHON)} > "${{@: -1}}/bin/python"
  echo {shlex.quote(MAXBENCH)} > "${{@: -1}}/bin/maxbench"
  chmod +x "${{@: -1}}"/bin/*
fi"""
# The fake Python of the image lacks a requirement until pip is called, which is recorded.
ENROOT = """echo "enroot $*" >> calls
case $1 in
  import | export) touch "$3" ;;
  digest) cat digest ;;
  start)
    while [[ $1 != python3 && $1 != bash ]]; do shift; done
    PATH=$PWD/image:$PATH exec "$@" ;;
esac"""
IMAGE_PYTHON = f"""echo "image python3 $*" >> calls
[[ "$*" == *needs.py* && ! -f installed ]] && echo "ml-collections is not installed" >&2 && exit 1
[[ "$*" == *"pip install"* ]] && {{ touch "${{INSTALLS:-/dev/null}}"; exit 0; }}
{PYTHON}"""


@pytest.fixture
def place(tmp_path):
    """A folder with fake programs on PATH."""
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
    """Output of setup.sh, and the commands that it called."""
    (place / "calls").write_text("")
    env = {"PATH": str(place / "bin"), "STAGE_PATH": str(place / "a b"), "PYTHONPATH": ""} | env
    env["MAXBENCH_ROOT"] = str(ROOT)
    command = [str(ROOT / "setup.sh"), *options]
    done = subprocess.run(
        command, env=plain_env(**env), cwd=place, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr, (place / "calls").read_text().splitlines()


def test_only_missing_parts_are_installed(place):
    """Environment, wrappers and image are checked one by one."""
    tool(place / "bin", "enroot", ENROOT)
    stage, installed = place / "a b", {"INSTALLS": "installed"}
    text, calls = setup(place, IMAGE="docker://x#y@sha256:1", **installed)
    assert f"RUN_CONF_IMAGE={stage}/maxbench.sqsh" in text
    assert f"uv venv --quiet --seed --python 3.12 {stage}/venv-{MACHINE}" in calls
    (pip,) = [c for c in calls if c.startswith("image python3 -m pip install")]
    assert "-c /tmp/constraints.txt" in pip  # the image's own jax stays
    assert [c for c in calls if c.startswith("enroot")][-1].startswith("enroot remove")
    wrapper = stage / "venv" / "bin" / "maxbench"
    done = subprocess.run([wrapper, "--help"], capture_output=True, text=True, check=True)
    assert "usage: maxbench COMMAND" in done.stdout
    # All is installed; now on a cluster, which is detected.
    fields = "NodeName=n1 Arch=riscv Gres=gpu:h200:8 Partitions=batch"
    tool(place / "bin", "scontrol", f"echo {fields}")
    tool(place / "bin", "sbatch", "exit 1")
    tool(place / "bin", "sacctmgr", "exit 1")
    skip = "while [[ $1 == -* ]]; do shift 2; done"
    tool(place / "bin", "srun", f'echo "srun $*" >> calls; {skip}; "$@"')
    text, calls = setup(place, IMAGE="docker://x#y@sha256:1", **installed, SBATCH_ACCOUNT="me")
    assert [c.split()[1] for c in calls if c.startswith("enroot")] == ["start"]
    assert not [c for c in calls if c.startswith("uv")]
    assert [c for c in calls if c.startswith("srun -N 1 -t 01:00:00 -A me -p batch ")]
    kept = tomllib.loads((stage / "cluster.toml").read_text())
    assert (kept["GPU_TYPE"], kept["ARCHITECTURE"]) == ("h200", "riscv")
    assert kept["RUN_CONF_IMAGE"] == f"{stage}/maxbench.sqsh"
    assert text.endswith(f"For launch.sh: export STAGE_PATH={stage}\n")  # the file has the image
    # Another image; an environment whose Python no longer exists.
    (stage / f"venv-{MACHINE}" / "bin" / "python").unlink()
    text, calls = setup(place, IMAGE="docker://x#y@sha256:2", **installed)
    assert [c for c in calls if "enroot import" in c and "sha256:2" in c]
    assert [c for c in calls if c.startswith("uv venv")]


def test_changed_image_tag_is_noted(place):
    """The digest of the tag is recorded if enroot and the registry report it."""
    tool(place / "bin", "enroot", ENROOT)
    command = [str(ROOT / "launch" / "image.sh"), "docker://x#y:26.06", str(place / "i.sqsh")]

    def output(digest: str) -> list[str]:
        (place / "calls").write_text("")
        (place / "digest").write_text(digest)
        env = plain_env(PATH=str(place / "bin"), INSTALLS="installed")
        done = subprocess.run(
            command, env=env, cwd=place, capture_output=True, text=True, check=True
        )
        assert done.stderr == ""
        return done.stdout.splitlines()

    image, was = f"{place}/i.sqsh", "sha256:1f"
    created = f"setup: created {image} from docker://x#y:26.06"
    complete = f"setup: {image}, from docker://x#y:26.06 ({was}), is complete"
    assert output(was) == [f"{created} ({was})"]
    assert output(was) == output("") == [complete]
    moved = "setup: note: docker://x#y:26.06 has changed to sha256:2e; to use it, remove "
    assert output("sha256:2e") == [complete, f"{moved}{image}"]
    assert "import" not in (place / "calls").read_text()
    (place / "i.sqsh").unlink()
    assert output("") == [f"{created} (unknown digest: needs enroot 4.0)"]


def test_image_in_which_maxbench_does_not_run_is_refused(place):
    tool(place / "bin", "enroot", ENROOT)
    text, _ = setup(place, code=2, IMAGE="docker://old")
    assert "ml-collections is not installed" in text
    assert "maxbench does not run in IMAGE='docker://old'" in text
    assert not list(place.rglob("maxbench.sqsh*"))


def test_missing_environment_of_an_architecture_is_named(place):
    setup(place, "--cpu")
    tool(place, "uname", "echo riscv")
    env = plain_env(PATH=f"{place}:{os.environ['PATH']}")
    wrapper = place / "a b" / "venv" / "bin" / "python"
    done = subprocess.run([wrapper], env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert (
        f"{place}/a b/venv-riscv does not exist: run setup.sh on a machine of this architecture"
        in done.stderr
    )


def test_missing_requirements_are_named(tmp_path):
    def error(*more: str) -> str:
        command = [sys.executable, "-I", str(ROOT / "launch" / "needs.py"), *more]
        return subprocess.run(command, capture_output=True, text=True).stderr

    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["absl-py>=99"]\n')
    assert ", but >=99 is required" in error(str(tmp_path))
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["absl-py"]\n')
    assert "no-such-package is not installed" in error(str(tmp_path), "no-such-package")
    assert "maxbench is imported from " in error(str(tmp_path))
