"""Steps of a log that are faster than the hardware: their time is dispatch, not work.

An asynchronous program returns from a step before the GPUs have done it, and a later step waits for
them: a first step of 60 s, a second of 0.3 s, a third of 106 s.
"""

import itertools
import statistics
from collections.abc import Mapping
from typing import NamedTuple

SHARE = 0.3  # of the median of the later half, below which a step without a known peak is not work
LIKE = 0.9  # of that median, from which on a step is one like the others
WAIT = 1.5  # of that median, above which the next step has waited for those before it
FIRST = 5  # steps of a log that are compared with the later ones: noise is left in
NAMED = 3  # steps that the note names


class FastSteps(NamedTuple):
    """Steps that are left out of the figures, and a note that names them, '' if there are none."""

    steps: frozenset[int]
    note: str


def find(times: Mapping[int, float], least_s: Mapping[int, float], device: str) -> FastSteps:
    """Finds steps that cannot be work, and the steps that waited for them.

    Args:
      times: step -> seconds.
      least_s: step -> time of its FLOPs at the peak of its GPUs; {} = unknown, then steps are
        compared with the median of the later half, the first FIRST alone.
      device: the GPUs, for the note.
    """
    order = sorted(times)
    if len(order) < 2:
        return FastSteps(frozenset(), "")
    usual = statistics.median(times[i] for i in order[len(order) // 2 :])
    limits = least_s or dict.fromkeys(order[:FIRST], SHARE * usual)
    fast = [i for i in order if times[i] < min(limits.get(i, 0), LIKE * usual)]
    if not fast or len(fast) == len(order):
        return FastSteps(frozenset(), "")
    waited = [
        b for a, b in itertools.pairwise(order)
        if a in fast and b not in fast and times[b] > WAIT * usual
    ]  # fmt: skip
    if len(fast) + len(waited) >= len(order):
        waited = []
    named = ", ".join(f"{i} ({times[i]:.3g} s)" for i in fast[:NAMED])
    named += f" and {len(fast) - NAMED} more" if len(fast) > NAMED else ""
    why = (
        f"its FLOPs take {least_s[fast[0]]:.3g} s at the peak of {device}"
        if least_s
        else f"the later steps take {usual:.3g} s"
    )
    note = f"left out as dispatch, not work: step{'s' * (len(fast) > 1)} {named}; {why}"
    if waited:
        longest = ", ".join(f"{i} ({times[i]:.3g} s)" for i in waited[:NAMED])
        note += f"; and step{'s' * (len(waited) > 1)} {longest}, which waited for it"
    return FastSteps(frozenset([*fast, *waited]), note)
