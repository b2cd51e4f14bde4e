"""What a Python lacks to run the maxbench of a checkout: one line and exit code 1; or nothing.

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
        sys.exit(f"{need.name} is not there")
    if not need.specifier.contains(found, prereleases=True):
        sys.exit(f"{need.name} is {found}, needed is {need.specifier}")
try:
    loop = importlib.import_module("maxbench.run.loop")  # all that a run loads
except ImportError as e:
    sys.exit(f"maxbench cannot be imported: {e}")
if pathlib.Path(loop.__file__).parents[2] != pathlib.Path(root).resolve():
    sys.exit(f"maxbench is that of {pathlib.Path(loop.__file__).parents[2]}")
