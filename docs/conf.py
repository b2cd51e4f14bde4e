"""Configuration of the documentation site: `sphinx-build -W docs build/docs`.

Needs `pip install '.[docs]'`. A dead link or anchor fails the build. The site loads nothing from a
network, has its own search, and can be opened from a disk.
"""

import html
import json
import os
import pathlib
import re

from sphinx.util import logging

DOCS = pathlib.Path(__file__).parent
ROOT = DOCS.parent
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # autodoc imports the package

project = "maxbench"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "maxbench"
html_show_sphinx = html_show_copyright = html_copy_source = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
# Copied to the root of the site, whatever their folder here.
html_extra_path = ["report.html", "plan.csv", "experiments.csv", "tutorial/notebook.ipynb"]
myst_heading_anchors = 3
smartquotes = False  # quotation marks are part of commands
default_role = "code"  # `of docstrings`
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_display_short_literal_types = True
log = logging.getLogger(__name__)


def setup(app):
    """Registers the changes of a page's source that are made before Sphinx parses it."""
    app.connect("source-read", prepare)


def prepare(app, page: str, source: list[str]) -> None:
    """Adds the notebook to its page, and rewrites the links that Sphinx cannot resolve."""
    if page == "tutorial/notebook":
        cells = json.loads((DOCS / "tutorial/notebook.ipynb").read_text())["cells"]
        source[0] += "\n\n".join(map(cell_markdown, cells))
    folder = (DOCS / page).parent
    extra = {(DOCS / path).resolve(): pathlib.Path(path).name for path in html_extra_path}

    def link(match: re.Match) -> str:
        text, path = match[1], match[2].partition("#")[0]
        target = (folder / path).resolve()
        if target in extra:
            name = os.path.relpath(DOCS / extra[target], folder)
            return f'<a href="{name}">{html.escape(text)}</a>'
        if target.is_relative_to(DOCS):
            return match[0]
        if not target.exists():
            log.warning("there is no %s", path, location=page)
        return f"`{os.path.relpath(target, ROOT)}`"

    source[0] = re.sub(r"(?<!!)\[([^]]*)\]\(((?!https?:|#)[^)\s]+)\)", link, source[0])


def cell_markdown(cell: dict) -> str:
    """A cell of a notebook, with its outputs, in Markdown."""
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return text
    return "\n\n".join([f"```python\n{text}\n```", *map(output_markdown, cell["outputs"])])


def output_markdown(output: dict) -> str:
    """An output of a notebook's cell: its HTML where it has one, else its text."""
    data = output.get("data", {})
    if "text/html" in data:
        return f'<div class="output">{"".join(data["text/html"])}</div>'
    return f"```text\n{''.join(output.get('text') or data['text/plain'])}\n```"
