"""`python -m maxbench.preflight`: the command `maxbench preflight`."""

import sys

from maxbench.cli import entry

if __name__ == "__main__":
    sys.exit(entry.run("preflight", sys.argv[1:]))
