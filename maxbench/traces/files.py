"""The profiles below given paths, read into one trace per rank; and what is wrong with them."""

import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence

from maxbench.config.errors import UserError
from maxbench.traces import kineto, nsight, xplane
from maxbench.traces.events import RankTrace

XPLANE = (".xplane.pb", ".xplane.pb.gz")
FORMS = (*XPLANE, ".json", ".json.gz", ".sqlite", ".nsys-rep")
# JSON of a run's folder that is no profile.
OTHERS = {"result.json", "job.json", "suite.json"}
LIKE = 0.5  # share of the kernels' names that ranks of one run have in common, at least


def read(paths: Iterable[str]) -> tuple[list[RankTrace], list[str]]:
    """The traces at and below paths by rank, and a note for each file that is left out.

    Raises:
      UserError: a path does not exist, or there is no profile that can be read.
    """
    ranks: list[RankTrace] = []
    given = [*map(pathlib.Path, paths)]
    found = [file for path in given for file in _files(path)]
    if not found:
        raise UserError(f"no profile at {', '.join(map(str, given))}: {', '.join(FORMS)} are read")
    errors: list[UserError] = []
    for file in found:
        try:
            several = _read_file(file)
        except UserError as e:
            errors.append(e)
            continue
        # Hosts of a JAX program number their GPUs from 0 on.
        base = 1 + max((r.rank for r in ranks), default=-1) if _is_xplane(file) else 0
        for trace in several:
            trace.rank += base
        ranks += several
    if not ranks:
        raise errors[0]
    notes = [f"{e}; left out" for e in errors]
    return _one_run(ranks, notes), notes


def _is_xplane(file: pathlib.Path) -> bool:
    return file.name.endswith(XPLANE)


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    """The profiles at or below a path. Of the files that one recording writes, one counts."""
    if path.is_file():
        if not path.name.endswith(FORMS):
            raise UserError(f"{path} is no profile: {', '.join(FORMS)} are read")
        return [path]
    if not path.is_dir():
        raise UserError(f"no such file or folder: {path}")
    files = sorted(
        pathlib.Path(folder, name)
        for folder, _, names in os.walk(path)
        for name in names
        if name.endswith(FORMS) and name not in OTHERS
    )
    if xplanes := [file for file in files if _is_xplane(file)]:
        # A folder per recording, by its time, and in it a file per host.
        return [
            *{file.name: file for file in sorted(xplanes, key=lambda x: x.parent.name)}.values()
        ]
    exported = {file.with_suffix("") for file in files if file.suffix == ".sqlite"}
    return [x for x in files if x.suffix != ".nsys-rep" or x.with_suffix("") not in exported]


def _read_file(file: pathlib.Path) -> list[RankTrace]:
    if _is_xplane(file):
        return xplane.read(file, file.name)
    if file.name.endswith((".sqlite", ".nsys-rep")):
        return nsight.read(file, file.name)
    try:
        return _with_progress(file, lambda f: kineto.read(file, file.name, kineto.blocks(file, f)))
    except OSError as e:
        raise UserError(f"{file} cannot be read: {e.strerror}") from None


def _with_progress(file: pathlib.Path, use: Callable[..., list[RankTrace]]) -> list[RankTrace]:
    """Reads a file with a bar on the terminal."""
    from rich import console, progress

    screen = console.Console(stderr=True)
    hidden = not sys.stderr.isatty()
    with progress.open(
        file, "rb", description=file.name, console=screen, disable=hidden, transient=True
    ) as f:
        return use(f)


def _one_run(ranks: Sequence[RankTrace], notes: list[str]) -> list[RankTrace]:
    """The ranks of one run in their order; adds a note for each that is not one of them."""
    by_rank: dict[int, RankTrace] = {}
    for trace in ranks:
        if first := by_rank.get(trace.rank):
            notes.append(f"{trace.source} is left out: it is rank {trace.rank}, as {first.source}")
            continue
        by_rank[trace.rank] = trace
    kept = [by_rank[rank] for rank in sorted(by_rank)]
    names = [{event.name for event in trace.events} for trace in kept]
    for trace, own in zip(kept[1:], names[1:], strict=True):
        first = kept[0]
        if trace.world and first.world and trace.world != first.world:
            notes.append(
                f"{trace.source} is of a run of {trace.world} ranks, {first.source} of one of "
                f"{first.world}: they are not the same run"
            )
        elif trace.device != first.device:
            notes.append(f"rank {trace.rank} ran on {trace.device or 'another GPU'}, rank "
                         f"{first.rank} on {first.device or 'another'}")  # fmt: skip
        elif len(own & names[0]) < LIKE * min(len(own), len(names[0])):
            notes.append(
                f"{trace.source} shares {len(own & names[0])} of {len(own)} kernel names with "
                f"{first.source}: another run, or another stage of a pipeline"
            )
    for trace in kept:
        if trace.world and trace.rank >= trace.world:
            notes.append(
                f"{trace.source} is rank {trace.rank} of {trace.world}: there is no such rank"
            )
    return kept
