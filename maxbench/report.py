"""`python -m maxbench.report`: the command `maxbench report`.

Do not import it: this module would replace the function maxbench.report.
"""

import sys

from maxbench.cli import entry

if __name__ == "__main__":
    sys.exit(entry.run("report", sys.argv[1:]))
