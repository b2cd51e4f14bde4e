"""`python -m maxbench.train`: the command `maxbench train`.

Do not import it: this module would replace the function maxbench.train.
"""

import sys

from maxbench.cli import entry

if __name__ == "__main__":
    sys.exit(entry.run("train", sys.argv[1:]))
