"""Where the time of a step goes on one rank, by interval arithmetic in whole nanoseconds."""

import bisect
import collections
import dataclasses
import heapq
from collections.abc import Mapping, Sequence

from maxbench.traces.events import (
    COMMUNICATION,
    KINDS,
    Event,
    Innermost,
    RankTrace,
    innermost,
)
from maxbench.traces.steps import Step

# Parts of a step besides KINDS: the device is idle, because the host launches what follows too
# late, or for another reason.
LATE, IDLE = "late", "idle"
PARTS = (*KINDS, LATE, IDLE)
LEAST_GAP = 20_000  # ns: shorter gaps are those between any two kernels
PRIORITY = {kind: place for place, kind in enumerate(KINDS)}


@dataclasses.dataclass(frozen=True)
class Gap:
    """Time in which a device runs nothing.

    Attributes:
      after, before: names of the kernels around it; '' at the ends of a trace.
      late_ns: of it, until the host launched what follows.
      host: what the host did for most of it, or ''.
    """

    start: int
    end: int
    after: str
    before: str
    late_ns: int
    host: str = ""

    @property
    def ns(self) -> int:
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class Account:
    """The time of a step on one rank, in ns.

    Attributes:
      parts: by PARTS; they sum to the step.
      own: of each event in the step, the time that counts for it.
      hidden: of communication while the device computes or copies.
      streams: busy time by stream.
      host: 'works', 'waits' and 'idle' of the threads that launch; empty without their calls.
      gaps: the longest first.
    """

    step: Step
    parts: Mapping[str, int]
    own: Sequence[tuple[Event, int]]
    hidden: int
    streams: Mapping[str, int]
    host: Mapping[str, int]
    gaps: Sequence[Gap]


class Accounts:
    """Accounts of the steps of a trace."""

    def __init__(self, trace: RankTrace):
        self.trace = trace
        self.starts = [event.start for event in trace.events]
        self.longest = max((event.end - event.start for event in trace.events), default=0)
        threads: dict[str, list[Event]] = collections.defaultdict(list)
        for call in trace.host:
            threads[call.stream].append(call)
        self.calls = {thread: [*innermost(calls)] for thread, calls in threads.items()}

    def of(self, step: Step) -> Account:
        """The account of a step."""
        first = bisect.bisect_left(self.starts, step.start - self.longest)
        last = bisect.bisect_left(self.starts, step.end)
        events = [event for event in self.trace.events[first:last] if event.end > step.start]
        own, idle = exclusive(events, step.start, step.end)
        parts = dict.fromkeys(PARTS, 0)
        streams: collections.Counter[str] = collections.Counter()
        for event, ns in own:
            parts[event.kind] += ns
        for stream in {event.stream for event in events}:
            streams[stream] = union([e for e in events if e.stream == stream], step.start, step.end)
        last_of = {event.end: event for event in sorted(events)}
        gaps = [self._gap(start, end, last_of.get(start)) for start, end in idle]
        parts[LATE] = sum(gap.late_ns for gap in gaps)
        parts[IDLE] = sum(gap.ns for gap in gaps) - parts[LATE]
        collectives = [event for event in events if event.kind == COMMUNICATION]
        hidden = union(collectives, step.start, step.end) - parts[COMMUNICATION]
        long = sorted((gap for gap in gaps if gap.ns >= LEAST_GAP), key=lambda gap: -gap.ns)
        explained = [dataclasses.replace(gap, host=self._host_in(gap)) for gap in long]
        return Account(step, parts, own, hidden, streams, self._host(step), explained)

    def _gap(self, start: int, end: int, after: Event | None) -> Gap:
        """The gap of a step between an event that ends and the next one that starts."""
        place = bisect.bisect_left(self.starts, end)
        before = self.trace.events[place] if place < len(self.starts) else None
        before = before if before and before.start == end else None
        launched = before.launched if before else 0
        late = max(0, min(launched, end) - start) if launched else 0
        return Gap(start, end, after.name if after else "", before.name if before else "", late)

    def _host_in(self, gap: Gap) -> str:
        """The innermost call that takes most of a gap, of all threads that launch."""
        seconds: collections.Counter[str] = collections.Counter()
        for calls in self.calls.values():
            for call in _within(calls, gap.start, gap.end):
                seconds[call.name] += min(call.end, gap.end) - max(call.start, gap.start)
        return max(seconds, key=lambda name: seconds[name], default="")

    def _host(self, step: Step) -> dict[str, int]:
        if not self.calls:
            return {}
        works: list[Innermost] = []
        waits: list[Innermost] = []
        for calls in self.calls.values():
            for call in _within(calls, step.start, step.end):
                (waits if call.waits else works).append(call)
        total, works_ns = step.end - step.start, union(works, step.start, step.end)
        either = union([*works, *waits], step.start, step.end)
        return {"works": works_ns, "waits": either - works_ns, "idle": total - either}


def _within(calls: Sequence[Innermost], start: int, end: int) -> Sequence[Innermost]:
    """Calls of one thread, which do not overlap, that overlap an interval."""
    first = bisect.bisect_right(calls, start, key=lambda call: call.end)
    return calls[first : bisect.bisect_left(calls, end, key=lambda call: call.start)]


def union(events: Sequence[Event | Innermost], start: int, end: int) -> int:
    """Nanoseconds of an interval in which at least one of the events runs."""
    total, now = 0, start
    for event in sorted(events, key=lambda event: event.start):
        until = min(event.end, end)
        total += max(0, until - max(now, event.start))
        now = max(now, until)
    return total


def exclusive(
    events: Sequence[Event], start: int, end: int
) -> tuple[list[tuple[Event, int]], list[tuple[int, int]]]:
    """Time that counts for each event of an interval, and the intervals in which none runs.

    An instant counts for one event of those that run: the first kind of KINDS, the earliest start.

    Args:
      events: by start.
    """
    own, idle = [0] * len(events), []
    running: list[tuple[int, int, int]] = []  # priority, start, place
    place, now = 0, start
    while now < end:
        while place < len(events) and events[place].start <= now:
            event = events[place]
            heapq.heappush(running, (PRIORITY[event.kind], event.start, place))
            place += 1
        while running and events[running[0][2]].end <= now:
            heapq.heappop(running)
        until = min(end, events[place].start if place < len(events) else end)
        if running:
            first = running[0][2]
            until = min(until, events[first].end)
            own[first] += until - now
        else:
            idle.append((now, until))
        now = until
    return [*zip(events, own, strict=True)], idle
