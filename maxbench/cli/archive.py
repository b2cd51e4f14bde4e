"""Packs folders of runs into one file: `maxbench archive`."""

import pathlib
from collections.abc import Sequence

from maxbench.config import command_line, options
from maxbench.config.errors import UserError
from maxbench.launch import archive


def main(argv: Sequence[str]) -> int:
    """Writes the archive; returns the exit code.

    Raises:
      UserError: another suffix, or folders that cannot be packed.
    """
    asked = command_line.read(options.Archive, argv)
    if not asked.to.endswith((".tar.gz", ".tgz")):
        raise UserError(f"to={asked.to!r} must end with .tar.gz or .tgz, as runs.tar.gz")
    target = pathlib.Path(asked.to)
    count, size = archive.write([*map(pathlib.Path, asked.words)], target)
    print(f"{target}: {count} files, {size / 2**20:.1f} MiB uncompressed")
    return 0
