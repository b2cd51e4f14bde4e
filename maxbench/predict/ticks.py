"""What a pipeline's schedule says of its compiled program: of its loops over ticks how much is for
something, and of what few ticks have, how often it is had and waited for."""

import itertools
import math
import re

import numpy as np

from maxbench.predict import hlo
from maxbench.predict.costs import is_gemm
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

# A tick sends dx and y, 'XY', waits for them, 'xy' or 'z' for y beside a product, has turns, loss.
EVENTS = {FORWARD_TURN: "f", BACKWARD_TURN: "b", LOSS: "l"}
TICK = re.compile(rf"{BOTH}/while/body/\w+/(?:(\w+)/while|ppermute)$")
ORDER = "YfzXbxl"  # as the executor writes it
SLACK = 0.5  # turns that 'z' may come late: 405B's products leave 0.6 ms, a turn has 0.3 to 1.1


def shares(plan: Schedule, program: hlo.Program | None = None) -> dict[str, tuple[float, float]]:
    """Of each phase, how much of a tick's work is for something, and how much for nothing; of each
    conditional, how often such work has it, and how often it waits for that of others. A turn is
    waited for by the stages beside, too: it is counted that much more often.
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
        seen = "".join(_event(where, i) for i in range(len(where.ops)))
        while "b" in seen:
            tick = next((seen[:i] for i in range(len(seen)) if seen[i] in seen[:i]), seen)
            found.add(tick)
            seen = seen.removeprefix(tick)
    return found


def _event(where: hlo.Computation, i: int) -> str:
    op = where.ops[i]
    name = TICK.search(op.op_name)
    if name and op.opcode == "while":
        return EVENTS.get(name[1], "")
    start = where.operands(op)[0] if op.is_done else op
    if not name or start.opcode != "collective-permute-start":
        return ""
    source, to = start.pairs[1]  # not those of the first stage: its dx goes to the last
    beside = any(map(is_gemm, where.ops[where.ops.index(start) : i]))
    event = "x" if to < source else "z" if beside else "y"
    return event if op.is_done else event.upper()


def turn_delay(plan: Schedule, order: str = ORDER) -> float:
    """How much longer a step takes for turns, in units of the turns that one stage has.

    Clocks of all stages, each with its EVENTS in this order. A backward turn is the next tick's and
    counts three, weights and the sums both ways; a forward one weights. For a loss all meet.
    """
    forward, backward = plan.column("f_load") >= 0, 3 * (plan.column("b_load") >= 0)
    late, meets = np.zeros(plan.pp), plan.column("loss")[:, 0] >= 0
    sent = {1: late, -1: late}
    for on, back, meet in zip(forward, np.roll(backward, -1, 0), meets, strict=True):
        for event in order:
            way = -1 if event in "Xx" else 1
            if event in "XY":
                sent[way] = late
            elif event in "xyz":
                late = np.maximum(late, np.roll(sent[way], way) - SLACK * (event == "z"))
            elif event in "bf":
                late = late + (back if event == "b" else on)
            elif meet:
                late = np.full(plan.pp, late.max())
    return float(late.max() / (forward + backward).sum(0).mean())


def kinds(often: dict[str, float]) -> list[tuple[float, set[str]]]:
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
