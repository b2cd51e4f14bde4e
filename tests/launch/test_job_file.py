"""Variables from files: files of jobs, suites, and cluster.toml."""

import json
import pathlib
import re
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxbench.cli import entry
from maxbench.config import recipes
from maxbench.config.errors import UserError
from maxbench.launch import job_file, slurm
from maxbench.run_logs.suite_file import Expectation
from tests.launch.test_launch import LAUNCH, RUNAI, dry_run, plain_env, run_launch_sh, tool
from tools import exemplar

JOBS = """
[defaults]
MAX_STEPS = 20
DTYPE = "fp8"
REPEATS = 2

[[jobs]]
MODEL_SIZE = "8b"
JOB_TOTAL_GPUS = [8, 16]
MBS = [1, 2]

[[jobs]]
MODEL = "llama2"
JOB_TOTAL_GPUS = "64"
DTYPE = ["bf16", "fp8"]
REPEATS = 1
"""


def write(folder: pathlib.Path, text: str, name: str = "jobs.toml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def sizes(settled) -> list[tuple]:
    return [(s.run.layout.gpus, s.run.precision.dtype, s.run.layout.mbs) for s in settled]


def test_jobs_of_a_file_are_all_combinations_largest_first(tmp_path):
    configs = job_file.resolve_jobs({}, file=write(tmp_path, JOBS))
    small = [(gpus, "fp8", mbs) for gpus in (16, 8) for mbs in (1, 1, 2, 2)]
    assert sizes(configs) == [(64, "bf16", 2), (64, "fp8", 2), *small]
    assert {s.run.train.steps for s in configs} == {20}
    assert not any(s.expect for s in configs)


def test_job_overrides_environment_and_environment_overrides_defaults(tmp_path):
    (tmp_path / "cluster.toml").write_text('MAX_STEPS = 7\nSLURM_ACCOUNT = "acct"\n')
    env = {"STAGE_PATH": str(tmp_path), "DTYPE": "bf16", "MODEL_SIZE": "70b"}
    configs = job_file.resolve_jobs(env | {"RUN_CONF_MAX_STEPS": "30"}, file=write(tmp_path, JOBS))
    assert {s.run.train.steps for s in configs} == {30}
    assert [s.run.precision.dtype for s in configs][:3] == ["bf16", "fp8", "bf16"]
    assert {s.values["SBATCH_ACCOUNT"] for s in configs} == {"acct"}
    notes = {note for s in configs for note in s.notes}
    assert "MODEL_SIZE of the environment is not used: jobs.toml job 1 sets it" in notes
    assert "DTYPE of the environment is not used: jobs.toml job 2 sets it" in notes
    alone = {"STAGE_PATH": str(tmp_path), "MODEL_SIZE": "8b"}
    assert {s.run.train.steps for s in job_file.resolve_jobs(alone)} == {7}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("jobs = 3", "jobs.toml has no job; a job is [[jobs]]"),
        ("", "jobs.toml has no job"),
        ("[[job]]", "a part='job' is not one of defaults, expect, jobs; did you mean 'jobs'"),
        ("[[jobs]", "jobs.toml' is not TOML: "),
        ("defaults = 1\n[[jobs]]", "defaults must be a table, [defaults]"),
        ("[[jobs]]\nMODLE = 1", "jobs.toml job 1: MODLE is not a variable; did you mean MODEL?"),
        ("[[jobs]]\nMAX_STEPS = 1.5", "MAX_STEPS=1.5 must be text, a whole number, true, false"),
        ("[[jobs]]\nDTYPE = []", "DTYPE=[] must be text"),
        ("[[jobs]]\nDTYPE = [{}]", "DTYPE=[{}] must be text"),
        ("[[jobs]]\n[[jobs]]\nDTYPE = 'fp16'", "jobs.toml job 2: DTYPE='fp16' is not one of"),
        ("[[jobs]]\nDP = 2", "jobs.toml job 1: DP='2' is refused: "),
        ("[[jobs]]\nCLUSTER_TYPE = 'runai'", "CLUSTER_TYPE cannot be set here; set it in the"),
        ("[defaults]\nSTAGE_PATH = '/x'\n[[jobs]]", "[defaults]: STAGE_PATH cannot be set here"),
        ("[[jobs]]\nexpect = 1", "jobs.toml job 1: expect=1 must be a table"),
    ],
)
def test_invalid_file_of_jobs_is_refused(tmp_path, text, message):
    with pytest.raises(UserError) as e:
        job_file.resolve_jobs({}, file=write(tmp_path, text))
    assert message in str(e.value)


@pytest.mark.parametrize(
    ("expect", "message"),
    [
        ("", "job 1: no expectation is set; [expect] published = 0.95 sets one"),
        (
            "[expect]\nshare = 1",
            "job 1: expect: share=1 is of the tokens/s at baseline_s=0",
        ),
        ("[expect]\npublished = -1", "job 1: expect.published=-1 must be a finite number, at"),
        ("[expect]\nloss = true", "job 1: expect.loss=True must be a finite number"),
    ],
)
def test_suite_without_valid_expectations_is_refused(tmp_path, expect, message):
    file = write(tmp_path, f"{expect}\n[[jobs]]")
    with pytest.raises(UserError) as e:
        job_file.resolve_jobs({}, file=file, suite=True)
    assert message in str(e.value)
    if not expect:
        assert job_file.resolve_jobs({}, file=file)


NAMES = [*job_file.NAMED, "defaults", "expect", "jobs", "published", "loss"]
TOML = st.recursive(
    st.text(max_size=5)
    | st.integers()
    | st.booleans()
    | st.floats()
    | st.sampled_from(["8b", "8"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    ),
    max_leaves=8,
)


def as_toml(value) -> str:
    """A value as TOML on one line."""
    match value:
        case dict():
            return f"{{{', '.join(f'{name} = {as_toml(x)}' for name, x in value.items())}}}"
        case list():
            return f"[{', '.join(map(as_toml, value))}]"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case bool():
            return str(value).lower()
        case _:
            return repr(value)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.fixed_dictionaries(
        {"jobs": st.lists(st.dictionaries(st.sampled_from(NAMES), TOML, max_size=2)) | TOML},
        optional={"defaults": TOML, "expect": TOML, "other": TOML},
    ),
    st.booleans(),
)
def test_any_file_of_jobs_gives_configurations_or_a_message(tmp_path, data, suite):
    file = write(tmp_path, "".join(f"{name} = {as_toml(x)}\n" for name, x in data.items()))
    configs, message = [], ""
    try:
        configs = job_file.resolve_jobs({"MODEL_SIZE": "8b"}, file=file, suite=suite)
    except UserError as e:
        message = str(e)
    assert configs or message.startswith("jobs.toml")
    assert all(isinstance(s.expect, Expectation) == suite for s in configs)


@pytest.mark.parametrize("gpu_type", ["gb300", "gb200", "b300", "b200", "h100"])
def test_a_suite_is_the_list_of_exemplar_performance(gpu_type):
    """Workloads, number formats and layouts are NVIDIA's; baselines are published or predicted."""
    file = job_file.suite_file(f"exemplar_{gpu_type}")
    configs = job_file.resolve_jobs({}, file=file, suite=True)
    rows = [row for row in exemplar.listed() if row["gpu_type"] == gpu_type]
    assert len(configs) == len(rows)
    for config, row in zip(configs, rows, strict=True):  # all on 512 GPUs: in the file's order
        run, axes = config.run, ("fsdp", "tp", "pp", "vp", "cp", "ep", "mbs", "gbs")
        model = run.model
        assert (model.name, model.size) == tuple(
            recipes.load_workload(row["workload"]).model[x] for x in ("name", "size")
        )
        assert (run.precision.dtype, model.layers) == (row["dtype"], int(row["layers"]))
        assert (run.train.seq, run.layout.gpus) == (int(row["seq"]), int(row["gpus"]))
        theirs = {axis: int(row[axis]) for axis in axes if row[axis]}
        key = row["workload"], row["gpu_type"], row["dtype"]
        for axis in exemplar.OTHER.get(key, ((), ""))[0]:
            assert getattr(run.layout, axis) != theirs.pop(axis)
        if "ep" in theirs:  # Megatron's ep may contain tp: the experts are whole then
            ours = run.layout.ep, run.layout.ep * run.layout.tp
            assert theirs.pop("ep") in ours
        assert {axis: getattr(run.layout, axis) for axis in theirs} == theirs
        expect = config.expect
        assert expect.share == 0.95
        if expect.baseline.startswith("published"):
            assert exemplar.baseline(row, recipes.load_workload(row["workload"])) == (
                expect.baseline_s, expect.baseline,
            )  # fmt: skip
        else:
            assert expect.baseline == "predicted by maxbench plan"


def test_an_unknown_suite_names_those_that_there_are():
    with pytest.raises(UserError, match="neither a file nor one of exemplar_b200, exemplar_b300"):
        job_file.suite_file("exemplar_b100")


def test_submitted_runs_of_a_suite_are_listed_until_sbatch_refuses_one(tmp_path):
    """A dry run, then a submission of which the third sbatch fails."""
    bin_, stage = tmp_path / "bin", tmp_path / "stage"
    bin_.mkdir()
    count = f"echo x >> {tmp_path}/n; [[ $(wc -l < {tmp_path}/n) -lt 3 ]] && echo 4711"
    tool(bin_, "sbatch", count)
    asked = "[expect]\npublished = 0.9\nloss = 11\n[[jobs]]\nMODEL_SIZE = '8b'\nREPEATS = 4\n"
    write(tmp_path, asked + "[[jobs]]\nMODEL_SIZE = '8b'\nexpect = {loss = 12}", "try.toml")
    env = {"PATH": f"{bin_}:{plain_env()['PATH']}", "STAGE_PATH": str(stage)}
    output = dry_run("--suite", "try.toml", **env, cwd=tmp_path)
    assert output.startswith("# 4 x pretrain_llama31_8b_bf16_gpus8_")
    about = "gbs128_......: at least 90% of published, loss at most 11\n# 1 x pretrain_llama31_8b"
    assert re.search(about, output)
    assert not stage.exists()
    assert "sbatch refused" in run_launch_sh("--suite=try.toml", code=2, **env, cwd=tmp_path)
    (listed,) = (stage / "experiments").glob("suite_try_*.json")
    suite = json.loads(listed.read_text())
    assert suite["suite"] == "try"
    assert [one["expect"]["loss"] for one in suite["runs"]] == [11.0] * 4 + [12.0]
    folders = [listed.parent / one["folder"] for one in suite["runs"] if "folder" in one]
    assert [(folder / "job_id").is_file() for folder in folders] == [True, True, False]


def refused(capsys, *words: str) -> str:
    """Error message of `maxbench launch`."""
    assert entry.run("launch", words) == 2
    return capsys.readouterr().err


def test_invalid_command_lines_are_refused(tmp_path, capsys, monkeypatch):
    file = write(tmp_path, JOBS)
    assert "give one of --file and --suite" in refused(capsys, "--file", file, "--suite", file)
    assert "flag --file" in refused(capsys, "--file")
    assert "'no.toml' is not a file" in refused(capsys, "--file", "no.toml", "--dry_run")
    assert "'a b.toml' is not a file" in refused(capsys, "--file=a b.toml", "--dry_run")
    assert "--wait=3 must be true or false" in refused(capsys, "--wait=3")
    output = refused(capsys, "--layers", "8")
    assert "--layers is a flag of maxbench train and has no effect here; " in output
    assert "flags of maxbench train follow after --" in output
    listed = write(tmp_path, "[expect]\nloss = 1\n[[jobs]]\nMODEL_SIZE = '8b'", "a.toml")
    with monkeypatch.context() as only:
        only.setenv("DISABLE_PERFRUN", "true")
        only.setenv("ENABLE_PROFILE", "true")
        assert "DISABLE_PERFRUN=true leaves out the runs" in refused(capsys, "--suite", listed)
    for name, value in RUNAI.items():
        monkeypatch.setenv(name, value)
    assert "--suite needs the run folders" in refused(capsys, "--suite", listed)


# --- the cluster's file ---


def test_cluster_file_has_the_lowest_precedence(tmp_path):
    text = 'SBATCH_PARTITION = "batch"\nSBATCH_ACCOUNT = "acct"\nSBATCH_GPUS_PER_NODE = 4\n'
    (tmp_path / "cluster.toml").write_text(text + 'GPU_TYPE = "h200"\nTIME_LIMIT = "01:00:00"\n')
    env = {"STAGE_PATH": str(tmp_path), "SLURM_ACCOUNT": "mine", "SLURM_GPUS_PER_NODE": "null"}
    (s,) = job_file.resolve_jobs(env)
    options = slurm.sbatch_options(s, "", pathlib.Path("x"))
    assert {"--partition=batch", "--account=mine", "--time=01:00:00"} <= {*options}
    assert s.run.layout.gpu_type == "h200"
    assert not [option for option in options if option.startswith("--gres")]
    (s,) = job_file.resolve_jobs(env | {"SBATCH_PARTITION": ""})  # set, though to nothing
    assert "--partition=batch" not in slurm.sbatch_options(s, "", pathlib.Path("x"))
    output = dry_run(STAGE_PATH=str(tmp_path))
    assert "#SBATCH --account=acct" in output
    assert "#SBATCH --gres=gpu:4" in output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("GPU_TYP = 'h100'", "cluster.toml: GPU_TYP is not a variable; did you mean GPU_TYPE?"),
        (
            "GPU_TYPE = ['h100', 'b200']",
            "GPU_TYPE is a list; cluster.toml has one value",
        ),
        ("STAGE_PATH = '/x'", "cluster.toml: STAGE_PATH cannot be set here"),
        ("GPU_TYPE = h100", "cluster.toml' is not TOML: Invalid value"),
        ("GPU_TYPE = 'v100'", "GPU_TYPE='v100' is not one of h100"),
    ],
)
def test_invalid_cluster_file_is_refused(tmp_path, text, message):
    (tmp_path / "cluster.toml").write_text(text)
    assert message in dry_run(code=2, STAGE_PATH=str(tmp_path))


def test_segment_follows_the_cluster_file(monkeypatch):
    monkeypatch.setattr(slurm, "sbatch_supports", lambda option: False)
    env = {"MODEL": "nemotron4", "GPU_TYPE": "gb200", "JOB_TOTAL_GPUS": "128"}
    for asked, output in (("true", []), ("false", ["--segment=16 is left out: SEGMENT=false"])):
        (s,) = job_file.resolve_jobs(env | {"SEGMENT": asked})
        options = slurm.sbatch_options(s, "", pathlib.Path("x"))
        assert ("--segment=16" in options) == (asked == "true")
        assert slurm.notes(s) == output


def test_nodes_of_another_architecture_need_their_own_environment(tmp_path, monkeypatch):
    """setup.sh has run on the login node alone; jobs call the wrapper."""
    here = slurm.platform.machine()
    for name in ("venv", f"venv-{here}"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").touch()
    monkeypatch.setenv("MAXBENCH_PYTHON", f"{tmp_path}/venv-{here}/bin/python")
    assert slurm.python_of_nodes() == f"{tmp_path}/venv/bin/python"
    settled = lambda kind: job_file.resolve_jobs({"ARCHITECTURE": kind})[0]
    slurm._check_environment(settled(here))
    with pytest.raises(
        UserError, match=f"are riscv and {tmp_path}/venv-riscv does not exist: sbatch"
    ):
        slurm._check_environment(settled("riscv"))
    monkeypatch.setenv("MAXBENCH_PYTHON", "/bin/python")
    slurm._check_environment(settled("riscv"))


def test_file_is_submitted_from_the_shell_of_an_allocation(tmp_path):
    env = plain_env(SLURM_JOB_ID="7", SLURM_CONF="")
    command = [str(LAUNCH), "--file=none.toml"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
    assert "'none.toml' is not a file" in done.stderr
    assert "--inside" not in done.stderr
