"""The steps of a trace: marked by the program, by executions of it, or found as a repetition."""

import collections
import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from maxbench.traces.events import COMMUNICATION, Event, Mark, RankTrace

ALIKE = 0.95  # share of the kernels that neighbouring steps have in common, at least
EVEN = 1.02  # ratio of the numbers of kernels of the largest and the smallest step, at most


class Step(NamedTuple):
    """A step on the device: from its first kernel to the first one of the next step."""

    number: int
    start: int
    end: int

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


def find(trace: RankTrace) -> tuple[list[Step], list[str]]:
    """The whole steps of a trace, and notes on what is in none. Without steps, all of the trace is
    one, number -1."""
    events = trace.events
    if trace.marks:
        steps, what = _marked(events, trace.marks), "the first marked step"
    elif any(event.run for event in events):
        steps, what = _executed(events), "the first execution of the program"
    else:
        steps, what = _repeated(events), "the first repetition"
    notes = []
    if not steps:
        notes.append(
            f"rank {trace.rank}: no step is marked and no sequence of kernels repeats; the whole "
            "trace is one interval"
        )
        return [Step(-1, events[0].start, max(event.end for event in events))], notes
    if before := sum(event.end <= steps[0].start for event in events):
        notes.append(f"rank {trace.rank}: {before:,} kernels and copies before {what} are left out")
    if after := sum(event.start >= steps[-1].end for event in events):
        notes.append(f"rank {trace.rank}: {after:,} kernels and copies after the last whole step "
                     "are left out")  # fmt: skip
    return steps, notes


def _between(starts: Sequence[int], numbers: Sequence[int], end: int) -> list[Step]:
    ends = [*starts[1:], end]
    return [Step(*step) for step in zip(numbers, starts, ends, strict=True) if step[2] > step[1]]


def _marked(events: Sequence[Event], marks: Sequence[Mark]) -> list[Step]:
    """Steps that the program marks on the host: a kernel is in the step that launched it."""
    edges = [mark.start for mark in marks[1:]] + [marks[-1].end]
    found, last = [], 0
    for mark, edge in zip(marks, edges, strict=True):
        own = [event for event in events if mark.start <= event.launched < edge]
        if own:
            found.append((min(event.start for event in own), mark.number))
            last = max(event.end for event in own)
    if not found:  # no launch is recorded: by time
        return [Step(*step) for step in ((m.number, m.start, m.end) for m in marks)
                if any(step[1] < e.end and e.start < step[2] for e in events)]  # fmt: skip
    starts, numbers = zip(*sorted(found), strict=True)
    return _between(starts, numbers, max(last, marks[-1].end))


def _executed(events: Sequence[Event]) -> list[Step]:
    """Executions of the program that takes most of the time."""
    busy: collections.Counter[str] = collections.Counter()
    for event in events:
        busy[event.run.partition(":")[0]] += event.end - event.start
    main = busy.most_common(1)[0][0]
    own = [event for event in events if event.run.partition(":")[0] == main]
    starts: dict[str, int] = {}
    for event in own:
        starts.setdefault(event.run, event.start)
    return _between([*starts.values()], range(len(starts)), max(event.end for event in own))


def _repeated(events: Sequence[Event]) -> list[Step]:
    """Repetitions of the sequence of kernels on the stream that computes most.

    A kernel that few others are as rare as runs once in a step, or in a part of it that does not
    repeat within the step. The first one between whose occurrences lie equal kernels divides it.
    """
    busy: collections.Counter[str] = collections.Counter()
    for event in events:
        busy[event.stream] += (event.end - event.start) * (event.kind != COMMUNICATION)
    stream = busy.most_common(1)[0][0]
    sequence = [event for event in events if event.stream == stream]
    names = [f"{event.op} {event.name}" for event in sequence]
    places: dict[str, list[int]] = collections.defaultdict(list)
    for i, name in enumerate(names):
        places[name].append(i)
    several = {len(at) for at in places.values() if len(at) > 1}
    for count in sorted(several)[:3]:
        for at in sorted((x for x in places.values() if len(x) == count), key=lambda x: x[0]):
            if all(names[i - at[0]] == names[0] for i in at):  # the trace begins with a step
                at = [i - at[0] for i in at]
            if ends := _divided(names, at):
                starts = [sequence[i].start for i in at[: len(ends)]]
                last = sequence[ends[-1] - 1] if ends[-1] == len(names) else None
                end = last.end if last else sequence[ends[-1]].start
                own = [e.end for e in events if starts[0] <= e.start < end] if last else [end]
                return _between(starts, range(len(starts)), max(own))
    return []


def _divided(names: Sequence[str], at: Sequence[int]) -> list[int]:
    """The end of each whole step, if the places `at` divide the names into equal steps; else []."""
    edges = [*at, len(names)]
    lengths = [end - start for start, end in itertools.pairwise(edges)]
    usual = statistics.median(lengths[:-1])
    if min(lengths[:-1]) * EVEN < usual or max(*lengths, at[0]) > EVEN * usual:
        return []
    parts = [
        collections.Counter(names[start:end]) for start, end in itertools.pairwise([0, *edges])
    ]
    for first, second in itertools.pairwise(parts):
        if (first & second).total() < ALIKE * min(first.total(), second.total()):
            return []
    return edges[1:] if lengths[-1] * EVEN >= usual else edges[1:-1]
