"""`python -m maxbench.calibrate`: the command `maxbench calibrate`."""

import sys

from maxbench.cli import entry

if __name__ == "__main__":
    sys.exit(entry.run("calibrate", sys.argv[1:]))
