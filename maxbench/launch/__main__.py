"""`python -m maxbench.launch`: the command `maxbench launch`."""

import sys

from maxbench.cli import entry

if __name__ == "__main__":
    sys.exit(entry.run("launch", sys.argv[1:]))
