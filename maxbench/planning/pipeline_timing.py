"""Counts of runs of each branch of a pipeline's compiled program, from its schedule.

Every stage runs the same program. Its loops over ticks do real work in some ticks and bubble in
others; chunk switches, embedding and loss run in few ticks, and neighbours wait for chunk switches.
"""

import math
import re
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from maxbench.cost_model import hlo
from maxbench.pipeline.schedule import (
    BACKWARD_CHUNK_SWITCH,
    COOLDOWN,
    EMBED,
    EMBED_BACKWARD,
    END_OF_TICK,
    FORWARD_CHUNK_SWITCH,
    FREQUENT_KIND,
    LOSS,
    OTHER_KIND,
    SEND_DX,
    SEND_X,
    STEADY,
    WARMUP,
    WAYS,
    Schedule,
)

if TYPE_CHECKING:
    from maxbench.cost_model.simulate import Timeline

# Events of a tick, one letter each: 'X' sends dx and 'Y' sends y, 'x' and 'y' receive them, 'f' and
# 'b' are the chunk switches, 'l' is the loss.
EVENTS = types.MappingProxyType({
    FORWARD_CHUNK_SWITCH: "f",
    BACKWARD_CHUNK_SWITCH: "b",
    LOSS: "l",
    END_OF_TICK: "bl",
    SEND_X: "y",
    SEND_DX: "x",
})  # fmt: skip
TICK = re.compile(rf"{STEADY}/while/body/\w+/(\w+)/(?:while|ppermute)$")
ORDER = "YfyXblx"  # as the executor writes it
Seconds = Mapping[str, float]
NO_SLACK: Seconds = types.MappingProxyType({})
# Relative lengths: forward copies weights, backward weights, and gradients in both directions.
CHUNK_SWITCHES: Seconds = types.MappingProxyType(
    {FORWARD_CHUNK_SWITCH: 1.0, BACKWARD_CHUNK_SWITCH: 3.0}
)


def branch_frequencies(
    schedule: Schedule,
    program: hlo.Program | None = None,
    first_pass: "Timeline | None" = None,
    other_kinds: float = 0.0,
) -> dict[str, tuple[float, float]]:
    """meaning.Frequencies of a schedule.

    A neighbour waits for a chunk switch too, so its frequency is multiplied by
    chunk_switch_delay().

    Args:
      program: its steady state determines the order of events in a tick; default ORDER.
      first_pass: Timeline of the program, simulated with the frequencies without it. It gives the
        lengths of the chunk switches, and by how much y may be late.
      other_kinds: layer_order.other_kinds() of the run.
    """
    found, work = {}, {}
    for phase, ticks in schedule.phases.items():
        # A backward pass takes as long as two forward passes.
        ways = {WARMUP: ("fwd",), STEADY: ("fwd", "bwd", "bwd"), COOLDOWN: ("bwd",)}[phase]
        busy = [(schedule.column(f"{w}_microbatch")[ticks] >= 0).mean() for w in ways if ticks]
        share = float(np.mean(busy)) if busy else 1.0
        found[phase], work[phase] = (share, 1 - share), len(ticks) * share
    lengths, slack = CHUNK_SWITCHES, NO_SLACK
    if first_pass:
        lengths, slack = first_pass.branch_s, first_pass.slack_s
    orders = (program and event_orders(program, slack)) or {ORDER: 0.0}
    delay = max(chunk_switch_delay(schedule, o, lengths, late) for o, late in orders.items())
    ends = {
        "fwd": {EMBED: "embed_microbatch", LOSS: "loss_microbatch"},
        "bwd": {EMBED_BACKWARD: "embed_grad_microbatch"},
    }
    for way, idle_phase, switch in (
        ("fwd", COOLDOWN, FORWARD_CHUNK_SWITCH),
        ("bwd", WARMUP, BACKWARD_CHUNK_SWITCH),
    ):
        tick_count = sum(n for phase, n in work.items() if phase != idle_phase)
        switches = (schedule.column(f"{way}_chunk_switch") >= 0).sum() / schedule.pp / tick_count
        found[switch] = float(min(delay * switches, 1)), 0.0
        # The first row is before the first tick.
        count = lambda column: (schedule.column(column)[1:] >= 0).any(1).sum()
        found |= {n: (float(count(column) / tick_count), 0.0) for n, column in ends[way].items()}
    # Nested in END_OF_TICK, so relative to it.
    nested = EMBED, EMBED_BACKWARD, BACKWARD_CHUNK_SWITCH, LOSS
    outer = min(sum(found[name][0] for name in nested), 1.0)
    found |= {name: (found[name][0] / outer, 0.0) for name in nested}
    kinds = {FREQUENT_KIND: (1 - other_kinds, 0.0), OTHER_KIND: (other_kinds, 0.0)}
    return found | {END_OF_TICK: (outer, 0.0)} | kinds


def event_orders(program: hlo.Program, slack: Seconds = NO_SLACK) -> dict[str, float]:
    """The orders that the program's steady-state ticks have their EVENTS in, as strings like ORDER.

    Args:
      slack: Timeline.slack_s of the program.

    Returns:
      Order -> seconds by which y may arrive later without delaying a tick of this order; the least
      over these ticks.
    """
    found: dict[str, float] = {}
    for where in program.computations.values():
        events = [(letter, op) for op in where.ops for letter in _events(op)]
        # A loop body may hold several ticks: one ends before its first letter repeats.
        while "b" in (letters := "".join(letter for letter, _ in events)):
            prefixes = (letters[:i] for i in range(len(letters)) if letters[i] in letters[:i])
            tick = next(prefixes, letters)
            in_tick, events = events[: len(tick)], events[len(tick) :]
            late = [slack.get(op.operands[0], 0.0) for letter, op in in_tick if letter == "y"]
            found[tick] = min([*late, found.get(tick, math.inf)])
    return found


def _events(op: hlo.Op) -> str:
    """Letters of an op's events; '' for most ops."""
    if op.opcode not in ("while", "collective-permute-start", "collective-permute-done"):
        return ""
    name = TICK.search(op.op_name)
    events = EVENTS.get(name[1], "") if name else ""
    return events.upper() if op.opcode.endswith("-start") else events


def chunk_switch_delay(
    schedule: Schedule, order: str = ORDER, lengths: Seconds = CHUNK_SWITCHES, slack: float = 0.0
) -> float:
    """Time that chunk switches add to a step, in units of the switches of one stage.

    Simulates one clock per stage, with the EVENTS of a tick in `order`. The backward switch in a
    tick is the next tick's; all stages meet at a loss.

    Args:
      lengths: seconds of each switch.
      slack: by how much y may be late, in the unit of `lengths`.
    """
    forward, backward = (schedule.column(f"{way}_chunk_switch") >= 0 for way in WAYS)
    switches = {"f": lengths[FORWARD_CHUNK_SWITCH] * forward}
    switches["b"] = lengths[BACKWARD_CHUNK_SWITCH] * np.roll(backward, -1, 0)
    delay, has_loss = np.zeros(schedule.pp), schedule.column("loss_microbatch")[:, 0] >= 0
    sent = {1: delay, -1: delay}  # direction -> each sender's delay
    for tick, loss in enumerate(has_loss):
        for event in order:
            direction = -1 if event in "Xx" else 1
            if event in "XY":
                sent[direction] = delay
            elif event in "xy":
                arrival = np.roll(sent[direction], direction) - slack * (event == "y")
                delay = np.maximum(delay, arrival)
            elif event in switches:
                delay = delay + switches[event][tick]
            elif loss:
                delay = np.full(schedule.pp, delay.max())
    return float(delay.max() / np.sum([*switches.values()], 0).sum(0).mean())
