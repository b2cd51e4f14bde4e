"""Runs in one file, to keep or to send: all but profiles and checkpoints, with checksums."""

import hashlib
import io
import os
import pathlib
import tarfile
from collections.abc import Iterator, Sequence

from maxbench.config.errors import UserError

LEFT_OUT = {"checkpoints", "nsys_profile", "xplane", "cache"}


def write(places: Sequence[pathlib.Path], target: pathlib.Path) -> tuple[int, int]:
    """Archives what is in folders; returns how many files, and their bytes.

    Raises:
      UserError: no folder was given, one is not there, or the archive is or cannot be written.
    """
    if lacking := next((p for p in places if not p.is_dir()), "" if places else "(none)"):
        raise UserError(f"{str(lacking)!r} is no folder; give those of runs, as experiments")
    part, count, size, sums = pathlib.Path(f"{target}.part"), 0, 0, []
    try:
        if target.exists():
            raise UserError(f"{str(target)!r} is there already; --to another, or remove it")
        if len({p.absolute().name for p in places}) < len(places):
            raise UserError("two of the folders have one name; archive them one by one")
        with tarfile.open(part, "w:gz") as tar:
            every = ((p, n) for place in places for p, n in files(place) if p != part.absolute())
            for path, name in every:
                text = path.read_bytes()  # once: a run may be writing it
                _add(tar, name, text, path.stat().st_mtime)
                sums.append(f"{hashlib.sha256(text).hexdigest()}  {name}\n")
                count, size = count + 1, size + len(text)
            _add(tar, "SHA256SUMS", "".join(sums).encode(), 0)
        part.rename(target)
    except OSError as e:
        raise UserError(f"{e.filename or target}: {e.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
    return count, size


def files(place: pathlib.Path) -> Iterator[tuple[pathlib.Path, str]]:
    """Regular files below a folder that are kept, and their names in the archive."""
    base = place.absolute().parent
    for folder, inner, names in os.walk(place.absolute()):
        inner[:] = sorted(set(inner) - LEFT_OUT)
        for name in sorted(names):
            path = pathlib.Path(folder, name)
            if path.is_file() and not path.is_symlink() and not name.endswith(".nsys-rep"):
                yield path, str(path.relative_to(base))


def _add(tar: tarfile.TarFile, name: str, text: bytes, time: float) -> None:
    about = tarfile.TarInfo(name)
    about.size, about.mtime = len(text), int(time)
    tar.addfile(about, io.BytesIO(text))
