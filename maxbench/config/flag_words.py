"""Flags as words of a command line, where a later value replaces an earlier one.

maxbench refuses a flag with two values. A launcher removes the flags that it derives where the
user gives them.
"""

from collections.abc import Collection, Iterable, Sequence


def replaced(words: Sequence[str], *later: str) -> list[str]:
    """Words with further ones, whose flags are not left among the first."""
    return [*without(words, names(later)), *later]


def names(words: Iterable[str]) -> set[str]:
    """Names of the flags among words: {'steps', 'checkpoint'} of --steps 5 --no-checkpoint."""
    return {_name(word) for word in words if word.startswith("--")}


def without(words: Sequence[str], flags: Collection[str]) -> list[str]:
    """Words without flags of these names, and without their values."""
    kept, keep = [], True
    for word in words:
        if word.startswith("--"):
            keep = _name(word) not in flags
        if keep:
            kept.append(word)
    return kept


def _name(word: str) -> str:
    name = word.removeprefix("--").partition("=")[0].replace("-", "_")
    return name.removeprefix("no").removeprefix("_")
