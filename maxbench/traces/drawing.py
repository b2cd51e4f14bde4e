"""The drawing of a measured step, and of the planned one below it."""

import statistics
from typing import TYPE_CHECKING

from maxbench.cost_model import hlo
from maxbench.cost_model.simulate import TraceEvent
from maxbench.planning import drawings
from maxbench.traces.accounts import Account
from maxbench.traces.events import COMMUNICATION, COPY, KERNEL

if TYPE_CHECKING:
    from maxbench.traces.report import TraceReport

STREAMS = {COMMUNICATION: "communication", COPY: "copies"}  # of the drawing; others compute
KINDS = {KERNEL: "others"}  # kind of an event -> key of drawings.COLORS, where it is another


def draw(found: "TraceReport") -> str:
    """An SVG document: the streams of the first rank in the step of median length, and below them
    those of the plan."""
    rank = found.ranks[0]
    middle = statistics.median_low([a.step.seconds for a in rank.accounts])
    account = next(a for a in rank.accounts if a.step.seconds == middle)
    title = f"measured, step {account.step.number} of rank {rank.trace.rank}"
    steps = {title: _events(account)}
    if found.plan:
        plan = found.plan.plan
        planned = plan.simulate(hlo.parse(plan.compiled.text), record=True)
        steps["planned"] = planned.events
    return drawings.streams(steps)


def _events(account: Account) -> list[TraceEvent]:
    """Events of a step in seconds from its start; those that overlap its ends are cut."""
    begin, end = account.step.start, account.step.end
    found = []
    for event, _ in account.own:
        first, last = max(event.start, begin), min(event.end, end)
        stream, kind = STREAMS.get(event.kind, "compute"), KINDS.get(event.kind, event.kind)
        start, seconds = (first - begin) / 1e9, (last - first) / 1e9
        found.append(TraceEvent(stream, event.name, kind, start, seconds))
    return found
