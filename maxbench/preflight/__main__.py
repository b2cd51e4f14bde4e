"""`python -m maxbench.preflight`: the command of that name (maxbench/cli/preflight.py)."""

import sys

from maxbench.cli.preflight import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
