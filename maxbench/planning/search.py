"""Search for the fastest layout and remat policy: legal layouts are ranked by an estimate, and the
best are compiled."""

import collections
import contextlib
import functools
import itertools
import math
import operator
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from maxbench.config import pipeline_layout, resolve
from maxbench.config.errors import UserError
from maxbench.config.model import Model
from maxbench.config.run import DEGREES, Run
from maxbench.config.sublayers import FSDP, RULES, mesh_axes
from maxbench.cost_model import compile_cache, memory, remat
from maxbench.cost_model.memory import GIB
from maxbench.metrics import flops
from maxbench.planning import planner, prediction
from maxbench.planning.compile_process import CompileProcess
from maxbench.planning.planner import Plan, plan

# By how much the ratio of compiled to estimated step differs between layouts of one model and GPU
# type: its relative standard deviation. Over 8 layouts of Llama 3.1 70B on 96 H100, the ratio was
# between 1.12 and 1.26.
SPREAD = 0.04
POLL_S = 0.1
PROGRESS_S = 10  # between lines of progress
MAX_AT_A_TIME = 4  # programs: compiling one takes up to 3 GiB
MAX_TP, MAX_PP, MAX_CP, MAX_MBS = 16, 16, 8, 16
first, first_two = operator.itemgetter(0), operator.itemgetter(0, 1)
WIDTH = 2  # bytes of a bf16 element
LOGITS = 3 << 30  # bytes of a chunk of logits, their gradient and the loss's temporaries
# Bytes per weight of embedding and LM head, and microbatch: adding a gradient to its sum, in bf16.
ACCUMULATED = 6


def powers(largest: int) -> list[int]:
    """1, 2, 4, ... up to `largest`."""
    return [1 << i for i in range(largest.bit_length())]


def degrees(gpus: int, largest: int) -> list[int]:
    """Divisors of `gpus` up to `largest`: legal degrees of a mesh axis."""
    return [n for n in range(1, min(gpus, largest) + 1) if gpus % n == 0]


def pipelines(layers: int, stages: Sequence[int]) -> list[tuple[int, int]]:
    """(pp, vp) of legal pipelines, with as few virtual stages as their slots per part allow."""
    found = [(1, 1)]
    for pp in stages[1:]:
        for each in range(-(-layers // pp), 0, -1):
            vp = -(-layers // (pp * each))
            if pipeline_layout.even(layers, pp * vp) and found[-1] != (pp, vp):
                found.append((pp, vp))
    return found


def layouts(run: Run, gpus: int, gbs: int) -> Iterator[Run]:
    """Every legal run of the same model and sequence length on `gpus` GPUs with batch `gbs`."""
    m, few = run.model, functools.partial(degrees, gpus)
    stages = pipelines(m.layers, few(MAX_PP))
    # Validation of a Run takes 0.1 ms, so the most frequent violations are filtered before.
    tps = [n for n in few(MAX_TP) if all(size % n == 0 for size in _split_by("tp", m))]
    eps = max(_split_by("ep", m), default=1)
    fsdps = [n for n in few(gpus) if m.embed % n == 0]
    for (pp, vp), tp, cp, ep, fsdp, mbs in itertools.product(
        stages, tps, few(MAX_CP), few(eps), fsdps, powers(MAX_MBS)
    ):
        dp, left = divmod(gpus, pp * tp * cp * ep * fsdp)
        if left or gbs % (mbs * dp * fsdp * ep) or gbs < pp * mbs * dp * fsdp * ep:
            continue
        axes: dict[str, Any] = dict(
            pp=pp, vp=vp, dp=dp, fsdp=fsdp, ep=ep, ep_nodes=None, cp=cp, tp=tp, mbs=mbs, gbs=gbs,
            stages=None,
        )  # fmt: skip
        with contextlib.suppress(UserError):  # an illegal layout
            yield resolve.changed(run, layout=axes)


@functools.lru_cache(64)
def _split_by(mesh_axis: str, m: Model) -> frozenset[int]:
    """The sizes of layers' weights that a mesh axis splits without fsdp."""
    parts = [part for _, layer in m.kinds for _, part in layer.parts()]
    axes = [(name, w) for part in parts for w in part.weights.values() for name in w.names]
    size = lambda axis: 1 if axis == "fsdp" else 2
    split = [(name, w) for name, w in axes if mesh_axis in mesh_axes(RULES[name], size)]
    return frozenset(getattr(w.owner, name) for name, w in split)


def estimate_step_s(run: Run) -> float:
    """Estimated seconds of a step, without a compiled program. For ranking only."""
    offloaded = 0.0
    if run.train.offload:
        without = remat.with_remat(run, run.train.remat)
        offloaded = memory.activation_bytes(without) - memory.activation_bytes(run)
    return _estimate_s(run, remat.recomputed_fraction(run), offloaded)


def _estimate_s(run: Run, recomputed: float, offloaded: float) -> float:
    """estimate_step_s(), of which it is the least with 0 and 0.

    Args:
      recomputed: fraction of the FLOPs of layers.
      offloaded: bytes of a microbatch.
    """
    a, m, seq = run.layout, run.model, run.train.seq
    costs = planner.costs_of(run)
    to = functools.cache(costs.axis_link)
    link = functools.cache(lambda kind, size, *axes: costs.collective(kind, to(*axes), size, size))
    rows, elements = a.mbs * seq // a.cp, a.mbs * seq // a.cp * m.embed  # of the residual stream
    rate, (wide, narrow) = costs.rate(run.format.peak), run.format.conversions
    head = 6 * m.vocab * m.embed * seq
    share = a.mbs / (a.cp * a.tp)  # of a sequence's FLOPs, per GPU and microbatch
    layers = (flops.per_sequence(m, seq, "causal") - head) * share / a.pp / rate
    # All stages wait for those that have the most layers in a part.
    layers *= (1 + recomputed / 3) * len(a.parts) * max(a.parts) / m.layers
    # In a pipeline the backward pass of a tick hides most collectives of the forward pass, unless
    # the experts' collectives over the network occupy the communication stream.
    waits = m.has_experts and "network" in (to(x).name for x in ("ep", "ep_nodes"))
    hops = 2 if a.pp > 1 and not waits else 6
    wait = 0.0
    for n, layer in m.kinds:
        parts = [part for _, part in layer.parts()]
        # Elements that memory-bound kernels move per layer, as counted in compiled programs.
        activated = rows * sum(part.activated for part in parts) / a.tp
        moved = (14 / a.tp + wide + 6 * (a.cp > 1)) * elements + (7 + narrow) * activated
        of_layer = costs.memory(WIDTH * moved) + hops * link("all-gather", WIDTH * elements, "tp")
        for part in parts:
            if not part.choices:
                continue
            wide_rows = WIDTH * rows * part.sent_width
            sent = wide_rows // a.tp  # dispatch and combine, forward and backward
            of_layer += 4 * link("all-to-all", sent * part.choices, "ep")
            of_layer += 4 * link("all-gather", sent * a.ep_nodes, "ep_nodes")
            # Slots are all-gathered before the GEMMs of the experts and reduce-scattered after
            # them; without tp they are copied, as an all-to-all's results are written again by
            # expert.
            if part.has_slots:
                of_layer += hops * link("all-gather", wide_rows * part.choices, "tp")
        wait += n * of_layer
    work = layers + wait / a.pp
    weights = memory.stage_weights(run)
    if a.fsdp > 1:  # all-gathered in both passes, reduce-scattered once, overlapping GEMMs
        gathers = 3 * link("all-gather", int(WIDTH * weights.dense), *FSDP)
        gathers += 3 * link("all-gather", int(WIDTH * weights.routed), "fsdp")
        crowded = a.tp * a.cp * a.ep > 1  # others share the stream: about half is exposed
        work = work + gathers / 2 if crowded else max(work, gathers)
    work += costs.offload(offloaded)  # copied out and back, of which about half is exposed
    if a.pp > 1:  # chunk switches of this stage and a neighbour: weights twice, and gradients
        work += 2 * costs.memory(8 * WIDTH * weights.layers) / run.train.microbatch_group_size
    loss = head * share / a.pp / costs.rate("bf16") + costs.memory(ACCUMULATED * weights.ends)
    step = (work + loss) * a.microbatches + work * (a.pp - 1) / a.vp
    # ZeRO-1: gradients reduce-scattered and weights all-gathered once.
    shards = memory.stage_weights(run, gathered=False)
    return step + 2 * link("all-gather", int(WIDTH * (shards.layers + shards.ends)), "dp", "cp")


def estimate_bytes(run: Run) -> float:
    """Estimated bytes on one GPU, without the activation stash."""
    a, m = run.layout, run.model
    weights = memory.stage_weights(run).layers
    shards = memory.stage_weights(run, gathered=False)
    unrolled = run.train.unrolled
    # Without a pipeline, gradients of experts are transposed into another array: of all layers of a
    # loop, or where tokens have slots of a fixed capacity. Accumulators of a loop are copied, too.
    transposed = m.has_experts and (m.capacity_factor > 0 or not unrolled)
    accumulated = a.microbatches > 1 and not unrolled
    copies = (a.pp == 1 and (transposed or accumulated)) * (shards.layers + shards.ends)
    # XLA all-gathers the weights of a loop's body ahead of their use.
    ahead = max(4, *(len(cycle) for _, cycle in m.groups)) if a.pp == 1 else 4
    gathered = ahead * WIDTH * weights * a.pp / m.layers if a.fsdp > 1 else 0
    gathered += 3 * WIDTH * weights / a.vp if a.pp > 1 else 0  # resident chunks
    rows = a.mbs * run.train.seq // a.cp
    parts = [(n, part) for n, layer in m.kinds for _, part in layer.parts()]
    widest = max(part.reserved(a.ep) for _, part in parts)
    scratch = 4 * WIDTH * rows * widest / a.tp + 4 * WIDTH * rows * m.embed
    if unrolled:
        kept = [(n, part.kept_if_unrolled(run)) for n, part in parts]
        scratch += rows * (sum(n * x for n, x in kept) - max(x for _, x in kept))
    scratch += min(LOGITS, 8 * rows * m.vocab / a.tp) / 2  # fp32, and their gradient
    if m.mtp_layers:  # gradients of the LM head in fp32, those of multi-token prediction too
        scratch += (1 + m.mtp_layers) * 4 * m.vocab * m.embed / a.tp
    return memory.lower_bound(run) + WIDTH * copies + gathered + scratch


def rank_layouts(run: Run, gpus: int, gbs: int = 0) -> list[Run]:
    """Runs of the same model on `gpus` GPUs that should fit, fastest first, by the estimates.

    Only the best of those that differ in vp, mbs, remat policy, or the degrees of fsdp and cp.
    Progress goes to stderr.

    Args:
      gbs: global batch; 0: that of the run.
    """
    capacity = memory.capacity(run.gpu)
    fitting: list[tuple[float, int, float, Run]] = []
    shown = time.monotonic()
    for number, candidate in enumerate(layouts(run, gpus, gbs or run.layout.gbs)):
        if time.monotonic() > shown + PROGRESS_S:
            shown = time.monotonic()
            print(f"ranking layouts of {gpus} GPUs: {number:,} so far", file=sys.stderr, flush=True)
        if (spare := capacity - estimate_bytes(candidate)) > 0:
            fitting.append((_estimate_s(candidate, 0, 0), number, spare, candidate))
    # Policies take longer to choose than a step to estimate: of a layout that would not be the
    # best of its kind without any recomputation they are not chosen.
    best: dict[tuple, tuple[float, int, Run]] = {}
    for least, number, spare, candidate in sorted(fitting, key=first):
        a = candidate.layout
        kind = (a.pp, a.tp, a.ep, a.cp > 1, a.fsdp > 1)
        if kind in best and best[kind][0] < least:
            continue
        for option in (remat.least_recomputed(candidate, spare), remat.offloaded(candidate, spare)):
            if option:
                ranked = estimate_step_s(option), number, option
                best[kind] = min(best.get(kind, (math.inf, 0, option)), ranked, key=first_two)
    first_of_each = sorted(best.values(), key=first_two)
    return [option for *_, option in first_of_each]


def with_other_microbatches(run: Run) -> list[Run]:
    """The run's mesh with other microbatch sizes, each with the remat policy that should fit, where
    the estimate is within its error of the run's (SPREAD); fastest first."""
    found, slowest = [], estimate_step_s(run) / (1 - SPREAD)
    for mbs in powers(MAX_MBS):
        if mbs == run.layout.mbs:
            continue
        with contextlib.suppress(UserError):  # an illegal layout
            other = resolve.changed(run, layout={"mbs": mbs})
            spare = memory.capacity(run.gpu) - estimate_bytes(other)
            fitting = remat.least_recomputed(other, spare), remat.offloaded(other, spare)
            found.append(min(filter(None, fitting), key=estimate_step_s, default=None))
    ranked = sorted(filter(None, found), key=estimate_step_s)
    return [other for other in ranked if estimate_step_s(other) < slowest]


def shortlist(run: Run, count: int) -> list[Run]:
    """The run, and the `count` fastest other layouts on as many GPUs, by the estimates."""
    ranked = rank_layouts(run, run.layout.gpus)
    return [run, *[other for other in ranked if other != run][:count]]


def fastest_on(run: Run, gpus: int, count: int, gbs: int | None = None) -> list[Run]:
    """The `count` fastest layouts on another number of GPUs.

    Args:
      gbs: global batch; None: the batch per GPU of the run.

    Raises:
      UserError: no layout is legal and fits; names a number of GPUs on which one does.
    """
    a = run.layout
    batch = lambda n: gbs or max(1, round(a.gbs * n / a.gpus))
    if ranked := rank_layouts(run, gpus, batch(gpus)):
        return ranked[:count]
    raise UserError(
        f"gpus={gpus}: no layout of {run.model.name} {run.model.size} with gbs {batch(gpus)} fits "
        f"{gpus} {a.gpu_type}; {smallest_fit(run, gpus, batch)}"
    )


def smallest_fit(run: Run, gpus: int, batch: Callable[[int], int]) -> str:
    """Hint at a layout that fits: on as many GPUs, on about as many in whole nodes, or on the
    fewest of their doublings and of the powers of two.

    Args:
      batch: number of GPUs -> global batch.
    """
    node = run.gpu.gpus_per_node
    near = [n for n in range(node, 2 * gpus, node) if 0 < abs(n / gpus - 1) < 0.15]
    near.sort(key=lambda n: abs(n - gpus))
    larger = {gpus << i for i in range(1, 12)} | {n for n in powers(gpus << 11) if n > gpus}
    for n in (gpus, *near, *sorted(larger)):
        if ranked := rank_layouts(run, n, batch(n)):
            a, t = ranked[0].layout, ranked[0].train
            axes = " ".join(f"--{x} {getattr(a, x)}" for x in (*DEGREES, "vp") if getattr(a, x) > 1)
            policy = f"--config.train.remat={t.remat}"
            policy += f" --config.train.offload={t.offload}" if t.offload else ""
            return f"estimated to fit on {n} GPUs: {axes} --mbs {a.mbs} --gbs {a.gbs} {policy}"
    return "a larger gbs allows more GPUs"


def why_it_cannot_fit(run: Run) -> str:
    """Message if no program of the run can fit, with a layout that does; otherwise ''."""
    needed, capacity = memory.lower_bound(run), memory.capacity(run.gpu)
    if needed < capacity:
        return ""
    hint = smallest_fit(run, run.layout.gpus, lambda _: run.layout.gbs)
    return (
        f"does not fit: weights, gradients and optimizer alone take {needed / GIB:.0f} GiB of each "
        f"GPU, which has {capacity / GIB:.0f}; {hint}"
    )


def memory_sensitivity(p: Plan) -> list[float | None]:
    """Seconds of a step with GPU memory scaled by each of prediction.FACTORS, and the remat policy
    chosen for it: estimates, scaled to the plan. None where no policy fits."""
    other = p.memory.total - memory.activation_bytes(p.run)
    scale, seconds = p.step_s / estimate_step_s(p.run), []
    for factor in prediction.FACTORS:
        spare = factor * p.memory.capacity - other
        run = remat.least_recomputed(p.run, spare)
        run = run and remat.with_fewer_layers(run, spare - memory.activation_bytes(run))
        seconds.append(estimate_step_s(run) * scale if run else None)
    return seconds


def search(candidates: Sequence[Run], given: Run, seconds: float = math.inf) -> list[Plan]:
    """Plans of the candidates, of which one is compiled on each core, at most MAX_AT_A_TIME;
    progress goes to stderr.

    A candidate that does not fit once compiled is followed by the policy with the largest stash
    that is smaller by the missing bytes. `given` is planned as it is. Compiled programs take longer
    than estimated, by about the same factor (SPREAD): a candidate that would be slower than the
    fastest plan so far by it is not compiled. Last, the mesh of the fastest plan is compiled with
    other microbatch sizes, which the estimate does not tell apart.

    Args:
      seconds: after which compilation ends, but that of `given`, if a plan fits by then.

    Raises:
      UserError: XLA's GPU compiler is not installed, and a program is not in the cache; or no
        candidate compiles.
    """
    if any(compile_cache.load(run) is None for run in candidates):
        compile_cache.require_compiler()
    log = lambda text: print(text, file=sys.stderr, flush=True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    at_a_time = min(cores or 1, MAX_AT_A_TIME, len(candidates))
    fastest, began = min(map(estimate_step_s, candidates)), time.monotonic()
    shown, end = began, began + seconds
    log(
        f"{len(candidates)} layouts, the fastest estimated at {fastest:.3f} s; compiling the first "
        f"{at_a_time}, then those that may be faster"
    )
    plans: list[Plan] = []
    waiting = collections.deque(enumerate(candidates, 1))
    running: list[tuple[int, Run, CompileProcess | None]] = []
    numbered = len(candidates)
    tried: list[Run] = []
    varied: list[dict[str, int]] = []  # meshes that were compiled with other microbatch sizes
    name = lambda i, run: f"{i}/{numbered}  {run.layout.describe()}; {run.remat_summary}"
    expected = lambda run: estimate_step_s(run) * _compiled_over_estimated(plans)
    skip = lambda i, run, why: log(f"{name(i, run)}: {why}, about {expected(run):.3f} s")
    too_late = f"not compiled in {seconds:.0f} s"
    try:
        while waiting or running:
            late = time.monotonic() > end and _fastest(plans) < math.inf
            while waiting and (late or len(running) < at_a_time):
                i, run = waiting.popleft()
                slower = i <= len(candidates) and expected(run) * (1 - SPREAD) > _fastest(plans)
                if run != given and (slower or late):
                    skip(i, run, "not compiled" if slower else too_late)
                else:
                    tried.append(run)
                    running.append((i, run, _start(run)))
            for i, run, process in [*running]:
                compiles = process and process.running
                if compiles and not (late and run != given):
                    continue
                running.remove((i, run, process))
                if process and compiles:
                    process.kill()
                    skip(i, run, too_late)
                    continue
                try:
                    plans.append(p := plan(run))
                except UserError as error:
                    if run == given:
                        raise
                    log(f"{name(i, run)}: fails: {error}")
                    if not (plans or waiting or running):
                        raise  # as all others
                    continue
                known = f"{name(i, run)}: {p.step_s:.3f} s"
                available = memory.activation_bytes(run) + p.memory.spare
                if not p.fits:
                    known += ", does not fit"
                    if run != given and (less := remat.policies(run, available)):
                        known += f"; next with {less[0].train.remat}"
                        waiting.appendleft((i, less[0]))
                best = _fastest(plans)
                log(f"{known}; fastest so far {best:.3f} s" if best < math.inf else known)
            winner = None if waiting or running or late else _winner(plans)
            if winner and winner.run.layout.mesh_shape not in varied:
                varied.append(winner.run.layout.mesh_shape)
                others = [x for x in with_other_microbatches(winner.run) if x not in tried]
                waiting.extend(enumerate(others, numbered + 1))
                numbered += len(others)
            if running and time.monotonic() > shown + PROGRESS_S:
                shown = time.monotonic()
                wait = f"; {len(waiting)} wait" if waiting else ""
                compiled = f"{len(running)} layout{'s' * (len(running) > 1)}"
                log(f"compiling {compiled}{wait}: {shown - began:.0f} s")
            time.sleep(POLL_S if running else 0)
    finally:
        for process in filter(None, (process for _, _, process in running)):
            process.kill()
    return plans


def _winner(plans: Sequence[Plan]) -> Plan | None:
    return min((p for p in plans if p.fits), key=lambda p: p.step_s, default=None)


def _fastest(plans: Sequence[Plan]) -> float:
    winner = _winner(plans)
    return winner.step_s if winner else math.inf


def _compiled_over_estimated(plans: Sequence[Plan]) -> float:
    """The median of the step of a compiled program over its estimate; 1 without plans."""
    return statistics.median([p.step_s / estimate_step_s(p.run) for p in plans] or [1])


def _start(run: Run) -> CompileProcess | None:
    """Starts another process that compiles a program into the cache; None if it is there. If that
    fails, plan() repeats it, and raises."""
    return None if compile_cache.load(run) else CompileProcess(run)
