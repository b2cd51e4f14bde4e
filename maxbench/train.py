"""`python -m maxbench.train`: the command of that name (maxbench/cli/train.py)."""

import sys

from maxbench.cli.train import main
from maxbench.config.python_api import make_callable

make_callable(__name__, "maxbench.run.subprocess_run.train")

if __name__ == "__main__":
    sys.exit(main(sys.argv))
