"""Which layout and remat policy is fastest: all legal ones by arithmetic, the best by compiling."""

import contextlib
import dataclasses
import functools
import itertools
import math
import operator
import sys
from collections.abc import Iterator, Sequence

from maxbench.config import lowering
from maxbench.config.errors import UserError
from maxbench.config.run import AXES, Run
from maxbench.cost_model import memory
from maxbench.cost_model.memory import GIB
from maxbench.metrics import flops
from maxbench.planning import planner
from maxbench.planning.planner import Plan, plan

MOST_TP, MOST_PP, MOST_CP = 16, 16, 8  # GPUs that split one thing, at most
first = operator.itemgetter(0)
WIDTH = 2  # bytes of a number in the forward and backward pass
LOGITS = 3 << 30  # bytes of a chunk's logits, their gradient and what the loss makes of them
MOVED = 6  # bytes per weight of the ends and microbatch: its gradient onto a sum, all in bf16


def powers(most: int) -> list[int]:
    """1, 2, 4, ... up to most."""
    return [1 << i for i in range(most.bit_length())]


def degrees(gpus: int, most: int) -> list[int]:
    """In how many parts an axis may cut so many GPUs, at most `most`."""
    return [n for n in range(1, min(gpus, most) + 1) if gpus % n == 0]


def pipelines(layers: int, stages: Sequence[int]) -> list[tuple[int, int]]:
    """Legal (pp, vp): both divide the layers, or the layers and two slots for the ends."""
    found = [(1, 1)]
    for pp in stages[1:]:
        chunks = {n // pp for n in (layers, layers + 2) if n % pp == 0}
        found += [
            (pp, vp)
            for vp in range(1, max(chunks, default=0) + 1)
            if any(c % vp == 0 for c in chunks)
        ]
    return found


def layouts(run: Run, gpus: int, gbs: int) -> Iterator[Run]:
    """Every legal run of the same model and sequence on so many GPUs, with that batch."""
    m, few = run.model, functools.partial(degrees, gpus)
    stages = pipelines(m.layers, few(MOST_PP))
    # What Run would refuse is mostly these two, and to ask it takes a tenth of a millisecond.
    tps = [n for n in few(MOST_TP) if all(k.heads % n == k.mlp % n == 0 for _, k in m.stacks)]
    fsdps = [n for n in few(gpus) if m.embed % n == 0]
    for (pp, vp), tp, cp, ep, fsdp, mbs in itertools.product(
        stages, tps, few(MOST_CP), few(m.experts or 1), fsdps, powers(4)
    ):
        dp, left = divmod(gpus, pp * tp * cp * ep * fsdp)
        if left or gbs % (mbs * dp * fsdp * ep) or gbs < pp * mbs * dp * fsdp * ep:
            continue
        axes = dict(pp=pp, vp=vp, dp=dp, fsdp=fsdp, ep=ep, cp=cp, tp=tp, mbs=mbs, gbs=gbs)
        with contextlib.suppress(UserError):  # it says why; here it only means: not legal
            yield dataclasses.replace(run, layout=dataclasses.replace(run.layout, **axes))


def estimate_step_s(run: Run) -> float:
    """Arithmetic: about how long a step takes. For ranking only; the compiled program decides."""
    a, m, seq = run.layout, run.model, run.train.seq
    costs = planner.costs_of(run)
    link = lambda kind, size, *axes: costs.collective(kind, costs.axis_link(*axes), size, size)
    rows, numbers = a.mbs * seq // a.cp, a.mbs * seq // a.cp * m.embed
    rate, (wide, narrow) = costs.rate(run.format.peak), run.format.conversions
    head = 6 * m.vocab * m.embed * seq
    share = a.mbs / (a.cp * a.tp)  # of the work on a sequence, this GPU's per microbatch
    layers = (flops.per_sequence(m, seq, "causal") - head) * share / a.pp / rate
    layers *= 1 + memory.recomputed(run) / 3
    # Kernels between the products: numbers per layer, as counted in compiled programs.
    routed = rows * (m.top_k if m.experts else 1) * m.mlp_inputs * m.mlp / a.tp
    moved = (14 / a.tp + wide + 6 * (a.cp > 1)) * numbers + (7 + narrow) * routed
    # In a pipeline a tick's backward pass hides most of what the forward pass waits for.
    hops = 2 if a.pp > 1 else 6
    wait = costs.memory(WIDTH * moved) + hops * link("all-gather", WIDTH * numbers, "tp")
    if m.experts:  # there and back, twice
        wait += 4 * link("all-to-all", WIDTH * numbers * m.top_k // a.tp, "ep")
    work = layers + wait * m.layers / a.pp
    weights, ends = memory.stage_weights(run)
    if a.fsdp > 1:  # gathered forward and backward, reduced once, beside the products
        gathers = 3 * link("all-gather", int(WIDTH * weights), "fsdp")
        crowded = a.tp * a.cp * a.ep > 1  # others wait for the same stream: about half is exposed
        work = work + gathers / 2 if crowded else max(work, gathers)
    if run.train.offload:  # there and back; a layer waits for its own, about half is exposed
        here = memory.with_remat(run, run.train.remat)
        work += costs.offload(memory.activation_bytes(here) - memory.activation_bytes(run))
    if a.pp > 1:  # each chunk's turn: weights twice and sums, and a neighbour's
        work += 2 * costs.memory(8 * WIDTH * weights) / max(run.train.microbatch_group_size, a.pp)
    loss = head * share / a.pp / costs.rate("bf16") + costs.memory(MOVED * ends)
    step = (work + loss) * a.microbatches + work * (a.pp - 1) / a.vp
    # Gradients reduced and weights gathered, once.
    return step + 2 * link("all-gather", int(WIDTH * (weights + ends) / a.fsdp), "dp", "cp")


def estimate_bytes(run: Run) -> float:
    """Arithmetic: about how many bytes a GPU holds, beside what the remat policy keeps."""
    a, m = run.layout, run.model
    weights, ends = memory.stage_weights(run)
    slots = 0 if m.layers % (a.pp * a.vp) == 0 else 2 / m.layers  # empty ones
    # Experts' gradients once more, turned round.
    more = 2 * slots * weights + (m.experts > 0 and a.pp == 1) * (weights + ends)
    gathered = 4 * WIDTH * weights * a.pp / m.layers if a.fsdp > 1 else 0
    gathered += 3 * WIDTH * weights / a.vp if a.pp > 1 else 0  # the chunks whose turn it is
    rows = a.mbs * run.train.seq // a.cp
    widest = m.mlp_inputs * max(kind.mlp * kind.rows(a.ep) for _, kind in m.stacks)
    scratch = 4 * WIDTH * rows * widest / a.tp + 4 * WIDTH * rows * m.embed
    if m.experts and lowering.layers_unrolled(run):
        # XLA puts off the products for the weights of all layers, and keeps what they read.
        read = rows * m.rows(a.ep) * (2 * m.embed + (m.mlp_inputs + 1) * m.mlp / a.tp)
        scratch += (m.layers - 1) * run.format.bytes * read
    return memory.lower_bound(run) + WIDTH * more / a.fsdp + gathered + LOGITS / 2 + scratch


def rank_layouts(run: Run, gpus: int, gbs: int = 0) -> list[Run]:
    """Runs of the same work on so many GPUs that should fit, the fastest first by arithmetic.

    `gbs` is that of the run where it is not given.

    Of those that differ in vp, mbs, policy, or the degrees of fsdp and cp alone, the best.
    """
    capacity = memory.capacity(run.gpu)
    best: dict[tuple, tuple[float, Run]] = {}
    for other in layouts(run, gpus, gbs or run.layout.gbs):
        a = other.layout
        kind = (a.pp, a.tp, a.ep, a.cp > 1, a.fsdp > 1)
        room = capacity - estimate_bytes(other)
        for one in (memory.least_recomputed(other, room), memory.offloaded(other, room)):
            if room > 0 and one:
                best[kind] = min(
                    best.get(kind, (math.inf, one)), (estimate_step_s(one), one), key=first
                )
    return [one for _, one in sorted(best.values(), key=first)]


def shortlist(run: Run, keep: int) -> list[Run]:
    """The run, and the `keep` others on as many GPUs that promise most."""
    return [run, *[one for one in rank_layouts(run, run.layout.gpus) if one != run][:keep]]


def at(run: Run, gpus: int, keep: int) -> list[Run]:
    """The `keep` runs that promise most on another number of GPUs, as many sequences for each.

    Raises:
      UserError: it fits in no layout, or none is legal.
    """
    gbs = max(1, round(run.layout.gbs * gpus / run.layout.gpus))
    if found := rank_layouts(run, gpus, gbs):
        return found[:keep]
    raise UserError(
        f"gpus={gpus}: no layout of {run.model.name} {run.model.size} with gbs {gbs} fits "
        f"{gpus} {run.layout.gpu_type}; {smallest_fit(run, gpus)}"
    )


def smallest_fit(run: Run, gpus: int) -> str:
    """What would hold the run: other axes, or about as many GPUs in whole nodes, or the fewest in
    doublings of those given."""
    node = run.gpu.gpus_per_node
    near = [n for n in range(node, 2 * gpus, node) if 0 < abs(n / gpus - 1) < 0.15]
    near.sort(key=lambda n: abs(n - gpus))
    for n in (gpus, *near, *(gpus << i for i in range(1, 12))):
        if found := rank_layouts(run, n):
            a = found[0].layout
            axes = " ".join(f"--{x} {getattr(a, x)}" for x in (*AXES, "vp") if getattr(a, x) > 1)
            t = found[0].train
            remat = f"--config.train.remat={t.remat}"
            remat += f" --config.train.offload={t.offload}" if t.offload else ""
            return f"by arithmetic {n} do: {axes} --mbs {a.mbs} --gbs {a.gbs} {remat}"
    return "a larger gbs leaves room for more GPUs"


def why_it_cannot_fit(run: Run) -> str:
    """Why the run cannot fit however it is compiled, and what would; '' where it may."""
    least, capacity = memory.lower_bound(run), memory.capacity(run.gpu)
    if least < capacity:
        return ""
    return (
        f"does not fit: weights, gradients and optimizer alone take {least / GIB:.0f} GiB of each "
        f"GPU, which has {capacity / GIB:.0f}; {smallest_fit(run, run.layout.gpus)}"
    )


def memory_sizes(p: Plan) -> list[float | None]:
    """Seconds of a step, were the GPU's memory of another size by each of planner.FACTORS, and what
    is recomputed chosen for it: by arithmetic, from the plan's own. None where nothing fits."""
    taken = p.memory.total - memory.activation_bytes(p.run)
    rooms = (factor * p.memory.capacity - taken for factor in planner.FACTORS)
    share, found = p.step_s / estimate_step_s(p.run), []
    for room in rooms:
        one = memory.least_recomputed(p.run, room)
        one = one and memory.with_more(one, room - memory.activation_bytes(one))
        found.append(estimate_step_s(one) * share if one else None)
    return found


def search(chosen: Sequence[Run], given: Run) -> list[Plan]:
    """Plans of the chosen runs, compiled one after the other; stderr is told how far it is.

    One that turns out not to fit is followed by what does by its own measure: the policy that keeps
    most of those that keep less by what was missing.
    """
    plans: list[Plan] = []
    say = lambda text: print(text, file=sys.stderr, flush=True)
    for i, one in enumerate(chosen):
        say(f"{i + 1}/{len(chosen)}  {one.layout.describe()}; {one.train.remat_summary}")
        plans.append(plan(one))
        room = memory.activation_bytes(one) + plans[-1].memory.spare
        if one != given and not plans[-1].fits and (less := memory.policies(one, room)):
            say(f"     does not fit; {less[0].train.remat}")
            plans.append(plan(less[0]))
    return plans
