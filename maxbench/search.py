"""Which layout and remat policy is fastest: all legal ones by arithmetic, the best by compiling."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

from maxbench import flops, memory
from maxbench.config import AXES, REMATS, Layout, Run
from maxbench.costs import Costs, Link
from maxbench.hardware import GPUS
from maxbench.memory import GIB

# Policies worth trying, each with what it computes again, as a share of a layer's forward pass.
CANDIDATES = ("none", "selective", "save_dot_except_mlpwi", "save_qkv_proj", "save_context", "full")


def powers(most: int) -> list[int]:
    """1, 2, 4, ... up to most."""
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def layouts(run: Run) -> Iterator[Run]:
    """Every legal run of the same work on the same GPUs: same batch, sequence, model."""
    gpus, gpu = run.layout.gpus, GPUS[run.layout.gpu_type]
    inside = powers(min(gpus, gpu.gpus_per_node if gpu.nvlink_gpus <= 8 else 16))
    experts = powers(run.model.experts) if run.model.experts else [1]
    for tp, cp, ep in itertools.product(inside, (1, 2, 4, 8), experts):
        shards = gpus // (tp * cp * ep)
        if shards * tp * cp * ep != gpus:
            continue
        for fsdp, mbs in itertools.product(powers(shards), (1, 2, 4)):
            if shards % fsdp:
                continue
            axes = dict(pp=1, vp=1, dp=shards // fsdp, fsdp=fsdp, ep=ep, cp=cp, tp=tp, mbs=mbs)
            try:
                layout = dataclasses.replace(run.layout, **axes)
                yield dataclasses.replace(run, layout=layout)
            except ValueError:
                continue  # Run says why; here it only means: not legal


def estimate(run: Run) -> tuple[float, float]:
    """Arithmetic: seconds of a step and bytes on one GPU. For ranking, not for print."""
    a, m, t = run.layout, run.model, run.train
    costs = Costs(a.gpu_type, {axis: getattr(a, axis) for axis in AXES})
    work = flops.per_sequence(m, t.seq, "causal") * a.gbs / a.gpus
    seconds = work * (1 + recomputed(run) / 3) / costs.gemm_rate
    width, count = 2, flops.params(m)
    local = count * width / (a.pp * a.tp * a.ep)  # expert weights dominate where there are any
    link = lambda axis, inner: Link(
        axis, getattr(a, axis), max(1, getattr(a, axis) * inner // costs.domain),
        max(1, min(getattr(a, axis), costs.domain // inner)),
    )  # fmt: skip
    outer = link("fsdp", a.ep * a.cp * a.tp)
    # FSDP gathers twice and reduces once per microbatch, mostly beside compute.
    gather = 3 * costs.collective("all-gather", outer, 0, int(local)) * a.microbatches
    tokens = a.mbs * t.seq // a.cp * a.microbatches
    sequence = costs.collective("all-gather", link("tp", 1), 0, tokens * m.embed * width)
    exchange = 0.0 if a.tp == 1 else 8 * m.layers * sequence
    if a.ep > 1:
        sent = int(tokens * m.embed * width * m.top_k / a.tp)
        exchange += (
            4 * m.layers * costs.collective("all-to-all", link("ep", a.cp * a.tp), sent, sent)
        )
    small = 12 * m.layers * a.microbatches * 1e-4 * (a.tp > 1)
    # The state is split over everything but what EP splits unevenly; gradients and the copy are not.
    state = 12 * count / a.gpus
    held = state + 2 * local / a.fsdp + memory.activation_bytes(run, t.remat)
    held += 4 * local / m.layers + 6 * t.loss_chunk * m.vocab / a.tp
    return max(seconds, gather) + exchange + small, held


def recomputed(run: Run) -> float:
    """Share of a layer's forward FLOPs that the backward pass computes again."""
    m, saved = run.model, run.train.saved
    k = m.top_k if m.experts else 1
    parts = {
        "query": m.heads * m.head_dim,
        "key": m.kv_heads * m.head_dim,
        "value": m.kv_heads * m.head_dim,
        "context": run.train.seq / 2 * m.heads * m.head_dim * 2 / m.embed,
        "attn_out": m.heads * m.head_dim,
        "mlp_up": k * m.gates * m.mlp,
    }
    total = sum(parts.values()) + k * m.mlp
    return sum(v for name, v in parts.items() if name not in saved) / total


def candidates(run: Run, keep: int) -> list[Run]:
    """The `keep` most promising runs that should fit, the given one among them."""
    room = memory.capacity(run.layout.gpu_type)
    ranked = []
    for other in layouts(run):
        fitting = []
        for remat in CANDIDATES:
            assert remat in REMATS
            one = dataclasses.replace(other, train=dataclasses.replace(other.train, remat=remat))
            seconds, held = estimate(one)
            if held < room:
                fitting.append((seconds, one))
        if fitting:
            ranked.append(min(fitting, key=lambda pair: pair[0]))
    ranked.sort(key=lambda pair: pair[0])
    chosen = [one for _, one in ranked[:keep]]
    return [run, *(one for one in chosen if one != run)]


def table(plans: list, baseline: Layout) -> str:
    """Plans that fit, fastest first, then those that do not."""
    lines = [f"{'step s':>9} {'MFU':>6} {'spare GiB':>10}  layout"]
    for p in sorted(plans, key=lambda p: (not p.fits, p.step_s)):
        mark = " (as given)" if p.run.layout == baseline else ""
        lines.append(
            f"{p.step_s:9.3f} {p.mfu:6.1%} {p.memory.spare / GIB:10.1f}  "
            f"{p.run.layout.describe()}; {p.run.train.remat}{mark}"
        )
    return "\n".join(lines)


def search(run: Run, plan: Callable, keep: int, say: Callable[[str], None]) -> list:
    """Plans of the candidates, compiled one after the other; `say` is told how far it is."""
    plans = []
    chosen = candidates(run, keep)
    for i, one in enumerate(chosen):
        say(f"{i + 1}/{len(chosen)}  {one.layout.describe()}; {one.train.remat}")
        plans.append(plan(one))
    return plans


def legal(run: Run) -> int:
    """How many layouts there are to choose from."""
    return sum(1 for _ in layouts(run)) * len(CANDIDATES)


assert math.prod(powers(4)) == 8
