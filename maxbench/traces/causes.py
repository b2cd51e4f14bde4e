"""Why a measured step takes as long as it does, in sentences."""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from maxbench.traces import accounts
from maxbench.traces.events import COMMUNICATION, COPY, short

if TYPE_CHECKING:
    from maxbench.traces.report import TraceReport

NAME = 48  # columns of a kernel's name
LARGE = 0.05  # least share of a step that is worth a sentence


def causes(found: "TraceReport") -> list[str]:
    """Time of a mean step in which a mean rank computes nothing, and ranks that others wait for, as
    sentences, the longest time first. Causes below LARGE are left out."""
    sentences = [*_lost(found), *_waited_for(found), *_clock(found)]
    large = (x for x in sentences if x[0] >= LARGE * found.step_s)
    return [text for _, text in sorted(large, key=lambda x: -x[0])]


def with_plan(found: "TraceReport") -> list[str]:
    """causes(), and before them the operation that explains most of a step longer than planned."""
    plan = found.plan
    longer = plan is not None and plan.measured_s > (1 + LARGE) * plan.predicted_s
    return ([plan.head()] if longer else []) + causes(found)


def _lost(found: "TraceReport") -> Sequence[tuple[float, str]]:
    mean = lambda part: statistics.mean(rank.mean_s(part) for rank in found.ranks)
    share = lambda seconds: f"{seconds / found.step_s:.0%} of the step"
    exposed, copies, late, idle = map(mean, (COMMUNICATION, COPY, accounts.LATE, accounts.IDLE))
    longest = next((k for k in found.kernels if k.kind == COMMUNICATION), None)
    rate = f", {longest.gbytes_per_s:.0f} GB/s" if longest and longest.gbytes_per_s else ""
    of = (
        f", {longest.seconds / exposed:.0%} of it {short(longest.name, NAME)}{rate}"
        if longest
        else ""
    )
    return [
        (exposed, f"communication is exposed for {share(exposed)}{of}"),
        (copies, f"copies take {share(copies)}"),
        (late, f"the device waits for the host to launch for {share(late)}"),
        (idle, f"the device is idle for {share(idle)}, for other reasons than late launches"),
    ]


def _clock(found: "TraceReport") -> Sequence[tuple[float, str]]:
    clocks = {rank.trace.rank: mhz for rank in found.ranks if (mhz := rank.clock_mhz)}
    if not (clocks and found.gpu):
        return []
    lowest, most = min(clocks, key=clocks.__getitem__), 1e3 * found.gpu.chip.clock_ghz
    text = f"the clock of rank {lowest} is {clocks[lowest]:,.0f} MHz in the steps, of {most:,.0f}"
    return [((1 - clocks[lowest] / most) * found.step_s, f"{text}: power, heat or a set limit")]


def _waited_for(found: "TraceReport") -> Sequence[tuple[float, str]]:
    if not found.collectives:
        return []
    seconds_of = lambda rank: rank.waits.waited_for / len(rank.accounts) / 1e9
    slowest = max(found.ranks, key=seconds_of)
    seconds, number = seconds_of(slowest), slowest.trace.rank
    last = f"last at {slowest.waits.last} of {found.collectives} collectives"
    return [(seconds, f"others wait for rank {number}: {found.text_s(seconds)} s a step, {last}")]
