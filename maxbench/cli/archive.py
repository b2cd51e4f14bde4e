"""Packs folders of runs into one file: `maxbench archive`."""

import pathlib
from collections.abc import Sequence

from maxbench.config import command_line, options
from maxbench.launch import archive


def main(argv: Sequence[str]) -> int:
    """Writes the archive; returns the exit code."""
    asked = command_line.read(options.Archive, argv)
    target = pathlib.Path(asked.to)
    count, size = archive.write([*map(pathlib.Path, asked.words)], target)
    print(f"{target}: {count} files, {size / 2**20:.1f} MiB uncompressed")
    return 0
