"""What a pipeline's schedule says of its compiled program: of its loops over ticks how much is for
something, and of what few ticks have, how often it is had and waited for."""

import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

from maxbench.cost_model import hlo
from maxbench.pipeline.schedule import (
    BACKWARD_CHUNK_SWITCH,
    COOLDOWN,
    EMBED,
    EMBED_BACKWARD,
    END_OF_TICK,
    FORWARD_CHUNK_SWITCH,
    LOSS,
    SEND_DX,
    SEND_X,
    STEADY,
    WARMUP,
    WAYS,
    Schedule,
)

# A tick sends dx and y, 'XY', waits for them, 'xy', has turns, and the loss.
EVENTS = {
    FORWARD_CHUNK_SWITCH: "f",
    BACKWARD_CHUNK_SWITCH: "b",
    LOSS: "l",
    END_OF_TICK: "bl",
    SEND_X: "y",
    SEND_DX: "x",
}
TICK = re.compile(rf"{STEADY}/while/body/\w+/(\w+)/(?:while|ppermute)$")
ORDER = "YfyXblx"  # as the executor writes it
Seconds = Mapping[str, float]  # Timeline.branches, by name, and Timeline.early
NOW: Seconds = {}  # nothing may be late
CHUNK_SWITCHES = {
    FORWARD_CHUNK_SWITCH: 1.0,
    BACKWARD_CHUNK_SWITCH: 3.0,
}  # their lengths: weights, and the sums both ways


def branch_frequencies(
    plan: Schedule, program: hlo.Program | None = None, first=None
) -> dict[str, tuple[float, float]]:
    """Of each phase, how much of a tick's work is for something, and how much for nothing; of each
    conditional, how often such work has it, and how often it waits for that of others. A turn is
    waited for by the stages beside, too: it is counted that much more often.

    `first` is the program's Timeline by shares without it: how long turns are there, and y early.
    """
    found, work = {}, {}
    for name, ticks in plan.phases.items():
        # A backward pass takes as long as two forward passes.
        ways = {WARMUP: ("fwd",), STEADY: ("fwd", "bwd", "bwd"), COOLDOWN: ("bwd",)}[name]
        busy = [(plan.column(f"{way}_microbatch")[ticks] >= 0).mean() for way in ways if ticks]
        done = float(np.mean(busy)) if busy else 1.0
        found[name], work[name] = (done, 1 - done), len(ticks) * done
    lengths, early = (first.branches, first.slack_s) if first else (CHUNK_SWITCHES, NOW)
    ways = (program and event_orders(program, early)) or {ORDER: 0.0}
    delay = max(chunk_switch_delay(plan, order, lengths, late) for order, late in ways.items())
    ends = {
        "fwd": {EMBED: "embed_microbatch", LOSS: "loss_microbatch"},
        "bwd": {EMBED_BACKWARD: "embed_grad_microbatch"},
    }
    for way, idle, turn in (
        ("fwd", COOLDOWN, FORWARD_CHUNK_SWITCH),
        ("bwd", WARMUP, BACKWARD_CHUNK_SWITCH),
    ):
        among = sum(n for name, n in work.items() if name != idle)
        often = (plan.column(f"{way}_chunk_switch") >= 0).sum() / plan.pp / among
        found[turn] = float(min(delay * often, 1)), 0.0
        had = lambda column: (plan.column(column)[1:] >= 0).any(1).sum()  # the first is no tick's
        found |= {n: (float(had(column) / among), 0.0) for n, column in ends[way].items()}
    inside = EMBED, EMBED_BACKWARD, BACKWARD_CHUNK_SWITCH, LOSS
    some = min(sum(found[name][0] for name in inside), 1.0)
    return (
        found | {name: (found[name][0] / some, 0.0) for name in inside} | {END_OF_TICK: (some, 0.0)}
    )


def event_orders(program: hlo.Program, early: Seconds = NOW) -> dict[str, float]:
    """In which orders ticks of both passes have their EVENTS, and how late y may come there."""
    found = {}
    for where in program.computations.values():
        events = [(event, op) for op in where.ops for event in _events(where, op)]
        while "b" in (seen := "".join(event for event, _ in events)):
            tick = next((seen[:i] for i in range(len(seen)) if seen[i] in seen[:i]), seen)
            these, events = events[: len(tick)], events[len(tick) :]
            late = [early.get(op.operands[0], 0.0) for event, op in these if event == "y"]
            found[tick] = min([*late, found.get(tick, math.inf)])
    return found


def _events(where: hlo.Computation, op: hlo.Op) -> str:
    if op.opcode not in ("while", "collective-permute-start", "collective-permute-done"):
        return ""
    name = TICK.search(op.op_name)
    events = EVENTS.get(name[1], "") if name else ""
    return events.upper() if op.opcode.endswith("-start") else events


def chunk_switch_delay(
    plan: Schedule, order=ORDER, lengths: Seconds = CHUNK_SWITCHES, slack: float = 0.0
) -> float:
    """How much longer a step takes for turns, in units of the turns that one stage has.

    Clocks of all stages, each with its EVENTS in this order. A backward turn is the next tick's; y
    may come late by `slack`, in the unit of `lengths`. For a loss all meet.
    """
    forward, backward = (plan.column(f"{way}_chunk_switch") >= 0 for way in WAYS)
    turns = {"f": lengths[FORWARD_CHUNK_SWITCH] * forward}
    turns["b"] = lengths[BACKWARD_CHUNK_SWITCH] * np.roll(backward, -1, 0)
    late, meets = np.zeros(plan.pp), plan.column("loss_microbatch")[:, 0] >= 0
    sent = {1: late, -1: late}
    for tick, meet in enumerate(meets):
        for event in order:
            way = -1 if event in "Xx" else 1
            if event in "XY":
                sent[way] = late
            elif event in "xy":
                late = np.maximum(late, np.roll(sent[way], way) - slack * (event == "y"))
            elif event in turns:
                late = late + turns[event][tick]
            elif meet:
                late = np.full(plan.pp, late.max())
    return float(late.max() / sum(turns.values()).sum(0).mean())


def tick_mix(often: dict[str, float]) -> list[tuple[float, set[str]]]:
    """Kinds of ticks: the share of all that each is, and what it has; last the one that has least.
    Each thing is had by the ticks after those of the one before, and at the end the first again."""
    ends = list(itertools.accumulate(often.values(), initial=0.0))
    spans = dict(zip(often, itertools.pairwise(ends), strict=True))
    found = []
    for begin, end in itertools.pairwise(sorted({0.0, 1.0} | {end % 1 for end in ends})):
        laps = [begin + lap for lap in range(math.ceil(ends[-1]))]
        had = {which for which, (a, b) in spans.items() if any(a <= at < b for at in laps)}
        found.append((end - begin, had))
    return sorted(found, key=lambda kind: -len(kind[1]))
