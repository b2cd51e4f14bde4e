"""The documentation as a site: it builds strictly, holds the docstrings, and fetches nothing."""

import csv
import html
import inspect
import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from benchmarks import pictures
from maxbench import plan, report, sweep, train
from maxbench.config import recipes
from maxbench.metrics import flops
from maxbench.model.hugging_face import from_hugging_face
from maxbench.planning.result import PlanResult
from maxbench.reporting.build_report import Report
from maxbench.reporting.sweep import Sweep
from maxbench.run.subprocess_run import TrainResult

DOCS = pathlib.Path("docs")
PUBLIC = (plan, train, report, sweep, PlanResult.to_dataframe, TrainResult.records, Report.text,
          Sweep.cells, recipes.build_run, flops.per_sequence, from_hugging_face)  # fmt: skip

pytestmark = pytest.mark.xdist_group("docs")  # one worker builds the site


def build(docs: pathlib.Path, out: pathlib.Path) -> subprocess.CompletedProcess:
    """The site of a folder, with every warning an error."""
    words = ["-W", "--keep-going", "-q", "-E", "-d", f"{out}.trees", str(docs), str(out)]
    command = [sys.executable, "-m", "sphinx", *words]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> pathlib.Path:
    out = tmp_path_factory.mktemp("site")
    done = build(DOCS, out)
    assert done.returncode == 0, done.stderr
    return out


def text(page: pathlib.Path) -> str:
    """What a page says, in one line."""
    body = re.sub(r"<(script|style).*?</\1>|<[^>]+>", "", page.read_text(), flags=re.DOTALL)
    return " ".join(html.unescape(body).replace("¶", "").split())


def test_every_page_is_there_and_in_the_navigation(site):
    """A page in no toctree would be a warning, so the build an error."""
    menu = (site / "index.html").read_text()
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).with_suffix(".html")
        assert (site / name).is_file()
        assert f'class="reference internal" href="{name}"' in menu or page.stem == "index"
    assert (site / "report.html").read_text() == (DOCS / "report.html").read_text()
    assert "import maxbench as mb" in text(site / "tutorial/notebook.html")
    assert "tokens/s" in text(site / "tutorial/notebook.html")


@pytest.mark.parametrize("public", PUBLIC, ids=lambda x: x.__qualname__)
def test_the_api_has_the_docstrings(site, public):
    first, *_ = inspect.getdoc(public).split("\n\n")
    assert " ".join(first.replace("`", "").split()) in text(site / "reference/python_api.html")


def test_nothing_is_fetched_from_a_network(site):
    fetched = r'(?:<(?:script|img|iframe|link)\b[^>]*(?:src|href)="|@import|url\(["\']?)https?:'
    for file in (*site.rglob("*.html"), *site.rglob("*.css")):
        assert not re.search(fetched, file.read_text()), file


def test_what_leads_nowhere_fails_the_build(tmp_path):
    docs = tmp_path / "docs"
    shutil.copytree(DOCS, docs, ignore=shutil.ignore_patterns("*.md"))
    shutil.copy(DOCS / "notebook.md", docs)
    links = "[a](nowhere.md) [b](notebook.md#nowhere) [c](../maxbench/nowhere.py)"
    (docs / "index.md").write_text(f"# Home\n\n{links}\n")
    done = build(docs, tmp_path / "site")
    assert done.returncode == 1
    assert "'nowhere.md'" in done.stderr
    assert "'nowhere'" in done.stderr or "'notebook:nowhere'" in done.stderr
    assert "there is no ../maxbench/nowhere.py" in done.stderr
    assert "notebook.md: WARNING: document isn't included in any toctree" in done.stderr


def test_the_model_of_the_page_is_a_workload(tmp_path):
    """Docs/how-to/add_a_model.md: its file is read, and says what the page says of it."""
    page = (DOCS / "how-to/add_a_model.md").read_text()
    file = tmp_path / "llama32_1b.py"
    file.write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    run = recipes.build_run(recipes.load_workload(f"{file}:fp8"), gpus=8)
    assert (run.layout.fsdp, run.precision.dtype) == (8, "fp8")
    assert f"{flops.params(run.model):,} parameters" in page


def test_the_pictures_are_of_this_revision():
    """If not: python -m benchmarks.pictures."""
    told = pictures.made_from()
    assert json.loads(pictures.MADE_FROM.read_text()) == told
    assert all((pictures.IMAGES / name).stat().st_size < 150e3 for name in told)
    assert "url(http" not in (pictures.IMAGES / "terminal.svg").read_text()


@pytest.mark.parametrize("page", ["reference/plan_table.md", "tutorial/laptop_to_report.md"])
def test_what_a_page_shows_of_a_plan_is_what_the_table_has(page):
    with (DOCS / "plan.csv").open(newline="") as f:
        rows = [r for r in csv.DictReader(f) if (r["workload"], r["gpus"]) == ("llama2_70b", "128")]
    predicted = next(r["step_s"] for r in rows if r["dtype"] == "bf16")
    shown = (DOCS / page).read_text().partition("Llama 2 70B bf16, 80 layers")[2]
    assert re.search(r"([\d.]+) s a step", shown)[1] == predicted
