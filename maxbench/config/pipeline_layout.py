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


def most_empty(slots: int) -> int:
    """The largest number of slots without a layer that is not refused: two, or a sixteenth."""
    return max(2, slots // 16)


def even(layers: int, parts: int) -> tuple[int, ...]:
    """Layers of each part without layout.stages: equal numbers. If the layers do not divide, one
    less in as many parts as that takes: the first, which embeds too, the last, which has the loss,
    the second, the last but one, and so on. (): more than most_empty() slots would be empty."""
    each = -(-layers // parts)
    fewer = each * parts - layers
    if fewer > most_empty(each * parts):
        return ()
    from_start, from_end = fewer - fewer // 2, fewer // 2
    return (*[each - 1] * from_start, *[each] * (parts - fewer), *[each - 1] * from_end)


def slots(parts: tuple[int, ...]) -> list[list[int]]:
    """The layer in each slot of each part, -1 in an empty one. Parts have as many slots as the
    longest; where even() leaves one in the first, that is the slot of the embedding."""
    first, rows = 0, []
    for count in parts:
        empty = max(parts) - count
        rows.append([*range(first, first + count), *[-1] * empty])
        first += count
    if min(parts) < max(parts) and parts == even(first, len(parts)):
        rows[0] = [*rows[0][-1:], *rows[0][:-1]]
    return rows
