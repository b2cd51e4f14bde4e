"""`python -m maxbench.plan`: the command `maxbench plan`.

Imported, this module is the function maxbench.plan: an import sets that attribute of the package.
"""

import sys

from maxbench import api
from maxbench.cli import entry

if __name__ == "__main__":
    sys.exit(entry.run("plan", sys.argv[1:]))
sys.modules[__name__] = api.plan  # type: ignore[assignment]
