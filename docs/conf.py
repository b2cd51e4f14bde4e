"""The documentation as a site: `sphinx-build -W docs build/docs`, from `pip install '.[docs]'`.

A link or an anchor that leads nowhere fails the build. What it makes fetches nothing from a
network, search included, and opens from a disk.
"""

import json
import os
import pathlib
import re

from sphinx.util import logging

ROOT = pathlib.Path(__file__).parents[1]
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # docstrings are read by importing

project = "maxbench"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "maxbench"
html_show_sphinx = html_show_copyright = html_copy_source = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_extra_path = ["report.html", "plan.csv", "notebook.ipynb"]
myst_heading_anchors = 3
smartquotes = False  # a quote is what one types
default_role = "code"  # `of docstrings`
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_display_short_literal_types = True
log = logging.getLogger(__name__)


def setup(app):
    """What these pages hold that Sphinx does not know."""
    app.connect("source-read", read)


def read(app, name: str, source: list[str]) -> None:
    """The notebook becomes a page; links out of docs/ become the names of the files."""
    if name == "notebook":
        cells = json.loads((ROOT / "docs/notebook.ipynb").read_text())["cells"]
        source[0] += "\n\n".join(map(shown, cells))

    def outside(link: re.Match) -> str:
        if not (ROOT / "docs" / link[1]).exists():
            log.warning("there is no %s", link[1], location=name)
        return f"`{link[1].removeprefix('../')}`"

    source[0] = re.sub(r"\[[^]]*\]\((\.\./[^)#]*)[^)]*\)", outside, source[0])
    # Pages that are made elsewhere, and files, are beside the pages of the site.
    beside = "|".join(map(re.escape, html_extra_path))
    source[0] = re.sub(rf"\[([^]]*)\]\(({beside})\)", r'<a href="\2">\1</a>', source[0])


def shown(cell: dict) -> str:
    """A cell of a notebook in Markdown."""
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return text
    return "\n\n".join([f"```python\n{text}\n```", *map(output, cell["outputs"])])


def output(out: dict) -> str:
    """What a cell has left: HTML, as in a notebook, else text."""
    data = out.get("data", {})
    if "text/html" in data:
        return f'<div class="output">{"".join(data["text/html"])}</div>'
    return f"```text\n{''.join(out.get('text') or data['text/plain'])}\n```"
