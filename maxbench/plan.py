"""`python -m maxbench.plan`: the command `maxbench plan`.

Do not import it: this module would replace the function maxbench.plan.
"""

import sys

from maxbench.cli import entry

if __name__ == "__main__":
    sys.exit(entry.run("plan", sys.argv[1:]))
