"""`python -m maxbench.calibrate`: the command of that name (maxbench/cli/calibrate.py)."""

import sys

from maxbench.cli.calibrate import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
