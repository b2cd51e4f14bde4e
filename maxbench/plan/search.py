"""Which layout and remat policy is fastest: all legal ones by arithmetic, the best by compiling."""

import contextlib
import dataclasses
import itertools
import math
import operator
import sys
from collections.abc import Iterator

from maxbench.plan import memory
from maxbench.plan.costs import Costs
from maxbench.plan.planner import Plan, plan
from maxbench.spec import flops
from maxbench.spec.errors import UserError
from maxbench.spec.run import AXES, Run

MOST_TP = 16  # GPUs that split one matrix product, at most
MOST_PP = 16
first = operator.itemgetter(0)
WIDTH = 2  # bytes of a number in the forward and backward pass
LOGITS = 3 << 30  # bytes of a chunk's logits, their gradient and what the loss makes of them
MOVED = 6  # bytes per weight of the ends and microbatch: its gradient onto a sum, all in bf16


def powers(most: int) -> list[int]:
    """1, 2, 4, ... up to most."""
    return [1 << i for i in range(most.bit_length())]


def pipelines(layers: int, most: int) -> list[tuple[int, int]]:
    """Legal (pp, vp): both divide the layers, or the layers and two slots for the ends."""
    found = [(1, 1)]
    for pp in powers(most)[1:]:
        chunks = {n // pp for n in (layers, layers + 2) if n % pp == 0}
        found += [
            (pp, vp)
            for vp in range(1, max(chunks, default=0) + 1)
            if any(c % vp == 0 for c in chunks)
        ]
    return found


def layouts(run: Run) -> Iterator[Run]:
    """Every legal run of the same work on as many GPUs: same batch, sequence and model."""
    gpus, m = run.layout.gpus, run.model
    inside = powers(min(gpus, MOST_TP))
    stages = pipelines(m.layers, min(gpus, MOST_PP))
    for (pp, vp), tp, cp, ep, fsdp, mbs in itertools.product(
        stages, inside, powers(8), powers(m.experts or 1), powers(gpus), powers(4)
    ):
        dp, left = divmod(gpus, pp * tp * cp * ep * fsdp)
        if left:
            continue
        axes = dict(pp=pp, vp=vp, dp=dp, fsdp=fsdp, ep=ep, cp=cp, tp=tp, mbs=mbs)
        with contextlib.suppress(UserError):  # it says why; here it only means: not legal
            yield dataclasses.replace(run, layout=dataclasses.replace(run.layout, **axes))


def seconds(run: Run) -> float:
    """Arithmetic: about how long a step takes. For ranking only; the compiled program decides."""
    a, m, seq = run.layout, run.model, run.train.seq
    costs = Costs(a.gpu_type, {axis: getattr(a, axis) for axis in AXES})
    link = lambda kind, size, *axes: costs.collective(kind, costs.axis_link(*axes), size, size)
    rows, numbers = a.mbs * seq // a.cp, a.mbs * seq // a.cp * m.embed
    rate, (wide, narrow) = costs.rate(run.format.peak), run.format.conversions
    head = 6 * m.vocab * m.embed * seq  # one stage's work, and the others wait
    share = a.mbs / (a.cp * a.tp)  # of the work on a sequence, this GPU's per microbatch
    layers = (flops.per_sequence(m, seq, "causal") - head) * share / a.pp / rate
    layers *= 1 + memory.recomputed(run) / 3
    # Kernels between the products: numbers per layer, as counted in compiled programs.
    routed = rows * (m.top_k if m.experts else 1) * m.gates * m.mlp / a.tp
    moved = (14 / a.tp + wide + 6 * (a.cp > 1)) * numbers + (7 + narrow) * routed
    wait = costs.memory(WIDTH * moved) + 6 * link("all-gather", WIDTH * numbers, "tp")
    if m.experts:  # there and back, twice
        wait += 4 * link("all-to-all", WIDTH * numbers * m.top_k // a.tp, "ep")
    work = layers + wait * m.layers / a.pp
    weights, ends = memory.stage_weights(run)
    if a.fsdp > 1:  # gathered forward and backward, reduced once, beside the products
        gathers = 3 * link("all-gather", int(WIDTH * weights), "fsdp")
        crowded = a.tp * a.cp * a.ep > 1  # others wait for the same stream: about half is exposed
        work = work + gathers / 2 if crowded else max(work, gathers)
    if a.pp > 1:
        work += 2 * a.vp * link("permute", WIDTH * numbers // a.tp, "pp")
    loss = head * share / costs.rate("bf16")
    loss += costs.memory(MOVED * ends)
    step = (work + loss) * a.microbatches + work * (a.pp - 1) / a.vp
    # Gradients reduced and weights gathered, once.
    return step + 2 * link("all-gather", int(WIDTH * (weights + ends) / a.fsdp), "dp", "cp")


def held(run: Run) -> float:
    """Arithmetic: about how many bytes a GPU holds."""
    a, m = run.layout, run.model
    weights, ends = memory.stage_weights(run)
    slots = 1 if m.layers % (a.pp * a.vp) == 0 else (m.layers + 2) / m.layers
    local = WIDTH * (weights * slots + ends) / a.fsdp
    # To compute with; gradients; experts' gradients once more, turned round.
    copies = 3 if m.experts and a.pp == 1 else 2
    layer = weights * a.pp / m.layers
    gathered = 4 * WIDTH * layer if a.fsdp > 1 else 0
    rows = a.mbs * run.train.seq // a.cp
    widest = m.gates * max(kind.mlp * kind.rows(a.ep) for _, kind in m.stacks)
    scratch = 4 * WIDTH * rows * widest / a.tp + 4 * WIDTH * rows * m.embed
    kept = memory.activation_bytes(run)
    return 12 * flops.params(m) / a.gpus + copies * local + gathered + LOGITS / 2 + scratch + kept


def candidates(run: Run, keep: int) -> list[Run]:
    """The `keep` layouts that promise most, after the given run.

    Of those that differ in vp, mbs, policy, or the degrees of fsdp and cp alone, the best.
    """
    room = memory.capacity(run.layout.gpu_type)
    best: dict[tuple, tuple[float, Run]] = {}
    for other in layouts(run):
        a = other.layout
        kind = (a.pp, a.tp, a.ep, a.cp > 1, a.fsdp > 1)
        for one in memory.policies(other):
            if held(one) < room:
                best[kind] = min(best.get(kind, (math.inf, one)), (seconds(one), one), key=first)
    ranked = [one for _, one in sorted(best.values(), key=first)]
    return [run, *[one for one in ranked if one != run][:keep]]


def search(run: Run, keep: int) -> list[Plan]:
    """Plans of the candidates, compiled one after the other; stderr is told how far it is.

    One that turns out not to fit is followed by what does by its own measure: the policy that keeps
    most of those that keep less by what was missing.
    """
    chosen, plans = candidates(run, keep), []
    say = lambda text: print(text, file=sys.stderr, flush=True)
    for i, one in enumerate(chosen):
        say(f"{i + 1}/{len(chosen)}  {one.layout.describe()}; {one.train.remat}")
        plans.append(plan(one))
        room = memory.activation_bytes(one) + plans[-1].memory.spare
        if one != run and not plans[-1].fits and (less := memory.policies(one, room)):
            say(f"     does not fit; {less[0].train.remat}")
            plans.append(plan(less[0]))
    return plans
