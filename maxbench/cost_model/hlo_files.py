"""Compiled programs that a job wrote with --xla_dump_to, as text files."""

import dataclasses
import gzip
import pathlib
import re
from typing import Any

from maxbench.config.errors import UserError
from maxbench.cost_model import hlo
from maxbench.cost_model.compile_cache import Compiled

OPTIMIZED = "*after_optimizations.txt*"  # of a folder: a text per module, scheduled
ASSIGNMENT = "-buffer-assignment.txt"  # next to it
ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(.*)$", re.MULTILINE)


def find(path: str) -> pathlib.Path:
    """The file of a program: `path`, or in a folder the largest module that was compiled for GPUs.

    Raises:
      UserError: there is none.
    """
    place = pathlib.Path(path)
    if place.is_file():
        return place
    if not place.is_dir():
        raise UserError(f"hlo={path!r} is no file and no folder")
    texts = [p for p in place.rglob(OPTIMIZED) if "cpu_after" not in p.name]
    if not texts:
        raise UserError(
            f"hlo={path!r} has no {OPTIMIZED}: run the job with XLA_FLAGS=--xla_dump_to=FOLDER, "
            "and remove --xla_dump_hlo_module_re or name the step in it"
        )
    return max(texts, key=lambda p: p.stat().st_size)


def read(path: pathlib.Path) -> tuple[Compiled, bool]:
    """A program's text and memory, and whether the memory is that of the compiler: of the file of
    its buffer assignment. Without that file it is 0.

    Raises:
      UserError: it cannot be read, or is no scheduled module.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt") as f:
            text = f.read()
        hlo.parse(text)
    except (OSError, EOFError, UnicodeDecodeError) as e:
        raise UserError(f"hlo={str(path)!r} cannot be read: {e}") from None
    except (ValueError, KeyError) as e:
        raise UserError(
            f"hlo={str(path)!r}: {e}; use a file *_gpu_after_optimizations.txt of --xla_dump_to, "
            "or the as_text() of a compiled jax function"
        ) from None
    stem = path.name.removesuffix(".gz").removesuffix(".txt")
    assigned = path.with_name(f"{stem}{ASSIGNMENT}")
    sizes: Any = _assigned(assigned.read_text()) if assigned.is_file() else {}
    compiled = Compiled(
        text=text, arguments=0, temporaries=0, host=0, lower_s=0, compile_s=0, peak_rss_gib=0
    )
    return dataclasses.replace(compiled, **sizes), bool(sizes)


def _assigned(text: str) -> dict[str, int]:
    """Bytes of a buffer assignment by purpose."""
    found = dict.fromkeys(("arguments", "results", "temporaries", "host"), 0)
    for size, about in ALLOCATION.findall(text):
        if "constant" in about or "thread-local" in about:
            continue
        purpose = "temporaries"
        if re.search(r"\bcolor 5\b", about):
            purpose = "host"
        elif "parameter" in about:
            purpose = "arguments"
        elif "maybe-live-out" in about:
            purpose = "results"
        found[purpose] += int(size)
    return found
