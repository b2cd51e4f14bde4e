"""Ranks that others wait for: of a collective, the rank whose kernel is the shortest came last.

A kernel of NCCL runs from the arrival of its rank to the end of the transfer, which all ranks see
at once. Durations need no common clock.
"""

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence

from maxbench.traces.events import COMMUNICATION, Event
from maxbench.traces.steps import Step

SKEW = 1e-3  # s: ends of the same collectives further apart are clocks that differ


@dataclasses.dataclass
class Waits:
    """Waits of one rank at collectives, over all steps, in ns.

    Attributes:
      waits: for ranks that come later.
      waited_for: sum over the other ranks of their waits for this one.
      last: collectives at which it came last.
    """

    waits: int = 0
    waited_for: int = 0
    last: int = 0


@dataclasses.dataclass
class Arrivals:
    """Waits by rank, the number of collectives that they are of, and notes."""

    ranks: Mapping[int, Waits]
    collectives: int
    notes: list[str]


def arrivals(ranks: Mapping[int, tuple[Sequence[Event], Sequence[Step]]]) -> Arrivals:
    """Who waits for whom at the collectives that several ranks recorded."""
    matched: dict[tuple, dict[int, Event]] = collections.defaultdict(dict)
    counts: dict[tuple, dict[int, int]] = collections.defaultdict(dict)
    for rank, (events, steps) in ranks.items():
        for key, event in _in_order(events, steps):
            matched[key][rank] = event
            counts[key[:-1]][rank] = key[-1] + 1
    members: dict[tuple, set[int]] = collections.defaultdict(set)
    for key, by_rank in counts.items():
        members[key[1:]] |= {*by_rank}
    differ = lambda key, of: len({of.get(rank, 0) for rank in members[key[1:]]}) > 1
    unequal = {key for key, by_rank in counts.items() if differ(key, by_rank)}
    waits = {rank: Waits() for rank in ranks}
    ends: dict[int, list[int]] = collections.defaultdict(list)
    number = 0
    for key, of in matched.items():
        if len(of) < 2 or key[:-1] in unequal:
            continue
        number += 1
        _add(waits, of)
        first = min(of)
        for rank, event in of.items():
            ends[rank].append(event.end - of[first].end)
    notes = []
    if unequal:
        _, group, name = min(unequal)
        over = f" over {group}" if group else ""
        notes.append(f"{len(unequal)} kinds of collectives ran in unequal numbers on the ranks and "
                     f"are not compared: {name:.60}{over}")  # fmt: skip
    for rank, offsets in ends.items():
        if abs(skew := statistics.median(offsets) / 1e9) > SKEW:
            where = "ahead" if skew > 0 else "behind"
            notes.append(f"the clock of rank {rank} is {abs(skew):.3f} s {where}, by the ends of "
                         f"{len(offsets)} collectives; no figure compares clocks")  # fmt: skip
    return Arrivals(waits, number, notes)


def _in_order(
    events: Iterable[Event], steps: Sequence[Step]
) -> Iterable[tuple[tuple[int, str, str, int], Event]]:
    """Collectives of steps: (step, group, name, occurrence) and event."""
    for step in steps:
        seen: collections.Counter[tuple[str, str]] = collections.Counter()
        for event in events:
            if event.kind != COMMUNICATION or not step.start <= event.start < step.end:
                continue
            if "sendrecv" in event.name.lower() and not event.work.group:
                continue  # of two ranks, which are not known
            key = event.work.group, event.op or event.name
            yield (step.number, *key, seen[key]), event
            seen[key] += 1


def _add(waits: Mapping[int, Waits], of: Mapping[int, Event]) -> None:
    """Adds one collective."""
    ns = {rank: event.end - event.start for rank, event in of.items()}
    last = min(ns, key=lambda rank: (ns[rank], rank))
    waits[last].last += 1
    for rank, duration in ns.items():
        waits[rank].waits += duration - ns[last]
        waits[last].waited_for += duration - ns[last]
