"""Runs docs/tutorial/notebook.ipynb and stores the output of its cells.

python -m tools.notebook
"""

import os
import pathlib
import tempfile

import nbclient
import nbformat

NOTEBOOK = pathlib.Path(__file__).parents[1] / "docs/tutorial/notebook.ipynb"


def run(folder: str | pathlib.Path) -> nbformat.NotebookNode:
    """The notebook with the output of its cells, which run in a folder.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised.
    """
    book = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    options = {"timeout": 600, "record_timing": False, "coalesce_streams": True}
    nbclient.NotebookClient(book, resources=resources, **options).execute()
    for cell in (c for c in book.cells if c.cell_type == "code"):
        cell.execution_count = None
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = None
    return book


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        os.environ["MAXBENCH_CACHE"] = f"{name}/cache"
        NOTEBOOK.write_text(nbformat.writes(run(name)).replace(f"{name}/", "") + "\n")
