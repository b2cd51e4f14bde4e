"""`python -m maxbench.launch`: the command of that name (maxbench/cli/launch.py)."""

import sys

from maxbench.cli.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
