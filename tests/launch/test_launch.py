"""The launcher without a cluster: variables, job scripts, submission."""

import contextlib
import io
import itertools
import os
import pathlib
import shlex
import shutil
import stat
import subprocess
import sys
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxbench.cli import entry
from maxbench.config import number_formats, options, recipes
from maxbench.config.errors import UserError
from maxbench.launch import images, jobs, slurm, variables
from maxbench.step import xla_options

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = ROOT / "launch" / "launch.sh"
RUNAI = {
    "CLUSTER_TYPE": "runai",
    "RUN_CONF_IMAGE": "nvcr.io/nvidia/jax:25.10-py3",
    "RUN_CONF_MOUNTS": "workspace:/workspace:workspace-project-abcde",
    "PROJECT_NAME": "llmb-testing",
    "PVC_DIR": "/workspace/results",
    "BASE_URL": "https://run.ai/api/v1",
    "APP_ID": "llmb-qa",
    "APP_SECRET": "secret-never-to-be-seen",
}


def plain_env(**more: str) -> dict[str, str]:
    """This environment without variables of launch.sh, Slurm, JAX and XLA."""
    names = {n for name, v in variables.VARIABLES.items() for n in (name, *v.also)}
    skipped = ("SLURM", "SBATCH", "JAX_", "XLA_")
    kept = {k: v for k, v in os.environ.items() if k not in names and not k.startswith(skipped)}
    return kept | {"MAXBENCH_PYTHON": sys.executable} | more


def run_launch_sh(*args: str, code: int = 0, cwd: pathlib.Path = ROOT, **env: str) -> str:
    """Runs launch.sh; returns its stdout, or its stderr if it should fail."""
    done = subprocess.run(
        [str(LAUNCH), *args], env=plain_env(**env), capture_output=True, text=True, cwd=cwd
    )
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


def dry_run(*args: str, code: int = 0, cwd: pathlib.Path = ROOT, **env: str) -> str:
    """As run_launch_sh("--dry_run"), but in this process, which takes a tenth of the time."""
    out, err = io.StringIO(), io.StringIO()
    slurm.sbatch_supports.cache_clear()  # by another PATH
    with (
        mock.patch.dict(os.environ, plain_env(**env), clear=True),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        assert entry.run("launch", ["--dry_run", *args]) == code, err.getvalue()
    return err.getvalue() if code else out.getvalue()


def tool(folder: pathlib.Path, name: str, body: str) -> None:
    """Writes a fake program."""
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


# --- commands and defaults of NVIDIA's recipes ---


@pytest.mark.parametrize(
    ("env", "name", "nodes", "tasks", "more"),
    [
        # every variable has a default
        ({}, "pretrain_llama31_8b_bf16_gpus8", 1, 8, {"TIME_LIMIT": "00:30:00"}),
        ({"MODEL_SIZE": "8b", "JOB_TOTAL_GPUS": "16", "GPUS_PER_NODE": "8"},
         "pretrain_llama31_8b_bf16_gpus16", 2, 8, {"MAX_STEPS": "50"}),
        # sbatch -N 8 determines the number of GPUs
        ({"MODEL": "llama2", "SLURM_JOB_NUM_NODES": "8"},
         "pretrain_llama2_70b_fp8_gpus64", 8, 8, {"TIME_LIMIT": "01:00:00"}),
        # one process per node
        ({"MODEL": "llama2", "JOB_TOTAL_GPUS": "128", "PROCESSES": "node"},
         "pretrain_llama2_70b_fp8_gpus128", 16, 1, {}),
        # a laptop
        ({"CPU_DEVICES": "4", "JOB_TOTAL_GPUS": "8", "PRESET": "tiny"},
         "pretrain_llama31_8b-tiny_bf16_gpus8", 2, 1, {}),
        # older names of the same variables
        ({"RUN_CONF_MAX_STEPS": "10", "SBATCH_GPUS": "16", "SLURM_GPUS_PER_NODE": "null"},
         "pretrain_llama31_8b_bf16_gpus16", 2, 8,
         {"MAX_STEPS": "10", "SBATCH_GPUS_PER_NODE": "none"}),
    ],
)  # fmt: skip
def test_commands_of_nvidia_recipes(env, name, nodes, tasks, more):
    s = variables.resolve_job(env)
    assert s.run.name.startswith(name)
    assert (s.nodes, s.tasks_per_node) == (nodes, tasks)
    assert {k: s.values[k] for k in more} == more


def test_defaults_of_nvidia_recipes():
    s = variables.resolve_job({})
    v = s.values
    assert (v["DTYPE"], v["MODEL_SIZE"], v["JOB_TOTAL_GPUS"]) == ("bf16", "8b", "8")
    assert (v["GPU_TYPE"], v["CLUSTER_TYPE"], v["MAX_STEPS"]) == ("h100", "slurm", "50")
    assert (v["PROFILE_START_STEP"], v["PROFILE_STOP_STEP"]) == ("20", "25")
    assert v["RUN_CONF_PROFILE_RANKS"] == "0,1,2,3,4,5,6,7"
    s = variables.resolve_job({"MODEL": "nemotron4", "JOB_TOTAL_GPUS": "128"})
    steps = [s.values[f"PROFILE_{which}_STEP"] for which in ("START", "STOP")]
    assert (s.values["DTYPE"], s.values["TIME_LIMIT"], steps) == ("fp8", "00:25:00", ["45", "50"])
    strong = {"GPU_TYPE": "gb200", "STRONG_SCALING": "true"}
    s = variables.resolve_job({"MODEL": "nemotron", "JOB_TOTAL_GPUS": "128"} | strong)
    assert (s.run.layout.gbs, s.values["TIME_LIMIT"]) == (512, "00:35:00")


# Variables that the scripts of each release of NVIDIA's recipes read, with a default that is equal
# here; '!' = refused here, '-' = without effect here.
RECIPES = {
    "nemotron4 24.11 to 25.02": (
        {"MODEL": "nemotron4", "SBATCH_GPUS": "128"},
        "DTYPE=fp8 RUN_CONF_GPU_PER_NODE=8 RUN_CONF_MAX_STEPS=50 ENABLE_PROFILE=false "
        "ENABLE_NCCL_TRACE=false RUN_CONF_PROFILE_RANKS=0,1,2,3,4,5,6,7 "
        "RUN_CONF_PROFILE_START_STEP RUN_CONF_PROFILE_STOP_STEP "
        "RUN_CONF_PROFILE_GPU_METRICS=false RUN_CONF_PROFILE_CPU=false RUN_CONF_RESULT_DIR "
        "STAGE_PATH OPTIMIZATION_NAME OPTIMIZATION_CODE=- SBATCH_GPUS_PER_NODE SLURM_MPI_TYPE "
        "SRUN_OUTPUT=- SRUN_ERROR=- GSW_VERSION=- FW_VERSION=- RUN_CONF_IMAGE",
    ),
    "nemotron4 25.12": (
        {"GPU_TYPE": "b200", "JOB_TOTAL_GPUS": "128"},
        "DTYPE=fp8 MODEL_SIZE=340b CLUSTER_TYPE=slurm STRONG_SCALING=false MAX_STEPS=50 GBS "
        "TIME_LIMIT=00:25:00 GPUS_PER_NODE=8 CUDA_GRAPH=- ENABLE_PROFILE=false RUN_CONF_MOUNTS "
        "PROFILE_START_STEP=45 PROFILE_STOP_STEP=50 ENABLE_GPU_METRICS=false ENABLE_VBOOST=false "
        "ENABLE_CHECKPOINT=false LOAD_CHECKPOINT_PATH CPU_PER_TASK_PINNING=- TP_COMM_OVERLAP "
        "LLMB_INSTALL LLMB_WORKLOAD SBATCH_ACCOUNT SBATCH_PARTITION ADDITIONAL_SLURM_PARAMS "
        "BASE_URL APP_ID APP_SECRET PROJECT_NAME PVC_DIR HF_TOKEN",
    ),
    "llama3.1 25.04": (
        {},
        "DTYPE=bf16 MODEL_SIZE=8b JOB_TOTAL_GPUS=8 GPUS_PER_NODE=8 TIME_LIMIT=00:30:00 "
        "MAX_STEPS=50 DISABLE_PERFRUN=false PROFILE_START_STEP=20 PROFILE_STOP_STEP=25 "
        "ENABLE_NCCLTRACE=false NEMO_HOME=- NEMORUN_HOME=- RUN_CONF_INDEX_DIR=-",
    ),
    "llama3.1 25.05 to 26.06": (
        {},
        "TP PP CP VP MBS GBS NUM_LAYERS HIDDEN_SIZE=! FSDP=! FP8_RECIPE=! CONFIG_OVERRIDES=! "
        "CHECKPOINT_DIR=! CHECKPOINT_INTERVAL PROFILE_RANKS CONFIG_VARIANT=- ENABLE_PCT_BINDING=- "
        "ENABLE_PYTORCH_PROFILE=!",
    ),
    "maxtext llama2": (
        {"MODEL": "llama2", "SBATCH_GPUS": "64"},
        "DTYPE=fp8 TIME_LIMIT=01:00:00 RUN_CONF_MAX_STEPS=50 RUN_CONF_EXTRA_MOUNTS "
        "DISABLE_PINNING=false DISABLE_SMT=- SLURM_ACCOUNT SLURM_PARTITION SLURM_GPUS_PER_NODE "
        "NUM_NODES=- N_GPUS=- N_GPUS_PER_NODE=-",
    ),
    "grok1": (
        {"MODEL": "grok1", "SBATCH_GPUS": "64"},
        "DTYPE=fp8 MODEL_SIZE=314b EP ET=! ETP=! DP=! NUM_LAYERS TIME_LIMIT=01:00:00",
    ),
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_variables_of_each_nvidia_recipe(recipe):
    env, table = RECIPES[recipe]
    named = {n: name for name, v in variables.VARIABLES.items() for n in (name, *v.also)}
    values = variables.resolve_job(env).values
    for name, _, wanted in (word.partition("=") for word in table.split()):
        if wanted == "!":
            with pytest.raises(UserError, match=f"^{name}='7' is refused: "):
                variables.resolve_job(env | {name: "7"})
        elif wanted == "-":
            notes = variables.resolve_job(env | {name: "7"}).notes
            assert [n for n in notes if n.startswith(f"{name} is not used: ")]
        else:
            assert name in {*named, *variables.SECRETS}, name
            assert not wanted or values[named[name]] == wanted, name


def test_data_parallelism_fills_the_gpus_that_other_axes_leave():
    layout = lambda **env: variables.resolve_job(env).run.layout
    two = layout(TP="2", MBS="2", GBS="64")
    assert (two.tp, two.cp, two.dp, two.mbs, two.gbs, two.gpus) == (2, 2, 2, 2, 64, 8)
    sharded = layout(MODEL="llama2", JOB_TOTAL_GPUS="512", TP="2")
    assert (sharded.fsdp, sharded.dp) == (128, 2)
    assert layout(MODEL="llama2", JOB_TOTAL_GPUS="64", TP="2").fsdp == 32
    flat = layout(MODEL_SIZE="405b", JOB_TOTAL_GPUS="512", PP="1")
    assert (flat.pp, flat.vp, flat.dp) == (1, 1, 32)
    assert layout(PRESET="tiny", JOB_TOTAL_GPUS="8", CP="2").fsdp == 4
    assert variables.resolve_job({"NUM_LAYERS": "8"}).run.model.layers == 8


def test_model_defaults_to_the_first_one_with_a_recipe_for_the_gpus():
    for more in ({}, {"STRONG_SCALING": "true"}):
        s = variables.resolve_job({"JOB_TOTAL_GPUS": "256", "GPU_TYPE": "gb200"} | more)
        assert (s.run.model.name, s.run.precision.dtype) == ("nemotron4", "fp8")
        which = "only" if more else "first"
        assert f"MODEL=nemotron4, the {which} one with a recipe for 256 gb200" in s.notes
    assert variables.resolve_job({"JOB_TOTAL_GPUS": "64"}).run.model.size == "8b"


def test_number_formats_are_those_of_the_trainer_and_follow_the_preset():
    """DTYPE has the options of --dtype, all of which can be launched, by preset as well."""
    assert variables.VARIABLES["DTYPE"].choices == number_formats.DTYPES
    blackwell = {"MODEL_SIZE": "20b", "GPU_TYPE": "b300", "JOB_TOTAL_GPUS": "8"}
    for dtype in number_formats.DTYPES:
        env = blackwell | {"MODEL_SIZE": "8b", "DTYPE": dtype, "PRESET": "proxy"}
        assert variables.resolve_job(env).run.precision.dtype == dtype
    for dtype in ("fp8", "nvfp4"):
        job = variables.resolve_job(blackwell | {"PRESET": dtype})
        assert job.run.precision.dtype == job.values["DTYPE"] == dtype
        assert "bf16" not in job.flags


@pytest.mark.parametrize("name", variables.OPTIONS)
def test_variables_of_an_option_accept_what_the_option_accepts(name):
    """Kind, choices and least value derive from the option, unless variables.toml narrows them."""
    v = variables.VARIABLES[name]
    field = options.TrainOptions.flags()[v.option]
    assert field.metadata["text"].partition(" (")[0] in v.meaning
    if v.kind == "choice":
        assert v.choices == tuple(filter(None, field.metadata["options"]))
    elif v.kind == "count":
        assert options.type_of(field) is int
        assert v.least >= field.metadata.get("at_least", 0)
    else:
        assert (v.kind == "bool") == (options.type_of(field) is bool)


def test_single_words_near_a_variable_are_noted():
    s = variables.resolve_job({"MODE": "fast", "PROFILE": "y", "DYTPE": "fp8"})
    assert "MODE is not a variable of launch.sh; did you mean MODEL?" in s.notes
    assert "DYTPE is not a variable of launch.sh; did you mean DTYPE?" in s.notes


def test_options_that_sbatch_did_not_get_are_noted(tmp_path):
    tool(tmp_path, "scontrol", "exit 1")
    tool(tmp_path, "sbatch", "echo --segment")
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "STAGE_PATH": str(tmp_path)}
    (tmp_path / "cluster.toml").write_text('TIME_LIMIT = "00:10:00"')
    env |= {"ADDITIONAL_SLURM_PARAMS": "nodelist=n1", "SLURM_CONF": ""}
    env |= {"CHECKPOINT_EVERY": "5", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [str(LAUNCH)]
    done = subprocess.run(command, env=plain_env(**env), capture_output=True, text=True)
    options = "--time=00:10:00 --requeue --signal=TERM@120 --nodelist=n1"
    assert f"this job was submitted without {options}" in done.stderr
    assert f"sbatch {options} launch.sh" in done.stderr


def test_virtual_environment_of_a_checkout_is_found(tmp_path):
    """setup.sh --cpu makes venv/ in the checkout; nothing else names it."""
    for part in ("maxbench", "configs", "launch"):
        (tmp_path / part).symlink_to(ROOT / part)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    tool(tmp_path / "venv" / "bin", "python", f'exec {sys.executable} "$@"')
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name in ("bash", "dirname", "sed"):
        (bin_ / name).symlink_to(shutil.which(name))
    env = {"PATH": str(bin_), "MAXBENCH_PYTHON": "", "MAXBENCH_ROOT": str(tmp_path)}
    env |= {"VIRTUAL_ENV": ""}
    command = [str(LAUNCH), "--dry_run"]
    done = subprocess.run(command, env=plain_env(**env), capture_output=True, text=True)
    assert f"TRAIN=({tmp_path}/venv/bin/python -m maxbench.train" in done.stdout, done.stderr


def test_gb200_has_four_gpus_per_node(monkeypatch):
    monkeypatch.setattr(slurm, "sbatch_supports", lambda option: True)
    env = {"MODEL": "nemotron4", "GPU_TYPE": "gb200", "JOB_TOTAL_GPUS": "128"}
    s = variables.resolve_job(env)
    assert (s.nodes, s.tasks_per_node) == (32, 4)
    assert "--segment=16" in slurm.sbatch_options(s, "", pathlib.Path("x"))
    assert not slurm.notes(s)
    monkeypatch.setattr(slurm, "sbatch_supports", lambda option: False)  # as Slurm 22.05
    assert "--segment=16" not in slurm.sbatch_options(s, "", pathlib.Path("x"))
    assert slurm.notes(s)[0].startswith("--segment=16 is left out: sbatch has no --segment")
    env = jobs.environment(s, "")
    assert env["NCCL_NET_GDR_C2C"] == "1"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in env


# --- invalid input ---


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"DTYPE": "fp16"}, "DTYPE='fp16' is not one of bf16, fp32, fp8, nvfp4"),
        ({"MODEL": "lama2"}, "did you mean 'llama2'?"),
        ({"MODEL_SIZE": "7b"}, "MODEL_SIZE='7b' is not one of 8b, 70b, 405b, 340b, 314b"),
        ({"MODEL": "grok1", "MODEL_SIZE": "70b"}, "MODEL_SIZE='70b' is not one of 314b"),
        ({"GPU_TYPE": "h10"}, "did you mean 'h100'"),
        ({"MODEL": "llama2", "JOB_TOTAL_GPUS": "96"},
         "JOB_TOTAL_GPUS=96: llama2 70b fp8 (weak scaling) has no recipe for 96 h100; nearest: "
         "JOB_TOTAL_GPUS=64 or 128"),
        ({"MODEL": "llama2"}, "JOB_TOTAL_GPUS is not set; llama2 70b fp8 on h100 has "
         "recipes for: 64, 128, 256, 512, 1024, 2048"),
        ({"JOB_TOTAL_GPUS": "8x"}, "JOB_TOTAL_GPUS='8x' must be a whole number, at least 1"),
        ({"MAX_STEPS": "0"}, "MAX_STEPS='0' must be a whole number, at least 1"),
        ({"CLUSTER_TYPE": "slrum"}, "did you mean 'slurm'?"),
        ({"ENABLE_PROFILE": "maybe"}, "ENABLE_PROFILE='maybe' is not one of true"),
        ({"TIME_LIMIT": "soon"}, "TIME_LIMIT='soon' must be HH:MM:SS, as 00:30:00"),
        ({"SBATCH_GPUS_PER_NODE": "all"}, "none where the cluster has no gres"),
        ({"PROFILE_START_STEP": "30"}, "PROFILE_START_STEP=30 must be below PROFILE_STOP_STEP=25"),
        ({"RUN_CONF_PROFILE_RANKS": "0-3"}, "for example 0,1,2,3"),
        ({"ADDITIONAL_SLURM_PARAMS": "nodelist n1"}, "'nodelist n1' is not key=value or key"),
        ({"GBS": "7"}, "GBS=7 is not a multiple of mbs x dp x fsdp x ep"),
        ({"MODEL": "llama2", "GPU_TYPE": "b200", "JOB_TOTAL_GPUS": "8"},
         "types that have one: h100; or name the axes: maxbench plan --gpus 8 finds them"),
        ({"TP": "3"}, "JOB_TOTAL_GPUS=8 is not a multiple of TP x PP x CP x EP = 3 x 1 x 2 x 1"),
        ({"EP": "2"}, "EP=2 needs experts, and llama31 8b has none"),
        ({"DP": "4"}, "DP='4' is refused: dp follows from JOB_TOTAL_GPUS and TP"),
        ({"JOB_TOTAL_GPUS": "9" * 5000}, "must be a whole number"),
        ({"STAGE_PATH": "/a\n#SBATCH --x"}, "has a line break or a control character"),
        ({"STAGE_PATH": "/a%j"}, "must be a path of letters, digits, spaces and"),
        ({"ADDITIONAL_SLURM_PARAMS": "comment=a\\b"}, "is not key=value or key"),
        ({"GPU_TYP": "b200"}, "did you mean GPU_TYPE?"),
        ({"PRESET": "tinny"}, "did you mean 'tiny'?"),
        ({"PRESET": "nvfp4", "DTYPE": "bf16"}, "DTYPE sets bf16 and PRESET=nvfp4 sets nvfp4"),
        ({"PRESET": "fp8,nvfp4"}, "PRESET=fp8 sets fp8 and PRESET=nvfp4 sets nvfp4"),
        ({"SBATCH_ACCOUNT": "a b"}, "SBATCH_ACCOUNT='a b' must be one word"),
        ({"LOAD_CHECKPOINT_PATH": "/nowhere"}, "has no complete checkpoint"),
        ({"DISABLE_PERFRUN": "true"}, "leaves no job to run"),
        ({"CLUSTER_TYPE": "runai"}, "RUN_CONF_IMAGE is not set, and CLUSTER_TYPE=runai needs"),
        (RUNAI | {"RUN_CONF_IMAGE": "a.io#b:1"}, "Run:ai needs docker's: RUN_CONF_IMAGE=a.io/b:1"),
        (RUNAI | {"RUN_CONF_MOUNTS": "a:b"}, "'a:b' is not name:path:k8s-claim"),
        (RUNAI | {"PVC_DIR": "/elsewhere"}, "is in none of the mounted paths"),
    ],
)  # fmt: skip
def test_invalid_variable_is_named_with_what_would_work(env, message):
    output = dry_run(code=2, **env)
    assert message in output
    assert "Traceback" not in output
    assert output.count("\n") == 1


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted(set(variables.VARIABLES) - {"STAGE_PATH"})),
        st.text(max_size=8)
        | st.integers(-9, 4096).map(str)
        | st.sampled_from(["true", "b200", "*"]),
        max_size=3,
    )
)
def test_any_values_give_a_configuration_or_a_message(env):
    try:
        s = variables.resolve_job(env)
        for kind in jobs.job_kinds(s):
            script = slurm.script(s, kind, 7)
            done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
            assert done.returncode == 0, done.stderr
    except ValueError as e:
        if not str(e):
            raise


def test_unknown_option_is_refused():
    assert "unknown flag 'dryrun'; did you mean --dry" in run_launch_sh("--dryrun", code=2)


# --- the script ---


def test_installation_without_job_scripts_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipes, "ROOT", tmp_path)
    assert entry.run("launch", ["--dry_run"]) == 2
    assert "CLUSTER_TYPE='slurm' needs the job scripts of a checkout" in capsys.readouterr().err


def test_dry_run_prints_a_job_file_without_jax(tmp_path):
    env = plain_env(MODEL_SIZE="8b", STAGE_PATH=str(tmp_path), PYTHONPROFILEIMPORTTIME="1")
    command = [str(LAUNCH), "--dry_run"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    assert "#SBATCH --nodes=1" in done.stdout
    assert "python3 -m maxbench.train --config llama31_8b --gpus 8" in done.stdout
    cache = f"export JAX_COMPILATION_CACHE_DIR={tmp_path}/cache/pretrain_llama31_8b_"
    assert cache in done.stdout
    assert not list(tmp_path.iterdir())
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "maxbench.launch.slurm" in loaded
    assert not loaded & {"jax", "numpy"}


def test_slurm_parameters_reach_sbatch():
    s = variables.resolve_job(
        {
            "ADDITIONAL_SLURM_PARAMS": "nodelist=node001,node002;constraint=gpu&memory;exclusive",
            "SBATCH_GPUS_PER_NODE": "8", "SBATCH_ACCOUNT": "acct", "SBATCH_PARTITION": "batch",
            "EXCLUDE_NODES": "n7,n9",
        }
    )  # fmt: skip
    options = slurm.sbatch_options(s, "", pathlib.Path("x"))
    for option in (
        "--nodelist=node001,node002", "--constraint=gpu&memory", "--gres=gpu:8",
        "--account=acct", "--partition=batch", "--exclude=n7,n9", "--requeue",
        "--dependency=singleton",
    ):  # fmt: skip
        assert option in options


def test_loading_a_checkpoint_trains_one_step(tmp_path):
    step = tmp_path / "run" / "checkpoints" / "50" / "about"
    step.mkdir(parents=True)
    (step / "run.json").write_text('{"step": 50}')
    s = variables.resolve_job({"LOAD_CHECKPOINT_PATH": str(tmp_path / "run")})
    assert s.run.train.steps == 51
    assert s.run.output.resume == str(tmp_path / "run")


def test_flag_replaces_what_no_variable_was_set_for():
    few = variables.resolve_job({}, ["--steps", "7", "--gpus", "16"])
    assert (few.run.train.steps, few.run.layout.gpus) == (7, 16)
    assert [word for word in few.flags if word in ("--steps", "--gpus")] == ["--steps", "--gpus"]
    with pytest.raises(UserError, match=r"^MAX_STEPS=9 and --steps=7 contradict each other"):
        variables.resolve_job({"MAX_STEPS": "9"}, ["--steps", "7"])


def test_profile_and_trace_save_no_checkpoint_of_their_own(tmp_path):
    s = variables.resolve_job({"CHECKPOINT_EVERY": "20", "ENABLE_NCCL_TRACE": "true"})
    perf, trace = (jobs.train_flags(s, kind) for kind in jobs.job_kinds(s))
    assert "--nocheckpoint" not in perf
    again = variables.resolve_job({}, trace[trace.index("--profile=nccltrace") :])
    assert (again.run.output.checkpoint, again.run.output.checkpoint_every) == (False, 0)
    assert slurm.BEFORE_TIME_LIMIT in slurm.sbatch_options(s, "", tmp_path)
    assert slurm.BEFORE_TIME_LIMIT not in slurm.sbatch_options(s, "nccltrace", tmp_path)


def test_one_step_after_a_checkpoint_is_not_profiled(tmp_path):
    (tmp_path / "about").mkdir()
    (tmp_path / "about/run.json").write_text('{"step": 50}')
    output = dry_run(code=2, LOAD_CHECKPOINT_PATH=str(tmp_path), ENABLE_PROFILE="true")
    assert "LOAD_CHECKPOINT_PATH trains one step" in output


def test_shellcheck_passes_on_every_script(tmp_path):
    # Of the test extra, whose wheel has the program; an environment may not be activated.
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    shellcheck = shutil.which("shellcheck", path=path)
    assert shellcheck, "shellcheck is not installed: pip install -e '.[test]'"
    job_script = tmp_path / "job.sh"
    s = variables.resolve_job({"ENABLE_PROFILE": "true"})
    job_script.write_text(slurm.script(s, "nsys", 1))
    scripts = [*ROOT.glob("launch/*.sh"), *ROOT.glob("*.sh"), job_script]
    done = subprocess.run([shellcheck, *map(str, scripts)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_scripts_need_nothing_newer_than_bash_4_2():
    """Features of later versions, by their spelling."""
    newer = ("@Q}", "wait -n", "declare -n", "local -n", "mapfile -d", "EPOCHSECONDS", "BASH_ARGV0")
    for script in [*ROOT.glob("launch/*.sh"), *ROOT.glob("*.sh")]:
        text = script.read_text()
        assert not [word for word in newer if word in text], script


# --- submission ---


@pytest.fixture
def fake_sbatch(tmp_path):
    """A PATH with an sbatch that records its arguments and environment."""
    folder = tmp_path / "bin"
    folder.mkdir()
    tool(folder, "sbatch", f'echo "$@" >> {tmp_path}/calls; env >> {tmp_path}/env; echo 4711')
    return f"{folder}:{os.environ['PATH']}"


def test_profile_and_trace_are_jobs_of_their_own(tmp_path, fake_sbatch):
    output = run_launch_sh(
        PATH=fake_sbatch, STAGE_PATH=str(tmp_path), ENABLE_PROFILE="true",
        ENABLE_NCCL_TRACE="true", ENABLE_GPU_METRICS="true", HF_TOKEN="hf_secret",
    )  # fmt: skip
    assert output.count("job 4711") == 3
    calls = (tmp_path / "calls").read_text().splitlines()
    kinds = ["", "_nsys", "_nccltrace"]
    scripts = [pathlib.Path(c.split()[-1]) for c in calls]
    assert [s.parent.parent.name.partition("gbs128")[2][len("_000000") :] for s in scripts] == kinds
    perf, nsys, trace = (s.read_text() for s in scripts)
    assert "maxbench.preflight" in perf
    assert "NCCL_DEBUG" not in perf
    assert "--profile=nsys" in nsys
    assert "--steps 25" in nsys
    assert "--capture-range=cudaProfilerApi" in nsys
    assert "export MB_GPU_METRICS=true" in nsys
    assert "export NCCL_DEBUG=INFO" in trace
    assert "--steps 5" in trace
    assert "--time=00:15:00" in trace
    whole = perf + nsys + trace + output + (tmp_path / "env").read_text()
    assert "hf_secret" not in whole


def test_lists_of_values_submit_a_run_for_each(tmp_path, fake_sbatch):
    many = {"JOB_TOTAL_GPUS": "8 16 32", "DTYPE": "bf16 fp8", "REPEATS": "3"}
    output = dry_run(**many)
    sizes = [line for line in output.splitlines() if line.startswith("# 3 x pretrain_llama31_8b_")]
    assert [line.split("_")[3:5] for line in sizes] == [
        [dtype, f"gpus{gpus}"] for gpus in (32, 16, 8) for dtype in ("bf16", "fp8")
    ]
    assert output.count("\n#!/bin/bash") == 6
    few = {"JOB_TOTAL_GPUS": "8 16", "REPEATS": "2", "MODEL_SIZE": "8b"}
    output = run_launch_sh(**few, PATH=fake_sbatch, STAGE_PATH=str(tmp_path))
    assert output.count("job 4711: ") == 4
    folders = [file.parent for file in tmp_path.rglob("job_id")]
    assert len({*folders}) == 4
    wrong = dry_run(code=2, JOB_TOTAL_GPUS="8 9")
    assert "JOB_TOTAL_GPUS=9: llama31 8b bf16 (weak scaling) has no recipe for 9 h100" in wrong


def test_variables_that_sbatch_reads_are_removed_from_its_environment(tmp_path, fake_sbatch):
    """The original recipes ask for SLURM_GPUS_PER_NODE=null; SBATCH_GPUS is their GPU count."""
    env = {"SLURM_GPUS_PER_NODE": "null", "SBATCH_GPUS": "16", "PATH": fake_sbatch}
    run_launch_sh(**env, STAGE_PATH=str(tmp_path))
    seen = (tmp_path / "env").read_text()
    assert "GPUS_PER_NODE=null" not in seen
    assert "SBATCH_GPUS" not in seen


def test_variables_without_effect_are_noted():
    command = [str(LAUNCH), "--dry_run"]
    env = plain_env(CUDA_GRAPH="false", OPTIMIZATION_CODE="x=1", MODEL_SIZE="8b")
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "CUDA_GRAPH is not used: XLA's command buffers follow GPU_TYPE" in done.stderr
    assert "OPTIMIZATION_CODE is not used" in done.stderr


def test_refusal_of_sbatch_is_an_error(tmp_path, fake_sbatch):
    tool(tmp_path / "bin", "sbatch", "echo 'sbatch: error: invalid account' >&2; exit 1")
    output = run_launch_sh(code=2, PATH=fake_sbatch, STAGE_PATH=str(tmp_path))
    assert "invalid account" in output
    assert "sbatch refused" in output


def test_missing_tool_is_named_with_the_alternative(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "dirname", "sed", "python3"):
        (folder / name).symlink_to(shutil.which(name))
    output = run_launch_sh(code=2, PATH=str(folder), STAGE_PATH=str(tmp_path))
    assert "sbatch is not on PATH" in output
    assert "python3 -m maxbench.train --config" in output
    output = run_launch_sh(code=2, **RUNAI, PATH=str(folder), STAGE_PATH=str(tmp_path))
    assert "runai is not on PATH" in output


def test_unknown_xla_flag_is_refused_before_submission(tmp_path, fake_sbatch):
    env = {"XLA_FLAGS": "--xla_gpu_graph_level=0", "PATH": fake_sbatch, "STAGE_PATH": str(tmp_path)}
    assert "use --xla_gpu_enable_command_buffer=" in run_launch_sh(code=2, **env)
    assert not (tmp_path / "calls").exists()


def test_xla_options_by_gpu_and_scale():
    options = lambda *flags, **env: xla_options.xla_options(
        "gpu", variables.resolve_job(env, list(flags)).run
    )
    scatter, command = (
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
        "xla_gpu_enable_command_buffer",
    )
    small = options(MODEL="llama2", JOB_TOTAL_GPUS="64")
    assert (small[scatter], small[command]) == (8 << 20, "")
    assert options(MODEL="llama2", JOB_TOTAL_GPUS="1024")[scatter] == 4 << 20
    assert options(MODEL="llama2", JOB_TOTAL_GPUS="64", DTYPE="bf16")[scatter] == 32 << 20
    new = options("--fsdp", "8", "--dp", "1", GPU_TYPE="b200", JOB_TOTAL_GPUS="8")
    assert new[command] == "FUSION,CUSTOM_CALL"
    wide = ("--tp", "2", "--dp", "4", "--cp", "1")
    alone = "xla_gpu_disable_async_collectives"
    assert alone not in options(*wide, TP_COMM_OVERLAP="true")
    assert options(*wide, TP_COMM_OVERLAP="false")[alone] == "ALLGATHER,REDUCESCATTER"
    assert xla_options.xla_options("cpu", variables.resolve_job({}).run) == {
        "xla_cpu_enable_concurrency_optimized_scheduler": False
    }


def test_stage_path_that_cannot_be_written_is_refused(tmp_path, fake_sbatch):
    (tmp_path / "file").write_text("")
    output = run_launch_sh(code=2, PATH=fake_sbatch, STAGE_PATH=str(tmp_path / "file"))
    assert f"STAGE_PATH='{tmp_path}/file' cannot be written" in output


def test_missing_image_is_refused(tmp_path, fake_sbatch):
    env = {"RUN_CONF_IMAGE": "/nowhere/x.sqsh", "PATH": fake_sbatch, "STAGE_PATH": str(tmp_path)}
    assert "setup.sh creates one if enroot is" in run_launch_sh(code=2, **env)


@pytest.mark.parametrize("name", ["nvcr.io/nvidia/jax:1", "docker://nvcr.io/nvidia/jax:1"])
def test_image_name_of_docker_is_refused_for_slurm(name):
    with pytest.raises(UserError, match=r"docker's form, .* RUN_CONF_IMAGE=nvcr.io#nvidia/jax:1"):
        images.check_for_slurm(name)


@pytest.mark.parametrize("name", ["", "nvcr.io#nvidia/jax:1", "me@nvcr.io#a/b", "me/jax:1", "jax"])
def test_image_names_of_pyxis_are_accepted(name):
    images.check_for_slurm(name)


def test_runai_gets_the_same_command_and_no_secret(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    tool(folder, "runai", f'printf "%s\\n" "$@" > {tmp_path}/args; env > {tmp_path}/env')
    output = run_launch_sh(**RUNAI, PATH=f"{folder}:{os.environ['PATH']}", JOB_TOTAL_GPUS="16")
    args = (tmp_path / "args").read_text().split("\n")
    name = "maxbench-llama31-8b-bf16-16g"
    assert args[:5] == ["training", "pytorch", "submit", name, "--project"]
    pairs = dict(itertools.pairwise(args))
    assert pairs["--workers"] == "1"  # and a master: two nodes
    assert pairs["--"] == "env"
    assert pairs["--gpu-devices-request"] == "8"
    assert pairs["--existing-pvc"] == "claimname=workspace-project-abcde,path=/workspace"
    assert pairs["--output_dir"] == "/workspace/results"
    assert any(w.startswith("JAX_COMPILATION_CACHE_DIR=/workspace/results/cache/") for w in args)
    assert "maxbench.train" in args
    everything = output + "".join(args) + (tmp_path / "env").read_text()
    assert "secret-never-to-be-seen" not in everything
    assert "secret-never-to-be-seen" not in dry_run(**RUNAI)


def test_runai_variables_become_flags_of_the_trainer():
    def output(**env: str) -> str:
        command = ["bash", str(ROOT / "launch" / "runai.sh"), "echo", "train"]
        done = subprocess.run(
            command, env=plain_env(**env), capture_output=True, text=True, check=True
        )
        return done.stdout

    env = {"MASTER_ADDR": "m0", "MASTER_PORT": "1234", "WORLD_SIZE": "2", "RANK": "1"}
    assert output(**env) == "train --coordinator m0:1234 --processes 2 --process 1\n"
    assert output(**env | {"WORLD_SIZE": "1"}) == "train\n"


def test_runai_jobs_of_one_node_and_of_other_kinds():
    one = dry_run(**RUNAI, ENABLE_NCCL_TRACE="true")
    perf, trace = one.split("\n\n")
    assert "--workers" not in perf
    assert "NCCL_DEBUG" not in perf
    assert "NCCL_DEBUG=INFO" in trace
    output = dry_run(code=2, **RUNAI, ENABLE_PROFILE="true")
    assert "use PROFILER=xplane" in output


def test_nsys_runs_on_chosen_ranks(tmp_path):
    tool(tmp_path, "nsys", 'echo nsys "$@"')
    s = variables.resolve_job({"RUN_CONF_PROFILE_RANKS": "0,3", "ENABLE_GPU_METRICS": "true"})
    task = [str(ROOT / "launch" / "task.sh"), "echo", "train"]

    def output(rank: str) -> str:
        env = plain_env(
            **slurm.nsys_variables(s), PATH=f"{tmp_path}:{os.environ['PATH']}", MB_PROFILE="nsys",
            MB_FOLDER=str(tmp_path), SLURM_JOB_ID="77", SLURM_NODEID="1", SLURM_PROCID=rank,
            SLURM_LOCALID=rank,
        )  # fmt: skip
        return subprocess.run(task, env=env, capture_output=True, text=True, check=True).stdout

    words = shlex.split(output("0"))
    name = "profile_llama31-8b-bf16_8g_77_node1_rank0"
    assert f"--output={tmp_path}/nsys_profile/{name}" in words
    assert {"--capture-range-end=stop", "--trace=cuda,nvtx", "--gpu-metrics-device=all"} <= {*words}
    assert words[-2:] == ["echo", "train"]
    assert "--gpu-metrics-device=all" not in output("3")
    assert output("1") == "train\n"


def test_missing_nsys_is_named_with_the_alternative(tmp_path):
    s = variables.resolve_job({})
    for name in ("bash", "uname"):
        (tmp_path / name).symlink_to(shutil.which(name))
    env = slurm.nsys_variables(s) | {"PATH": str(tmp_path), "MB_PROFILE": "nsys"}
    task = [str(ROOT / "launch" / "task.sh"), "true"]
    done = subprocess.run(task, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert "PROFILER=xplane, which needs neither" in done.stderr


def test_gpu_power_is_logged_during_the_run(tmp_path):
    tool(tmp_path, "nvidia-smi", "echo '2026, 0, 700.1, 60, 1900'")
    env = plain_env(
        PATH=f"{tmp_path}:{os.environ['PATH']}", MB_FOLDER=str(tmp_path), SLURMD_NODENAME="n7"
    )
    subprocess.run([str(ROOT / "launch" / "task.sh"), "sleep", "0.5"], env=env, check=True)
    assert (tmp_path / "gpu-n7.csv").read_text() == "2026, 0, 700.1, 60, 1900\n"
