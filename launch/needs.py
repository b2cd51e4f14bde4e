"""Checks that a Python can run the maxbench of a checkout: otherwise one line and exit code 1.

python needs.py CHECKOUT [further requirements]
"""

import importlib
import pathlib
import sys
import tomllib
from importlib import metadata

from pip._vendor.packaging.requirements import Requirement

root, *more = sys.argv[1:]
project = tomllib.loads(pathlib.Path(root, "pyproject.toml").read_text())["project"]
for text in [*project["dependencies"], *more]:
    need = Requirement(text)
    try:
        found = metadata.version(need.name)
    except metadata.PackageNotFoundError:
        sys.exit(f"{need.name} is not installed")
    if not need.specifier.contains(found, prereleases=True):
        sys.exit(f"{need.name} is {found}, but {need.specifier} is required")
try:
    loop = importlib.import_module("maxbench.run.loop")  # imports all that a run needs
except ImportError as e:
    sys.exit(f"maxbench cannot be imported: {e}")
if pathlib.Path(loop.__file__).parents[2] != pathlib.Path(root).resolve():
    sys.exit(f"maxbench is imported from {pathlib.Path(loop.__file__).parents[2]}")
