"""Packs folders of runs into one file: `maxbench archive`."""

import pathlib
from collections.abc import Sequence

from maxbench.config import command_line, commands
from maxbench.launch import archive


def main(argv: Sequence[str]) -> int:
    """Writes the archive; returns the exit code."""
    fv = commands.define("archive")
    _, *folders = command_line.parse_flags(fv, argv)
    target = pathlib.Path(fv.to)
    count, size = archive.write([*map(pathlib.Path, folders)], target)
    print(f"{target}: {count} files, {size / 2**20:.1f} MiB uncompressed")
    return 0
