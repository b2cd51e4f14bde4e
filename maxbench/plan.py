"""`python -m maxbench.plan`: the command of that name (maxbench/cli/plan.py)."""

import sys

from maxbench.cli.plan import main
from maxbench.config.python_api import make_callable

make_callable(__name__, "maxbench.planning.result.plan")

if __name__ == "__main__":
    sys.exit(main(sys.argv))
