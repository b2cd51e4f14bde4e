"""`python -m maxbench.train`: the command `maxbench train`.

Imported, this module is the function maxbench.train: an import sets that attribute of the package.
"""

import sys

from maxbench import api
from maxbench.cli import entry

if __name__ == "__main__":
    sys.exit(entry.run("train", sys.argv[1:]))
sys.modules[__name__] = api.train  # type: ignore[assignment]
