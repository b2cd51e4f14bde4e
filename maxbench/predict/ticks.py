"""What a pipeline's schedule says of its compiled program: of its loops over ticks how much is for
something, and of what few ticks have, how often it is had and waited for."""

import itertools
import math
import re

import numpy as np

from maxbench.predict import hlo
from maxbench.step.schedule import (
    BACKWARD_TURN,
    BOTH,
    DRAIN,
    EMBED,
    EMBED_BACKWARD,
    FILL,
    FORWARD_TURN,
    LOSS,
    Schedule,
)

# A tick's events: sends 'X' dx and 'Y' y, waits for 'x' and 'y', has its turns, and the loss.
EVENTS = {FORWARD_TURN: "f", BACKWARD_TURN: "b", LOSS: "l"}
TICK = re.compile(rf"{BOTH}/while/body/\w+/(?:(\w+)/while|ppermute)$")
ORDER = "XYbfxyl"  # as the executor writes it


def shares(plan: Schedule, program: hlo.Program | None = None) -> dict[str, tuple[float, float]]:
    """Of each phase, how much of a tick's work is for something, and how much for nothing; of each
    conditional, how often such work has it, and how often it waits for that of others.

    A turn is waited for by the stages beside, too: it is counted that much more often.
    """
    found = {}
    for name, ticks in plan.phases.items():
        ways = {FILL: "f", BOTH: "fbb", DRAIN: "b"}[name]  # backward is as long as two forward
        work = [(plan.column(f"{way}_micro")[ticks] >= 0).mean() for way in ways if ticks]
        done = float(np.mean(work)) if work else 1.0
        found[name] = done, 1 - done
    work = {name: len(ticks) * found[name][0] for name, ticks in plan.phases.items()}
    delay = max(turn_delay(plan, order) for order in (program and orders(program)) or [ORDER])
    ends = {"f": {EMBED: 1, LOSS: plan.together}, "b": {EMBED_BACKWARD: 1}}
    for way, idle, turn in (("f", DRAIN, FORWARD_TURN), ("b", FILL, BACKWARD_TURN)):
        among = sum(n for name, n in work.items() if name != idle)
        often = (plan.column(f"{way}_load") >= 0).sum() / plan.pp / among
        found[turn] = float(min(delay * often, 1)), 0.0
        found |= {n: (plan.microbatches / of / among, 0.0) for n, of in ends[way].items()}
    return found


def orders(program: hlo.Program) -> set[str]:
    """In which orders ticks of both passes have their EVENTS in a program."""
    found = set()
    for where in program.computations.values():
        seen = "".join(_event(where, op) for op in where.ops)
        while "b" in seen:
            tick = next((seen[:i] for i in range(len(seen)) if seen[i] in seen[:i]), seen)
            found.add(tick)
            seen = seen.removeprefix(tick)
    return found


def _event(where: hlo.Computation, op: hlo.Op) -> str:
    if not (name := TICK.search(op.op_name)):
        return ""
    if name[1]:
        return EVENTS.get(name[1], "") if op.opcode == "while" else ""
    start = where.operands(op)[0] if op.is_done else op
    if start.opcode != "collective-permute-start":
        return ""
    source, to = start.pairs[1]  # not those of the first stage: its dx goes to the last
    return ("y" if to > source else "x") if op.is_done else ("Y" if to > source else "X")


def turn_delay(plan: Schedule, order: str = ORDER) -> float:
    """How much longer a step takes for turns, in units of the turns that one stage has.

    Clocks of all stages, played over the schedule: each sends, waits, and has its turns and the
    loss in the given order of EVENTS. What is between a turn and the next is as long on all stages.
    A turn is that of the next tick, where the loss is still that of the last. Two stages send both
    ways in one permute. For a loss, of which each stage has a part, all wait for all. A backward
    turn counts three: weights, and the sums both ways; a forward one weights alone.
    """
    forward, backward = plan.column("f_load") >= 0, 3 * (plan.column("b_load") >= 0)
    late, sent = np.zeros(plan.pp), {}
    met = np.concatenate([[False], plan.column("loss")[:-1, 0] >= 0])
    for on, back, all_meet in zip(forward, backward, met, strict=True):
        for event in order:
            if event in "XY":
                sent[event.lower()] = late
            elif event in "xy":
                late = np.maximum(late, np.roll(sent[event], 1 if event == "y" else -1))
            elif event in "bf":
                late = late + (back if event == "b" else on)
            elif all_meet:
                late = np.full(plan.pp, late.max())
    return float(late.max() / (forward + backward).sum(0).mean())


def kinds(often: dict[str, float]) -> list[tuple[float, set[str]]]:
    """Kinds of ticks: the share of all that each is, and what it has; last the one that has least.
    Each thing is had by the ticks after those of the one before; where that is more than all, by
    the first ones again."""
    ends = list(itertools.accumulate(often.values(), initial=0.0))
    spans = dict(zip(often, itertools.pairwise(ends), strict=True))
    found = []
    for begin, end in itertools.pairwise(sorted({0.0, 1.0} | {end % 1 for end in ends})):
        laps = [begin + lap for lap in range(math.ceil(ends[-1]))]
        had = {which for which, (a, b) in spans.items() if any(a <= at < b for at in laps)}
        found.append((end - begin, had))
    return sorted(found, key=lambda kind: -len(kind[1]))
