"""The documentation: links, navigation, examples and generated files. `.ci/run` builds the site."""

import ast
import csv
import inspect
import json
import os
import pathlib
import re
import subprocess
import textwrap
import tomllib

import pytest

import maxbench
from maxbench.cli import entry, launch
from maxbench.cli import plan as plan_command
from maxbench.config import command_line, number_formats, recipes
from maxbench.config.options import COMMANDS, Plan, RunOptions
from maxbench.config.precedence import build_config
from maxbench.config.resolve import resolve
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.launch import job_file
from maxbench.metrics import flops
from maxbench.planning import planner, run_result
from maxbench.run_logs import formats, readers
from maxbench.run_logs.record import Given
from tests.conftest import train_command
from tests.launch.test_launch import plain_env
from tools import doc_samples, pictures, reference_pages

DOCS = pathlib.Path("docs")
PAGES = sorted(DOCS.rglob("*.md"))
TOP = [pathlib.Path(name) for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(page: pathlib.Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and myst_heading_anchors form them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
    return {*words}


@pytest.mark.parametrize("page", [*TOP, *PAGES], ids=str)
def test_links_lead_to_files_and_headings(page):
    text = CODE.sub("", page.read_text())
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    for link in links:
        if re.match("https?:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_navigation():
    index = (DOCS / "index.md").read_text()
    entries = set()
    for tree in re.findall(r"```\{toctree\}(.*?)```", index, re.DOTALL):
        lines = [line for line in tree.split("\n") if line and not line.startswith(":")]
        entries |= {re.sub(r".*<(.*)>", r"\1", line) for line in lines}
    pages = {str(p.relative_to(DOCS).with_suffix("")) for p in PAGES}
    assert entries == pages - {"index"}


def test_the_api_page_has_the_public_functions():
    page = (DOCS / "reference/python_api.md").read_text()
    for name in maxbench.__all__:
        public = getattr(maxbench, name)
        assert inspect.getdoc(public), name
        assert re.search(
            rf"^\.\. auto\w+:: maxbench\.(?:\w+\.)*{name}(\(.*\))?$", page, re.MULTILINE
        ), name


def test_the_architecture_page_lists_every_package():
    page = (DOCS / "explanation/architecture.md").read_text()
    tree = re.search(r"^maxbench/\n(.*?)^configs/", page, re.DOTALL | re.MULTILINE)[1]
    listed = re.findall(r"^  (\w+)/ ", tree, re.MULTILINE)
    assert {*listed} == {p.parent.name for p in pathlib.Path("maxbench").glob("*/__init__.py")}


def test_pages_outside_reference_have_at_most_1500_words():
    pages = [p for p in DOCS.rglob("*.md") if p.parent.name != "reference"]
    words = {str(p): len(p.read_text().split()) for p in pages}
    assert {p: n for p, n in words.items() if n > 1500} == {}


def test_experiments_have_an_outcome_and_figures_or_a_reason():
    with (DOCS / "experiments.csv").open(newline="") as f:
        rows = list(csv.DictReader(f))
    outcomes = ("kept", "left out", "not built", "correction of the cost model")
    for row in rows:
        assert row["idea"]
        assert row["jax"]
        assert row["reason"].startswith(outcomes)
        assert (row["before"] and row["after"]) or row["after"] or ": " in row["reason"]
    assert len(rows) > 300


def test_the_example_model_is_a_valid_workload(tmp_path):
    """The file in docs/how-to/add_a_model.md has the parameter count that the page prints."""
    page = (DOCS / "how-to/add_a_model.md").read_text()
    file = tmp_path / "llama32_1b.py"
    file.write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    run = resolve(build_config(recipes.load_workload(f"{file}:fp8"), gpus=8), GPU_TYPES)
    assert (run.layout.fsdp, run.precision.dtype) == (8, "fp8")
    assert f"{flops.params(run.model):,} parameters" in page


@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_tables_of_options_and_variables_are_up_to_date(name):
    """On failure run `python -m tools.reference_pages`."""
    assert (reference_pages.DOCS / name).read_text() == reference_pages.page(name)
    assert reference_pages.PAGES[name]() in reference_pages.page(name)


def test_the_example_mixer_is_that_of_the_test():
    page = (DOCS / "how-to/add_a_mixer.md").read_text()
    code = re.search(r"```python\n(@register.*?)```", page, re.DOTALL)[1]
    lines = pathlib.Path("tests/gated_recurrence.py").read_text().splitlines()
    assert {*filter(str.strip, code.splitlines())} <= {*lines}


def blocks_of(page: str, kind: str) -> list[str]:
    """The code blocks of a language in a page, without their indentation."""
    found = doc_samples.BLOCK.findall((DOCS / page).read_text())
    return [textwrap.dedent(code) for _, name, code in found if name == kind]


# Python and TOML blocks of a page -> the test that runs or reads them.
READ_BY = {
    "how-to/add_a_gpu_type.md": "test_commands_of_a_page_run",
    "how-to/add_a_launcher.md": "test_functions_of_a_launcher_are_those_of_the_page",
    "how-to/add_a_mixer.md": "test_the_example_mixer_is_that_of_the_test, tests/test_new_mixer.py",
    "how-to/add_a_model.md": "test_the_example_model_is_a_valid_workload",
    "how-to/add_a_number_format.md": "test_the_example_format_is_the_one_in_use",
    "how-to/launch_on_a_cluster.md": "test_files_of_the_launcher_are_read",
    "how-to/plan_any_program.md": "tests/planning/test_programs.py",
    "how-to/use_from_python.md": "tests/test_api.py",
    "how-to/use_the_network.md": "tests/model/test_model.py",
    "reference/launcher.md": "test_files_of_the_launcher_are_read",
    "reference/log_formats.md": "test_the_example_log_format_reads_its_lines",
}


def test_every_code_block_is_run_or_read_by_a_test():
    kinds = lambda page: {kind for _, kind, _ in doc_samples.BLOCK.findall(page.read_text())}
    with_code = {page for page in [*TOP, *PAGES] if kinds(page) & {"python", "toml"}}
    assert with_code == {DOCS / page for page in READ_BY}
    for tests in READ_BY.values():
        for name in tests.split(", "):
            assert name in globals() or pathlib.Path(name).is_file(), name


def test_functions_of_a_launcher_are_those_of_the_page():
    (code,) = blocks_of("how-to/add_a_launcher.md", "python")
    functions = [x for x in ast.parse(code).body if isinstance(x, ast.FunctionDef)]
    assert {x.name for x in functions} == {"dry_run", "submit"}
    for scheduler in launch.SCHEDULERS.values():
        for function in functions:
            parameters = inspect.signature(getattr(scheduler, function.name)).parameters
            assert [*parameters] == [x.arg for x in function.args.args]
            defaults = [ast.literal_eval(x) for x in function.args.defaults]
            given = [x.default for x in parameters.values() if x.default is not x.empty]
            assert given == defaults


def test_the_example_format_is_the_one_in_use():
    (code,) = blocks_of("how-to/add_a_number_format.md", "python")
    names = {"Format": number_formats.Format}
    exec(code, names)
    assert names["_NVFP4"] == number_formats.FORMATS["nvfp4"]


def test_files_of_the_launcher_are_read(tmp_path):
    (cluster,) = blocks_of("reference/launcher.md", "toml")
    assert job_file.variables("cluster.toml", tomllib.loads(cluster))["SEGMENT"] == "true"
    jobs, expect = blocks_of("how-to/launch_on_a_cluster.md", "toml")
    (tmp_path / "suite.toml").write_text(f"{expect}\n{jobs}")
    env = {"STAGE_PATH": str(tmp_path)}
    found = job_file.resolve_jobs(env, file=str(tmp_path / "suite.toml"), suite=True)
    assert len(found) == 3 * (3 * 2 + 1)
    assert {job.expect.published for job in found} == {0.95}


def test_the_example_log_format_reads_its_lines(tmp_path):
    (table,) = blocks_of("reference/log_formats.md", "toml")
    (tmp_path / "my_formats.toml").write_text(table)
    page = (DOCS / "reference/log_formats.md").read_text()
    (line,) = re.findall(r"For lines such as `(.*)`:", page)
    lines = [line.replace("12/50", f"{i}/50") for i in range(1, 51)]
    (tmp_path / "run.log").write_text("\n".join(["global batch 128", *lines]) + "\n")
    known = formats.read(tmp_path / "my_formats.toml", formats.FORMATS)
    (record,) = readers.read([tmp_path / "run.log"], Given(table=known))
    assert (record.source, record.gbs, record.total_steps) == ("acme", 128, 50)
    assert (record.loss[11], record.step_s[11]) == (2.31, 9.4)


def test_pictures_are_up_to_date():
    """On failure run `python -m tools.pictures`."""
    digests = pictures.source_digests()
    assert json.loads(pictures.DIGESTS.read_text()) == digests
    assert all((pictures.IMAGES / name).stat().st_size < 150e3 for name in digests)
    assert "url(http" not in (pictures.IMAGES / "terminal.svg").read_text()


# Programs of command blocks that no test of a page runs, and the test of what they do.
ELSEWHERE = {
    "pip": "tests/config/test_recipes.py, tests/launch/test_workload_file.py",
    "python3": "tests/launch/slurm_cluster.py",
    "./setup.sh": "tests/launch/test_setup.py",
    **dict.fromkeys((".", "cd", "mkdir", "git", "python", "sudo", "rm", "pre-commit"), "the shell"),
}
SUBMITS = {"PATH": os.environ["PATH"], "SBATCH_ACCOUNT": "a", "SBATCH_PARTITION": "b"}
COMMAND_BLOCKS = [p for p in [*TOP, *PAGES] if "```bash" in p.read_text()]


def dry(env: dict[str, str], words: list[str], monkeypatch, capsys) -> None:
    """Runs a command without a cluster, training or a compiler: it must be valid."""
    program, *rest = words
    if program == "eval":
        program, *rest = rest[0].removeprefix("$(").removesuffix(")").split()
    if program in ("launch/launch.sh", "sbatch") and words[-1] != "./setup.sh":
        env |= {"SLURM_JOB_NUM_NODES": rest[rest.index("-N") + 1]} if "-N" in rest else {}
        program, rest = "maxbench", ["launch", *(rest if program != "sbatch" else [])]
    if pathlib.Path(program).name != "maxbench":
        assert program in ELSEWHERE or words[-1] == "./setup.sh", words
        return
    name, *flags = rest
    if name == "launch":
        for variable in os.environ.keys() - plain_env().keys():
            monkeypatch.delenv(variable)
        if env.get("CLUSTER_TYPE") == "kubernetes":
            env = {"RUN_CONF_IMAGE": "a/b"} | env  # `maxbench cluster` asks for it
        for variable, value in (SUBMITS | env).items():
            monkeypatch.setenv(variable, value)
        flags = [flag for flag in flags if flag not in ("--dry_run", "--wait")]
        assert entry.run("launch", ["--dry_run", *flags]) == 0, capsys.readouterr().err
        return
    command = Plan.taking(flags) if name == "plan" else COMMANDS[name]
    asked = command_line.read(command, ["maxbench", *flags])
    if name == "train":
        code, _, err = train_command(*flags, "--dry_run")
        assert code == 0, err
    elif isinstance(asked, Plan) and asked.schedule:
        assert plan_command.schedule(asked)
    elif isinstance(asked, Plan):
        run, candidates = run_result.run_of(asked)
        assert not run_result.search.why_it_cannot_fit(run) or candidates
        command_line.writable("timeline", asked.timeline, ".json")
        if asked.as_published:
            planner.as_published(run)
    elif isinstance(asked, RunOptions):
        command_line.resolve_run(asked)


@pytest.mark.parametrize("page", COMMAND_BLOCKS, ids=str)
def test_commands_of_a_page_run(page, tmp_path, monkeypatch, capsys):
    text = page.read_text()
    for name, content in doc_samples.files_of(text).items():
        (tmp_path / name).write_text(content)
    for name in ("launch", "README.md", "CONTRIBUTING.md"):
        (tmp_path / name).symlink_to(pathlib.Path(name).absolute())
    monkeypatch.chdir(tmp_path)
    for section in re.split("^## ", text, flags=re.MULTILINE):
        exported = {}
        for _, kind, block in doc_samples.BLOCK.findall(section):
            if kind == "bash":
                subprocess.run(["bash", "-n", "-c", block], check=True)
            for env, words in doc_samples.commands(block) if kind == "bash" else ():
                if not words or words[0] == "export":
                    exported |= env | dict(word.split("=", 1) for word in words[1:])
                else:
                    dry(exported | env, words, monkeypatch, capsys)


def test_flags_of_the_plan_page_are_valid():
    """Those of its tables, each with a plan of its example."""
    page = (DOCS / "how-to/plan_a_purchase.md").read_text()
    flags = re.findall(r"^\|[^|]*\|(.*--.*)\|$", page, re.MULTILINE)
    found = [span for row in flags for span in re.findall(r"`(--[^`]*)`", row)]
    found = [flag.partition("=")[0] if flag.endswith("_every") else flag for flag in found]
    assert len(found) > 8
    for flag in found:
        if flag.startswith("--") and (" " in flag or "=" in flag):
            words = ["maxbench", *f"--config llama2_70b --gpus 128 {flag}".split()]
            run_result.run_of(command_line.read(COMMANDS["plan"], words))


@pytest.mark.gpu_compile
@pytest.mark.exhaustive
@pytest.mark.parametrize("page", doc_samples.pages(), ids=lambda page: page.stem)
def test_samples_of_output_are_up_to_date(page):
    """On failure run `python -m tools.doc_samples`. Source lines may be those of any revision."""
    lines = lambda text: re.sub(r"\.py:\d+ *", ".py:N", text)
    assert lines(page.read_text()) == lines(doc_samples.page(page))
