"""Hostile values of variables in job scripts: quoted or refused, never executed."""

import os
import pathlib
import shlex
import subprocess
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxbench.config.errors import UserError
from maxbench.launch import jobs, slurm, variables
from tests.launch.test_launch import LAUNCH, plain_env, tool

# Characters and words that a shell, sbatch or a list of container mounts interprets.
SPIKES = [" ", "\n", "\t", "'", '"', "$(touch PWNED)", "`touch PWNED`", "; touch PWNED #", "\\"]
SPIKES += [
    "%j",
    "&",
    "|",
    "\n#SBATCH --wrap=x\n",
    "${IFS}",
    "*",
    "~",
    ",",
    ":",
    "\x1b[2J",
    "=",
    "-x",
]
SPIKES += ["\udcff"]  # a byte that is not UTF-8
NAMES = sorted({*variables.VARIABLES} - {"CLUSTER_TYPE", "HARDWARE"})
TEXT = st.lists(st.sampled_from([*SPIKES, "a", "/tmp/x", "é"]), max_size=4).map("".join)
PLACE = st.lists(st.sampled_from([" ", "a", "é", "~", "=", "-x", "+@"]), max_size=4).map("".join)
LOOSE = ["RUN_CONF_IMAGE", "RUN_CONF_MOUNTS", "OPTIMIZATION_NAME", "ADDITIONAL_SLURM_PARAMS"]
# srun records its arguments, each followed by NUL, and succeeds.
STUBS = {
    "scontrol": '[[ "$2" == hostnames ]] && echo n1 || echo "NodeAddr=n1 "',
    "srun": r"""exec >>"$CALLS"; printf '%s\0' "$@" "--CACHE=$JAX_COMPILATION_CACHE_DIR" \
      "--LABEL=$MB_LABEL" "--OUT=$MB_OUT"; echo """,
}


def run_script(script: str, folder: pathlib.Path) -> list[list[str]]:
    """Runs a job script with fake Slurm commands; returns the arguments of each srun."""
    bin_, calls = folder / "bin", folder / "calls"
    bin_.mkdir()
    for name, body in STUBS.items():
        tool(bin_, name, body)
    env = plain_env(PATH=f"{bin_}:{os.environ['PATH']}", CALLS=str(calls), SLURM_JOB_ID="7")
    env |= {"SLURM_JOB_NODELIST": "n1", "SLURM_CPUS_ON_NODE": "8"}
    done = subprocess.run(["bash"], input=script, env=env, cwd=folder, text=True,
                          capture_output=True, errors="surrogateescape")  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line.rstrip("\0").split("\0") for line in calls.read_text().split("\0\n") if line]


@pytest.mark.parametrize("examples", [20, pytest.param(150, marks=pytest.mark.exhaustive)])
def test_values_reach_the_job_unchanged_or_are_refused(examples):
    values = st.dictionaries(st.sampled_from(LOOSE) | st.sampled_from(NAMES), TEXT, max_size=2)
    check = given(values, st.lists(TEXT, max_size=2), PLACE | TEXT)(check_values)
    settings(max_examples=examples, deadline=None)(check)()


def check_values(env, extra, folder_name):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        extra = [f"--config.output.resume={word}" for word in extra]
        env = {"STAGE_PATH": f"{folder}/{folder_name.replace('/', '')}"} | env
        try:
            s = variables.resolve_job(env, extra)
            script = slurm.script(s, "", 7)
        except UserError:
            return
        lines = [line[8:] for line in script.splitlines() if line.startswith("#SBATCH")]
        options = slurm.sbatch_options(
            s, "", s.out / "experiments" / s.run.name / f"{s.run.name}_7"
        )
        assert [shlex.split(line) for line in lines] == [[option] for option in options]
        if not s.out.is_relative_to(folder):
            return
        *_, train = run_script(script, folder)
        words = train[train.index("-m") + 1 :]
        sent = [*jobs.train_flags(s, ""), "--config.output.stamp=7"]
        assert words[1 : 1 + len(sent)] == sent
        assert train[-3:] == [
            f"--CACHE={s.out}/cache/{s.run.name}",
            f"--LABEL={s.values['OPTIMIZATION_NAME']}", f"--OUT={s.out}",
        ]  # fmt: skip
        assert not list(folder.rglob("PWNED"))


def test_result_folder_may_have_a_space(tmp_path):
    """From launch.sh to the files that the job writes."""
    bin_, stage = tmp_path / "bin", tmp_path / "a b"
    bin_.mkdir()
    tool(bin_, "sbatch", f"cp \"${{@: -1}}\" '{tmp_path}/job.sh'; echo 7")
    env = plain_env(PATH=f"{bin_}:{os.environ['PATH']}", STAGE_PATH=str(stage))
    subprocess.run([str(LAUNCH)], env=env, check=True, capture_output=True)
    (tmp_path / "there").mkdir()
    preflight, train = run_script((tmp_path / "job.sh").read_text(), tmp_path / "there")
    assert "maxbench.preflight" in preflight
    assert train[train.index("--output_dir") + 1] == str(stage)
    (job,) = stage.rglob("job.json")
    assert (job.parent / "exit.json").exists()
