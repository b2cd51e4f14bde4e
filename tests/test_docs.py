"""The documentation: links, navigation, examples and generated files. `.ci/run` builds the site."""

import csv
import inspect
import json
import pathlib
import re

import pytest

import maxbench
from maxbench.config import recipes
from maxbench.config.precedence import build_config
from maxbench.config.resolve import resolve
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.metrics import flops
from tools import pictures, reference_pages

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


def test_pictures_are_up_to_date():
    """On failure run `python -m tools.pictures`."""
    digests = pictures.source_digests()
    assert json.loads(pictures.DIGESTS.read_text()) == digests
    assert all((pictures.IMAGES / name).stat().st_size < 150e3 for name in digests)
    assert "url(http" not in (pictures.IMAGES / "terminal.svg").read_text()
