"""Numbers of layers of the parts of a pipeline: even, or those of layout.stages. Needs no jax.

A pipeline has pp x vp parts (chunks) in the order of the network; stage p has parts p, p + pp, ...
"""

import re

from maxbench.config.errors import UserError

FORM = "Megatron's pipeline_model_parallel_layout, as 'Et|(tt|)*30mL', or layers per part, as 1,2,2"
# One repeated symbol or group: t*3, (tt|)*29. Groups may be nested.
REPEATED = re.compile(r"(?:\(([^()]*)\)|([Etm L|]))\*(\d+)")
MAX_SYMBOLS = 100_000


def layers_of_parts(text: str) -> tuple[int, ...]:
    """The number of layers of each part that layout.stages gives.

    Megatron's letters are E (embedding), t (layer), m (multi-token prediction) and L (loss), and |
    separates parts. Only t counts: the others have no part of their own here, as all stages share
    them (pipeline/embed_and_loss.py).

    Raises:
      UserError: it is neither form.
    """
    bad = UserError(f"layout.stages={text[:60]!r} is not understood: give {FORM}")
    if re.fullmatch(r"\d{1,6}( *, *\d{1,6})*", text):
        return tuple(map(int, text.split(",")))
    expanded = text
    while match := REPEATED.search(expanded):
        part, count = match[1] if match[2] is None else match[2], int(match[3])
        if len(expanded) + len(part) * count > MAX_SYMBOLS:
            raise bad
        expanded = expanded[: match.start()] + part * count + expanded[match.end() :]
    while (without := re.sub(r"\(([^()*]*)\)| ", r"\1", expanded)) != expanded:
        expanded = without
    if not re.fullmatch(r"[EtmL|]*t[EtmL|]*", expanded):
        raise bad
    return tuple(part.count("t") for part in expanded.removesuffix("|").split("|"))


def even(layers: int, parts: int) -> tuple[int, ...]:
    """Layers of each part without layout.stages: equal numbers. If layers + 2 divide instead, one
    less in the first part, which embeds too, and in the last one, which has the loss. Else ()."""
    if layers % parts == 0:
        return (layers // parts,) * parts
    if (layers + 2) % parts == 0 and parts > 1:
        each = (layers + 2) // parts
        return (each - 1, *[each] * (parts - 2), each - 1)
    return ()


def slots(parts: tuple[int, ...]) -> list[list[int]]:
    """The layer in each slot of each part, -1 in an empty one. Parts have as many slots as the
    longest; the empty slot of the first of even() is that of the embedding."""
    first, rows = 0, []
    for count in parts:
        empty = max(parts) - count
        rows.append([*range(first, first + count), *[-1] * empty])
        first += count
    if min(parts) < max(parts) and parts == even(first, len(parts)):
        rows[0] = [*rows[0][-1:], *rows[0][:-1]]
    return rows
