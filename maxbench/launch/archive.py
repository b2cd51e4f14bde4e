"""Archives of run folders: all files except profiles and checkpoints, with checksums."""

import hashlib
import io
import os
import pathlib
import tarfile
from collections.abc import Iterator, Sequence

from maxbench.config.errors import UserError

LEFT_OUT = {"checkpoints", "nsys_profile", "xplane", "cache"}


def write(folders: Sequence[pathlib.Path], target: pathlib.Path) -> tuple[int, int]:
    """Archives folders as a tar.gz file; returns the number of files and their bytes.

    Raises:
      UserError: no folder is given, one does not exist, or the archive exists or cannot be written.
    """
    if not folders:
        raise UserError("no folder is given; give folders of runs, as experiments")
    if missing := next((p for p in folders if not p.is_dir()), None):
        raise UserError(f"{str(missing)!r} is not a folder; give folders of runs, as experiments")
    part, count, size, sums = pathlib.Path(f"{target}.part"), 0, 0, []
    try:
        if target.exists():
            raise UserError(
                f"{str(target)!r} exists already; choose another with --to, or remove it"
            )
        if len({p.absolute().name for p in folders}) < len(folders):
            raise UserError("two of the folders have the same name; archive them separately")
        with tarfile.open(part, "w:gz") as tar:
            archived = (x for folder in folders for x in files(folder) if x[0] != part.absolute())
            for path, name in archived:
                data = path.read_bytes()  # only once: a run may be writing it
                _add(tar, name, data, path.stat().st_mtime)
                sums.append(f"{hashlib.sha256(data).hexdigest()}  {name}\n")
                count, size = count + 1, size + len(data)
            _add(tar, "SHA256SUMS", "".join(sums).encode(), 0)
        part.rename(target)
    except OSError as e:
        raise UserError(f"{e.filename or target}: {e.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
    return count, size


def files(root: pathlib.Path) -> Iterator[tuple[pathlib.Path, str]]:
    """Regular files below a folder that are archived, and their names in the archive."""
    base = root.absolute().parent
    for folder, subfolders, names in os.walk(root.absolute()):
        subfolders[:] = sorted(set(subfolders) - LEFT_OUT)
        for name in sorted(names):
            path = pathlib.Path(folder, name)
            if path.is_file() and not path.is_symlink() and not name.endswith(".nsys-rep"):
                yield path, str(path.relative_to(base))


def _add(tar: tarfile.TarFile, name: str, data: bytes, time: float) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime = len(data), int(time)
    tar.addfile(info, io.BytesIO(data))
