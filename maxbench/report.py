"""`python -m maxbench.report`: the command `maxbench report`.

Imported, this module is the function maxbench.report: an import sets that attribute of the package.
"""

import sys

from maxbench import api
from maxbench.cli import entry

if __name__ == "__main__":
    sys.exit(entry.run("report", sys.argv[1:]))
sys.modules[__name__] = api.report  # type: ignore[assignment]
