"""`python -m maxbench.report`: the command of that name (maxbench/cli/report.py)."""

import sys

from maxbench.cli.report import main
from maxbench.config.python_api import make_callable

make_callable(__name__, "maxbench.reporting.build_report.report")

if __name__ == "__main__":
    sys.exit(main(sys.argv))
