"""`maxbench COMMAND ...` is `python -m maxbench.COMMAND ...`."""

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence

COMMANDS = {
    "train": "maxbench.train",
    "plan": "maxbench.plan.__main__",
    "report": "maxbench.report.__main__",
    "cluster": "maxbench.launch.cluster",
    "launch": "maxbench.launch.__main__",
    "jobs": "maxbench.launch.follow",
    "watch": "maxbench.launch.watch",
    "archive": "maxbench.launch.archive",
    "preflight": "maxbench.preflight",
}


def main() -> int:
    """`maxbench train ...` is `python -m maxbench.train ...`."""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(
            f"usage: maxbench {chr(124).join(COMMANDS)} [flags]; --help after a command{hint}",
            file=sys.stderr,
        )
        return 0 if command in ("--help", "-h", "help") else 2
    run: Callable[[Sequence[str]], int] = importlib.import_module(COMMANDS[command]).main
    return run([f"maxbench {command}", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
